"""From one placement to another: which expert moves where, and in which order.

Experts move in *rounds*. In a round a rank sends at most one expert and receives at most one; all that arrives is put
in place at once, at the end. Until then every slot holds, and serves, what it held before. An order is right if every
expert has a replica after each round:

* A slot may be overwritten if its expert has another replica. With spare places that is nearly always so.
* Where nobody may be overwritten, experts change places in a circle of ranks: each sends what the next one wants and
  receives into the slot it gives up. A circle that came to a rank twice would be two circles, so each fits a round.

A rank ends with the experts that the target gives it; which of its slots they take follows from the order.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Move:
    """``expert`` of ``layer`` from slot ``source`` to slot ``slot``, both counted over all ranks."""

    layer: int
    expert: int
    source: int
    slot: int


Round = list[Move]


def rounds(current: NDArray[np.integer], target: NDArray[np.integer], ranks: int) -> list[Round]:
    """Rounds from a placement int [layers, physical] to another one that gives every rank as many slots. In both, no
    rank holds an expert twice and every expert has a slot.

    Raises:
        ValueError: the placements are of two shapes, or of different sets of experts.
    """
    if current.shape != target.shape:
        raise ValueError(f"placements of shapes {current.shape} and {target.shape}; legal: the same")
    pending = [_Layer(layer, *pair, ranks) for layer, pair in enumerate(zip(current, target, strict=True))]
    found: list[Round] = []
    while pending := [layer for layer in pending if not layer.done]:
        round_, senders, receivers = Round(), set[int](), set[int]()
        for layer in pending:
            layer.begin_round()
            while moves := layer.next(senders, receivers):
                round_ += moves
                senders |= {layer.rank_of(move.source) for move in moves}
                receivers |= {layer.rank_of(move.slot) for move in moves}
            if len(senders) == ranks:
                break
        found.append(round_)
    return found


class _Layer:
    """A layer on its way: what each rank still gives up and still wants."""

    def __init__(self, layer: int, current: NDArray[np.integer], target: NDArray[np.integer], ranks: int):
        if set(current.tolist()) != set(target.tolist()):
            raise ValueError(f"layer {layer}: the placements hold different experts; legal: the same ones")
        self.layer, self.slots = layer, len(current) // ranks
        self.held: list[int] = current.tolist()  # by slot, the moves chosen so far included
        self.replicas: dict[int, set[int]] = {}  # slots of an expert, likewise
        for slot, expert in enumerate(self.held):
            self.replicas.setdefault(expert, set()).add(slot)
        self.given: list[list[int]] = []  # slots, by rank
        self.wanted: list[list[int]] = []  # experts, by rank
        for rank in range(ranks):
            own = slice(rank * self.slots, (rank + 1) * self.slots)
            have, want = self.held[own], target[own].tolist()
            self.given.append([own.start + index for index, expert in enumerate(have) if expert not in want])
            self.wanted.append([expert for expert in want if expert not in have])
        self.readable: dict[int, set[int]] = {}

    @property
    def done(self) -> bool:
        return not any(self.wanted)

    def rank_of(self, slot: int) -> int:
        return slot // self.slots

    def begin_round(self) -> None:
        """What is overwritten in a round can still be read in it; what arrives cannot."""
        self.readable = {expert: set(slots) for expert, slots in self.replicas.items()}

    def next(self, senders: set[int], receivers: set[int]) -> list[Move]:
        """The next move, or circle of moves, that this round has room for; none."""
        for rank, wanted in enumerate(self.wanted):
            free = [slot for slot in self.given[rank] if len(self.replicas[self.held[slot]]) > 1]
            if not free or rank in receivers:
                continue
            for expert in wanted:
                if (source := self._source(expert, senders)) is not None:
                    return [self._move(expert, source, free[0])]
        # A move that only waits for a free rank comes later; a circle could take the last replica it would leave.
        if any(len(self.replicas[self.held[slot]]) > 1 for given in self.given for slot in given):
            return []
        slots = self._circle()
        if (senders | receivers) & {self.rank_of(slot) for slot in slots}:
            return []
        pairs = [(self.held[slots[index - 1]], slots[index - 1], slot) for index, slot in enumerate(slots)]
        return [self._move(*pair) for pair in pairs]

    def _source(self, expert: int, senders: set[int]) -> int | None:
        usable = (slot for slot in sorted(self.readable[expert]) if self.rank_of(slot) not in senders)
        return next(usable, None)

    def _circle(self) -> list[int]:
        """Slots of different ranks, each of which holds what the rank of the next one wants; none when all is done. Of
        what is given up here nothing has a replica, so somebody wants it."""
        rank = next((rank for rank, given in enumerate(self.given) if given), None)
        path: dict[int, int] = {}
        while rank is not None and rank not in path:
            path[rank] = self.given[rank][0]
            rank = next(other for other, wanted in enumerate(self.wanted) if self.held[path[rank]] in wanted)
        return [] if rank is None else list(path.values())[list(path).index(rank) :]

    def _move(self, expert: int, source: int, slot: int) -> Move:
        rank = self.rank_of(slot)
        self.given[rank].remove(slot)
        self.wanted[rank].remove(expert)
        self.replicas[self.held[slot]].discard(slot)
        self.held[slot] = expert
        self.replicas[expert].add(slot)
        return Move(self.layer, expert, source, slot)
