"""Launches of ``site.cu``: a whole site of the hyper-connections.

Four bf16 streams of a multiple of 64 channels; everything else is left to the ops that a site is made of.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from . import jit

STREAMS, ROWS, CHANNELS, PART = 4, 64, 64, 32  # as in site.cu


@functools.cache
def kernels(hidden: int, expand: bool) -> tuple[jit.Kernel, jit.Kernel]:
    enter = jit.kernel("site.cu", "enter", (72,), HIDDEN=hidden, EXPAND=int(expand))
    return enter, jit.kernel_like(enter, "finish")


def hc_site(
    streams: Tensor,
    pre: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    weight: Tensor,
    norm_eps: float,
    hc_eps: float,
    iters: int,
    out: Tensor | None,
    post: Tensor | None,
    comb: Tensor | None,
) -> Any:
    rows, m, h = streams.shape
    if streams.dtype != torch.bfloat16 or m != STREAMS or h % CHANNELS or not rows:
        return NotImplemented
    enter, finish = kernels(h, out is not None)
    new = lambda *shape, dtype=torch.float32: torch.empty(shape, dtype=dtype, device=streams.device)  # noqa: E731
    late = [pre if each is None else jit.aligned(each.contiguous()) for each in (out, post, comb)]
    given = [jit.aligned(each.contiguous()) for each in (streams, pre, fn, base, scale, weight)]
    given_fn = fn
    streams, pre, fn, base, scale, weight = given
    expanded = streams if out is None else torch.empty_like(streams)
    x, pieces = new(rows, h, dtype=torch.bfloat16), h // CHANNELS
    mixes = new(rows, m), new(rows, m), new(rows, m, m)
    parts = new(rows, pieces, PART)
    grid = pieces, -(-rows // ROWS)
    # It reads fn before it waits: not if that is a copy made just now.
    early = fn is given_fn
    enter.launch(grid, 128, 0, late[0], streams, pre, *late[1:], fn, expanded, x, parts, rows, overlap=early)
    read = expanded, parts, base, scale, weight
    finish.launch((rows,), 256, 0, *read, x, *mixes, float(norm_eps), float(hc_eps), iters, overlap=True)
    return x, expanded, *mixes
