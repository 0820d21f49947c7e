"""Compressed latents of a KV source: one per token (ratio 1) or one per pair of tokens (ratio 2), written to the
pages."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from deepinfer_plugin.kernels import Ops

from .config import V41Config
from .layers import Dense, RMSNorm
from .step import Step


class Compressor(nn.Module):
    """Ratio 2 pools the pair {2g, 2g+1} per channel with a softmax over learned scores, in float32; ratio 1 is a
    projection. The value and score of a token whose pair is not complete wait in the state pool."""

    def __init__(self, ops: Ops, config: V41Config, layer: int):
        super().__init__()
        self.ops = ops
        self.source = config.kv_sources.index(layer)
        self.ratio = config.compress_ratios[layer]
        pooled = self.ratio == 2
        self.tail = sum(ratio == 2 for ratio in config.source_ratios[: self.source])
        self.wkv = Dense(ops, config.hidden_size, config.head_dim, torch.float32 if pooled else None)
        self.wgate = Dense(ops, config.hidden_size, config.head_dim, torch.float32) if pooled else None
        self.norm = RMSNorm(ops, config.head_dim, config.norm_eps)

    def forward(self, x: Tensor, step: Step, inv_freq: Tensor) -> Tensor:
        """The unrotated latent [R, head_dim] of the group each row completes (anything for rows that complete
        none); its rotated, quantised form goes to the pages."""
        rows = step.rows
        latent = self.wkv(x)
        if self.wgate is not None:
            score, tail = self.wgate(x), step.state.tails[self.tail]
            value = latent
            latent = self.ops.compress_pair(value, score, rows.positions, rows.fresh, rows.row_slots, tail, x.dtype)
            self.ops.tail_write(value, score, rows.positions, rows.row_slots, step.keep_tail, tail)
        latent = self.norm(latent)
        target, pages = step.target(self.ratio), step.source(self.source)
        self.ops.latent_write(
            self.ops.rope(latent.clone(), target.positions, inv_freq),
            pages.latent,
            pages.latent_scale,
            target.page_ids,
            target.groups,
            target.keep,
        )
        return latent
