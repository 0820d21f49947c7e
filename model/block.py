"""A transformer block on hyper-connected residual streams (mHC, shifted).

The residual is ``hc_mult`` parallel streams. Each sublayer site derives three mixes from the streams it receives:
``pre`` collapses the streams into one input, ``post`` spreads the sublayer's output, ``comb`` (doubly stochastic)
mixes the streams themselves. Shifted: the ``pre`` of a site is used by the *next* site, so a sublayer's input never
waits for its own statistics.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from deepinfer_plugin.kernels import Ops

from .config import V41Config
from .expert_map import ExpertMap
from .layers import RMSNorm, parameter
from .moe import MoE
from .parallel import Parallel
from .step import Step


@dataclass(frozen=True)
class Residual:
    """The streams [R, hc_mult, H] with ``pre`` of the site before, and a sub-layer's output [R, H] that they are still
    to take in by its ``post`` and ``comb``: the next site does that on its way."""

    streams: Tensor
    pre: Tensor
    out: Tensor | None = None
    post: Tensor | None = None
    comb: Tensor | None = None

    def settled(self, ops: Ops) -> Residual:
        """With nothing to take in."""
        if self.out is None:
            return self
        assert self.post is not None and self.comb is not None
        return Residual(ops.hc_expand(self.out, self.streams, self.post, self.comb), self.pre)

    def collapsed(self, ops: Ops) -> Tensor:
        """[R, H]: what the next site would read."""
        return ops.hc_collapse(self.settled(ops).streams, self.pre)


class Block(nn.Module):
    """``places``: of its set of experts, of which it is layer ``layer``; ``topk`` of them for a row."""

    def __init__(
        self,
        ops: Ops,
        config: V41Config,
        attention: nn.Module,
        places: ExpertMap,
        layer: int,
        topk: int,
        parallel: Parallel,
    ):
        super().__init__()
        self.ops = ops
        self.hc_eps, self.hc_iters = config.hc_eps, config.hc_iters
        self.attn = attention
        self.ffn = MoE(ops, config, places, layer, topk, parallel)
        self.attn_norm = RMSNorm(ops, config.hidden_size, config.norm_eps)
        self.ffn_norm = RMSNorm(ops, config.hidden_size, config.norm_eps)
        streams = config.hc_mult
        mixes = (2 + streams) * streams
        for site in ("attn", "ffn"):
            setattr(self, f"hc_{site}_fn", parameter(mixes, streams * config.hidden_size, dtype=torch.float32))
            setattr(self, f"hc_{site}_base", parameter(mixes, dtype=torch.float32))
            setattr(self, f"hc_{site}_scale", parameter(3, dtype=torch.float32))

    def enter(self, site: str, norm: RMSNorm, before: Residual) -> tuple[Tensor, Residual]:
        """The input [R, H] of a sub-layer, and the residual that waits for its output."""
        fn, base, scale = (getattr(self, f"hc_{site}_{part}") for part in ("fn", "base", "scale"))
        numbers = norm.eps, self.hc_eps, self.hc_iters
        late = before.out, before.post, before.comb
        x, streams, pre, post, comb = self.ops.hc_site(
            before.streams, before.pre, fn, base, scale, norm.weight, *numbers, *late
        )
        return x, Residual(streams, pre, None, post, comb)

    def forward(self, residual: Residual, step: Step) -> Residual:
        x, residual = self.enter("attn", self.attn_norm, residual)
        residual = replace(residual, out=self.attn(x, step))
        x, residual = self.enter("ffn", self.ffn_norm, residual)
        return replace(residual, out=self.ffn(x, step))


def expand_embedding(x: Tensor, streams: int) -> tuple[Tensor, Tensor]:
    """All streams start as the embedding [R, H]; the first site reads stream 0 alone. Returns streams [R,
    streams, H] and pre."""
    pre = torch.zeros(x.shape[0], streams, dtype=torch.float32, device=x.device)
    pre[:, 0] = 1.0
    return x.unsqueeze(1).repeat(1, streams, 1), pre
