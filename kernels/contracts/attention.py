"""Contracts of the indexer and of attention (model description: attention steps 4-6, candidates)."""

from __future__ import annotations

from torch import Tensor

from .base import ACTIVATION, BLOCK, BOOL, F32, I64, LATENT_BLOCK, U8, OpTable, check, check_multiple, fail


class AttentionOps(OpTable):
    def index_scores(
        self,
        query: Tensor,
        weight: Tensor,
        key: Tensor,
        key_scale: Tensor,
        page_table: Tensor,
        requests: Tensor,
        visible: Tensor,
        low_precision: bool,
    ) -> Tensor:
        """Score of every compressed group for every row: sum over heads of weight * relu(query . key).

        Args:
            query: [R, heads, D] rotated index queries, D a multiple of 32; cast to e2m1 with a UE8M0 scale per 32
                channels inside.
            weight: [R, heads] of query's dtype, already times the index scale.
            key, key_scale: uint8 [pages, G, D/2] and [pages, G, D/32], views into the page pool.
            page_table: int64 [B, P].
            requests: int64 [R], 0..B-1.
            visible: int64 [R]: groups 0..visible-1 of the row's request are reachable.
            low_precision: bf16 only. True (model profile): dot, relu(dot) * weight and the sum are each rounded to
                bf16. False (deepinfer profile): rounded once at the end. float32: never rounded below float32,
                whatever this says.

        Returns:
            [R, P*G] of query's dtype, -inf where a group is not reachable. A NaN in query or key makes its score NaN.
        """
        op = "index_scores"
        check(op, "query", query, (None, None, None), ACTIVATION)
        r, heads, d = query.shape
        check_multiple(op, "query", d, BLOCK)
        check(op, "weight", weight, (r, heads), (query.dtype,))
        check(op, "key", key, (None, None, d // 2), U8)
        check(op, "key_scale", key_scale, (*key.shape[:2], d // BLOCK), U8)
        check(op, "page_table", page_table, (None, None), I64)
        check(op, "requests", requests, (r,), I64)
        check(op, "visible", visible, (r,), I64)
        return self._run[op](query, weight, key, key_scale, page_table, requests, visible, low_precision)

    def candidate_blocks(self, scores: Tensor, visible: Tensor, block_size: int, blocks: int) -> Tensor:
        """Keep the best blocks of ``block_size`` consecutive groups.

        Args:
            scores: [R, G]; visible: int64 [R] reachable groups.
            blocks: how many blocks to keep.

        Returns:
            bool [R, G], only reachable groups. A block's score is its best reachable one; the block of the last
            reachable group is always kept. Ties: the lower block wins. A NaN or -inf score ranks below all others,
            but stays reachable.
        """
        op = "candidate_blocks"
        check(op, "scores", scores, (None, None), ACTIVATION)
        check(op, "visible", visible, (scores.shape[0],), I64)
        for arg, value in (("block_size", block_size), ("blocks", blocks)):
            if value < 1:
                fail(op, arg, value, "at least 1")
        return self._run[op](scores, visible, block_size, blocks)

    def top_groups(self, scores: Tensor, visible: Tensor, k: int, candidates: Tensor | None) -> Tensor:
        """The k best reachable groups of each row.

        Args:
            scores: [R, G]; visible: int64 [R].
            candidates: bool [R, G], or None for all. Candidates go first; if fewer than k are reachable, the other
                reachable groups follow, lowest id first.

        Returns:
            int64 [R, k]: ascending group ids, then -1. Ties: the lower id wins. NaN as in ``candidate_blocks``.
        """
        op = "top_groups"
        check(op, "scores", scores, (None, None), ACTIVATION)
        check(op, "visible", visible, (scores.shape[0],), I64)
        if k < 1:
            fail(op, "k", k, "at least 1")
        if candidates is not None:
            check(op, "candidates", candidates, tuple(scores.shape), BOOL)
        return self._run[op](scores, visible, k, candidates)

    def sparse_attention(
        self,
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
        """One softmax over a row's window keys and its selected compressed groups; a key is its own value.

        Args:
            q: [R, heads, D] rotated queries.
            window: uint8 [R, D + D/32] packed window keys of the rows of this batch.
            positions, fresh, row_slots, window_floor: int64 [R].
            ring: uint8 [slots, L, D + D/32] window keys of earlier rows, position p at p % L.
            window_len: keys in a window, the row's own included.
            latent, latent_scale: uint8 [pages, G, D/2] and [pages, G, D/16], views into the page pool. The five
                arguments from ``latent`` to ``selected`` are given together, or all None in layers without compressed
                keys.
            page_table: int64 [B, P]; requests: int64 [R].
            selected: int64 [R, K] groups of the row's request, -1 = none; duplicates of window keys count twice.
            sink: float32 [heads], a logit without a value.
            scale: factor on q . k.
            block_future: None, or int64 [R] for rows of a draft block.

        Window keys of a row at position p are positions max(window_floor, p - window_len + 1, 0) .. p. With
        ``block_future`` they are max(window_floor, 0) .. p + block_future: all rows of a draft block see each other,
        and the caller puts the window's start in the floor. Position p-j is row r-j of ``window`` if j <= fresh
        (negative j: later rows), else row (p-j) % L of the slot's ring.

        bf16: logits are float32. Keys are read 64 at a time: window slots oldest first (window_len slots, padded to a
        multiple of 64; absent keys keep their slot), then the selected. A probability is taken relative to the largest
        logit read so far and rounded to bf16 before it meets its value; the denominator sums unrounded probabilities
        and, once, exp(sink - largest). The result is rounded once. float32: the same sums without these roundings.

        Returns:
            [R, heads, D] of q's dtype. A row without keys is zero. A NaN in a key that is present, or in q, makes the
            heads it meets NaN; absent keys and unused ring rows may hold anything.
        """
        op = "sparse_attention"
        check(op, "q", q, (None, None, None), ACTIVATION)
        r, heads, d = q.shape
        check_multiple(op, "q", d, BLOCK)
        width = d + d // BLOCK
        check(op, "window", window, (r, width), U8)
        for arg, ids in (
            ("positions", positions),
            ("fresh", fresh),
            ("row_slots", row_slots),
            ("window_floor", window_floor),
        ):
            check(op, arg, ids, (r,), I64)
        check(op, "ring", ring, (None, None, width), U8)
        if not 0 < window_len <= ring.shape[1]:
            fail(op, "window_len", window_len, f"1..{ring.shape[1]}, the rows of a ring")
        if selected is None:
            for arg, value in (
                ("latent", latent),
                ("latent_scale", latent_scale),
                ("page_table", page_table),
                ("requests", requests),
            ):
                if value is not None:
                    fail(op, arg, "a tensor", "None when selected is None")
        else:
            check(op, "selected", selected, (r, None), I64)
            check(op, "latent", latent, (None, None, d // 2), U8)
            assert latent is not None
            check(op, "latent_scale", latent_scale, (*latent.shape[:2], d // LATENT_BLOCK), U8)
            check(op, "page_table", page_table, (None, None), I64)
            check(op, "requests", requests, (r,), I64)
        check(op, "sink", sink, (heads,), F32)
        if block_future is not None:
            check(op, "block_future", block_future, (r,), I64)
        return self._run[op](
            q,
            window,
            positions,
            fresh,
            row_slots,
            window_floor,
            ring,
            window_len,
            latent,
            latent_scale,
            page_table,
            requests,
            selected,
            sink,
            scale,
            block_future,
        )
