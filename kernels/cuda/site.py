"""Launches of ``site.cu``: a whole site of the hyper-connections.

Four bf16 streams of a multiple of 64 channels; everything else is left to the ops that a site is made of.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import jit

STREAMS, ROWS, CHANNELS, GROUP, PART = 4, 64, 64, 5, 32  # as in site.cu
MANY_ROWS = 1024  # from here on groups of pieces alone fill the GPU


class Kernels(NamedTuple):
    enter: jit.Kernel
    finish: jit.Kernel
    parts: int  # of a row in memory


@functools.cache
def kernels(hidden: int, expand: bool, loops: bool) -> Kernels:
    enter = jit.kernel("site.cu", "enter", (72,), HIDDEN=hidden, EXPAND=int(expand), LOOPS=int(loops))
    pieces = hidden // CHANNELS
    return Kernels(enter, jit.kernel_like(enter, "finish"), -(-pieces // GROUP) if loops else pieces)


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
    run = kernels(h, out is not None, rows >= MANY_ROWS)
    new = lambda *shape, dtype=torch.float32: torch.empty(shape, dtype=dtype, device=streams.device)  # noqa: E731
    given = [jit.aligned(each.contiguous()) for each in (streams, pre, fn, base, scale, weight)]
    late = [pre if each is None else jit.aligned(each.contiguous()) for each in (out, post, comb)]
    streams, pre, fn, base, scale, weight = given
    expanded = streams if out is None else torch.empty_like(streams)
    x = new(rows, h, dtype=torch.bfloat16)
    mixes = new(rows, m), new(rows, m), new(rows, m, m)
    parts = new(rows, run.parts, PART)
    grid = run.parts, -(-rows // ROWS)
    run.enter.launch(grid, 128, 0, late[0], streams, pre, *late[1:], fn, expanded, x, parts, rows, overlap=True)
    finish = expanded, parts, base, scale, weight, x, *mixes, float(norm_eps), float(hc_eps), iters
    run.finish.launch((rows,), 256, 0, *finish, overlap=True)
    return x, expanded, *mixes
