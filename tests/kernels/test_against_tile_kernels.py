"""Our reference against the torch references that DeepSeek ships in tile-kernels 2.1.0.

Formats, hashes and choices of experts must be equal to the bit. Where theirs computes in float32 and ours in float64,
bf16 results may differ by the one rounding that a float32 error can tip over: "one step" below is one bf16 step of
the result.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from deepinfer_plugin.kernels import Ops
from deepinfer_plugin.kernels.reference import formats

from . import tile_kernels


@pytest.fixture(scope="module")
def theirs() -> SimpleNamespace:
    return tile_kernels.load()


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def within_one_step(ours: Tensor, theirs: Tensor, share: float = 0.02) -> None:
    """Equal, but for a small share of elements that differ by at most one bf16 step."""
    assert ours.dtype == theirs.dtype == torch.bfloat16
    a, b = ours.float(), theirs.float()
    step = torch.maximum(a.abs(), b.abs()) * 2.0**-7
    assert ((a - b).abs() <= step).all()
    assert (a != b).float().mean() <= share


def adversarial(block: int, dtype: torch.dtype) -> Tensor:
    """Rows of 4 blocks: all binades, ties, boundaries of the scale, zeros, subnormals, mixed magnitudes."""
    midpoints = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])
    rows = [torch.zeros(4 * block), -torch.zeros(4 * block)]
    for k in range(-40, 40, 3):
        for top in (448.0, 6.0, 1.0, 256.0, 4.0):
            row = random(4 * block, seed=k + 100) * top / 4
            row[::block] = top
            row[1::block] = -midpoints[k % 8] * top / 6
            rows.append(row * 2.0**k)
            rows.append(torch.nextafter(row, torch.tensor(torch.inf)) * 2.0**k)
            rows.append(torch.nextafter(row, torch.tensor(-torch.inf)) * 2.0**k)
    rows.append(torch.full((4 * block,), 1e-4))
    rows.append(torch.full((4 * block,), 2.0**-133))
    return torch.stack(rows).to(dtype)


def inputs(block: int, dtype: torch.dtype) -> Tensor:
    spread = torch.exp2(random(300, 1, seed=3) * 6)
    return torch.cat((random(300, 4 * block, seed=1).mul(spread).to(dtype), adversarial(block, dtype)))


# ---- formats ---------------------------------------------------------------------------------------------


def test_floors_are_theirs(theirs):
    config = theirs.config
    assert config.get_amax_clamp_for_quant("e4m3", False) == formats.FP8_AMAX_FLOOR
    assert config.get_amax_clamp_for_quant("e2m1", False) == formats.FP4_AMAX_FLOOR
    assert config.get_amax_clamp_for_quant("e2m1", True) == formats.LATENT_AMAX_FLOOR


def test_fp8_cast(theirs, dtype):
    x = inputs(32, dtype)
    values, scale = theirs.cast.cast(x, "e4m3", block_size=(1, 32), round_sf=True)
    ours, our_scale = formats.fp8_cast(x)
    assert torch.equal(ours.view(torch.uint8), values.view(torch.uint8))
    assert torch.equal(formats.e8m0_value(our_scale), scale)
    back = theirs.cast.cast_back((values, scale), "fp32", block_size=(1, 32))
    assert torch.equal(formats.fp8_dequant(ours, our_scale), back)
    assert torch.equal(formats.fp8_round_trip(x), back)


@pytest.mark.parametrize("shape", [(64, 96), (33, 70), (1, 1), (100, 32)])
def test_fp8_weight_cast(theirs, dtype, shape):
    w = (random(*shape) * torch.exp2(random(shape[0], 1, seed=2) * 5)).to(dtype)
    values, scale = theirs.cast.cast(w, "e4m3", block_size=(32, 32), round_sf=True)
    ours, our_scale = formats.fp8_weight_cast(w)
    assert torch.equal(ours.view(torch.uint8), values.view(torch.uint8))
    assert torch.equal(formats.e8m0_value(our_scale), scale)
    back = theirs.cast.cast_back((values, scale), "fp32", block_size=(32, 32))
    assert torch.equal(formats.fp8_weight_dequant(ours, our_scale), back)


def test_mxfp4_cast(theirs, dtype):
    x = inputs(32, dtype)
    packed, scale = theirs.cast.cast(x, "e2m1", block_size=(1, 32), round_sf=True)
    ours, our_scale = formats.mxfp4_cast(x)
    assert torch.equal(ours, packed.view(torch.uint8))
    assert torch.equal(formats.e8m0_value(our_scale), scale)
    back = theirs.cast.cast_back((packed, scale), "fp32", block_size=(1, 32))
    assert torch.equal(formats.mxfp4_dequant(ours, our_scale), back)


def compare_latents(theirs, x: Tensor) -> int:
    """Equal scales, equal codes but for midpoints; how many codes differ.

    Ours divides by the scale, as DeepSeek's published inference code does. Theirs multiplies by the float32 reciprocal,
    which for some scales lands beside a quotient that is exactly a midpoint: no tie there, and the other code.
    """
    packed, scale = theirs.cast.cast(x, "e2m1", block_size=(1, 16), use_e4m3_sf=True)
    packed = packed.view(torch.uint8)
    ours, our_scale = formats.latent_cast(x)
    assert torch.equal(our_scale.view(torch.uint8), scale.view(torch.uint8))
    back = theirs.cast.cast_back((ours.view(torch.int8), our_scale), "fp32", block_size=(1, 16))
    assert torch.equal(formats.latent_dequant(ours, our_scale), back)
    codes, their_codes = (torch.stack((p & 15, p >> 4), -1).flatten(-2) for p in (ours, packed))
    differ = codes != their_codes
    quotient = (x.double().unflatten(-1, (-1, 16)) / scale.double()[..., None]).flatten(-2)[differ]
    assert torch.isin(quotient.abs(), torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]).double()).all()
    assert ((codes[differ].int() - their_codes[differ].int()).abs() == 1).all()
    return int(differ.sum())


def test_latent_cast(theirs):
    x = inputs(16, torch.bfloat16)
    # beyond 2688 theirs makes a NaN scale and ours saturates
    compare_latents(theirs, x[(x.abs().amax(-1) <= 2688) & x.isfinite().all(-1)])


def test_latent_cast_all_bf16_significands(theirs):
    """Every bf16 significand under every amax of one binade: each quotient class of the format."""
    values = (torch.arange(128, 512) / 128.0).to(torch.bfloat16)
    amax = (torch.arange(128, 256) / 32.0).to(torch.bfloat16)
    x = torch.zeros(len(amax), 32, 16, dtype=torch.bfloat16)
    x[..., 0] = amax[:, None]
    x[..., 1:13] = values.view(32, 12)
    x = torch.minimum(x, amax[:, None, None]).flatten(1)
    assert compare_latents(theirs, x) > 0


# ---- norm, rope, mhc -------------------------------------------------------------------------------------


def test_rms_norm(theirs, ops: Ops):
    for seed, x in enumerate((random(50, 256), random(50, 256) * 1e-12, random(50, 256) * 1e12, torch.zeros(3, 256))):
        x = x.to(torch.bfloat16)
        weight = random(256, seed=seed + 9, dtype=torch.bfloat16)
        want, _, _ = theirs.norm.norm_forward_ref(x, weight, 1e-20)
        # 0 * rsqrt(1e-20) is 0 on both sides
        within_one_step(ops.rms_norm(x, weight, 1e-20), want)
        want32, _, _ = theirs.norm.norm_forward_ref(x.float(), weight, 1e-20)
        torch.testing.assert_close(ops.rms_norm(x.float(), weight, 1e-20), want32, rtol=1e-6, atol=0)


@pytest.mark.parametrize("inverse", [False, True])
def test_rope(theirs, ops: Ops, dtype, inverse):
    inv_freq = 1.0 / 10000 ** (torch.arange(0, 32, 2, dtype=torch.float32) / 32)
    positions = torch.tensor([0, 1, 2, 127, 128, 65535, 65536, 1000000, 1048575])
    angle = positions.float()[:, None] * inv_freq
    x = random(len(positions), 3, 64).to(dtype)
    want = x.clone()
    want[..., 32:] = theirs.rope.rotary_embedding_ref(
        x[..., 32:], angle.cos(), angle.sin(), interleaved=True, conjugate=inverse
    )
    got = ops.rope(x.clone(), positions, inv_freq, inverse)
    assert torch.equal(got[..., :32], x[..., :32])
    if dtype == torch.bfloat16:
        # cancellation: the float32 error of cos and sin is relative to the pair, not to the result
        torch.testing.assert_close(got.float(), want.float(), rtol=2.0**-8, atol=2.0**-20)
    else:
        torch.testing.assert_close(got, want, rtol=0, atol=4e-6)


@pytest.mark.parametrize("spread", [0.0, 4.0, 30.0])
def test_hc_mix(theirs, ops: Ops, dtype, spread):
    """``spread`` scales the logits: at 30 the Sinkhorn starts from nearly one-hot rows."""
    t, m, h = 40, 4, 128
    streams = random(t, m, h).to(dtype)
    fn = random(24, m * h, seed=1) * (m * h) ** -0.5
    base, scale = random(24, seed=2) * max(1.0, spread), torch.tensor([1.0, 0.5, max(1.0, spread)])
    mixes = theirs.mhc.mhc_pre_norm_fn_ref(streams[None], fn, None, 1e-20)
    # their per-group form sums one group here: the RMS runs over all streams
    pre, post, comb = theirs.mhc.mhc_pre_split_mixes_ref(mixes, scale, base, m, 2.0, 1e-6)
    comb = theirs.mhc.sinkhorn_normalize_ref(comb, repeat=20, eps=1e-6)
    ours = ops.hc_mix(streams, fn, base, scale, 1e-20, 1e-6, 20)
    # float32 against float64 through 40 normalisations: a few 1e-6 of the largest entry, 1
    for got, want in zip(ours, (pre[0, ..., 0], post[0, ..., 0], comb[0]), strict=True):
        torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-6)


def test_hc_collapse_and_expand(theirs, ops: Ops):
    t, m, h = 40, 4, 128
    streams, out = random(t, m, h, dtype=torch.bfloat16), random(t, h, seed=1, dtype=torch.bfloat16)
    pre, post = torch.sigmoid(random(t, m, seed=2)), 2 * torch.sigmoid(random(t, m, seed=3))
    comb = torch.softmax(random(t, m, m, seed=4), -1)
    want = theirs.mhc.mhc_pre_apply_mix_ref(streams, pre[..., None])
    got = ops.hc_collapse(streams, pre)
    # sums that cancel: float32's absolute error may be several steps of a tiny result
    torch.testing.assert_close(got.float(), want.float(), rtol=2.0**-8, atol=1e-5)
    want = theirs.mhc.mhc_post_ref(out[None], streams[None], post[None, ..., None], comb[None])[0]
    got = ops.hc_expand(out, streams, post, comb)
    torch.testing.assert_close(got.float(), want.float(), rtol=2.0**-8, atol=1e-5)


# ---- gate, swiglu, experts -------------------------------------------------------------------------------


def gate(ops: Ops, logits: Tensor, bias: Tensor, bias_vl: Tensor | None, mask: Tensor | None, topk: int):
    """Our gate on given logits: the router weight is the identity."""
    identity = ops.prepare_dense(torch.eye(logits.shape[1], dtype=torch.bfloat16))
    return ops.moe_gate(logits, identity, bias, bias_vl, mask, topk, 1.5)


def their_gate(theirs, logits: Tensor, bias: Tensor, bias_vl: Tensor | None, mask: Tensor | None, topk: int):
    ids, weights = theirs.topk.moe_topk_gate_forward(
        logits, topk, False, 0, 1.5, 0, "sqrtsoftplus", bias=bias, image_bias=bias_vl, image_token_mask=mask
    )
    return weights, ids


@pytest.mark.parametrize(("experts", "topk"), [(384, 6), (128, 3), (8, 8)])
def test_moe_gate(theirs, ops: Ops, experts, topk):
    logits, bias, bias_vl = random(200, experts) * 3, random(experts, seed=1), random(experts, seed=2)
    mask = random(200, seed=3) > 0
    for vl, image in ((None, None), (bias_vl, mask)):
        weights, ids = gate(ops, logits, bias, vl, image, topk)
        want, want_ids = their_gate(theirs, logits, bias, vl, image, topk)
        assert torch.equal(ids, want_ids)
        torch.testing.assert_close(weights, want, rtol=1e-6, atol=0)


def test_moe_gate_ties(theirs, ops: Ops):
    """Few distinct logits: nearly every choice is a tie, and the lower id wins on both sides."""
    logits = torch.randint(-2, 3, (300, 64), generator=torch.Generator().manual_seed(0)).float()
    weights, ids = gate(ops, logits, torch.zeros(64), None, None, 6)
    want, want_ids = their_gate(theirs, logits, torch.zeros(64), None, None, 6)
    assert torch.equal(ids, want_ids)
    torch.testing.assert_close(weights, want, rtol=1e-6, atol=0)


def test_moe_gate_extreme_logits(theirs, ops: Ops):
    rows = [80.0, 30.0, 20.5, 19.5, 5.0, 0.0, -5.0, -15.0], [-15.0] * 8, [-60.0 - e for e in range(8)]
    logits = torch.tensor(rows)
    weights, ids = gate(ops, logits, torch.zeros(8), None, None, 4)
    want, want_ids = their_gate(theirs, logits, torch.zeros(8), None, None, 4)
    assert torch.equal(ids, want_ids)
    torch.testing.assert_close(weights, want, rtol=1e-6, atol=0)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("limit", [10.0, 0.0])
def test_swiglu(theirs, ops: Ops, dtype, limit, weighted):
    x = (random(60, 128) * 9).to(dtype)
    x[0, :8] = torch.tensor([10.0, -10.0, 100.0, -100.0, 0.0, -0.0, 10.0625, -88.0])
    weight = torch.rand(60, generator=torch.Generator().manual_seed(1)) if weighted else None
    want = theirs.swiglu.swiglu_forward(x, topk_weights=weight, clamp_value=limit or None)
    got = ops.swiglu(x[:, :64].contiguous(), x[:, 64:].contiguous(), limit, weight)
    if dtype == torch.bfloat16:
        within_one_step(got, want.to(torch.bfloat16))
    else:
        # float32 exp overflows below -88: theirs is then zero, ours a subnormal
        torch.testing.assert_close(got, want, rtol=2e-6, atol=1e-37)


def test_moe_experts(theirs, ops: Ops):
    """The whole expert path put together from their pieces: casts, swiglu, reduction."""
    t, h, inner, experts, topk = 20, 128, 64, 5, 2
    w13 = [theirs.cast.cast(random(2 * inner, h, seed=e), "e2m1", (1, 32), round_sf=True) for e in range(experts)]
    w2 = [theirs.cast.cast(random(h, inner, seed=9 + e), "e2m1", (1, 32), round_sf=True) for e in range(experts)]
    x = random(t, h, seed=50, dtype=torch.bfloat16)
    ids = torch.stack([torch.randperm(experts, generator=torch.Generator().manual_seed(i))[:topk] for i in range(t)])
    ids = ids.sort(-1).values  # theirs adds in the order of the list, ours in the order of the ids
    weights = torch.rand(t, topk, generator=torch.Generator().manual_seed(2))

    def activation(a: Tensor) -> Tensor:
        return theirs.cast.cast_back(theirs.cast.cast(a, "e4m3", (1, 32), round_sf=True), "fp32", (1, 32)).double()

    def weight(quantised: tuple[Tensor, Tensor]) -> Tensor:
        return theirs.cast.cast_back(quantised, "fp32", (1, 32)).double()

    pairs = []
    for token in range(t):
        for k in range(topk):
            e = int(ids[token, k])
            gate_up = (activation(x[token : token + 1]) @ weight(w13[e]).T).bfloat16()
            mid = theirs.swiglu.swiglu_forward(gate_up, topk_weights=weights[token, k : k + 1], clamp_value=10.0)
            pairs.append((activation(mid.bfloat16()) @ weight(w2[e]).T).bfloat16())
    position = torch.arange(t * topk).view(t, topk)
    want = theirs.reduce_fused.reduce_fused(torch.cat(pairs).float(), None, position)

    def stacked(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        scale = torch.stack([s for _, s in parts])
        scale = (scale.view(torch.int32) >> 23).to(torch.uint8).view(torch.float8_e8m0fnu)
        return torch.stack([w.view(torch.uint8) for w, _ in parts]), scale

    prepared = ops.prepare_experts(*stacked(w13), *stacked(w2))
    got = ops.moe_experts(x, weights, ids, prepared, 10.0)
    # Their swiglu is float32: rarely a bf16 rounding in the middle tips, then one FP8 step of one channel reaches
    # every output.
    error = (got - want).abs().amax(-1) / want.abs().amax(-1)
    assert (error > 1e-6).float().mean() <= 0.2 and error.max() <= 0.02


# ---- engram ----------------------------------------------------------------------------------------------


def test_engram_hash(theirs, ops: Ops):
    r = torch.Generator().manual_seed(0)
    t, vocab = 200, 99092
    classes = torch.randint(0, vocab, (t,), generator=r)
    classes[:4] = vocab - 1
    multipliers = torch.randint(0, (2**63 - 1) // vocab // 2, (4,), generator=r) * 2 + 1
    multipliers[0] = ((2**63 - 1) // vocab // 2 - 1) * 2 + 1  # the largest there is: products close to 2^63
    primes = torch.tensor([[16000057, 16000061], [16000069, 16000073], [16000081, 16000097]])
    offsets = theirs.engram.make_offsets(primes[None].to(torch.int32))[0].long()
    pad = 2
    padded = torch.cat((torch.full((3,), pad), classes))
    grams = torch.stack([padded[3 - k : 3 - k + t] for k in range(4)], -1)
    want = theirs.engram.engram_hash_ref(grams.int(), multipliers[None], primes[None].int(), offsets[None].int())[0]
    positions = torch.arange(t)
    ngrams = torch.full((1, 9), -1)
    got = ops.engram_hash(
        classes, positions, positions, torch.zeros(t, dtype=torch.int64), ngrams, multipliers, primes, offsets, pad
    )
    assert torch.equal(got, want.long())


def test_engram_gate(theirs, ops: Ops):
    t, m, h = 60, 4, 128
    streams, kv = random(t, m, h, dtype=torch.bfloat16), random(t, m + 1, h, seed=1, dtype=torch.bfloat16)
    q_weight, k_weight = random(m, h, seed=2, dtype=torch.bfloat16), random(m, h, seed=3, dtype=torch.bfloat16)
    kv[0, :m] = 0  # no agreement: gate 1/2 but for the floor under the root
    live = random(t, seed=4) > -0.5
    live[0] = True
    want = theirs.engram.engram_gate_ref(streams, kv, q_weight, k_weight, 1e-6, 1e-20, image_token_mask=~live)
    got = ops.engram_gate(streams, kv.flatten(1), q_weight, k_weight, 1e-20, live)
    assert torch.equal(got[~live], streams[~live])
    # At a dot product of exactly zero theirs has sign 0 and gate 1/2, ours the gate of the floor: 1/2 + 2.5e-4.
    torch.testing.assert_close(got[0].float(), want[0].float(), rtol=2.0**-7, atol=2e-3)
    torch.testing.assert_close(got[1:].float(), want[1:].float(), rtol=2.0**-8, atol=1e-5)
