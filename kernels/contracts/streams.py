"""Contracts of norms, rotary positions and hyper-connections (model description: embedding and RoPE; shifted mHC)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .base import ACTIVATION, BF16, F32, I64, OpTable, check, fail


class StreamOps(OpTable):
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x * rsqrt(mean(x^2) + eps) * weight over the last dimension.

        x [T, D], weight bf16 [D] -> [T, D] of x's dtype. The product with the weight is taken before the only
        rounding. An all-zero row is zero. A row that holds a NaN or an infinity is NaN.
        """
        check("rms_norm", "x", x, (None, None), ACTIVATION)
        check("rms_norm", "weight", weight, (x.shape[1],), BF16)
        return self._run["rms_norm"](x, weight, eps)

    def rope(self, x: Tensor, positions: Tensor, inv_freq: Tensor, inverse: bool = False) -> Tensor:
        """Rotate the last 2n channels of x in interleaved pairs (2i, 2i+1); the other channels stay as they are.

        Args:
            x: [T, ..., D], given up and not to be read again: the result may lie in its memory, so that what is not
                rotated need not move. Not an expanded view.
            positions: int64 [T]; a position is exact up to 2^24.
            inv_freq: float32 [n], 2n <= D.
            inverse: rotate back.

        The angle is the float32 product position * inv_freq, cos and sin are float32, the result is rounded once. NaN
        and infinities stay inside their pair.
        """
        check("rope", "positions", positions, (None,), I64)
        rank = x.dim() if isinstance(x, Tensor) and x.dim() > 2 else 2
        check("rope", "x", x, (positions.shape[0], *(None,) * (rank - 1)), ACTIVATION)
        check("rope", "inv_freq", inv_freq, (None,), F32)
        if 2 * inv_freq.shape[0] > x.shape[-1]:
            fail("rope", "inv_freq", f"{inv_freq.shape[0]} frequencies", f"at most {x.shape[-1] // 2} frequencies")
        return self._run["rope"](x, positions, inv_freq, inverse)

    def hc_mix(
        self, streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, norm_eps: float, hc_eps: float, iters: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The mixing weights of one site, from the streams as they enter it.

        Args:
            streams: [T, M, H].
            fn: float32 [(2+M)*M, M*H]; rows are pre (M), post (M), comb (M*M, source-major). The norm weight is
                folded in.
            base: float32 [(2+M)*M].
            scale: float32 [3], for pre, post, comb.
            norm_eps: epsilon of the RMS over all M*H channels; hc_eps: epsilon of the weights; iters: Sinkhorn
                rounds, at least 1.

        Returns:
            pre [T, M] = sigmoid + hc_eps, post [T, M] = 2 * sigmoid, comb [T, M, M] (source, target): softmax over
            targets + hc_eps, normalised over sources, then iters-1 times over targets and over sources, each sum +
            hc_eps. All float32, nothing is rounded in between. A row with a NaN or an infinity is NaN.
        """
        op = "hc_mix"
        check(op, "streams", streams, (None, None, None), ACTIVATION)
        _, m, h = streams.shape
        mixes = (2 + m) * m
        check(op, "fn", fn, (mixes, m * h), F32)
        check(op, "base", base, (mixes,), F32)
        check(op, "scale", scale, (3,), F32)
        if iters < 1:
            fail(op, "iters", iters, "at least 1")
        return self._run[op](streams, fn, base, scale, norm_eps, hc_eps, iters)

    def hc_collapse(self, streams: Tensor, pre: Tensor) -> Tensor:
        """sum_k pre[k] * streams[k], rounded once.

        streams [T, M, H], pre float32 [T, M] -> [T, H] of the streams' dtype.

        NaN and infinities stay in their channel; an infinity times a zero weight is NaN.
        """
        check("hc_collapse", "streams", streams, (None, None, None), ACTIVATION)
        check("hc_collapse", "pre", pre, tuple(streams.shape[:2]), F32)
        return self._run["hc_collapse"](streams, pre)

    def hc_expand(self, out: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        """New streams after a sub-layer: stream k is post[k] * out + sum_j comb[j, k] * streams[j], rounded once.

        out [T, H], streams [T, M, H] of the same dtype, post float32 [T, M], comb float32 [T, M, M] -> [T, M, H]. NaN
        as in ``hc_collapse``.
        """
        op = "hc_expand"
        check(op, "streams", streams, (None, None, None), ACTIVATION)
        t, m, h = streams.shape
        check(op, "out", out, (t, h), (streams.dtype,))
        check(op, "post", post, (t, m), F32)
        check(op, "comb", comb, (t, m, m), F32)
        return self._run[op](out, streams, post, comb)

    def hc_site(
        self,
        streams: Tensor,
        pre: Tensor,
        fn: Tensor,
        base: Tensor,
        scale: Tensor,
        weight: Tensor,
        norm_eps: float,
        hc_eps: float,
        iters: int,
        out: Tensor | None = None,
        post: Tensor | None = None,
        comb: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """What a site does before its sub-layer: ``hc_expand``, if there is an ``out``, then ``hc_mix`` of the new
        streams with fn, base and scale, and ``rms_norm`` with ``weight`` of what ``hc_collapse`` takes out of them.

        streams, post and comb as the sub-layer before had them, out [T, H] what it gave; pre [T, M] is of the site
        before. -> the sub-layer's input [T, H], the new streams, then pre, post and comb of this site.

        It is exactly those four ops, or one of their provider's own that may round the input where a sum before it
        rounded otherwise.
        """
        op = "hc_site"
        check(op, "streams", streams, (None, None, None), ACTIVATION)
        t, m, h = streams.shape
        mixes = (2 + m) * m
        check(op, "pre", pre, (t, m), F32)
        check(op, "fn", fn, (mixes, m * h), F32)
        check(op, "base", base, (mixes,), F32)
        check(op, "scale", scale, (3,), F32)
        check(op, "weight", weight, (h,), BF16)
        if iters < 1:
            fail(op, "iters", iters, "at least 1")
        if out is not None:
            check(op, "out", out, (t, h), (streams.dtype,))
            check(op, "post", post, (t, m), F32)
            check(op, "comb", comb, (t, m, m), F32)
        arguments = (streams, pre, fn, base, scale, weight, norm_eps, hc_eps, iters, out, post, comb)
        joined = self._run.get(op)
        found = NotImplemented if joined is None else joined(*arguments)
        return compose_site(self, *arguments) if found is NotImplemented else found


def compose_site(
    ops: Any,
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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``hc_site`` by the four ops it is made of."""
    if out is not None:
        streams = ops.hc_expand(out, streams, post, comb)
    mixes = ops.hc_mix(streams, fn, base, scale, norm_eps, hc_eps, iters)
    return ops.rms_norm(ops.hc_collapse(streams, pre), weight, norm_eps), streams, *mixes
