"""Contracts of Engram (model description: Engram) and of the two draft heads (DSpark)."""

from __future__ import annotations

import torch
from torch import Tensor

from .base import ACTIVATION, BF16, BLOCK, BOOL, E4M3, E8M0, I64, OpTable, Prepared, check, check_multiple, fail


class EngramOps(OpTable):
    def engram_hash(
        self,
        token_classes: Tensor,
        positions: Tensor,
        fresh: Tensor,
        row_slots: Tensor,
        ngrams: Tensor,
        multipliers: Tensor,
        primes: Tensor,
        offsets: Tensor,
        pad_class: int,
    ) -> Tensor:
        """Table rows of the 2- to n-grams that end at each row.

        Args:
            token_classes: int64 [R]; -1 = dead (inside an image).
            positions, fresh, row_slots: int64 [R].
            ngrams: int64 [slots, L] classes of earlier tokens, position p at p % L, -1 = dead.
            multipliers: int64 [n], one per look-back.
            primes: int64 [n-1, heads] bucket counts; offsets: int64 [(n-1)*heads] first bucket of each column.
            pad_class: class that stands for a missing token.

        The class at position p-k is row r-k if k <= fresh, else ``ngrams[slot, (p-k) % L]``. Looking back stops at
        the start of the sequence and at a dead token: that place and all before it are pad. A dead row is all pad.
        The i-gram hash is the XOR of the first i products class * multiplier (int64, wrapping), modulo its prime (never
        negative).

        Returns:
            int64 [R, (n-1)*heads], n-gram size major.
        """
        op = "engram_hash"
        check(op, "token_classes", token_classes, (None,), I64)
        rows = tuple(token_classes.shape)
        for arg, ids in (("positions", positions), ("fresh", fresh), ("row_slots", row_slots)):
            check(op, arg, ids, rows, I64)
        check(op, "multipliers", multipliers, (None,), I64)
        check(op, "primes", primes, (multipliers.shape[0] - 1, None), I64)
        check(op, "offsets", offsets, (primes.numel(),), I64)
        check(op, "ngrams", ngrams, (None, None), I64)
        if ngrams.shape[1] < multipliers.shape[0] - 1:
            fail(op, "ngrams", f"{ngrams.shape[1]} places a slot", f"at least {multipliers.shape[0] - 1} places a slot")
        return self._run[op](
            token_classes, positions, fresh, row_slots, ngrams, multipliers, primes, offsets, pad_class
        )

    def ngram_write(
        self, token_classes: Tensor, positions: Tensor, row_slots: Tensor, keep: Tensor, ngrams: Tensor
    ) -> None:
        """Remember the classes int64 [R] of kept rows at ``ngrams[slot, position % L]``, ngrams int64 [slots, L]."""
        op = "ngram_write"
        check(op, "token_classes", token_classes, (None,), I64)
        rows = tuple(token_classes.shape)
        check(op, "positions", positions, rows, I64)
        check(op, "row_slots", row_slots, rows, I64)
        check(op, "keep", keep, rows, BOOL)
        check(op, "ngrams", ngrams, (None, None), I64)
        self._run[op](token_classes, positions, row_slots, keep, ngrams)

    def engram_gather(self, rows: Tensor, table: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        """Fetch and dequantise table rows.

        rows int64 [R, C], table e4m3 [N, D], scale UE8M0 [N, D/32] -> [R, C*D] of ``dtype``; exact in bf16. The table
        may be a view of a file. NaN bytes stay NaN.
        """
        op = "engram_gather"
        check(op, "rows", rows, (None, None), I64)
        check(op, "table", table, (None, None), E4M3)
        n, d = table.shape
        check_multiple(op, "table", d, BLOCK)
        check(op, "scale", scale, (n, d // BLOCK), E8M0)
        if dtype not in ACTIVATION:
            fail(op, "dtype", dtype, "torch.bfloat16 or torch.float32")
        return self._run[op](rows, table, scale, dtype)

    def engram_gate(
        self, streams: Tensor, kv: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, live: Tensor
    ) -> Tensor:
        """Add the fetched value to each stream as far as the stream agrees with its key.

        Args:
            streams: [T, M, H].
            kv: [T, (M+1)*H] of the same dtype: M keys, then one value.
            q_weight, k_weight: bf16 [M, H].
            eps: epsilon of both RMS norms (per token and stream).
            live: bool [T]; rows that are not live come back unchanged, whatever their kv holds.

        gate = sigmoid(sign(a) * sqrt(max(|a|, 1e-6))), a = sum(stream * q_weight * k_weight * key) / rms(stream) /
        rms(key) / sqrt(H); stream + gate * value, rounded once. NaN stays in its token; a NaN in the value stays in
        its channel.
        """
        op = "engram_gate"
        check(op, "streams", streams, (None, None, None), ACTIVATION)
        t, m, h = streams.shape
        check(op, "kv", kv, (t, (m + 1) * h), (streams.dtype,))
        check(op, "q_weight", q_weight, (m, h), BF16)
        check(op, "k_weight", k_weight, (m, h), BF16)
        check(op, "live", live, (t,), BOOL)
        return self._run[op](streams, kv, q_weight, k_weight, eps, live)


class DraftOps(OpTable):
    def markov(self, prev: Tensor, embed: Tensor, head: Prepared) -> tuple[Tensor, Tensor]:
        """What the previous token says about the next.

        prev int64 [B], embed bf16 [V, r], head ``prepare_dense`` of bf16 [V, r] -> logit bias float32 [B, V], and the
        embedding bf16 [B, r] that ``confidence`` reads. Sums are float32 or better, no rounding below float32.
        """
        data = self._layout("markov", "head", head, "prepare_dense")
        vocab, rank = head.shape
        check("markov", "prev", prev, (None,), I64)
        check("markov", "embed", embed, (vocab, rank), BF16)
        return self._run["markov"](prev, embed, data)

    def confidence(self, hidden: Tensor, e: Tensor, proj: Tensor) -> Tensor:
        """Raw logit of a draft's acceptance: [hidden, e] . proj in float32, before temperature and sigmoid.

        hidden [B, H] (before the final norm), e bf16 [B, r], proj bf16 [1, H+r] -> float32 [B]. NaN propagates.
        """
        check("confidence", "hidden", hidden, (None, None), ACTIVATION)
        b, h = hidden.shape
        check("confidence", "e", e, (b, None), BF16)
        check("confidence", "proj", proj, (1, h + e.shape[1]), BF16)
        return self._run["confidence"](hidden, e, proj)
