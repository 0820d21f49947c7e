"""The indexer: a small attention that scores every visible group and keeps the best ``index_topk`` of each row."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from deepinfer_plugin.kernels import Ops

from .config import V41Config
from .layers import Dense, Linear, RMSNorm
from .profiles import Profile
from .step import Step

SCORE_BYTES = 1 << 30  # scores of one launch


class Indexer(nn.Module):
    """An index source. KV sources also turn their latents into index keys; the others read the keys of the last
    KV source. The candidate layer additionally restricts the index sources after it to its best blocks of
    groups."""

    def __init__(self, ops: Ops, config: V41Config, profile: Profile, layer: int):
        super().__init__()
        self.ops = ops
        self.source = config.kv_source_of[layer]
        self.ratio = config.compress_ratios[layer]
        self.topk = config.index_topk
        self.heads, self.head_dim = config.index_heads, config.index_head_dim
        self.scale = config.index_scale
        self.low_precision = profile.low_precision_scores
        self.makes_candidates = layer == config.candidate_layer
        self.uses_candidates = 0 <= config.candidate_layer < layer
        self.block_size, self.blocks = config.candidate_block_size, config.candidate_blocks
        self.wq_b = Linear(ops, config.q_lora_rank, self.heads * self.head_dim)
        self.weights_proj = Dense(ops, config.hidden_size, self.heads)
        owns_keys = layer in config.kv_sources
        self.wk = Dense(ops, config.head_dim, self.head_dim) if owns_keys else None
        self.k_norm = RMSNorm(ops, self.head_dim, config.norm_eps) if owns_keys else None

    def forward(self, x: Tensor, low_rank: Tensor, latent: Tensor | None, step: Step, inv_freq: Tensor) -> Tensor:
        """Selected groups int64 [R, topk], ascending, -1 padded."""
        rows, pages = step.rows, step.source(self.source)
        if self.wk is not None and self.k_norm is not None:
            assert latent is not None
            target = step.target(self.ratio)
            key = self.ops.rope(self.k_norm(self.wk(latent)), target.positions, inv_freq)
            self.ops.index_key_write(key, pages.key, pages.key_scale, target.page_ids, target.groups, target.keep)
        query = self.wq_b(low_rank).unflatten(-1, (self.heads, self.head_dim))
        query = self.ops.rope(query, rows.positions, inv_freq)
        weight = self.weights_proj(x) * self.scale
        return self._select(query, weight, step)

    def _select(self, query: Tensor, weight: Tensor, step: Step) -> Tensor:
        """Scores are as wide as the page tables, so many rows of a long context take turns; what they may choose from
        then waits for the later index sources as a flag a block."""
        rows, pages, visible = step.rows, step.source(self.source), step.visible(self.ratio)
        groups = rows.page_table.shape[1] * (step.pages.layout.page_size // self.ratio)
        most = max(1, SCORE_BYTES // max(1, groups * query.element_size()))
        whole = rows.count <= most
        selected, candidates = [], []
        for first in range(0, max(1, rows.count), most):
            part = slice(first, first + most)
            scores = self.ops.index_scores(
                query[part],
                weight[part],
                pages.key,
                pages.key_scale,
                rows.page_table,
                rows.requests[part],
                visible[part],
                self.low_precision,
            )
            allowed = None
            if self.makes_candidates:
                found = self.ops.candidate_blocks(scores, visible[part], self.block_size, self.blocks)
                candidates.append(found if whole else found[:, :: self.block_size].clone())
            elif self.uses_candidates:
                assert step.candidates is not None
                allowed = step.candidates[part]
                if not whole:  # a block is allowed as a whole, as far as a row can see
                    allowed = allowed.repeat_interleave(self.block_size, dim=1)[:, :groups]
            selected.append(self.ops.top_groups(scores, visible[part], self.topk, allowed))
        if self.makes_candidates:
            step.candidates = candidates[0] if whole else torch.cat(candidates)
        return selected[0] if whole else torch.cat(selected)
