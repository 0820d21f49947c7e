"""Contracts of the mixture of experts (model description: MoE)."""

from __future__ import annotations

from torch import Tensor

from .base import ACTIVATION, BLOCK, BOOL, E8M0, F32, I32, I64, U8, OpTable, Prepared, check, check_multiple, fail


class MoeOps(OpTable):
    def moe_gate(
        self,
        x: Tensor,
        weight: Prepared,
        bias: Tensor,
        bias_vl: Tensor | None,
        image_mask: Tensor | None,
        topk: int,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        """Choose ``topk`` experts per token.

        Args:
            x: [T, H].
            weight: ``prepare_dense`` of the router, bf16 [E, H].
            bias: float32 [E], added for the choice only.
            bias_vl: float32 [E] or None, takes the place of ``bias`` where ``image_mask`` (bool [T] or None) is True.
            scale: factor on the weights after they are normalised. A single expert (topk 1) has nothing to weigh
                against: its weight is s * scale.

        Returns:
            weights float32 [T, topk] = s / (sum of chosen s + 1e-20) * scale with s = sqrt(softplus(logit)), and ids
            int64 [T, topk] in descending order of s + bias. Logits and s are float32. Ties: the lower id wins. A NaN
            ranks last.
        """
        op = "moe_gate"
        data = self._layout(op, "weight", weight, "prepare_dense")
        experts, h = weight.shape
        check(op, "x", x, (None, h), ACTIVATION)
        check(op, "bias", bias, (experts,), F32)
        if bias_vl is not None:
            check(op, "bias_vl", bias_vl, (experts,), F32)
        if image_mask is not None:
            check(op, "image_mask", image_mask, (x.shape[0],), BOOL)
        if not 0 < topk <= experts:
            fail(op, "topk", topk, f"1..{experts}")
        return self._run[op](x, data, bias, bias_vl, image_mask, topk, scale)

    def assign_slots(
        self, ids: Tensor, home: Tensor, shared: Tensor, slots: Tensor, per_rank: int, rounds: int
    ) -> tuple[Tensor, Tensor]:
        """Which slot computes each row's experts, where some lie in several, on different ranks: so that the busiest
        rank gets as few rows as can be. All ranks call it with the same and get the same, in whole numbers.

        Args:
            ids: int64 [T, k] experts, of the rows of all ranks; -1 for none.
            home: int64 [E]: the slot of an expert that has one, or -1 - n for the expert in row n of ``slots``.
            shared: int32 [K]: the expert in each row of ``slots``; -1 for rows that stand for none, which come last.
            slots: int32 [K, R]: its slot on each of at most 128 ranks, or -1.
            per_rank: slots of a rank: slot s is one of rank s // per_rank.
            rounds: how many divisions are looked at, each nearer to the least that the busiest rank could have; 8 come
                close (docs/eplb.md). 0: an expert's ranks share its rows evenly.

        The busiest rank has at most as many rows as by the even division, rounded. Which division is found is what the
        reference says, to the last row. Those of an expert that go to a rank follow each other among its rows.

        Returns:
            slots int64 [T, k], -1 for none, and counts int64 [E], the rows of each expert.
        """
        op = "assign_slots"
        check(op, "ids", ids, (None, None), I64)
        check(op, "home", home, (None,), I64)
        check(op, "shared", shared, (None,), I32)
        check(op, "slots", slots, (shared.shape[0], None), I32)
        if not shared.shape[0]:
            fail(op, "shared", "no rows", "of one row at least")
        if not 0 < slots.shape[1] <= 128:
            fail(op, "slots", f"{slots.shape[1]} ranks", "of 1..128 ranks")
        if per_rank < 1 or rounds < 0:
            fail(op, "per_rank, rounds", (per_rank, rounds), "at least 1 and 0")
        return self._run[op](ids, home, shared, slots, per_rank, rounds)

    def swiglu(self, gate: Tensor, up: Tensor, limit: float, weight: Tensor | None) -> Tensor:
        """silu(min(gate, limit)) * clamp(up, -limit, limit) * weight, float32 inside, rounded once.

        gate, up [T, I] of one dtype, already rounded to it; limit 0 = no clamp; weight float32 [T] or None -> [T, I].
        NaN propagates; infinities are clamped (limit 0: propagate).
        """
        check("swiglu", "gate", gate, (None, None), ACTIVATION)
        check("swiglu", "up", up, tuple(gate.shape), (gate.dtype,))
        if weight is not None:
            check("swiglu", "weight", weight, (gate.shape[0],), F32)
        return self._run["swiglu"](gate, up, limit, weight)

    def prepare_experts(self, w13: Tensor, s13: Tensor, w2: Tensor, s2: Tensor) -> Prepared:
        """Lay out MXFP4 experts for ``moe_experts``.

        Args:
            w13: uint8 [E, 2I, H/2], two e2m1 values a byte (low nibble first): gate rows, then up rows. s13: UE8M0
                [E, 2I, H/32].
            w2: uint8 [E, H, I/2]. s2: UE8M0 [E, H, I/32].

        Raises:
            ValueError: the scales of a matrix span more than a provider holds (the cuda kernel: 2^126; blocks of zeros
                do not count).
        """
        op = "prepare_experts"
        check(op, "w13", w13, (None, None, None), U8)
        e, double, half = w13.shape
        h, inner = 2 * half, double // 2
        check_multiple(op, "w13", h, BLOCK)
        if double % 2 or inner % BLOCK:
            fail(op, "w13", f"{double} rows", f"twice a multiple of {BLOCK} rows")
        check(op, "s13", s13, (e, double, h // BLOCK), E8M0)
        check(op, "w2", w2, (e, h, inner // 2), U8)
        check(op, "s2", s2, (e, h, inner // BLOCK), E8M0)
        return self._prepared(op, (e, h, inner), w13, s13, w2, s2)

    def replace_expert(self, experts: Prepared, slot: int, w13: Tensor, s13: Tensor, w2: Tensor, s2: Tensor) -> None:
        """Make ``slot`` of prepared experts another expert, in place: whatever reads them, a captured graph too, finds
        it at the same addresses.

        Args:
            experts: from ``prepare_experts``.
            w13, s13, w2, s2: the expert, as in ``prepare_experts`` without the first dimension. ``prepare_experts`` has
                accepted it on some rank: scales are not looked at again, which would wait for the device.
        """
        op = "replace_expert"
        self._check_slot(op, experts, slot)
        _, h, inner = experts.shape
        check(op, "w13", w13, (2 * inner, h // 2), U8)
        check(op, "s13", s13, (2 * inner, h // BLOCK), E8M0)
        check(op, "w2", w2, (h, inner // 2), U8)
        check(op, "s2", s2, (h, inner // BLOCK), E8M0)
        for provider, replace in self._prepare[op].items():
            replace(experts.data[provider], slot, w13, s13, w2, s2)

    def read_expert(self, experts: Prepared, slot: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The expert in ``slot`` as ``replace_expert`` takes it: (w13, s13, w2, s2) that are laid out alike again. They
        may be views of the layout.

        The values that the provider multiplies with: the same as those that were given, zeros with their signs, but for
        what ``cuda-fast`` has rounded. A scale that is NaN stays so, and one of a block of zeros may be another.
        """
        op = "read_expert"
        self._check_slot(op, experts, slot)
        provider = self.choices["moe_experts"]
        return self._prepare[op][provider](experts.data[provider], slot)

    def _check_slot(self, op: str, experts: Prepared, slot: int) -> None:
        self._layout("moe_experts", "experts", experts, "prepare_experts")
        if not 0 <= slot < experts.shape[0]:
            fail(op, "slot", slot, f"0..{experts.shape[0] - 1}")

    def moe_experts(self, x: Tensor, weights: Tensor, ids: Tensor, experts: Prepared, limit: float) -> Tensor:
        """Sum of each token's routed experts.

        Args:
            x: [T, H]; bf16 is cast FP8/32.
            weights: float32 [T, k]; ids: int64 [T, k], no expert twice for a token; -1 = no expert (it is another
                rank's), adds nothing.
            experts: from ``prepare_experts``; limit: clamp of ``swiglu``.

        Gate and up outputs are rounded to x's dtype; swiglu includes the routing weight and is rounded; that is cast
        FP8/32 (bf16) for the down projection, whose output is rounded to x's dtype; the sum is float32 in ascending
        order of expert id.

        Returns:
            float32 [T, H]. NaN as in ``linear``, only in tokens that chose the expert.
        """
        op = "moe_experts"
        data = self._layout(op, "experts", experts, "prepare_experts")
        check(op, "x", x, (None, experts.shape[1]), ACTIVATION)
        check(op, "ids", ids, (x.shape[0], None), I64)
        check(op, "weights", weights, tuple(ids.shape), F32)
        return self._run[op](x, weights, ids, data, limit)
