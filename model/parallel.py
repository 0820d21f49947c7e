"""Many ranks: who runs which rows, and how rows, columns and expert outputs travel between them.

Ranks form *attention groups*: the ranks of a group run the same rows, each its own heads. Several groups (data-parallel
attention) run different rows and meet in the routed experts, which are divided among all ranks. The network is written
for one rank; what it does on several is in ``Parallel``, injected when it is built, and ``Exchange``, made for each
forward.

Bits do not depend on the number of ranks. Every sum is made whole on one rank, in the order of a single one, and only
results travel: columns of attention are gathered, the output of an expert for a row goes to the rank that *owns* the
row, which adds a row's experts in ascending order, as one rank does. Owners divide the rows of a group evenly.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from .layout import Layout
from .place import Place, Share

T = TypeVar("T")
OP_BY_OP = sys.maxsize  # the size of a forward that no captured one can take the place of


class RankDivergence(RuntimeError):
    """Ranks that must do the same thing are about to do different things; names rank and step."""


class Group(Protocol):
    """Some ranks that communicate. Every member makes the same calls in the same order."""

    rank: int  # among ``size``
    size: int

    def all_gather(self, x: Tensor) -> Tensor:
        """[size, ...] of every member's x, all of one shape and dtype."""

    def all_to_all(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """Rows of x, ``send[i]`` of them to member i, in order; ``receive[i]`` rows from member i, in order."""

    def host_gather(self, numbers: Sequence[int]) -> list[list[int]]:
        """Every member's numbers, on the host."""

    def from_first(self, value: T) -> T:
        """Member 0's value, any object, on every member."""

    def tensor_from_first(self, x: Tensor) -> Tensor:
        """Member 0's x; all of one shape and dtype."""


class Alone:
    """A group of one."""

    rank, size = 0, 1

    def all_gather(self, x: Tensor) -> Tensor:
        return x.unsqueeze(0)

    def all_to_all(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        return x

    def host_gather(self, numbers: Sequence[int]) -> list[list[int]]:
        return [list(numbers)]

    def from_first(self, value: T) -> T:
        return value

    def tensor_from_first(self, x: Tensor) -> Tensor:
        return x


class Exchange(Protocol):
    """What one forward sends between ranks. ``R`` rows of the own group, of which ``own`` belong to this rank."""

    @property
    def total(self) -> int:
        """Rows of all groups."""

    def own(self, x: Tensor) -> Tensor:
        """This rank's part of x [R, ...]."""

    def whole(self, x: Tensor) -> Tensor:
        """[R, ...] from every owner's part."""

    def routed(self, experts: ExpertSum, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """Weighted sum over each own row's experts, float32 [own, H], from x [R, H], weights and expert ids [R, k]."""

    def lookup(self, table: Tensor, scale: Tensor, total: int, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """A table, its scales and row numbers [R, columns] in it, that stand for the rows int64 [R, columns] of a table
        of ``total`` rows, of which ``table`` [n, D] and ``scale`` [n, S] are this rank's share."""


class ExpertSum(Protocol):
    """The routed experts of a layer, as far as this rank has them."""

    slots: int  # of every rank, in each of which lies an expert

    def __call__(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """Float32 [T, H]: weighted sum over each row's experts, ids [T, k] slots counted from this rank's first."""

    def assign(self, ids: Tensor) -> Tensor:
        """Slots int64 [T, k], counted over all ranks, that compute the experts ids [T, k] of the rows of all groups."""

    def local(self, slots: Tensor) -> Tensor:
        """Slots int64 as ``assign`` returns them, counted from this rank's first; -1 for another's, and for -1."""


@dataclass(frozen=True)
class Forward:
    """What all ranks know of a forward before it begins. ``counts``: rows of each attention group. ``size``: of the
    captured forward that runs instead, OP_BY_OP if none does, 0 if nobody has rows."""

    counts: Sequence[int]
    size: int = OP_BY_OP


class Parallel(Protocol):
    """What the network knows of other ranks."""

    place: Place
    groups: int  # attention groups

    def columns(self, x: Tensor) -> Tensor:
        """[R, n] of this rank's outputs -> the outputs of all ranks that divide the heads, in order."""

    def meet(self, count: int, what: Iterable[Tensor], size: int = OP_BY_OP) -> Forward:
        """Called once before every forward by all ranks, each with its number of rows, which may be 0, what decides
        what it computes, and the size of the smallest captured forward that these fit, 0 if it has none."""

    def exchange(self, forward: Forward) -> Exchange:
        """Of a forward that runs op by op."""

    @property
    def captures(self) -> bool:
        """Whether what ranks send each other in a forward can be captured in a graph."""

    def captured(self, rows: int, live: Tensor) -> Exchange:
        """Of a forward that is captured for ``rows`` rows of each group. live: int64 [1], how many of them are no
        padding when it is replayed."""

    @property
    def leads(self) -> bool:
        """Whether this is the first rank of its attention group."""

    def agree(self, value: T) -> T:
        """What the first rank of the attention group has: what a clock or chance decides is decided once."""

    def agree_tensor(self, x: Tensor) -> Tensor:
        """The same for a tensor, of one shape on all ranks of the group, without the host."""

    def agree_everywhere(self, value: T) -> T:
        """What the first of all ranks has."""


class Single:
    """One rank that holds everything."""

    place, groups, leads, captures = Place(), 1, True, True

    def columns(self, x: Tensor) -> Tensor:
        return x

    def meet(self, count: int, what: Iterable[Tensor], size: int = OP_BY_OP) -> Forward:
        return Forward([count], size)

    def exchange(self, forward: Forward) -> Exchange:
        return Here(sum(forward.counts))

    def captured(self, rows: int, live: Tensor) -> Exchange:
        return Here(rows)

    def agree(self, value: T) -> T:
        return value

    def agree_tensor(self, x: Tensor) -> Tensor:
        return x

    def agree_everywhere(self, value: T) -> T:
        return value


@dataclass(frozen=True)
class Here:
    """The exchange of a rank that has everything: nothing travels."""

    total: int = 0

    def own(self, x: Tensor) -> Tensor:
        return x

    def whole(self, x: Tensor) -> Tensor:
        return x

    def routed(self, experts: ExpertSum, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        return experts(x, weights, ids)

    def lookup(self, table: Tensor, scale: Tensor, total: int, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return table, scale, rows


class Ranks:
    """``group``: the ranks that run this rank's rows; ``world``: all, attention groups one after another, each of the
    size of ``group``. check: compare what the ranks of a group are about to run before every forward, which costs a
    round trip on the host.

    split_heads, split_experts: False leaves these whole on every rank of a group, or of all. layout: which experts lie
    in which slots; None: each once, in order.
    travelling: makes what a forward sends between ranks, from these and the rows of each group; None: ``Travelling``.
    fixed: the same for a forward that is captured, from these, the rows of a group and how many are live; None: such
    forwards are not captured.

    between: called by every rank before every forward, also one that drafts; what it does may communicate.
    """

    def __init__(
        self,
        group: Group,
        world: Group,
        *,
        split_heads: bool = True,
        split_experts: bool = True,
        layout: Layout | None = None,
        check: bool = False,
        travelling: Callable[[Ranks, Sequence[int]], Exchange] | None = None,
        fixed: Callable[[Ranks, int, Tensor], Exchange] | None = None,
    ):
        if world.size % group.size or world.rank % group.size != group.rank:
            raise ValueError(f"{world.size} ranks are not attention groups of {group.size}, one after another")
        self.group, self.world, self.check = group, world, check
        self.heads: Group = group if split_heads else Alone()
        self.experts: Group = world if split_experts else Alone()
        self.groups = world.size // group.size
        self.place = Place(Share(self.heads.rank, self.heads.size), Share(self.experts.rank, self.experts.size), layout)
        self.travelling, self.fixed = travelling or Travelling, fixed
        self.between: Callable[[], None] | None = None
        self.step = 0  # forwards begun, the same on every rank

    def columns(self, x: Tensor) -> Tensor:
        if self.heads.size == 1:
            return x
        if not x.shape[0]:  # of the others as well
            return x.new_empty(0, x.shape[1] * self.heads.size)
        return self.heads.all_gather(x.contiguous()).transpose(0, 1).flatten(1)

    @property
    def leads(self) -> bool:
        return self.group.rank == 0

    def agree(self, value: T) -> T:
        return self.group.from_first(value)

    def agree_tensor(self, x: Tensor) -> Tensor:
        return self.group.tensor_from_first(x)

    def agree_everywhere(self, value: T) -> T:
        return self.world.from_first(value)

    def meet(self, count: int, what: Iterable[Tensor], size: int = OP_BY_OP) -> Forward:
        """
        Raises:
            RankDivergence: other ranks are at another step, or (always with several groups, else only with ``check``)
                a rank of this group has another number of rows, or (with ``check``) other rows.
        """
        if self.between is not None:
            self.between()
        self.step += 1
        if self.groups == 1 and not self.check:
            return Forward([count], size)
        everybody = self.world.host_gather([self.step, count, fingerprint(what) if self.check else 0, size])
        self._compare(everybody)
        counts = [everybody[first][1] for first in range(0, self.world.size, self.group.size)]
        return Forward(counts, max(theirs[3] for theirs in everybody))

    def exchange(self, forward: Forward) -> Exchange:
        if self.experts.size == 1:
            return Here(sum(forward.counts))
        return self.travelling(self, forward.counts)

    @property
    def captures(self) -> bool:
        return self.experts.size == 1 or self.fixed is not None

    def captured(self, rows: int, live: Tensor) -> Exchange:
        if self.experts.size == 1:
            return Here(rows * self.groups)
        assert self.fixed is not None
        return self.fixed(self, rows, live)

    def _compare(self, everybody: list[list[int]]) -> None:
        size = self.group.size
        for rank, (step, count, print_, _) in enumerate(everybody):
            first = rank // size * size
            _, other_count, other_print, _ = everybody[first]
            if step != everybody[0][0]:
                raise RankDivergence(f"rank {rank} begins forward {step} while rank 0 begins forward {everybody[0][0]}")
            if (count, print_) != (other_count, other_print):
                raise RankDivergence(
                    f"rank {rank} begins forward {step} with {count} rows ({print_:#x}) while rank {first}, of the "
                    f"same attention group, has {other_count} ({other_print:#x})"
                )


def fingerprint(what: Iterable[Tensor]) -> int:
    """63 bits of everything that decides what a forward computes."""
    digest = hashlib.blake2b(digest_size=8)
    for part in what:
        digest.update(part.cpu().contiguous().numpy().tobytes())
    return int.from_bytes(digest.digest(), "little") >> 1


class Travelling:
    """The exchange of one forward among ranks that divide the experts. ``counts``: rows of each attention group.

    Rows reach all ranks by one gather (of their owners' parts; nothing to do with a single group, whose ranks have them
    already), expert outputs return to the owners by one all-to-all. Their sizes follow from expert ids that every rank
    knows, so nobody has to announce them.
    """

    def __init__(self, ranks: Ranks, counts: Sequence[int]):
        self.ranks, self.total = ranks, sum(counts)
        size = ranks.group.size
        starts = [sum(counts[:index]) for index in range(len(counts))]
        # First row of each rank, by its number among all rows, then the end of the last.
        self.bounds = [
            start + count * member // size
            for start, count in zip(starts, counts, strict=True)
            for member in range(size)
        ] + [self.total]
        me = ranks.world.rank
        self.mine = range(self.bounds[me], self.bounds[me + 1])
        first = ranks.world.rank // size
        self.offset, self.count = starts[first], counts[first]

    # ---- rows ------------------------------------------------------------------------------------------------------

    def own(self, x: Tensor) -> Tensor:
        return x[self.mine.start - self.offset : self.mine.stop - self.offset]

    def whole(self, x: Tensor) -> Tensor:
        size, first = self.ranks.group.size, self.ranks.world.rank - self.ranks.group.rank
        if size == 1 or not self.count:
            return x
        return gather_rows(self.ranks.group, x, self.bounds[first : first + size + 1])

    def everywhere(self, x: Tensor) -> Tensor:
        """x [R, D] of this group -> [total, D] of all groups."""
        if self.ranks.groups == 1:
            return x
        return gather_rows(self.ranks.world, self.own(x), self.bounds)

    # ---- experts and tables ----------------------------------------------------------------------------------------

    def rows_everywhere(self, x: Tensor, weights: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What ``routed`` is given, of all groups: one message a row instead of three."""
        if self.ranks.groups == 1:
            return x, weights, ids
        fields = (x, weights, ids.to(torch.int32))
        message = torch.cat([field.contiguous().view(torch.uint8) for field in fields], 1)
        parts = self.everywhere(message).split([field.shape[1] * field.element_size() for field in fields], 1)
        x, weights, ids = (part.contiguous().view(field.dtype) for part, field in zip(parts, fields, strict=True))
        return x, weights, ids.to(torch.int64)

    def routed(self, experts: ExpertSum, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        x, weights, ids = self.rows_everywhere(x, weights, ids)
        slots = experts.assign(ids)
        travel = Travel(self, slots // experts.slots)
        pairs = travel.held
        rows = pairs // ids.shape[1]
        local = slots.flatten()[pairs, None] - experts.slots * self.ranks.experts.rank
        # An expert's output is one rounded number a channel: float32 here, as exact in the dtype of x.
        outputs = experts(x[rows], weights.flatten()[pairs, None], local).to(x.dtype)
        return ascending_sum(travel.to_owners(outputs), ids[self.mine.start : self.mine.stop])

    def lookup(self, table: Tensor, scale: Tensor, total: int, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        each = -(-total // self.ranks.experts.size)
        everyone = self.everywhere(rows)
        travel = Travel(self, everyone // each)
        local = everyone.flatten()[travel.held] - each * self.ranks.experts.rank
        found = torch.cat([part.view(torch.uint8)[local] for part in (table, scale)], 1)
        return self.fetched(travel.to_owners(found), table, scale)

    def fetched(self, found: Tensor, table: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What ``lookup`` returns, from the bytes uint8 [own, columns, D + S] of the rows of own rows."""
        whole = self.whole(found)
        values, scales = whole.flatten(0, 1).split([table.shape[1], scale.shape[1]], 1)
        numbers = torch.arange(values.shape[0], device=found.device).view(whole.shape[:2])
        return values.contiguous().view(table.dtype), scales.contiguous().view(scale.dtype), numbers


@dataclass(frozen=True)
class Travel:
    """The way back of results that are made where experts or table rows lie. ``holders`` int64 [total, k]: the rank
    that has the result of each row and choice."""

    exchange: Travelling
    holders: Tensor

    @cached_property
    def held(self) -> Tensor:
        """int64 [n] (row, choice) pairs, numbered row by row, whose results are made here."""
        return (self.holders.flatten() == self.exchange.ranks.experts.rank).nonzero()[:, 0]

    def to_owners(self, results: Tensor) -> Tensor:
        """results [n, D] of ``held`` -> [own, k, D] of own rows."""
        exchange, choices = self.exchange, self.holders.shape[1]
        group, mine = exchange.ranks.experts, exchange.mine
        if not exchange.total:
            return results.new_empty(0, choices, *results.shape[1:])
        # Rows ascend from owner to owner, so results in order of rows are in order of owners.
        bounds = torch.tensor(exchange.bounds, device=results.device) * choices
        send = torch.searchsorted(self.held, bounds).diff().tolist()
        own = self.holders[mine.start : mine.stop].flatten()
        receive = torch.bincount(own, minlength=group.size).tolist()
        arrived = group.all_to_all(results, send, receive)
        placed = torch.empty_like(arrived)
        placed[own.argsort(stable=True)] = arrived
        return placed.unflatten(0, (len(mine), choices))


def ascending_sum(outputs: Tensor, ids: Tensor) -> Tensor:
    """Float32 [n, H]: each row's outputs [n, k, H] added in ascending order of their experts, ids [n, k], no expert
    twice in a row."""
    order = ids.argsort(-1)
    outputs = outputs.gather(1, order[..., None].expand_as(outputs))
    total = outputs[:, 0].to(torch.float32)
    for choice in range(1, ids.shape[1]):
        total += outputs[:, choice].to(torch.float32)
    return total


def gather_rows(group: Group, x: Tensor, bounds: Sequence[int]) -> Tensor:
    """Every member's rows, in order; member i has ``bounds[i + 1] - bounds[i]`` of them."""
    counts = [after - before for before, after in pairwise(bounds)]
    most = max(counts)
    if not most:
        return x
    padded = x if x.shape[0] == most else torch.cat([x, x.new_zeros(most - x.shape[0], *x.shape[1:])])
    gathered = group.all_gather(padded.contiguous())
    if min(counts) == most:
        return gathered.flatten(0, 1)
    return torch.cat([gathered[member, :count] for member, count in enumerate(counts)])
