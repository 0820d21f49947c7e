"""The ops that libraries serve on Blackwell, against the reference: our kernels in Triton's interpreter, the libraries'
as documented. ``test_blackwell.py`` runs it, in a process where the interpreter was chosen first."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from deepinfer_plugin.kernels import OP_NAMES, Ops, blackwell, cuda, identity, select
from deepinfer_plugin.kernels.blackwell import attention, casts, experts
from deepinfer_plugin.kernels.ops import SEQUENCES
from deepinfer_plugin.kernels.reference import formats

from ..kernels import test_dense_ops
from ..kernels.cases import Case, Random, Weights, make
from ..kernels.test_contract import assert_close
from . import documented

LIBRARY_OPS = ("linear", "moe_experts")
HEADS, CHANNELS = 32, 128  # of the indexer
D = 512


@pytest.fixture(scope="module")
def ops() -> Iterator[Ops]:
    with documented.installed():
        table = blackwell.ops(torch.device("cpu"))
        yield Ops(torch.device("cpu"), dict.fromkeys(OP_NAMES, "blackwell"), {"blackwell": table})


@pytest.fixture(scope="module")
def reference() -> Ops:
    return select("cpu", "reference")


def check(case: Case, ops: Ops, reference: Ops) -> None:
    for actual, expected in zip(case.run(ops), case.run(reference), strict=True):
        assert_close(actual, expected, case.ulps)


@pytest.mark.parametrize("rows", [0, 1, 17])
@pytest.mark.parametrize("scale", [1, 3])
@pytest.mark.parametrize("name", LIBRARY_OPS)
def test_contract(ops, reference, name, rows, scale):
    case = make(name, torch.bfloat16, max(rows, 1), seed=rows, scale=scale)
    if not rows:
        (result,) = case.run(ops, [])
        assert result.shape[0] == 0
        return
    check(case, ops, reference)


@pytest.mark.parametrize("name", LIBRARY_OPS)
def test_float32_activations(ops, reference, name):
    check(make(name, torch.float32, 5), ops, reference)


# ---- products --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "k"), [(1, 32), (40, 160), (64, 128), (96, 416)])
def test_cut_tiles_of_scales(ops, reference, n, k):
    r = Random(n, torch.bfloat16)
    args = {"x": r.normal(5, k, spread=3), "weight": Weights("prepare_linear", r.fp8_weight(n, k))}
    check(Case("linear", args, ("x",)), ops, reference)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_number_that_is_none_stays_in_its_row(ops, bad):
    case = make("linear", torch.bfloat16, 4)
    case.args["x"][2, 5] = bad
    (out,) = case.run(ops)
    assert out[2].isnan().all() and out[[0, 1, 3]].isfinite().all()


@pytest.mark.parametrize("rows", [1, 5])
def test_scales_are_laid_out_as_the_library_reads_them(rows):
    x = torch.randn(rows, 288).bfloat16()
    values, packed = casts.cast_fp8(x)
    right, byte = formats.fp8_cast(x)
    assert torch.equal(values.view(torch.uint8), right.view(torch.uint8))
    assert packed.shape == (rows, 3) and packed.stride() == (1, -(-rows // 4) * 4)
    assert torch.equal(packed.contiguous().view(torch.uint8)[:, :9], byte.view(torch.uint8))


# ---- experts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alignment", [1, 16, 128])
@pytest.mark.parametrize("tokens", [1, 9])
def test_every_pair_has_one_row_of_its_expert(alignment, tokens):
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.stack([torch.randperm(6, generator=generator)[:4] for _ in range(tokens)]) - 1
    route = experts.Route.of(ids, 5, alignment)
    end, seen = 0, []
    for expert, following in enumerate(route.ends.tolist()):
        start, end = -(-end // alignment) * alignment, following
        pairs = route.source[start:end].tolist()
        assert all(ids.flatten()[pair] == expert for pair in pairs) and pairs == sorted(pairs)
        seen += pairs
    assert sorted(seen) == (ids.flatten() >= 0).nonzero()[:, 0].tolist()
    assert len(seen) == int((route.source >= 0).sum()) and route.source.shape[0] % alignment == 0
    for pair, place in enumerate(route.place.tolist()):
        here = ids.flatten()[pair] >= 0
        assert route.source[place] == pair if here else place == route.source.shape[0]


def test_experts_of_other_ranks_only(ops):
    case = make("moe_experts", torch.bfloat16, 6)
    case.args["ids"] = torch.full_like(case.args["ids"], -1)
    (out,) = case.run(ops)
    assert torch.equal(out, torch.zeros_like(out))


def test_one_busy_expert(ops, reference):
    case = make("moe_experts", torch.bfloat16, 40)
    case.args["ids"] = torch.tensor([[4, -1, -1]] * 40)
    check(case, ops, reference)


def test_a_replaced_expert(ops):
    test_dense_ops.test_a_replaced_expert_is_found_at_the_same_place(ops, torch.bfloat16)


def test_an_expert_that_is_read(ops):
    test_dense_ops.test_an_expert_that_is_read_is_laid_out_alike_again(ops)


# ---- index scores ----------------------------------------------------------------------------------------------------


def index_case(groups: int, rows: int) -> Case:
    """Keys and scales in pages that also hold other things, poisoned: the views that the page pool gives."""
    r = Random(groups, torch.bfloat16)
    before, after = 16 * 37, 44
    section = groups * (CHANNELS // 2 + CHANNELS // 32)
    pool = torch.full((9, before + section + after), 255, dtype=torch.uint8)
    key, key_scale = r.keys(9, groups, CHANNELS)
    split = before + groups * CHANNELS // 2
    pool[:, before:split] = key.flatten(1)
    pool[:, split : before + section] = key_scale.flatten(1)
    args = {
        "query": r.normal(rows, HEADS, CHANNELS),
        "weight": r.normal(rows, HEADS),
        "key": pool[:, before:split].unflatten(1, (groups, CHANNELS // 2)),
        "key_scale": pool[:, split : before + section].unflatten(1, (groups, CHANNELS // 32)),
        "page_table": r.ints(0, 9, 3, 2),
        "requests": r.ints(0, 3, rows).sort().values,
        "visible": r.ints(0, 2 * groups + 1, rows),
        "low_precision": False,
    }
    return Case("index_scores", args, ("query", "weight", "requests", "visible"), ulps=HEADS)


@pytest.mark.parametrize("groups", [32, 64, 128])
@pytest.mark.parametrize("rows", [1, 7])
def test_index_scores(ops, reference, groups, rows):
    check(index_case(groups, rows), ops, reference)


def test_no_index_scores(ops):
    (out,) = index_case(64, 3).run(ops, [])
    assert out.shape == (0, 128)


@pytest.mark.parametrize(("change", "why"), [
    ({"low_precision": True}, r"low_precision=True .*; legal: False \(profile deepinfer\)"),
    ({"query": torch.zeros(3, 12, 128).bfloat16(), "weight": torch.zeros(3, 12).bfloat16()}, "12 heads"),
    ({"key": torch.zeros(9, 64, 64, dtype=torch.uint8)}, "right behind them"),
    ({"key": torch.zeros(9, 48, 64, dtype=torch.uint8), "key_scale": torch.zeros(9, 48, 4, dtype=torch.uint8)},
     "pages of 48 groups"),
])  # fmt: skip
def test_index_scores_that_are_not_served(ops, change, why):
    case = index_case(64, 3)
    case.args |= change
    with pytest.raises(ValueError, match=why):
        case.run(ops)


# ---- attention -------------------------------------------------------------------------------------------------------


def attention_case(rows: int, heads: int, chosen: int | None) -> Case:
    r = Random(rows + heads, torch.bfloat16)
    slots = r.ints(0, 4, rows).sort().values
    first = torch.cat((slots.new_ones(1), slots.diff())) > 0
    begin = torch.where(first, torch.arange(rows), 0).cummax(0).values
    fresh = torch.arange(rows) - begin  # earlier rows of the same request in this batch
    args = {
        "q": r.normal(rows, heads, D) * 2,
        "window": r.window(rows, D),
        "positions": r.ints(0, 200, 4)[slots] + fresh,
        "fresh": fresh,
        "row_slots": slots,
        "window_floor": r.ints(0, 40, 4)[slots],
        "ring": r.window(4, 140, D),
        "window_len": 128,
        "latent": None,
        "latent_scale": None,
        "page_table": None,
        "requests": None,
        "selected": None,
        "sink": r.normal(heads, dtype=torch.float32),
        "scale": D**-0.5,
        "block_future": None,
    }
    if chosen is not None:
        latent, latent_scale = r.latents(12, 8, D)
        args |= {
            "latent": latent,
            "latent_scale": latent_scale,
            "page_table": r.ints(0, 12, 4, 5),
            "requests": slots,
            "selected": r.ints(-1, 40, rows, chosen),
        }
    rows_of = ("q", "positions", "fresh", "row_slots", "window_floor", "requests", "selected")
    # Our reference rounds probabilities to bf16 as the model does; how the library rounds them is its own affair.
    return Case("sparse_attention", args, rows_of, ulps=6)


@pytest.mark.parametrize("chosen", [None, 0, 70])
@pytest.mark.parametrize(("rows", "heads"), [(1, 64), (6, 3)])
def test_attention(ops, reference, rows, heads, chosen):
    check(attention_case(rows, heads, chosen), ops, reference)


def test_a_draft_block(ops, reference):
    case = attention_case(10, 2, None)
    block = torch.arange(10) % 5
    anchor = torch.tensor([150, 7]).repeat_interleave(5)
    case.args |= {
        "positions": anchor + block,
        "fresh": block,
        "row_slots": torch.tensor([1, 3]).repeat_interleave(5),
        "window_floor": (anchor - 128).clamp(min=0),
        "block_future": 4 - block,
    }
    check(case, ops, reference)


def test_keys_are_copied_for_some_rows_at_a_time(ops, reference, monkeypatch):
    case = attention_case(11, 2, 30)
    (whole,) = case.run(ops)
    monkeypatch.setattr(attention, "MOST_ROWS", 4)
    (parts,) = case.run(ops)
    assert torch.equal(parts, whole)
    check(case, ops, reference)


def test_other_sizes_run_our_own_kernel(ops, reference):
    check(make("sparse_attention", torch.bfloat16, 3), ops, reference)


# ---- the table -------------------------------------------------------------------------------------------------------


def test_every_op_is_there(ops):
    assert set(blackwell.ops(torch.device("cpu"))) == set(cuda.every_op()) - set(SEQUENCES)


def test_hyper_connections_of_the_start_check(ops):
    identity.check(ops)
