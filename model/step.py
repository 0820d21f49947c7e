"""What the layers of one forward share: the rows, the two memories, and what a source layer hands to the layers after
it."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from .memory import PagePool, SourcePages, StatePool
from .parallel import Exchange, Here
from .rows import Rows


@dataclass(frozen=True)
class GroupTarget:
    """Where the compressed group that a row completes is written."""

    page_ids: Tensor  # int64 [R]
    groups: Tensor  # int64 [R] group inside the page
    keep: Tensor  # bool [R] the row completes a group and may write it
    positions: Tensor  # int64 [R] position of the group: that of its first token


@dataclass
class Step:
    rows: Rows
    pages: PagePool
    state: StatePool
    selected: Tensor | None = None  # int64 [R, topk] groups picked by the last index source, -1 = none
    candidates: Tensor | None = None  # bool [R, G] groups the later index sources may pick from, or [R, blocks] of them
    exchange: Exchange = field(default_factory=Here)  # with ranks that have other parts of the network, or other rows

    @cached_property
    def keep_ring(self) -> Tensor:
        """Rows that still fit the window ring when the whole batch is written."""
        return self.rows.ring_rows <= self.state.layout.ring_length

    @cached_property
    def keep_tail(self) -> Tensor:
        return self.rows.ring_rows <= self.state.layout.tail_length

    @cached_property
    def keep_ngram(self) -> Tensor:
        return self.rows.ring_rows <= self.state.ngrams.shape[1]

    def source(self, index: int) -> SourcePages:
        return self.pages.sources[index]

    def visible(self, ratio: int) -> Tensor:
        """int64 [R] compressed groups a row can see: those whose last token is not after it."""
        return (self.rows.positions + 1) // ratio

    def target(self, ratio: int) -> GroupTarget:
        rows, page_size = self.rows, self.pages.layout.page_size
        page_ids = rows.page_table[rows.requests, rows.positions // page_size]
        return GroupTarget(
            page_ids=page_ids,
            groups=rows.positions % page_size // ratio,
            keep=rows.writes_pages & ((rows.positions + 1) % ratio == 0),
            positions=torch.clamp(rows.positions - (ratio - 1), min=0),
        )
