"""What a server must answer, from the library: one-shot logits where the rule is exact, and where it is not, the same
rule applied to the same history."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from deepinfer_plugin.model import V41
from deepinfer_plugin.model.v41 import Session

CHUNK = 512  # rows of a forward of the library; makes no difference but to time and memory


def random_ids(length: int, seed: int = 0) -> list[int]:
    """Plain text ids of the tiny vocabulary, other ones for every length and seed."""
    generator = torch.Generator().manual_seed(100_003 * seed + length)
    return torch.randint(3, 1200, (length,), generator=generator).tolist()


def same(found: Sequence[int], expected: Sequence[int], what: str) -> None:
    """Equal token lists, or the first place where they differ."""
    if list(found) == list(expected):
        return
    pairs = enumerate(zip(found, expected, strict=False))
    first = next((i for i, (a, b) in pairs if a != b), min(len(found), len(expected)))
    raise AssertionError(
        f"{what}: token {first} differs ({len(found)} against {len(expected)} tokens)\n"
        f"  found    ...{list(found[max(first - 2, 0) : first + 4])}\n"
        f"  expected ...{list(expected[max(first - 2, 0) : first + 4])}"
    )


class Reference:
    """The checkpoint as a library, loaded once."""

    def __init__(self, model: V41):
        self.model = model
        self._right: dict[tuple[int, ...], list[int]] = {}  # prompt -> the longest greedy continuation known

    def one_shot(self, prompt: Sequence[int], output: Sequence[int], what: str = "") -> None:
        """Every token of ``output`` is the greedy choice of one full forward over the prompt and what came before
        it."""
        key, output = tuple(prompt), list(output)
        if self._right.get(key, [])[: len(output)] == output and output:
            return
        logits = self.model.logits([*prompt, *output[:-1]])[len(prompt) - 1 :]
        assert torch.isfinite(logits).all()
        same(output, logits.argmax(-1).tolist(), f"{what or 'one shot'}, prompt of {len(prompt)}")
        self._right[key] = output

    def logprobs(self, ids: Sequence[int]) -> Tensor:
        """float32 [T, vocab] after every token."""
        return torch.log_softmax(self.model.logits(list(ids)), -1)

    def tree(self, page_size: int) -> Tree:
        return Tree(V41(self.model.network, page_size))


@dataclass
class Turn:
    """A request as the rule serves it. ``cached`` tokens came from the tree; ``replayed`` of them ran again."""

    session: Session
    cached: int
    replayed: int
    ids: list[int]


@dataclass
class Tree:
    """The prefix tree of a server and its rule: a hit is the longest run of whole pages that begins the prompt and
    ends before its last token; the last ``min(hit, window)`` tokens of it are replayed. Pages once in the tree stay
    as they were written."""

    model: V41
    kept: list[Session] = field(default_factory=list)  # oldest first

    def hit(self, ids: Sequence[int]) -> tuple[int, Session | None]:
        """Cached tokens for a prompt, and a session that holds their pages."""
        best, owner = 0, None
        for session in self.kept:
            length = self._common(session, ids)
            if length > best:
                best, owner = length, session
        return best, owner

    def begin(self, ids: Sequence[int], capacity: int, limit: int | None = None) -> Turn:
        """Prefill, which puts the prompt's whole pages into the tree. ``limit``: cached tokens that were not evicted
        since."""
        cached, owner = self.hit(ids)
        if limit is not None and limit < cached:
            cached, owner = limit, owner if limit else None
        session = self.model.session(capacity) if owner is None else owner.fork(cached, capacity)
        replayed = session.replay
        session.extend(list(ids[cached:]), chunk=CHUNK)
        self.kept.append(session)
        return Turn(session, cached, replayed, [])

    def serve(self, ids: Sequence[int], count: int, limit: int | None = None) -> Turn:
        """A whole request of ``count`` greedy tokens. Its output's pages are in the tree as well, but for the last
        token, which is never run."""
        turn = self.begin(ids, len(ids) + count, limit)
        turn.ids += turn.session.generate(count, ignore_eos=True)
        return turn

    def interrupted(self, ids: Sequence[int], retracted_after: Iterable[int], count: int) -> list[int]:
        """A request that lost its pages and slot after each of these numbers of output tokens, and began again from
        what the tree had of its prompt and output. Only prefills put pages into the tree."""
        output: list[int] = []
        for end in [*retracted_after, count]:
            if end > len(output):
                known = [*ids, *output]
                turn = self.begin(known, len(ids) + count)
                output += turn.session.generate(end - len(output), ignore_eos=True)
                turn.session.tokens = turn.session.tokens[: len(known)]
        return output

    def _common(self, session: Session, ids: Sequence[int]) -> int:
        size = self.model.page_layout.page_size
        count = min(session.length, len(ids) - 1)
        other = torch.tensor(ids[:count], dtype=torch.int64)
        equal = (session.tokens[:count] == other).cumprod(0).sum().item()
        return int(equal) // size * size
