"""The forward of a verification: per request its newest token and as many of its drafts as are to be verified."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.speculative.spec_info import SpecInput, SpecInputType
from torch import Tensor

from ..runtime.transfer import to_device


@dataclass(frozen=True)
class VerifyRows:
    """``lengths`` int64 [B] rows of each request, 1 .. ``width``; ``total`` their sum, known on the host before the
    launch. Request by request, rows ascend by position. ``width`` is the draft block and the newest token."""

    lengths: Tensor
    total: int
    width: int

    @classmethod
    def build(cls, lengths: list[int], width: int, device: torch.device | str) -> VerifyRows:
        return cls(to_device(lengths, device), sum(lengths), width)

    @cached_property
    def cu_rows(self) -> Tensor:
        """int64 [B + 1] the first row of each request, then ``total``."""
        return torch.cat([self.lengths.new_zeros(1), self.lengths.cumsum(0)])

    @property
    def first(self) -> Tensor:
        return self.cu_rows[:-1]

    @cached_property
    def owners(self) -> Tensor:
        """int64 [total] the request of each row."""
        index = torch.arange(len(self.lengths), device=self.lengths.device)
        return torch.repeat_interleave(index, self.lengths, output_size=self.total)

    @cached_property
    def offsets(self) -> Tensor:
        """int64 [total] how far a row is from its request's newest token."""
        return torch.arange(self.total, device=self.lengths.device) - self.first[self.owners]

    @cached_property
    def padded(self) -> Tensor:
        """int64 [B, width] the row at each offset; beyond a request's last row, that row."""
        offset = torch.arange(self.width, device=self.lengths.device)
        return self.first[:, None] + torch.minimum(offset, self.lengths[:, None] - 1)

    # ---- what SGLang and our backend call a ragged layout ----------------------------------------------------------

    @property
    def verify_lens(self) -> Tensor:
        return self.lengths

    @property
    def total_verify_tokens(self) -> int:
        return self.total


@dataclass
class VerifyInput(SpecInput):
    """``spec_info`` of a verification."""

    positions: Tensor  # int64 [total]
    longest: int  # no request is longer, these rows included
    ragged_verify_layout: VerifyRows
    capture_hidden_mode: CaptureHiddenMode = CaptureHiddenMode.NULL
    hidden_states: Tensor | None = None

    def __post_init__(self) -> None:
        super().__init__(SpecInputType.UNO_VERIFY)  # the kinds are a closed enum; this one says "verify"
        self.num_tokens_per_req = self.num_tokens_for_logprob_per_req = 1
        self.draft_token_num = self.ragged_verify_layout.width
