"""The start-up check of a provider's hyper-connections: it passes what is right and names what is not."""

from __future__ import annotations

import pytest
import torch

from deepinfer_plugin.kernels import OP_NAMES, Ops, identity, reference


def broken(**replaced) -> Ops:
    return Ops(torch.device("cpu"), dict.fromkeys(OP_NAMES, "some"), {"some": {**reference.OPS, **replaced}})


def test_the_reference_passes():
    identity.check(broken())


def test_whatever_the_caller_s_defaults_are():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            identity.check(broken())
    finally:
        torch.set_default_dtype(before)


def even(streams, pre):
    """All weights taken for equal: what a library did that left them out."""
    return (streams.double().mean(1) * 1.424).to(streams.dtype)


def no_weights(streams, fn, base, scale, norm_eps, hc_eps, iters):
    return reference.OPS["hc_mix"](streams, fn * 0, base, scale, norm_eps, hc_eps, iters)


def no_base(streams, fn, base, scale, norm_eps, hc_eps, iters):
    return reference.OPS["hc_mix"](streams, fn, base * 0, scale, norm_eps, hc_eps, iters)


def transposed(out, streams, post, comb):
    return reference.OPS["hc_expand"](out, streams, post, comb.mT.contiguous())


def no_comb(out, streams, post, comb):
    return (streams.double() + post.double()[..., None] * out.double()[:, None]).to(streams.dtype)


def nan(streams, pre):
    return torch.full_like(streams[:, 0], torch.nan)


@pytest.mark.parametrize(
    ("op", "wrong"),
    [
        ("hc_collapse", even),
        ("hc_collapse", nan),
        ("hc_collapse", lambda streams, pre: streams[:, 0] * 0.356),
        ("hc_mix", no_weights),
        ("hc_mix", no_base),
        ("hc_expand", transposed),
        ("hc_expand", no_comb),
    ],
)
def test_ignored_weights_are_named(op, wrong):
    with pytest.raises(identity.IdentityError, match=f"{op} of kernel provider 'some' on cpu is off"):
        identity.check(broken(**{op: wrong}))
