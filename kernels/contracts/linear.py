"""Contracts of the matrix products (model description: weights and quantisation)."""

from __future__ import annotations

import torch
from torch import Tensor

from .base import ACTIVATION, BF16, BLOCK, E4M3, E8M0, OpTable, Prepared, check, check_multiple, fail


def _check_fp8(op: str, weight: Tensor, scale: Tensor) -> tuple[int, int]:
    check(op, "weight", weight, (None, None), E4M3)
    n, k = weight.shape
    check_multiple(op, "weight", k, BLOCK)
    check(op, "scale", scale, (-(-n // BLOCK), k // BLOCK), E8M0)
    return n, k


class LinearOps(OpTable):
    def prepare_linear(self, weight: Tensor, scale: Tensor) -> Prepared:
        """Lay out an FP8 weight for ``linear``.

        Args:
            weight: e4m3 [N, K], K a multiple of 32.
            scale: UE8M0 [ceil(N/32), K/32], one per 32x32 tile.
        """
        return self._prepared("prepare_linear", _check_fp8("prepare_linear", weight, scale), weight, scale)

    def linear(self, x: Tensor, weight: Prepared) -> Tensor:
        """x [T, K] times an FP8 weight [N, K] -> [T, N] of x's dtype.

        bf16: x is cast to FP8 with a UE8M0 scale per 32 channels, products are exact, sums at least float32, one
        rounding at the end. float32: x is not cast.

        NaN: a NaN or an infinity makes its row NaN. One in a weight makes its column NaN, and may take the columns that
        share its scale with it.

        Raises:
            OpError: shape or dtype of an argument.
        """
        data = self._layout("linear", "weight", weight, "prepare_linear")
        check("linear", "x", x, (None, weight.shape[1]), ACTIVATION)
        return self._run["linear"](x, data)

    def prepare_dense(self, weight: Tensor) -> Prepared:
        """Lay out a bf16 weight [N, K] for ``dense``, ``moe_gate`` and ``markov``."""
        check("prepare_dense", "weight", weight, (None, None), BF16)
        return self._prepared("prepare_dense", tuple(weight.shape), weight)

    def dense(self, x: Tensor, weight: Prepared, out_dtype: torch.dtype | None = None) -> Tensor:
        """x [T, K] times a bf16 weight [N, K] -> [T, N] of ``out_dtype`` (None: x's dtype).

        Exact products, sums at least float32, one rounding. float32 output is what the ratio-2 compressors, the gate
        and the heads read. NaN as in ``linear``.
        """
        data = self._layout("dense", "weight", weight, "prepare_dense")
        check("dense", "x", x, (None, weight.shape[1]), ACTIVATION)
        if out_dtype is not None and out_dtype not in ACTIVATION:
            fail("dense", "out_dtype", out_dtype, "None, torch.bfloat16 or torch.float32")
        return self._run["dense"](x, data, out_dtype)

    def prepare_grouped(self, weight: Tensor, scale: Tensor, groups: int) -> Prepared:
        """Lay out a block-diagonal FP8 weight for ``grouped_linear``.

        Args:
            weight: e4m3 [groups * N, K]: rows g*N .. (g+1)*N-1 belong to group g. K a multiple of 32.
            scale: UE8M0 [ceil(groups*N/32), K/32]. A tile may span two groups.
        """
        n, k = _check_fp8("prepare_grouped", weight, scale)
        if groups < 1 or n % groups:
            fail("prepare_grouped", "groups", groups, f"a divisor of the {n} rows")
        return self._prepared("prepare_grouped", (groups, n // groups, k), weight, scale, groups)

    def grouped_linear(self, o: Tensor, weight: Prepared, fp8: bool) -> Tensor:
        """o [T, G, K], group g times its own [N, K] -> [T, G*N] of o's dtype: the first half of the output projection.

        fp8=False (model and float32 profiles): o is not cast, dequantised weights, one rounding.
        fp8=True (deepinfer profile, bf16 only): o is cast FP8/32 along K and the rounded output is cast FP8/32 along
        N and back. NaN as in ``linear``.
        """
        op = "grouped_linear"
        data = self._layout(op, "weight", weight, "prepare_grouped")
        groups, n, k = weight.shape
        check(op, "o", o, (None, groups, k), BF16 if fp8 else ACTIVATION)
        if fp8 and groups * n % BLOCK:
            fail(op, "weight", f"{groups * n} outputs", f"a multiple of {BLOCK} outputs when fp8=True")
        return self._run[op](o, data, fp8)
