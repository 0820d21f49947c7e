"""Launches of the indexer's kernels (``index_scores.cu``, ``select.cu``)."""

from __future__ import annotations

import torch
from torch import Tensor

from . import MULTIPROCESSORS, jit

MAX_COLUMNS = 256  # of a wgmma instruction: heads times rows that share a tile
MOST_QUERY = 20480  # channels of all heads of a row: four rows fit into shared memory
MOST_ROWS = 65535  # the second axis of a grid
MOST_TILES = 128  # of a block: a graph's page tables may be far wider than what most of its requests see
BLOCKS_PER_MULTIPROCESSOR = 6  # two waves of the three that fit: what an uneven end costs is halved


def index_scores(
    query: Tensor,
    weight: Tensor,
    key: Tensor,
    key_scale: Tensor,
    page_table: Tensor,
    requests: Tensor,
    visible: Tensor,
    low_precision: bool,
) -> Tensor:
    rows, heads, channels = query.shape
    requests, visible = requests.contiguous(), visible.contiguous()
    groups, pages = key.shape[1], page_table.shape[1]
    if rows > MOST_ROWS:
        parts = zip(*(each.split(MOST_ROWS) for each in (query, weight, requests, visible)), strict=True)
        return torch.cat([index_scores(q, w, key, key_scale, page_table, r, v, low_precision) for q, w, r, v in parts])
    out = torch.empty(rows, pages * groups, dtype=query.dtype, device=query.device)
    if not out.numel():
        return out
    if key.stride(2) != 1 or key_scale.stride(2) != 1:
        raise ValueError("index_scores: the bytes of a key and of its scales must be neighbours")
    scores = ScoresKernels(
        channels, heads, groups, query.dtype, low_precision and query.dtype == torch.bfloat16, _aligned(key, channels)
    )
    image = torch.empty(rows, scores.heads, channels, dtype=torch.bfloat16, device=query.device)
    padded = torch.empty(rows, scores.heads, dtype=query.dtype, device=query.device)
    leads = torch.empty(rows, dtype=torch.int32, device=query.device)
    scores.queries.launch(
        (rows,), 512, 0, query.contiguous(), weight.contiguous(), requests, image, padded, leads, rows
    )
    tiles = -(-pages * groups // 64)
    wanted = MULTIPROCESSORS * BLOCKS_PER_MULTIPROCESSOR * scores.rows // rows + 1
    per_block = min(MOST_TILES, max(2, -(-tiles // wanted)))
    scores.scores.launch(
        (-(-tiles // per_block), rows),
        128,
        scores.rows * scores.heads * channels * 2,
        image,
        padded,
        leads,
        key,
        key_scale,
        page_table.contiguous(),
        requests,
        visible,
        out,
        rows,
        pages,
        per_block,
        *key.stride()[:2],
        *key_scale.stride()[:2],
    )
    return out


class ScoresKernels:
    """The two kernels of a shape: ``queries`` and ``scores``, with ``rows`` of ``heads`` (padded) in a tile.

    Raises:
        ValueError: more heads than a tile holds for four rows.
    """

    def __init__(self, channels: int, heads: int, groups: int, dtype: torch.dtype, low: bool, aligned: bool):
        self.heads = -(-heads // 8) * 8
        if 4 * self.heads > MAX_COLUMNS or self.heads * channels > MOST_QUERY:
            raise ValueError(
                f"index_scores: {heads} heads of {channels} channels are not supported by the cuda kernel; legal: "
                f"up to 64 heads, and {MOST_QUERY} channels of all (heads rounded up to eight)"
            )
        self.rows = 4
        columns = self.rows * self.heads
        defines = {
            "D": channels,
            "HEADS": self.heads,
            "SOURCE_HEADS": heads,
            "ROWS": self.rows,
            "GROUPS": groups,
            "LOW": int(low),
            "WIDE": int(dtype == torch.float32),
            "ALIGNED": int(aligned),
            "WGMMA": columns,
        }
        self.queries, self.scores = (
            jit.kernel("index_scores.cu", entry, (columns,), jit.ARCH, **defines)
            for entry in ("prepare_queries", "index_scores")
        )


def _aligned(key: Tensor, channels: int) -> bool:
    return channels == 128 and not any(size % 16 for size in (key.data_ptr(), *key.stride()[:2]))


def candidate_blocks(scores: Tensor, visible: Tensor, block_size: int, blocks: int) -> Tensor:
    scores, visible = scores.contiguous(), visible.contiguous()
    rows, groups = scores.shape
    out = torch.empty(rows, groups, dtype=torch.bool, device=scores.device)
    if out.numel():
        _select(scores, block_size).launch((rows,), 512, 0, scores, visible, _NO_TENSOR, out, groups, blocks)
    return out


def top_groups(scores: Tensor, visible: Tensor, k: int, candidates: Tensor | None) -> Tensor:
    scores, visible = scores.contiguous(), visible.contiguous()
    rows, groups = scores.shape
    out = torch.empty(rows, k, dtype=torch.int64, device=scores.device)
    if rows:
        allowed: Tensor | int = _NO_TENSOR
        if candidates is not None:  # eight at a time
            allowed = candidates.contiguous() if candidates.data_ptr() % 8 == 0 else candidates.clone()
        _select(scores, 0).launch((rows,), 512, 0, scores, visible, allowed, out, groups, k)
    return out


_NO_TENSOR = 0  # a null pointer: pointers and integers are both 64 bits


CHUNK = 4096  # items that a block of the selection kernel takes at a time


HELD = (1, 2, 4, 8, 0)  # chunks that stay in registers; 0: a longer row is read again for every digit


def _select(scores: Tensor, block: int) -> jit.Kernel:
    chunks = -(-scores.shape[1] // max(1, block) // CHUNK)
    return select_kernel(
        wide=scores.dtype == torch.float32,
        block=block,
        held=next((held for held in HELD if chunks <= held), 0),
        vector=scores.data_ptr() % 16 == 0 and scores.shape[1] % 8 == 0,
        arch=jit.arch_of(scores.device),
    )


def select_kernel(*, wide: bool, block: int, held: int, vector: bool, arch: str = jit.ARCH) -> jit.Kernel:
    """It uses no instruction of one GPU, so it also runs on others than Hopper."""
    return jit.kernel("select.cu", "select", arch=arch, WIDE=int(wide), BLOCK=block, HELD=held, VECTOR=int(vector))
