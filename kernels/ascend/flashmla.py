"""sparse_attention by DeepSeek's FlashMLA, where it was built for Ascend. Never executed on hardware (docs/ascend.md).

Its decoding kernel reads rows in our formats, values then scales: 528 bytes a window key, 288 a latent, and takes any
row by number. Our window keys lie in two memories, the batch and the ring, and our pages keep values and scales of a
latent apart. So the rows that queries attend to are gathered first, packed as they are, into one cache for each call.
A provider of its own, ``ascend-flashmla``, that serves only where it is asked for by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ..flash_mla import attend
from . import soc
from .attention import selected_rows, window_rows, window_slots

HEADS, SIZE = 64, 512  # the only ones it was built for
CORES = 32  # its grid, which it insists on
CHUNK_BYTES = 256 << 20  # of gathered rows at a time


def unavailable(device: torch.device) -> str | None:
    """Why nothing here runs on ``device``, or None."""
    if device.type != "npu":
        return "it needs an Ascend 950"
    machine = soc.machine()
    if (problem := machine.problem()) is not None:
        return problem
    chip = soc.soc_of(machine.soc or "")
    if chip is None or chip.cores != CORES:
        return f"FlashMLA is written for {CORES} cores; not supported: found {machine.soc}"
    try:
        import_module("flash_mla.npu")
    except ImportError as error:
        return f"it needs FlashMLA built for Ascend, deepinfer-flashmla 1.0.0: {error}"
    return None


def ops(device: torch.device) -> Mapping[str, Callable[..., Any]]:
    """Op -> implementation."""
    return {"sparse_attention": sparse_attention}


def sparse_attention(
    q: Tensor,
    window: Tensor,
    positions: Tensor,
    fresh: Tensor,
    row_slots: Tensor,
    window_floor: Tensor,
    ring: Tensor,
    window_len: int,
    latent: Tensor | None,
    latent_scale: Tensor | None,
    page_table: Tensor | None,
    requests: Tensor | None,
    selected: Tensor | None,
    sink: Tensor,
    scale: float,
    block_future: Tensor | None,
) -> Tensor:
    """
    Raises:
        NotImplementedError: other activations than bfloat16, or other heads than FlashMLA has.
    """
    rows, heads, size = q.shape
    if q.dtype != torch.bfloat16 or (heads, size) != (HEADS, SIZE):
        raise NotImplementedError(
            f"sparse_attention of ascend-flashmla takes bfloat16 [rows, {HEADS}, {SIZE}], got "
            f"{str(q.dtype).removeprefix('torch.')} {list(q.shape)}; force sparse_attention=ascend"
        )
    slots = window_slots(rows, ring, window_len, block_future)
    chosen = 0 if selected is None else selected.shape[1]
    # Gathering takes an int64 address a word, at worst a byte.
    step = max(1, CHUNK_BYTES // (9 * (slots * ring.shape[-1] + chosen * (size // 2 + size // 16))))
    out = torch.empty_like(q)
    for first in range(0, rows, step):
        part = slice(first, min(rows, first + step))
        future = None if block_future is None else block_future[part]
        packed, there = window_rows(
            window, first, positions[part], fresh[part], row_slots[part], window_floor[part], ring, window_len, future
        )
        more, also = None, None
        if chosen:
            assert selected is not None and requests is not None
            assert latent is not None and latent_scale is not None and page_table is not None
            values, scales, also = selected_rows(latent, latent_scale, page_table[requests[part]], selected[part])
            more = torch.cat((values, scales), -1)
        chosen_numbers = None if also is None else _numbers(also)
        out[part] = attend(q[part], packed, _numbers(there), more, chosen_numbers, sink, scale, batch_invariant=False)
    return out


def _numbers(there: Tensor) -> Tensor:
    """int32 [n, 1, S]: each key's number in the cache, -1 where there is none."""
    number = torch.arange(there.numel(), dtype=torch.int32, device=there.device).view(there.shape)
    return torch.where(there, number, -1).unsqueeze(1)
