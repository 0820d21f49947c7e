"""Products, norms, streams, experts, gates and heads against float64 one-liners; and where NaN may go."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from deepinfer_plugin.kernels import OpError, select
from deepinfer_plugin.kernels.reference import formats, numeric

from .cases import BUILDERS, E, H, I, Random, Weights, make
from .test_contract import assert_close


def one_step(got: Tensor, exact: Tensor, terms: Tensor | None = None) -> None:
    """``got`` is the float64 result rounded once; a sum in another order may tip the rounding by one step.

    terms: sum of the magnitudes of what was added, given for a provider whose sums are float32: the last bits of a
    float32 result are then those sums' own.
    """
    step = 2.0**-7 if got.dtype == torch.bfloat16 else 2.0**-22
    error = (got.double() - exact).abs()
    if terms is not None and got.dtype == torch.float32:
        assert (error <= terms * 2.0**-21).all(), (error / terms).max()
        return
    assert (error <= exact.abs() * step + 1e-300).all(), error.max()
    assert (got != exact.to(got.dtype)).double().mean() < 0.01


def round_trip(x: Tensor) -> Tensor:
    return formats.fp8_dequant(*formats.fp8_cast(x)).double() if x.dtype == torch.bfloat16 else x.double()


def weight(case, name: str = "weight") -> tuple:
    return case.args[name].args


def test_linear(ops, dtype):
    case = make("linear", dtype, rows=20)
    (got,) = case.run(ops)
    one_step(got, round_trip(case.args["x"]) @ formats.fp8_weight_dequant(*weight(case)).double().T)


@pytest.mark.parametrize("out_dtype", [None, torch.bfloat16, torch.float32])
def test_dense(ops, dtype, out_dtype):
    case = make("dense", dtype, rows=20)
    case.args["out_dtype"] = out_dtype
    (got,) = case.run(ops)
    assert got.dtype == (out_dtype or dtype)
    x, w = case.args["x"].double(), weight(case)[0].double()
    one_step(got, x @ w.T, None if ops.choices["dense"] == "reference" else x.abs() @ w.abs().T)


def test_grouped_linear(ops, dtype):
    case = make("grouped_linear", dtype, rows=20)
    (got,) = case.run(ops)
    values, scale, groups = weight(case)
    w = formats.fp8_weight_dequant(values, scale).double().unflatten(0, (groups, -1))
    one_step(got, torch.einsum("tgk,gnk->tgn", case.args["o"].double(), w).flatten(1))


def test_grouped_linear_fp8_casts_input_and_output(ops):
    case = make("grouped_linear_fp8", torch.bfloat16, rows=20)
    (got,) = case.run(ops)
    values, scale, groups = weight(case)
    w = formats.fp8_weight_dequant(values, scale).double().unflatten(0, (groups, -1))
    exact = torch.einsum("tgk,gnk->tgn", round_trip(case.args["o"]), w).flatten(1)
    assert torch.equal(got, formats.fp8_dequant(*formats.fp8_cast(exact.bfloat16())).bfloat16())


def test_rms_norm(ops, dtype):
    case = make("rms_norm", dtype, rows=20)
    (got,) = case.run(ops)
    x = case.args["x"].double()
    one_step(got, x / (x.square().mean(-1, keepdim=True) + 1e-20).sqrt() * case.args["weight"].double())


@pytest.mark.parametrize("size", [1e-30, 1e-18, 1e18])
def test_rms_norm_of_tiny_and_huge_rows(ops, size):
    """Squares leave float32's range; eps 1e-20 matters for the tiny ones only."""
    x = torch.tensor([[1.0, -2.0] * 16]) * size
    got = ops.rms_norm(x, torch.ones(32, dtype=torch.bfloat16), 1e-20)
    wide = x.double()
    one_step(got, wide / (wide.square().mean() + 1e-20).sqrt())
    assert torch.equal(ops.rms_norm(x * 0, torch.ones(32, dtype=torch.bfloat16), 1e-20), x * 0)


def test_rope_there_and_back(ops, dtype):
    case = make("rope", dtype)
    x, positions, inv_freq = case.args["x"], case.args["positions"], case.args["inv_freq"]
    there = ops.rope(x.clone(), positions, inv_freq)
    assert torch.equal(there[..., :32], x[..., :32])
    back = ops.rope(there.clone(), positions, inv_freq, inverse=True)
    torch.testing.assert_close(back.float(), x.float(), rtol=0, atol=0.04 if dtype == torch.bfloat16 else 1e-6)
    angle = (positions.float()[:, None] * inv_freq).double()
    pair = torch.view_as_complex(x[..., 32:].double().unflatten(-1, (-1, 2)))
    turned = torch.view_as_real(pair * torch.polar(torch.ones_like(angle), angle)[:, None]).flatten(-2)
    torch.testing.assert_close(there[..., 32:].double(), turned, rtol=2.0**-8, atol=1e-6)


def test_rope_takes_any_rank(ops, dtype):
    x = Random(0, dtype).normal(5, 2, 3, 32)
    positions, inv_freq = torch.arange(5), torch.ones(8)
    got = ops.rope(x.clone(), positions, inv_freq)
    assert torch.equal(got[:, 1, 2], ops.rope(x[:, 1, 2], positions, inv_freq))


def test_hc_mix_is_doubly_stochastic(ops, dtype):
    case = make("hc_mix", dtype, rows=20)
    pre, post, comb = case.run(ops)
    assert ((pre > 0) & (pre < 1.00001)).all() and ((post > 0) & (post < 2)).all()
    torch.testing.assert_close(comb.sum(1), torch.ones(20, 4), rtol=0, atol=1e-4)
    torch.testing.assert_close(comb.sum(2), torch.ones(20, 4), rtol=0, atol=1e-3)


def test_hc_mix_orders_source_before_target(ops):
    """A base that favours (source 1, target 2) shows up at comb[1, 2]."""
    base = torch.zeros(24)
    base[8 + 4 * 1 + 2] = 3.0
    _, _, comb = ops.hc_mix(torch.ones(1, 4, 32), torch.zeros(24, 128), base, torch.ones(3), 1e-20, 1e-6, 1)
    assert comb[0].argmax() == 4 * 1 + 2


@pytest.mark.parametrize("m", [1, 2, 3, 4, 8])
def test_any_number_of_streams(ops, m):
    r = Random(0, torch.float32)
    streams = r.normal(5, m, 32)
    pre, post, comb = ops.hc_mix(
        streams, r.normal((2 + m) * m, m * 32), r.normal((2 + m) * m), torch.ones(3), 1e-20, 1e-6, 20
    )
    got = ops.hc_expand(ops.hc_collapse(streams, pre), streams, post, comb)
    x = torch.einsum("tm,tmh->th", pre.double(), streams.double()).float().double()
    want = post.double()[..., None] * x[:, None] + torch.einsum("tjk,tjh->tkh", comb.double(), streams.double())
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


def test_identity_mix_returns_the_stream(ops, dtype):
    """The network starts with all of stream 0 and nothing of the others."""
    streams = Random(0, dtype).normal(3, 4, 32)
    pre = torch.tensor([[1.0, 0, 0, 0]]).repeat(3, 1)
    assert torch.equal(ops.hc_collapse(streams, pre), streams[:, 0])
    same = ops.hc_expand(streams[:, 0], streams, torch.zeros(3, 4), torch.eye(4).repeat(3, 1, 1))
    assert torch.equal(same, streams)


@pytest.mark.parametrize("name", ["hc_site", "hc_first_site"])
def test_a_site_is_its_four_ops(ops, name, dtype):
    case = make(name, dtype, rows=70, scale=8)
    args = case.args
    x, streams, *mixes = case.run(ops)
    late = [args[name] for name in ("out", "streams", "post", "comb") if name in args]
    assert_close(streams, ops.hc_expand(*late) if len(late) > 1 else args["streams"], 2)
    weights = [args[name] for name in ("fn", "base", "scale", "norm_eps", "hc_eps", "iters")]
    for got, want in zip(mixes, ops.hc_mix(streams, *weights), strict=True):
        assert_close(got, want, 64)
    assert_close(x, ops.rms_norm(ops.hc_collapse(streams, args["pre"]), args["weight"], args["norm_eps"]), 4)


def test_moe_gate(ops, dtype):
    case = make("moe_gate", dtype, rows=50)
    weights, ids = case.run(ops)
    logits = (case.args["x"].double() @ weight(case)[0].double().T).float().double()
    s = torch.nn.functional.softplus(logits).sqrt()
    bias = torch.where(case.args["image_mask"][:, None], case.args["bias_vl"], case.args["bias"])
    want = (s + bias).topk(3, -1).indices
    assert torch.equal(ids, want)
    chosen = s.gather(1, want)
    torch.testing.assert_close(weights.double(), chosen / chosen.sum(-1, keepdim=True) * 1.5, rtol=1e-6, atol=0)


def test_moe_gate_without_image_bias(ops):
    case = make("moe_gate", torch.bfloat16)
    want = make("moe_gate", torch.bfloat16)
    want.args["image_mask"] = torch.zeros(7, dtype=torch.bool)
    case.args["image_mask"] = None
    assert torch.equal(case.run(ops)[1], want.run(ops)[1])
    case.args["bias_vl"] = None
    assert torch.equal(case.run(ops)[1], want.run(ops)[1])


def test_moe_gate_puts_nan_last(ops):
    identity = ops.prepare_dense(torch.eye(4, dtype=torch.bfloat16))
    bias = torch.tensor([0.0, 5.0, torch.nan, 1.0])
    _, ids = ops.moe_gate(torch.ones(1, 4), identity, bias, None, None, 4, 1.0)
    assert ids.tolist() == [[1, 3, 0, 2]]


def test_swiglu(ops, dtype):
    case = make("swiglu", dtype, rows=20)
    (got,) = case.run(ops)
    gate, up = case.args["gate"].double().clamp(max=10), case.args["up"].double().clamp(-10, 10)
    one_step(got, gate * torch.sigmoid(gate) * up * case.args["weight"].double()[:, None])


def test_swiglu_limits(ops):
    big = torch.tensor([[torch.inf, -torch.inf, 50.0, -50.0]])
    got = ops.swiglu(big, torch.full_like(big, torch.inf), 10.0, None)
    top = 10 / (1 + math.exp(-10)) * 10
    torch.testing.assert_close(got[0, :3], torch.tensor([top, torch.nan, top]), equal_nan=True)
    assert ops.swiglu(torch.tensor([[20.0]]), torch.tensor([[30.0]]), 0.0, None).item() == pytest.approx(600)


def experts_oracle(case) -> Tensor:
    x, weights, ids = case.args["x"], case.args["weights"], case.args["ids"]
    w13, s13, w2, s2 = weight(case, "experts")
    out = torch.zeros(len(x), H)
    for t in range(len(x)):
        for k in ids[t].argsort().tolist():
            e = int(ids[t, k])
            if e < 0:
                continue
            first = (round_trip(x[t]) @ formats.mxfp4_dequant(w13[e], s13[e]).double().T).to(x.dtype)
            gate, up = first[:I].double().clamp(max=10), first[I:].double().clamp(-10, 10)
            mid = (gate * torch.sigmoid(gate) * up * weights[t, k].double()).to(x.dtype)
            out[t] += (round_trip(mid) @ formats.mxfp4_dequant(w2[e], s2[e]).double().T).to(x.dtype).float()
    return out


def test_moe_experts(ops, dtype):
    case = make("moe_experts", dtype, rows=20)
    case.args["ids"][4] = -1  # a row without any expert here
    (got,) = case.run(ops)
    assert got.dtype == torch.float32 and torch.equal(got[4], torch.zeros(H))
    want = experts_oracle(case)
    error = (got - want).abs().amax(-1) / want.abs().amax(-1).clamp(min=1e-9)
    # equal, unless a rounding in the middle tips: then one step of one channel, and of its FP8 cast
    assert (error > 1e-6).float().mean() <= 0.1 and error.max() < 0.02


def test_moe_experts_add_in_order_of_id(ops, dtype):
    """The order in which a token lists its experts does not matter, to the bit."""
    case = make("moe_experts", dtype, rows=20)
    (straight,) = case.run(ops)
    for arg in ("ids", "weights"):
        case.args[arg] = case.args[arg].flip(-1)
    assert torch.equal(case.run(ops)[0], straight)


def test_a_replaced_expert_is_found_at_the_same_place(ops, dtype):
    case, other = make("moe_experts", dtype, rows=20), make("moe_experts", dtype, rows=7, seed=5)
    old, new = weight(case, "experts"), weight(other, "experts")
    prepared = ops.prepare_experts(*(tensor.clone() for tensor in old))
    case.args["experts"] = prepared
    (before,) = case.run(ops)
    ops.replace_expert(prepared, 2, *(tensor[2] for tensor in new))
    (after,) = case.run(ops)
    mixed = [torch.stack([*a[:2], b[2], *a[3:]]) for a, b in zip(old, new, strict=True)]
    case.args["experts"] = ops.prepare_experts(*mixed)
    assert torch.equal(after, case.run(ops)[0])
    chose = (case.args["ids"] == 2).any(-1)
    assert torch.equal(after[~chose], before[~chose]) and not torch.equal(after[chose], before[chose])


def test_an_expert_that_is_read_is_laid_out_alike_again(ops):
    """As it was given, and as it was put into its place; what moves to another rank is what it reads."""
    case, other = make("moe_experts", torch.bfloat16, rows=20), make("moe_experts", torch.bfloat16, seed=5)
    old, new = ([tensor.clone() for tensor in weight(c, "experts")] for c in (case, other))
    for scales, slot in ((old[1], 0), (new[3], 2)):
        scales.view(torch.uint8)[slot, 3, 1] = 255  # NaN
    prepared = ops.prepare_experts(*(tensor.clone() for tensor in old))
    ops.replace_expert(prepared, 2, *(tensor[2] for tensor in new))
    read = [ops.read_expert(prepared, slot) for slot in range(E)]
    for slot, found in enumerate(read):
        given = [tensor[slot] for tensor in (new if slot == 2 else old)]
        for at in (0, 2):
            assert found[at].dtype == torch.uint8 and found[at + 1].dtype == torch.float8_e8m0fnu
            got, want = (formats.mxfp4_dequant(*pair[at : at + 2]) for pair in (found, given))
            torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
            assert torch.equal(got.signbit(), want.signbit()), "of zeros too"
    case.args["experts"] = prepared
    (straight,) = case.run(ops)
    case.args["experts"] = ops.prepare_experts(*(torch.stack(parts) for parts in zip(*read, strict=True)))
    torch.testing.assert_close(case.run(ops)[0], straight, rtol=0, atol=0, equal_nan=True)
    with pytest.raises(OpError, match=rf"^read_expert: slot must be 0..{E - 1}, got {E}"):
        ops.read_expert(prepared, E)


def test_a_replaced_expert_is_checked_by_name(ops):
    w13, s13, w2, s2 = make("moe_experts", torch.float32).args["experts"].args
    prepared = ops.prepare_experts(w13, s13, w2, s2)
    for slot, args, text in (
        (E, (w13[0], s13[0], w2[0], s2[0]), f"slot must be 0..{E - 1}"),
        (0, (w13[0, :64], s13[0], w2[0], s2[0]), "w13 must be of shape"),
        (0, (w13[0], s13[0], w2[0], s2[0, :64]), "s2 must be of shape"),
    ):
        with pytest.raises(OpError, match=rf"^replace_expert: {text}"):
            ops.replace_expert(prepared, slot, *args)


def test_expert_shards_add_up(ops):
    """Two ranks with half the experts each, -1 for the others': every term is on exactly one rank."""
    case = make("moe_experts", torch.bfloat16, rows=20)
    (whole,) = case.run(ops)
    w13, s13, w2, s2 = weight(case, "experts")
    ids, total = case.args["ids"], torch.zeros(20, H)
    for rank in range(2):
        low, high = rank * E // 2, (rank + 1) * E // 2
        case.args["ids"] = torch.where((ids >= low) & (ids < high), ids - low, -1)
        case.args["experts"] = Weights("prepare_experts", (w13[low:high], s13[low:high], w2[low:high], s2[low:high]))
        total += case.run(ops)[0]
    torch.testing.assert_close(total, whole, rtol=1e-6, atol=1e-6)


def test_engram_gather(ops, dtype):
    case = make("engram_gather", dtype)
    (got,) = case.run(ops)
    table = formats.fp8_dequant(case.args["table"], case.args["scale"])
    assert torch.equal(got.float(), table[case.args["rows"]].flatten(1))


def test_engram_gate(ops, dtype):
    case = make("engram_gate", dtype, rows=20)
    (got,) = case.run(ops)
    streams, kv, live = case.args["streams"].double(), case.args["kv"].double(), case.args["live"]
    key, value = kv[:, : 4 * H].unflatten(1, (4, H)), kv[:, 4 * H :]
    q = streams / (streams.square().mean(-1, keepdim=True) + 1e-20).sqrt() * case.args["q_weight"].double()
    k = key / (key.square().mean(-1, keepdim=True) + 1e-20).sqrt() * case.args["k_weight"].double()
    match = (q * k).sum(-1) * H**-0.5
    gate = torch.sigmoid(match.sign() * match.abs().clamp(min=1e-6).sqrt())
    want = torch.where(live[:, None, None], streams + gate[..., None] * value[:, None], streams)
    torch.testing.assert_close(got.double(), want, rtol=2.0**-8 if dtype == torch.bfloat16 else 1e-6, atol=1e-6)
    assert torch.equal(got[~live], case.args["streams"][~live])


def test_engram_gate_without_agreement(ops):
    """A dot product of zero counts as the floor: the gate is sigmoid(sqrt(1e-6)), a little above one half."""
    kv = torch.cat((torch.zeros(1, 4 * H), torch.ones(1, H)), -1)
    one, live = torch.ones(4, H, dtype=torch.bfloat16), torch.ones(1, dtype=torch.bool)
    got = ops.engram_gate(torch.zeros(1, 4, H), kv, one, one, 1e-20, live)
    torch.testing.assert_close(got, torch.full((1, 4, H), 1 / (1 + math.exp(-1e-3))), rtol=1e-6, atol=0)


def test_dead_rows_ignore_what_was_fetched(ops, dtype):
    case = make("engram_gate", dtype)
    case.args["live"][:] = torch.arange(7) % 2 == 0
    case.args["kv"][1::2] = torch.nan
    (got,) = case.run(ops)
    assert got.isfinite().all() and torch.equal(got[1::2], case.args["streams"][1::2])


def test_markov_and_confidence(ops, dtype):
    case = make("markov", dtype)
    bias, e = case.run(ops)
    embed, head = case.args["embed"], weight(case, "head")[0]
    assert torch.equal(e, embed[case.args["prev"]]) and bias.dtype == torch.float32
    wide, head = e.double(), head.double()
    one_step(bias, wide @ head.T, None if ops.choices["markov"] == "reference" else wide.abs() @ head.abs().T)
    case = make("confidence", dtype)
    (got,) = case.run(ops)
    features = torch.cat((case.args["hidden"].double(), case.args["e"].double()), -1)
    torch.testing.assert_close(got.double(), features @ case.args["proj"][0].double(), rtol=1e-6, atol=1e-5)


# ---- NaN ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    ("name", "arg"),
    [
        ("linear", "x"),
        ("dense", "x"),
        ("grouped_linear", "o"),
        ("rms_norm", "x"),
        ("hc_mix", "streams"),
        ("hc_collapse", "streams"),
        ("hc_expand", "streams"),
        ("hc_site", "streams"),
        ("hc_first_site", "streams"),
        ("swiglu", "up"),
        ("moe_gate", "x"),
        ("moe_experts", "x"),
        ("engram_gate", "streams"),
        ("engram_gate", "kv"),
        ("confidence", "hidden"),
        ("rope", "x"),
    ],
)
def test_a_bad_number_stays_in_its_row_and_is_seen(ops, name, arg, dtype, bad):
    case = make(name, dtype)
    if name == "engram_gate":
        case.args["live"][:] = True
    if name == "swiglu":
        case.args["limit"] = 0.0
    if name == "moe_experts":
        case.args["ids"].clamp_(min=0)
        case.args["ids"][3] = torch.tensor([0, 2, 4])
    clean = case.run(ops)
    case.args[arg].view(7, -1)[3, -1] = bad
    for got, want in zip(case.run(ops), clean, strict=True):
        keep = torch.arange(7) != 3
        assert torch.equal(got[keep], want[keep])
        if got.dtype.is_floating_point and not (name == "moe_gate" and bad != bad):
            assert name == "moe_gate" or not got[3].isfinite().all()


def test_non_finite_activations_make_fp8_rows_nan(ops):
    case = make("linear", torch.bfloat16)
    case.args["x"][2, 5] = torch.inf
    (got,) = case.run(ops)
    assert got[2].isnan().all() and got[:2].isfinite().all() and got[3:].isfinite().all()


# ---- the reference's own machinery --------------------------------------------------------------------------


@pytest.mark.parametrize("name", BUILDERS)
def test_default_dtype_does_not_matter(ops, name, dtype):
    """Servers set bfloat16 as torch's default."""
    case = make(name, dtype)
    want = case.run(ops)
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.bfloat16)
        got = case.run(ops)
    finally:
        torch.set_default_dtype(before)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


@pytest.mark.parametrize("name", ["linear", "dense", "grouped_linear", "moe_gate", "moe_experts", "markov"])
def test_weights_beyond_the_cache_give_the_same_bits(reference, name, dtype, monkeypatch):
    case = make(name, dtype, scale=2)
    want = case.run(reference)
    monkeypatch.setattr(numeric, "CACHE_BYTES", 0)
    monkeypatch.setattr(numeric, "SLAB_BYTES", 1 << 15)
    for a, b in zip(case.run(reference), want, strict=True):
        assert torch.equal(a, b)


def test_the_cache_keeps_its_budget_and_gives_it_back(monkeypatch):
    ops = select()
    before = numeric._cached_bytes
    monkeypatch.setattr(numeric, "CACHE_BYTES", before + 3 * 64 * 64 * 8)
    weights = [ops.prepare_dense(torch.ones(64, 64, dtype=torch.bfloat16)) for _ in range(5)]
    assert numeric._cached_bytes == before  # nothing until it is used
    for _ in range(2):
        for weight in weights:
            ops.dense(torch.ones(1, 64, dtype=torch.bfloat16), weight)
    assert numeric._cached_bytes == before + 3 * 64 * 64 * 8
    del weights, weight
    assert numeric._cached_bytes == before


def test_float32_is_split_without_loss():
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0)) * torch.exp2(torch.arange(1000) % 80 - 40.0)
    x[:3] = torch.tensor([0.0, -0.0, 1 + 2.0**-23])
    parts = numeric.significands(x)
    assert torch.equal(sum(parts), x.double())
    for part in parts:
        assert torch.equal(part.to(torch.bfloat16).double(), part)


@pytest.mark.parametrize("width", [1, 2, 3, 7, 8, 100])
def test_tree_sum(width):
    x = torch.randint(-99, 99, (3, width, 2), generator=torch.Generator().manual_seed(0)).double()
    assert torch.equal(numeric.tree_sum(x, 1), x.sum(1))
    assert torch.equal(numeric.tree_sum(x.mT), x.sum(1))
