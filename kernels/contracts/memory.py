"""Contracts of the writes to request state and pages (model description: KV cache; compressors).

Rows of a batch that belong to one request are contiguous and ascend by one position per row. ``fresh`` [R] counts how
many earlier rows of the request the batch holds. ``row_slots`` [R] is each row's slot in a state tensor. All ids are
int64 and may address memory beyond 2^31 bytes. Writes are in place; a row that is not kept writes nothing, and its
ids are not looked at.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .base import ACTIVATION, BLOCK, BOOL, F32, I32, I64, LATENT_BLOCK, U8, OpTable, check, check_multiple, fail


class MemoryOps(OpTable):
    def window_pack(self, kv: Tensor) -> Tensor:
        """Rotated window keys in the form the rings store them: e4m3 values, then a UE8M0 scale per 32 channels.

        kv [R, D], bf16 or float32, D a multiple of 32 -> uint8 [R, D + D/32]. A block that holds a NaN or an infinity
        gets scale byte 255 and reads back as NaN.
        """
        check("window_pack", "kv", kv, (None, None), ACTIVATION)
        check_multiple("window_pack", "kv", kv.shape[1], BLOCK)
        return self._run["window_pack"](kv)

    def window_write(
        self, packed: Tensor, row_slots: Tensor, positions: Tensor, keep: Tensor, ring: Tensor, tags: Tensor
    ) -> None:
        """Store window rows at ``ring[slot, position % L]`` and their positions at the same place of ``tags``.

        Args:
            packed: uint8 [R, W].
            row_slots, positions: int64 [R].
            keep: bool [R]; at most one kept row per place.
            ring: uint8 [slots, L, W], any strides.
            tags: int32 [slots, L].
        """
        op = "window_write"
        check(op, "ring", ring, (None, None, None), U8)
        slots, length, width = ring.shape
        check(op, "packed", packed, (None, width), U8)
        rows = (packed.shape[0],)
        check(op, "row_slots", row_slots, rows, I64)
        check(op, "positions", positions, rows, I64)
        check(op, "keep", keep, rows, BOOL)
        check(op, "tags", tags, (slots, length), I32)
        self._run[op](packed, row_slots, positions, keep, ring, tags)

    def compress_pair(
        self,
        value: Tensor,
        score: Tensor,
        positions: Tensor,
        fresh: Tensor,
        row_slots: Tensor,
        tail: Tensor,
        dtype: torch.dtype,
    ) -> Tensor:
        """Pool the pair of tokens (p-1, p) that each odd position p completes.

        Per channel, a softmax of the two scores weighs the two values.

        Args:
            value, score: float32 [R, D].
            positions, fresh, row_slots: int64 [R]. Position p-1 is row r-1 if fresh[r] > 0, else in the tail, at
                ``tail[slot, (p-1) % L]``.
            tail: float32 [slots, L, 2, D], value and score.
            dtype: of the result, bfloat16 or float32; float32 inside, one rounding.

        Returns:
            [R, D]; zero for even positions. A NaN, or two scores that are both infinite of one sign, makes its
            channel NaN.
        """
        op = "compress_pair"
        check(op, "value", value, (None, None), F32)
        r, d = value.shape
        check(op, "score", score, (r, d), F32)
        for arg, ids in (("positions", positions), ("fresh", fresh), ("row_slots", row_slots)):
            check(op, arg, ids, (r,), I64)
        check(op, "tail", tail, (None, None, 2, d), F32)
        if dtype not in ACTIVATION:
            fail(op, "dtype", dtype, "torch.bfloat16 or torch.float32")
        return self._run[op](value, score, positions, fresh, row_slots, tail, dtype)

    def tail_write(
        self, value: Tensor, score: Tensor, positions: Tensor, row_slots: Tensor, keep: Tensor, tail: Tensor
    ) -> None:
        """Remember value and score of kept rows at ``tail[slot, position % L]``.

        value, score: float32 [R, D]; positions, row_slots: int64 [R]; keep: bool [R]; tail: float32 [slots, L, 2, D].
        """
        op = "tail_write"
        check(op, "value", value, (None, None), F32)
        r, d = value.shape
        check(op, "score", score, (r, d), F32)
        check(op, "positions", positions, (r,), I64)
        check(op, "row_slots", row_slots, (r,), I64)
        check(op, "keep", keep, (r,), BOOL)
        check(op, "tail", tail, (None, None, 2, d), F32)
        self._run[op](value, score, positions, row_slots, keep, tail)

    def latent_write(
        self, latent: Tensor, values: Tensor, scales: Tensor, page_ids: Tensor, groups: Tensor, keep: Tensor
    ) -> None:
        """Store rotated compressed latents in their pages: e2m1 with an E4M3 scale per 16 channels.

        Args:
            latent: [R, D], D a multiple of 16.
            values: uint8 [pages, G, D/2], scales: uint8 [pages, G, D/16]: views into the page pool, strided by the
                page.
            page_ids, groups: int64 [R], page and group inside the page.
            keep: bool [R]; at most one kept row per place.

        A block that holds a NaN or an infinity gets a NaN scale; beyond 2688 values saturate.
        """
        op = "latent_write"
        check(op, "latent", latent, (None, None), ACTIVATION)
        check_multiple(op, "latent", latent.shape[1], LATENT_BLOCK)
        _check_pages(op, latent, LATENT_BLOCK, ("values", values), ("scales", scales), page_ids, groups, keep)
        self._run[op](latent, values, scales, page_ids, groups, keep)

    def index_key_write(
        self, key: Tensor, values: Tensor, scales: Tensor, page_ids: Tensor, groups: Tensor, keep: Tensor
    ) -> None:
        """Store rotated index keys in their pages: e2m1 with a UE8M0 scale per 32 channels.

        As ``latent_write``, with key [R, D], D a multiple of 32, values uint8 [pages, G, D/2], scales uint8
        [pages, G, D/32].
        """
        op = "index_key_write"
        check(op, "key", key, (None, None), ACTIVATION)
        check_multiple(op, "key", key.shape[1], BLOCK)
        _check_pages(op, key, BLOCK, ("values", values), ("scales", scales), page_ids, groups, keep)
        self._run[op](key, values, scales, page_ids, groups, keep)


def _check_pages(
    op: str,
    x: Tensor,
    block: int,
    values: tuple[str, Tensor],
    scales: tuple[str, Tensor],
    page_ids: Tensor,
    groups: Tensor,
    keep: Tensor,
) -> None:
    r, d = x.shape
    check(op, *values, (None, None, d // 2), U8)
    check(op, *scales, (*values[1].shape[:2], d // block), U8)
    check(op, "page_ids", page_ids, (r,), I64)
    check(op, "groups", groups, (r,), I64)
    check(op, "keep", keep, (r,), BOOL)
