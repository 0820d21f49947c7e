"""What every provider must do, whatever the op: agree with the reference, keep rows apart, refuse by name."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import Tensor

from deepinfer_plugin.kernels import OP_NAMES, OpError, Ops, identity
from deepinfer_plugin.kernels.ops import SEQUENCES

from .cases import BUILDERS, Case, Weights, make

APART = [name for name in BUILDERS if not ((case := make(name, torch.float32)).written or case.together)]


def test_every_op_has_a_case():
    assert {make(name, torch.float32).op for name in BUILDERS} == {*OP_NAMES, *SEQUENCES}


@pytest.mark.parametrize("name", [*OP_NAMES, *SEQUENCES])
def test_every_op_is_documented(name):
    text = inspect.getdoc(getattr(Ops, name))
    assert text is not None and len(text) > 60


def assert_close(actual: Tensor, expected: Tensor, ulps: float) -> None:
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    if ulps == 0 or not expected.dtype.is_floating_point:
        torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
        return
    step = 2.0**-8 if expected.dtype == torch.bfloat16 else 2.0**-23
    got, want = actual.to(torch.float64), expected.to(torch.float64)
    finite = want.isfinite()
    assert torch.equal(got.isfinite(), finite) and torch.equal(got.isnan(), want.isnan())
    largest = want.abs().where(finite, 0).flatten(1).amax(1) if want.dim() > 1 else want.abs()
    bound = (ulps * step * largest).view(-1, *(1,) * (want.dim() - 1))
    error = (got - want).abs().where(finite, 0)
    assert (error <= bound).all(), f"largest error {(error / bound.clamp(min=1e-300)).max().item():.2f} of the bound"


@pytest.mark.parametrize("rows", [1, 7, 33])
@pytest.mark.parametrize("name", BUILDERS)
def test_agrees_with_reference(ops, reference, name, dtype, rows):
    case = make(name, dtype, rows, seed=rows)
    for actual, expected in zip(case.run(ops), case.run(reference), strict=True):
        assert_close(actual, expected, case.ulps)


def test_hyper_connections_of_the_start_check_agree_with_reference(ops):
    identity.check(ops)


@pytest.mark.parametrize("name", BUILDERS)
def test_no_rows(ops, name, dtype):
    case = make(name, dtype, 3)
    empty, written = case.run(ops, []), len(case.written)
    for result, full in zip(empty[: len(empty) - written], case.run(ops), strict=False):
        assert result.shape == (0, *full.shape[1:]) and result.dtype == full.dtype
        if case.together:
            break
    for result, arg in zip(empty[len(empty) - written :], case.written, strict=True):
        assert torch.equal(result, case.args[arg])


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


@pytest.mark.parametrize("scale", [1, 8], ids=["narrow", "wide"])
@pytest.mark.parametrize("name", APART)
def test_a_row_does_not_depend_on_its_batch(ops, name, dtype, scale):
    rows = 37
    case = make(name, dtype, rows, seed=scale, scale=scale)
    whole = case.run(ops)
    generator = torch.Generator().manual_seed(1)
    subsets = [[row] for row in range(rows)]
    subsets += [torch.randperm(rows, generator=generator)[:n].tolist() for n in (2, 3, 4, 8, 16, 17, 36)]
    subsets += [list(range(start, start + 5)) for start in range(0, 30, 5)]
    if "requests" in case.rows or "row_slots" in case.rows:  # rows of a request are contiguous
        subsets = [sorted(subset) for subset in subsets]
    for subset in subsets:
        for part, full in zip(case.run(ops, subset), whole, strict=True):
            assert torch.equal(bits(part), bits(full[torch.tensor(subset)])), f"rows {subset}"


@pytest.mark.parametrize("name", [name for name in BUILDERS if make(name, torch.float32).written])
def test_writes_are_the_sum_of_their_rows(ops, name, dtype):
    """Written all at once, or one row at a time: the same memory."""
    case = make(name, dtype, 9)
    whole = case.run(ops)
    for row in range(case.count):
        case.args |= dict(zip(case.written, case.run(ops, [row]), strict=True))
    for written, expected in zip(case.written, whole, strict=True):
        assert torch.equal(case.args[written], expected)


@pytest.mark.parametrize("name", BUILDERS)
def test_inputs_are_left_alone(ops, name, dtype):
    case = make(name, dtype)
    before = {k: v.clone() for k, v in case.args.items() if isinstance(v, Tensor)}
    case.run(ops)
    for arg, value in before.items():
        assert torch.equal(bits(case.args[arg]), bits(value)), arg


@pytest.mark.parametrize("name", BUILDERS)
def test_repeats_to_the_bit(ops, name, dtype):
    case = make(name, dtype)
    for first, second in zip(case.run(ops), case.run(ops), strict=True):
        assert torch.equal(bits(first), bits(second))


# ---- refusals ----------------------------------------------------------------------------------------


def tensor_arguments(case: Case) -> list[str]:
    return [name for name, value in case.args.items() if isinstance(value, Tensor)]


WRONG = [(name, arg) for name in BUILDERS for arg in tensor_arguments(make(name, torch.bfloat16))]


@pytest.mark.parametrize(("name", "arg"), WRONG)
def test_wrong_dtype_is_named(ops, name, arg):
    case = make(name, torch.bfloat16)
    case.args[arg] = case.args[arg].view(torch.uint8).to(torch.int16)
    with pytest.raises(OpError, match=rf"^{case.op}: {arg} must be .*int16"):
        case.run(ops)


@pytest.mark.parametrize(("name", "arg"), WRONG)
def test_wrong_rank_is_named(ops, name, arg):
    case = make(name, torch.bfloat16)
    case.args[arg] = case.args[arg].reshape(-1)[0]
    with pytest.raises(OpError, match=rf"^{case.op}: {arg} must be .*got shape \[\]"):
        case.run(ops)


@pytest.mark.parametrize(("name", "arg"), WRONG)
def test_not_a_tensor_is_named(ops, name, arg):
    case = make(name, torch.bfloat16)
    case.args[arg] = [1, 2]
    with pytest.raises(OpError, match=rf"^{case.op}: {arg} must be a tensor, got list"):
        case.run(ops)


@pytest.mark.parametrize("name", BUILDERS)
def test_one_row_too_many_is_named(ops, name):
    """Arguments that share the row count: one that has another is refused (not broadcast)."""
    case = make(name, torch.bfloat16)
    sized = [arg for arg in case.rows if isinstance(case.args[arg], Tensor)]
    for arg in sized[1:]:
        value = case.args[arg]
        case.args[arg] = torch.cat((value, value[:1]))
        with pytest.raises(OpError, match=rf"^{case.op}: \w+ must be"):
            case.run(ops)
        case.args[arg] = value


@pytest.mark.parametrize("name", ["linear", "dense", "grouped_linear", "moe_gate", "moe_experts", "markov"])
def test_wrong_weight_is_named(ops, name):
    case = make(name, torch.bfloat16)
    arg = next(k for k, v in case.args.items() if isinstance(v, Weights))
    wrong = ops.prepare_linear(*make("linear", torch.bfloat16).args["weight"].args)
    if case.op == "linear":
        wrong = ops.prepare_dense(torch.zeros(4, 4, dtype=torch.bfloat16))
    case.args[arg] = wrong
    with pytest.raises(
        OpError, match=rf"^{case.op}: {arg} must be the result of prepare_\w+, got the result of prepare_"
    ):
        case.run(ops)
    case.args[arg] = torch.zeros(3)
    with pytest.raises(OpError, match=rf"^{case.op}: {arg} must be the result of prepare_\w+, got Tensor"):
        case.run(ops)


@pytest.mark.parametrize(
    ("name", "arg", "value", "text"),
    [
        ("dense", "out_dtype", torch.float16, "float16"),
        ("rope", "inv_freq", torch.ones(33), "33 frequencies"),
        ("hc_mix", "iters", 0, "at least 1"),
        ("window_pack", "kv", torch.zeros(2, 40), "multiple of 32"),
        ("latent_write", "latent", torch.zeros(7, 40), "multiple of 16"),
        ("index_key_write", "key", torch.zeros(7, 48), "multiple of 32"),
        ("compress_pair", "dtype", torch.float64, "float64"),
        ("candidate_blocks", "blocks", 0, "at least 1"),
        ("candidate_blocks", "block_size", 0, "at least 1"),
        ("top_groups", "k", 0, "at least 1"),
        ("sparse_attention", "window_len", 39, r"1\.\.38"),
        ("sparse_attention", "window_len", 0, r"1\.\.38"),
        ("sparse_attention", "latent", None, "a tensor, got NoneType"),
        ("sparse_attention", "requests", None, "a tensor, got NoneType"),
        ("sparse_attention", "selected", None, "None when selected is None"),
        ("moe_gate", "topk", 7, r"1\.\.6"),
        ("engram_hash", "ngrams", torch.zeros(5, 2, dtype=torch.int64), "at least 3 places"),
        ("engram_gather", "dtype", torch.float16, "float16"),
    ],
)
def test_illegal_values_are_named(ops, name, arg, value, text):
    case = make(name, torch.float32)
    case.args[arg] = value
    with pytest.raises(OpError, match=rf"^{case.op}: .*{text}"):
        case.run(ops)


@pytest.mark.parametrize(
    ("prepare", "args", "text"),
    [
        ("prepare_linear", lambda w, s: (w[:, :40], s), "prepare_linear: weight must be .*multiple of 32"),
        ("prepare_linear", lambda w, s: (w, s[:1]), "prepare_linear: scale must be of shape"),
        ("prepare_linear", lambda w, s: (w.to(torch.bfloat16), s), "prepare_linear: weight must be float8_e4m3fn"),
        ("prepare_linear", lambda w, s: (w, s.view(torch.uint8)), "prepare_linear: scale must be float8_e8m0fnu"),
        ("prepare_dense", lambda w, s: (w.to(torch.float32),), "prepare_dense: weight must be bfloat16"),
        ("prepare_grouped", lambda w, s: (w, s, 5), "prepare_grouped: groups must be a divisor"),
        ("prepare_grouped", lambda w, s: (w, s, 0), "prepare_grouped: groups must be a divisor"),
    ],
)
def test_prepare_refuses_by_name(ops, prepare, args, text):
    weight, scale = make("linear", torch.float32).args["weight"].args
    with pytest.raises(OpError, match=text):
        getattr(ops, prepare)(*args(weight[:64], scale[:2]))


def test_prepare_experts_refuses_by_name(ops):
    w13, s13, w2, s2 = make("moe_experts", torch.float32).args["experts"].args
    for args, text in (
        ((w13[:, :100], s13, w2, s2), "w13 must be twice a multiple of 32 rows"),
        ((w13[..., :8], s13, w2, s2), "w13 must be a positive multiple of 32"),
        ((w13, s13[:, :5], w2, s2), "s13 must be of shape"),
        ((w13, s13, w2[:2], s2), "w2 must be of shape"),
        ((w13, s13, w2, s2[..., :1]), "s2 must be of shape"),
    ):
        with pytest.raises(OpError, match=rf"^prepare_experts: {text}"):
            ops.prepare_experts(*args)


def test_fp8_output_projection_refuses_float32(ops):
    case = make("grouped_linear_fp8", torch.float32)
    case.args["o"] = case.args["o"].float()
    with pytest.raises(OpError, match="grouped_linear: o must be bfloat16, got float32"):
        case.run(ops)
