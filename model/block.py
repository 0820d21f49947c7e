"""A transformer block on hyper-connected residual streams (mHC, shifted).

The residual is ``hc_mult`` parallel streams. Each sublayer site derives three mixes from the streams it receives:
``pre`` collapses the streams into one input, ``post`` spreads the sublayer's output, ``comb`` (doubly stochastic)
mixes the streams themselves. Shifted: the ``pre`` of a site is used by the *next* site, so a sublayer's input never
waits for its own statistics.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from deepinfer_plugin.kernels import Ops

from .config import V41Config
from .expert_map import ExpertMap
from .layers import RMSNorm, parameter
from .moe import MoE
from .parallel import Parallel
from .step import Step


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
        self.norm_eps, self.hc_eps, self.hc_iters = config.norm_eps, config.hc_eps, config.hc_iters
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

    def mix(self, site: str, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        fn, base, scale = (getattr(self, f"hc_{site}_{part}") for part in ("fn", "base", "scale"))
        return self.ops.hc_mix(streams, fn, base, scale, self.norm_eps, self.hc_eps, self.hc_iters)

    def forward(self, streams: Tensor, pre: Tensor, step: Step) -> tuple[Tensor, Tensor]:
        """streams [R, hc_mult, H] and the ``pre`` of the site before; returns both for the site after."""
        ops = self.ops
        attn_pre, post, comb = self.mix("attn", streams)
        out = self.attn(self.attn_norm(ops.hc_collapse(streams, pre)), step)
        streams = ops.hc_expand(out, streams, post, comb)

        ffn_pre, post, comb = self.mix("ffn", streams)
        out = self.ffn(self.ffn_norm(ops.hc_collapse(streams, attn_pre)), step)
        return ops.hc_expand(out, streams, post, comb), ffn_pre


def expand_embedding(x: Tensor, streams: int) -> tuple[Tensor, Tensor]:
    """All streams start as the embedding [R, H]; the first site reads stream 0 alone. Returns streams [R,
    streams, H] and pre."""
    pre = torch.zeros(x.shape[0], streams, dtype=torch.float32, device=x.device)
    pre[:, 0] = 1.0
    return x.unsqueeze(1).repeat(1, streams, 1), pre
