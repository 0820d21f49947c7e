"""Hyper-connections. The Sinkhorn rounds are torch_npu's, whose documented order (softmax over targets, then sources,
then targets and sources in turn, every sum with the epsilon) is the contract's. Its fused pre op is not used: it
collapses the streams with the weights of its own site, and V4.1 collapses them with those of the site before.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .vendor import op


def hc_mix(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, norm_eps: float, hc_eps: float, iters: int
) -> tuple[Tensor, Tensor, Tensor]:
    rows, m = streams.shape[:2]
    if rows == 0:
        empty = streams.new_empty(0, m, dtype=torch.float32)
        return empty, empty.clone(), streams.new_empty(0, m, m, dtype=torch.float32)
    flat = streams.flatten(1).to(torch.float32)
    mix = torch.nn.functional.linear(flat, fn) / torch.sqrt((flat * flat).mean(-1, keepdim=True) + norm_eps)
    factors = torch.cat([part.expand(n) for part, n in zip(scale.split(1), (m, m, m * m), strict=True)])
    mix = mix * factors + base
    gates = torch.sigmoid(mix[:, : 2 * m])
    comb = op("npu_mhc_sinkhorn")(mix[:, 2 * m :].reshape(rows, m, m), eps=hc_eps, num_iters=iters)[0]
    return gates[:, :m] + hc_eps, 2 * gates[:, m:], comb


def hc_collapse(streams: Tensor, pre: Tensor) -> Tensor:
    return (streams.to(torch.float32) * pre[..., None]).sum(1).to(streams.dtype)


def hc_expand(out: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    result = post[..., None] * out.to(torch.float32)[:, None]
    for j in range(streams.shape[1]):
        result = result + comb[:, j, :, None] * streams[:, j, None].to(torch.float32)
    return result.to(streams.dtype)
