"""Rows: the only thing the network is ever asked to run.

A row is one query token. Prefill is many rows of one request, decode one row of many, ragged verification a few rows
each, replay some rows that read pages without writing them; the network does not know which. The rows of a request
are contiguous and ascend by one position per row.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rows:
    """One batch of query tokens. R rows of B requests; every index tensor is int64 and lies on the model's device.

    Row 0 of the state pool and page 0 of the page pool are junk: padding rows point there and are harmless.
    """

    token_ids: Tensor  # [R]
    positions: Tensor  # [R] position of the token in its sequence
    requests: Tensor  # [R] which request of this batch, 0..B-1
    cu_rows: Tensor  # [B+1] first row of each request, then R
    slots: Tensor  # [B] state slot
    page_table: Tensor  # [B, P] page ids of each request, in order of position; unused entries 0
    window_floor: Tensor  # [R] no window key below this position is visible (start of a replay, else 0)
    writes_pages: Tensor  # [R] bool: False for replayed rows, whose compressed groups are already in the pages
    image_mask: Tensor | None = None  # [R] bool, True inside an image span; None = all text

    @classmethod
    def build(
        cls,
        token_ids: Tensor,
        starts: list[int],
        lengths: list[int],
        slots: list[int],
        page_table: Tensor,
        replayed: list[int] | None = None,
        image_mask: Tensor | None = None,
    ) -> Rows:
        """Rows from host lists: request i runs positions starts[i] .. starts[i]+lengths[i]-1, the first
        replayed[i] of them as replay."""
        device = token_ids.device
        count = torch.tensor(lengths, dtype=torch.int64, device=device)
        requests = torch.repeat_interleave(torch.arange(len(lengths), device=device), count)
        cu_rows = torch.zeros(len(lengths) + 1, dtype=torch.int64, device=device)
        cu_rows[1:] = count.cumsum(0)
        first = torch.tensor(starts, dtype=torch.int64, device=device)[requests]
        offset = torch.arange(len(token_ids), device=device) - cu_rows[requests]
        replay = torch.tensor(replayed or [0] * len(lengths), dtype=torch.int64, device=device)[requests]
        return cls(
            token_ids=token_ids.to(torch.int64),
            positions=first + offset,
            requests=requests,
            cu_rows=cu_rows,
            slots=torch.tensor(slots, dtype=torch.int64, device=device),
            page_table=page_table,
            window_floor=torch.where(replay > 0, first, 0),
            writes_pages=offset >= replay,
            image_mask=image_mask,
        )

    @classmethod
    def none(cls, device: torch.device | str) -> Rows:
        """No rows of no request: the forward of a rank that has nothing to do while others do."""
        nothing = torch.empty(0, dtype=torch.int64, device=device)
        return cls.build(nothing, [], [], [], nothing.view(0, 1))

    @property
    def count(self) -> int:
        return self.token_ids.shape[0]

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """Everything that decides what a forward of text computes."""
        return (
            self.token_ids,
            self.positions,
            self.cu_rows,
            self.slots,
            self.page_table,
            self.window_floor,
            self.writes_pages,
        )

    @cached_property
    def row_slots(self) -> Tensor:
        """[R] state slot of each row."""
        return self.slots[self.requests]

    @cached_property
    def fresh(self) -> Tensor:
        """[R] how many earlier rows of the same request are in this batch: positions p-fresh .. p are rows
        r-fresh .. r."""
        return torch.arange(self.count, device=self.token_ids.device) - self.cu_rows[self.requests]

    @cached_property
    def ring_rows(self) -> Tensor:
        """[R] rows left in the request from this one on, itself included: a ring of N rows keeps a row iff
        ring_rows <= N."""
        return self.cu_rows[self.requests + 1] - torch.arange(self.count, device=self.token_ids.device)

    @cached_property
    def last(self) -> Tensor:
        """[B] the last row of each request."""
        return self.cu_rows[1:] - 1
