"""Hyper-connections: the residual is M parallel streams, collapsed into a sub-layer's input and expanded from its
output.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .numeric import product, row_chunks, sigmoid, square_mean, tree_sum


def hc_mix(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, norm_eps: float, hc_eps: float, iters: int
) -> tuple[Tensor, Tensor, Tensor]:
    m = streams.shape[1]
    flat = streams.flatten(1)
    parts = [product(flat[rows], fn) for rows in row_chunks(flat.shape[0], flat.shape[1] * 24)]
    mix = (parts[0] if len(parts) == 1 else torch.cat(parts)) / torch.sqrt(square_mean(flat) + norm_eps)
    mix = mix * torch.cat([s.expand(n) for s, n in zip(scale, (m, m, m * m), strict=True)]) + base
    gates = sigmoid(mix[:, : 2 * m])
    pre, post = gates[:, :m] + hc_eps, 2 * gates[:, m:]
    comb = _sinkhorn(mix[:, 2 * m :].unflatten(-1, (m, m)), iters, hc_eps)
    return pre.to(torch.float32), post.to(torch.float32), comb.to(torch.float32)


def _sinkhorn(logits: Tensor, iters: int, eps: float) -> Tensor:
    """[T, source, target] logits -> nearly doubly stochastic weights."""
    m = logits.shape[-1]
    logits = logits.permute(1, 2, 0)  # rows last: sums over sources or targets are then plain additions of long rows
    comb = torch.exp(logits - logits.amax(1, keepdim=True))
    # One more source and one more target that are always eps, so that a sum over either has its eps in it.
    padded = torch.full((m + 1, m + 1, logits.shape[-1]), eps, dtype=torch.float64, device=logits.device)
    by_source, by_target, body = padded[:, :m], padded[:m], padded[:m, :m]
    body.copy_(comb / comb.sum(1, keepdim=True) + eps)
    body.div_(by_source.sum(0, keepdim=True))
    for _ in range(iters - 1):
        body.div_(by_target.sum(1, keepdim=True))
        body.div_(by_source.sum(0, keepdim=True))
    return body.permute(2, 0, 1)


def hc_collapse(streams: Tensor, pre: Tensor) -> Tensor:
    return tree_sum(streams.to(torch.float64) * pre[..., None], 1).to(streams.dtype)


def hc_expand(out: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    result = post.to(torch.float64)[..., None] * out.to(torch.float64)[:, None]
    wide, comb = streams.to(torch.float64), comb.to(torch.float64)
    for j in range(streams.shape[1]):
        result += comb[:, j, :, None] * wide[:, j, None]
    return result.to(streams.dtype)
