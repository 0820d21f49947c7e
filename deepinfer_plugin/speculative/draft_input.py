"""What the scheduler carries for us between two steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.speculative.spec_info import SpecInput, SpecInputType
from torch import Tensor


@dataclass
class DraftInput(SpecInput):
    """The newest token of each request of a batch and the position it will run at.

    Drafts are not here: batches are filtered and merged between steps, so those lie in buffers indexed by request
    slot. With overlap scheduling the two tensors lie in SGLang's buffers too, and ``future_indices`` says where.
    """

    bonus_tokens: Tensor  # int64 [B]
    new_seq_lens: Tensor  # int64 [B] committed tokens
    future_indices: Tensor | None = None

    # Read by SGLang's relay, which knows the drafts of other algorithms.
    topk_p = None
    topk_index = None
    hidden_states = None

    def __post_init__(self) -> None:
        super().__init__(SpecInputType.UNO_STATE)  # the kinds are a closed enum; this one is neither draft nor verify
        self.num_tokens_per_req = self.num_tokens_for_logprob_per_req = 1

    @classmethod
    def empty(cls, device: Any) -> DraftInput:
        nothing = torch.empty(0, dtype=torch.int64, device=device)
        return cls(nothing, nothing)

    def filter_batch(self, new_indices: Tensor, new_indices_cpu: list[int] | None = None) -> None:
        if self.future_indices is not None:
            self.future_indices = self.future_indices[new_indices]
            return
        self.bonus_tokens = self.bonus_tokens[new_indices]
        self.new_seq_lens = self.new_seq_lens[new_indices]

    def merge_batch(self, other: DraftInput) -> None:
        if self.future_indices is not None:
            assert other.future_indices is not None
            self.future_indices = torch.cat([self.future_indices, other.future_indices])
            return
        self.bonus_tokens = torch.cat([self.bonus_tokens, other.bonus_tokens])
        self.new_seq_lens = torch.cat([self.new_seq_lens, other.new_seq_lens])
