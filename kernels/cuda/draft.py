"""The two heads of the draft stages.

markov gathers the embeddings of the previous tokens and runs ``dense``'s product over the vocabulary. confidence is a
dot product a row: a program is a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .formats import widen
from .linear import Weight, dense
from .norm_rope import warps
from .overlap import OVERLAP, after_previous


def markov(prev: Tensor, embed: Tensor, head: Weight) -> tuple[Tensor, Tensor]:
    e = embed.index_select(0, prev)
    return dense(e, head, torch.float32), e


@triton.jit
def _confidence(
    hidden, e, proj, out, H: tl.constexpr, RANK: tl.constexpr, BLOCK: tl.constexpr, RANK_BLOCK: tl.constexpr
):
    after_previous()
    row = tl.program_id(0).to(tl.int64)
    channel, rank = tl.arange(0, BLOCK), tl.arange(0, RANK_BLOCK)
    x = widen(tl.load(hidden + row * H + channel, mask=channel < H, other=0.0)).to(tl.float64)
    weight = widen(tl.load(proj + channel, mask=channel < H, other=0.0)).to(tl.float64)
    y = widen(tl.load(e + row * RANK + rank, mask=rank < RANK, other=0.0)).to(tl.float64)
    other = widen(tl.load(proj + H + rank, mask=rank < RANK, other=0.0)).to(tl.float64)
    total = tl.sum(x * weight, axis=0) + tl.sum(y * other, axis=0)
    tl.store(out + row, total.to(tl.float32))


def confidence(hidden: Tensor, e: Tensor, proj: Tensor) -> Tensor:
    (rows, h), rank = hidden.shape, e.shape[1]
    out = torch.empty(rows, dtype=torch.float32, device=hidden.device)
    if rows:
        block = triton.next_power_of_2(h)
        _confidence[(rows,)](
            hidden.contiguous(),
            e.contiguous(),
            proj.contiguous(),
            out,
            h,
            rank,
            block,
            triton.next_power_of_2(max(1, rank)),
            num_warps=warps(block),
            **OVERLAP,
        )
    return out
