"""The contract suite on the ascend provider, torch_npu's ops as documented. Batch invariance to the bit is not asked
for: the vendor's products do not promise it."""

from __future__ import annotations

import pytest
import torch

from deepinfer_plugin.kernels import OP_NAMES, ascend, identity, select
from deepinfer_plugin.kernels.ascend import formats, vendor
from deepinfer_plugin.kernels.ops import PREPARED_FOR
from deepinfer_plugin.kernels.reference import formats as reference_formats

from ..kernels import test_dense_ops
from ..kernels.cases import BUILDERS, Case, make
from ..kernels.test_contract import assert_close, bits
from . import documented
from .conftest import table

# float32 is a debugging profile here: its sums are float32, the reference's float64. Factors on a case's bound.
FLOAT32_FACTOR = 64


def bound(case: Case, dtype: torch.dtype) -> float:
    return case.ulps * (FLOAT32_FACTOR if dtype == torch.float32 else 1)


def test_every_op_has_an_answer():
    assert set(OP_NAMES) == set(ascend.ANSWERS) == ascend.OPS.keys() - PREPARED_FOR.keys()


@pytest.mark.parametrize("rows", [1, 7, 33])
@pytest.mark.parametrize("name", BUILDERS)
def test_agrees_with_reference(ops, reference, name, dtype, rows):
    case = make(name, dtype, rows, seed=rows)
    for actual, expected in zip(case.run(ops), case.run(reference), strict=True):
        assert_close(actual, expected, bound(case, dtype))


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


@pytest.mark.parametrize("name", [name for name in BUILDERS if make(name, torch.float32).written])
def test_writes_are_the_sum_of_their_rows(ops, name, dtype):
    case = make(name, dtype, 9)
    whole = case.run(ops)
    for row in range(case.count):
        case.args |= dict(zip(case.written, case.run(ops, [row]), strict=True))
    for written, expected in zip(case.written, whole, strict=True):
        assert torch.equal(case.args[written], expected)


@pytest.mark.parametrize("name", BUILDERS)
def test_inputs_are_left_alone(ops, name, dtype):
    case = make(name, dtype)
    before = {k: v.clone() for k, v in case.args.items() if isinstance(v, torch.Tensor)}
    case.run(ops)
    for arg, value in before.items():
        assert torch.equal(bits(case.args[arg]), bits(value)), arg


@pytest.mark.parametrize("name", BUILDERS)
def test_the_caller_s_default_type_does_not_matter(ops, name):
    """A server makes and runs the model under bfloat16."""
    case = make(name, torch.bfloat16)
    want, before = case.run(ops), torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        got = case.run(ops)
    finally:
        torch.set_default_dtype(before)
    for actual, expected in zip(got, want, strict=True):
        assert actual.dtype == expected.dtype and torch.equal(bits(actual), bits(expected))


# ---- hyper-connections at start, idle ranks, missing ops -----------------------------------------------------------


def test_the_identity_check(ops):
    identity.check(ops)


def test_a_sinkhorn_that_ignores_its_input_is_caught():
    def flat(x, *, eps, num_iters):
        return torch.full_like(x, 0.25), None, None

    with documented.installed(npu_mhc_sinkhorn=flat), pytest.raises(identity.IdentityError, match="hc_mix"):
        identity.check(table())


@pytest.mark.parametrize("tokens", [1, 5])
def test_an_idle_rank(ops, reference, dtype, tokens):
    """Every choice is another rank's: no group has a row, and what the product leaves in memory does not come out."""
    case = make("moe_experts", dtype, tokens)
    case.args["ids"] = torch.full_like(case.args["ids"], -1)
    (got,) = case.run(ops)
    assert torch.equal(got, torch.zeros_like(got)) and got.shape == case.args["x"].shape


def test_a_replaced_expert(ops, reference, dtype):
    case, (w13, s13, w2, s2) = make("moe_experts", dtype, 9), make("moe_experts", dtype, 1, seed=4).args["experts"].args
    stacked, results = case.args["experts"].args, []
    for served in (ops, reference):
        experts = served.prepare_experts(*(tensor.clone() for tensor in stacked))
        served.replace_expert(experts, 3, *(tensor[3] for tensor in (w13, s13, w2, s2)))
        case.args["experts"] = experts
        results.append(case.run(served))
    for actual, expected in zip(*results, strict=True):
        assert_close(actual, expected, bound(case, dtype))


def test_an_expert_that_is_read(ops):
    test_dense_ops.test_an_expert_that_is_read_is_laid_out_alike_again(ops)


def test_one_busy_expert(ops, reference, dtype):
    case = make("moe_experts", dtype, 9)
    case.args["ids"] = torch.tensor([[4, -1, -1]] * 9)
    for actual, expected in zip(case.run(ops), case.run(reference), strict=True):
        assert_close(actual, expected, bound(case, dtype))


def test_a_missing_vendor_op_is_named():
    """Where torch_npu is not loaded nothing answers: the op raises by name and nothing steps in."""
    with pytest.raises(vendor.MissingOp, match="torch_npu has no npu_rms_norm"):
        vendor.op("npu_rms_norm")
    assert issubclass(vendor.MissingOp, NotImplementedError)


def test_never_chosen_without_the_device():
    assert (
        ascend.unavailable(torch.device("cpu")) == ascend.unavailable(torch.device("cuda")) == "it needs an Ascend 950"
    )
    with pytest.raises(ValueError, match="'ascend' cannot serve cpu"):
        select("cpu", "ascend")
    assert "ascend" not in select("cpu").choices.values()


def test_scales_are_deepseek_s_not_ocp_s():
    """With the vendor's default rule (floor) values saturate; the provider asks for the other."""
    x = torch.full((1, 64), 500.0, dtype=torch.bfloat16)
    with documented.installed():
        values, scale = formats.fp8_cast(x)
    want_values, want_scale = reference_formats.fp8_cast(x)
    assert torch.equal(values, want_values.view(torch.uint8)) and torch.equal(scale, want_scale.view(torch.uint8))
    floored = documented.npu_dynamic_mx_quant(
        x, axis=-1, round_mode="rint", dst_type=torch.float8_e4m3fn, block_size=32, scale_alg=0, max_low_bound=0.0
    )
    assert not torch.equal(floored[0].view(torch.uint8), values)
