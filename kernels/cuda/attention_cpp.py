"""Launches of attention in CUDA C++ (``attention.cu``): bf16 rows of a multiple of 64 heads x 512 channels, the
released shape. Everything else goes to the Triton kernel of ``attention.py``."""

from __future__ import annotations

import torch
from torch import Tensor

from . import attention as triton_attention
from . import jit

HEADS, CHANNELS = 64, 512  # of a block
SHARED_BYTES, MOST_CHOSEN = 230_528, 2048  # of a block; selected places that fit into them
KERNEL = jit.kernel("attention.cu", "sparse_attention", (64, 128), SHARED_BYTES=SHARED_BYTES, MOST_CHOSEN=MOST_CHOSEN)


def served(
    q: Tensor,
    window: Tensor,
    ring: Tensor,
    latent: Tensor | None,
    latent_scale: Tensor | None,
    selected: Tensor | None,
) -> bool:
    """Whether the kernel takes these: the released shape, all bytes in aligned runs of 16."""
    runs = [window[:, None], ring, *(each for each in (latent, latent_scale) if each is not None)]
    return (
        q.dtype == torch.bfloat16
        and q.shape[1] % HEADS == 0
        and q.shape[2] == CHANNELS
        and (selected is None or selected.shape[1] <= MOST_CHOSEN)
        and all(each.stride(2) == 1 and not (each.data_ptr() | each.stride(0) | each.stride(1)) % 16 for each in runs)
    )


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
    window = window if window.stride(1) == 1 else window.contiguous()
    q = jit.aligned(q.contiguous())
    if not served(q, window, ring, latent, latent_scale, selected):
        return triton_attention.sparse_attention(
            q, window, positions, fresh, row_slots, window_floor, ring, window_len,
            latent, latent_scale, page_table, requests, selected, sink, scale, block_future,
        )  # fmt: skip
    rows, heads, _ = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    paged = (latent, latent_scale, page_table, selected)
    groups, chosen = (1, 0) if latent is None or selected is None else (latent.shape[1], selected.shape[1])
    KERNEL.launch(
        (min(rows, jit.multiprocessors(q.device)), heads // HEADS), 512, SHARED_BYTES,
        q, window, *(each.contiguous() for each in (positions, fresh, row_slots, window_floor)), ring,
        *(0 if each is None else each for each in (latent, latent_scale, page_table)),
        0 if requests is None else requests.contiguous(), 0 if selected is None else selected,
        sink.contiguous(), 0 if block_future is None else block_future.contiguous(), out,
        rows, heads, window_len, ring.shape[1], groups, chosen, window.stride(0), *ring.stride()[:2],
        *(stride for each in paged for stride in ((0, 0) if each is None else each.stride()[:2])), scale,
    )  # fmt: skip
    return out
