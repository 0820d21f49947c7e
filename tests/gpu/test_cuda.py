"""The cuda provider at the shapes it was written for, where the small cases of the contract suite cannot reach: many
tokens an expert, long contexts, large page ids, graph capture, poisoned outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from deepinfer_plugin.kernels import Ops, select
from deepinfer_plugin.kernels import cuda as provider
from deepinfer_plugin.kernels.cuda import attention_cpp
from deepinfer_plugin.kernels.reference import formats
from deepinfer_plugin.model import V41
from deepinfer_plugin.model.expert_map import ExpertMap

from ..kernels.cases import Random
from ..kernels.test_contract import assert_close

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(provider.unavailable(torch.device("cuda")) is not None, reason="no Hopper GPU"),
]


FAST_ERROR = 8e-3  # of the fast class: a sum that is off by 1e-4 rounds to the other of two FP8 values now and then


@pytest.fixture(scope="module")
def tables() -> tuple[Ops, Ops]:
    return select("cuda"), select("cuda", "reference")


@pytest.fixture(scope="module")
def fast() -> Ops:
    return select("cuda", profile="deepinfer")


@pytest.fixture(autouse=True)
def poisoned():
    """Memory that the allocator hands out is full of NaN, so an output that is not written shows."""
    torch.full((1 << 28,), torch.nan, device="cuda")
    generator = torch.random.get_rng_state()
    torch.manual_seed(0)
    yield
    torch.random.set_rng_state(generator)


PRODUCTS = pytest.mark.parametrize(
    ("groups", "outputs", "channels"),
    [(1, 512, 5120), (1, 300, 320), (1, 4608, 2304), (1, 100, 96), (8, 1024, 512), (3, 96, 160)],
)


def check_products(ours: Ops, reference: Ops, groups: int, outputs: int, channels: int, fp8: bool) -> float:
    """Every width of a tile, splits that go through memory and splits added in registers: the same bits for a row.
    The error against the reference."""
    weight = torch.randint(256, (groups * outputs, channels), device="cuda", dtype=torch.uint8)
    weight = torch.where(weight & 0x7F == 0x7F, 0x30, weight).view(torch.float8_e4m3fn)
    scale = torch.randint(110, 120, (-(-groups * outputs // 32), channels // 32), device="cuda", dtype=torch.uint8)
    args = (weight, scale.view(torch.float8_e8m0fnu))
    x = torch.randn(2100, groups, channels, device="cuda", dtype=torch.bfloat16)
    x *= torch.exp2(4 * torch.randn(2100, 1, 1, device="cuda")).bfloat16()

    def product(table: Ops, rows: Tensor) -> Tensor:
        if groups == 1:
            return table.linear(rows[:, 0], table.prepare_linear(*args))
        return table.grouped_linear(rows, table.prepare_grouped(*args, groups), fp8)

    want = product(reference, x[:300])
    got = product(ours, x[:300])
    for rows in (1, 8, 9, 30, 64, 90, 128, 190, 256, 1024, 1025, 2100):
        again = product(ours, x[:rows])
        assert torch.equal(again[:300], got[:rows]), rows
    x[3, 0, 5] = torch.nan
    poisoned = product(ours, x[:9])
    assert poisoned[3].isnan().any() and not poisoned[4:].isnan().any() and torch.equal(poisoned[:3], got[:3])
    if ours.choices["linear"] == "cuda":
        assert_close(got, want, 2.0**20)
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


@PRODUCTS
def test_fp8_products_with_any_number_of_rows(tables, groups, outputs, channels):
    assert check_products(*tables, groups, outputs, channels, fp8=False) < 2e-4


@PRODUCTS
def test_fast_fp8_products_with_any_number_of_rows(tables, fast, groups, outputs, channels):
    """Of a group's product the result is cast too, and some values round to the other of two neighbours."""
    assert fast.choices["linear"] == fast.choices["grouped_linear"] == "cuda-fast"
    error = check_products(fast, tables[1], groups, outputs, channels, fp8=True)
    assert error < (2e-3 if groups == 1 else 2 * FAST_ERROR), error


@pytest.mark.parametrize("late", [True, False])
def test_a_site_with_any_number_of_rows(tables, late):
    """At released size, beside the four ops it is made of; the same bits for a row whatever the batch."""
    ours, reference = tables
    assert "hc_site" in ours._run
    rows, m, h = 700, 4, 5120

    def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, device="cuda", dtype=dtype)

    streams, pre = normal(rows, m, h, dtype=torch.bfloat16), torch.sigmoid(normal(rows, m))
    fn, base = normal(24, m * h) * (m * h) ** -0.5, normal(24)
    weights = fn, base, torch.ones(3, device="cuda"), normal(h, dtype=torch.bfloat16), 1e-20, 1e-6, 20
    before = normal(rows, h, dtype=torch.bfloat16), normal(rows, m), torch.softmax(normal(rows, m, m), -1)

    def site(table: Ops, part: slice) -> tuple[Tensor, ...]:
        return table.hc_site(streams[part], pre[part], *weights, *(each[part] for each in before if late))

    whole = site(ours, slice(None))
    x, new, *_ = site(reference, slice(None))
    assert_close(whole[0], x, 4)
    assert_close(whole[1], new, 2)
    for got, want in zip(whole[2:], reference.hc_mix(whole[1], *weights[:3], *weights[4:]), strict=True):
        assert_close(got, want, 64)
    for part in (slice(1), slice(699, None), slice(63, 65), slice(5, 69), slice(100, 356)):
        for got, want in zip(site(ours, part), whole, strict=True):
            assert torch.equal(got, want[part])


def experts(count: int, hidden: int, inner: int) -> tuple[Tensor, ...]:
    def weight(*shape: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(*shape, device="cuda") * torch.exp2(torch.randn(*shape[:-1], 1, device="cuda"))
        return formats.mxfp4_cast(x * shape[-1] ** -0.5)

    return *weight(count, 2 * inner, hidden), *weight(count, hidden, inner)


@pytest.mark.parametrize("tokens", [1, 5, 64, 65, 130, 700])
@pytest.mark.parametrize("skew", [0.0, 3.0])
def test_experts_with_any_number_of_tokens(tables, tokens, skew):
    """From none to all tokens in an expert: every width of a tile, several pieces an expert, both kernels."""
    ours, reference = tables
    count, hidden, inner, topk = 11, 320, 288, 4
    raw = experts(count, hidden, inner)
    x = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16)
    taste = torch.rand(tokens, count + 3, device="cuda") + skew * torch.rand(count + 3, device="cuda")
    ids = taste.topk(topk, -1).indices
    ids = torch.where(ids < count, ids, -1)
    weights = torch.rand(tokens, topk, device="cuda")
    got = ours.moe_experts(x, weights, ids, ours.prepare_experts(*raw), 10.0)
    want = reference.moe_experts(x, weights, ids, reference.prepare_experts(*raw), 10.0)
    assert_close(got, want, 2.0**17)
    error = ((got - want).norm() / want.norm()).item()
    assert error < 2e-3, error
    again = ours.moe_experts(x, weights, ids, ours.prepare_experts(*raw), 10.0)
    assert torch.equal(got, again)
    alone = torch.cat([ours.moe_experts(x[i : i + 1], weights[i : i + 1], ids[i : i + 1],
                                        ours.prepare_experts(*raw), 10.0) for i in range(min(tokens, 3))])  # fmt: skip
    assert torch.equal(alone, got[:3])


@pytest.mark.parametrize("tokens", [1, 5, 64, 65, 130, 700])
@pytest.mark.parametrize("skew", [0.0, 3.0])
def test_fast_experts_with_any_number_of_tokens(tables, fast, tokens, skew):
    """The bound is wide for sums that are right to 1e-4: such a difference moves some of the values between the two
    products across a boundary of bf16 and FP8, and those are then off by one in 8."""
    assert fast.choices["moe_experts"] == "cuda-fast"
    exact, reference = tables
    count, hidden, inner, topk = 11, 320, 288, 4
    raw = experts(count, hidden, inner)
    x = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16)
    taste = torch.rand(tokens, count + 3, device="cuda") + skew * torch.rand(count + 3, device="cuda")
    ids = taste.topk(topk, -1).indices
    ids = torch.where(ids < count, ids, -1)
    weights = torch.rand(tokens, topk, device="cuda")
    prepared = fast.prepare_experts(*raw)
    got = fast.moe_experts(x, weights, ids, prepared, 10.0)
    for other in (exact, reference):
        want = other.moe_experts(x, weights, ids, other.prepare_experts(*raw), 10.0)
        error = ((got - want).norm() / want.norm()).item()
        assert error < FAST_ERROR, error
    assert torch.equal(got, fast.moe_experts(x, weights, ids, prepared, 10.0))
    for i in range(min(tokens, 5)):
        part = slice(i, i + 1)
        assert torch.equal(fast.moe_experts(x[part], weights[part], ids[part], prepared, 10.0), got[part])


def test_fast_experts_with_scales_far_apart(tables, fast):
    """Blocks 2^-47 below the largest of their row; a NaN scale; a NaN and an infinity in x."""
    reference = tables[1]
    raw = [each.clone() for each in experts(3, 128, 64)]
    raw[1].view(torch.uint8).random_(100, 147)
    raw[3].view(torch.uint8).random_(90, 130)
    x = torch.randn(9, 128, device="cuda", dtype=torch.bfloat16) * 1e-3
    ids = torch.arange(9, device="cuda")[:, None] % 3
    weights = torch.ones(9, 1, device="cuda")
    for poison in (False, True):
        if poison:
            raw[1].view(torch.uint8)[1, 5, 2] = 255
            x[4, 40], x[5, 3] = torch.nan, torch.inf
        got = fast.moe_experts(x, weights, ids, fast.prepare_experts(*raw), 10.0)
        want = reference.moe_experts(x, weights, ids, reference.prepare_experts(*raw), 10.0)
        assert torch.equal(got.isnan(), want.isnan()) and torch.equal(got.isfinite(), want.isfinite())
        seen = want.isfinite()
        assert (got[seen] - want[seen]).norm() < FAST_ERROR * want[seen].norm()


def test_experts_beyond_the_range_of_one_factor(tables):
    """Scales from 2^-127 to 2^20 and NaN ones; a NaN in x."""
    ours, reference = tables
    raw = [each.clone() for each in experts(3, 128, 64)]
    raw[1].view(torch.uint8).random_(100, 147)
    raw[3].view(torch.uint8).random_(90, 130)
    x = torch.randn(9, 128, device="cuda", dtype=torch.bfloat16) * 1e-3
    ids = torch.arange(9, device="cuda")[:, None] % 3
    weights = torch.ones(9, 1, device="cuda")
    for poison in (False, True):
        if poison:
            raw[1].view(torch.uint8)[1, 5, 2] = 255
            x[4, 40] = torch.nan
        got = ours.moe_experts(x, weights, ids, ours.prepare_experts(*raw), 10.0)
        want = reference.moe_experts(x, weights, ids, reference.prepare_experts(*raw), 10.0)
        assert_close(got, want, 2.0**17)


def pages(count: int, groups: int) -> tuple[Tensor, Tensor]:
    """Index keys of random pages: views into one pool, with other bytes between them."""
    pool = torch.randint(0, 256, (count, groups * (64 + 4) + 1024), dtype=torch.uint8, device="cuda")
    key = pool[:, 512 : 512 + groups * 64].unflatten(1, (groups, 64))
    scale = pool[:, 512 + groups * 64 : 512 + groups * 68].unflatten(1, (groups, 4))
    scale.copy_(torch.randint(118, 134, scale.shape, dtype=torch.uint8, device="cuda"))
    return key, scale


@pytest.mark.parametrize("groups", [64, 128])
@pytest.mark.parametrize("low", [True, False])
def test_index_scores_of_ragged_rows(tables, groups, low):
    """Requests with 1 to 9 rows, contexts of nothing to 5,000 groups."""
    ours, reference = tables
    lengths = torch.tensor([1, 4, 9, 2, 6, 5, 1, 8])
    requests = torch.arange(8).repeat_interleave(lengths).cuda()
    rows, width = len(requests), 5000 // groups
    key, scale = pages(200, groups)
    table = torch.randint(0, 200, (8, width), device="cuda")
    visible = torch.randint(0, width * groups + 1, (rows,), device="cuda")
    visible[:3] = torch.tensor([0, 1, width * groups])
    query = torch.randn(rows, 32, 128, device="cuda", dtype=torch.bfloat16)
    query[5, 3, 40] = torch.nan
    weight = torch.randn(rows, 32, device="cuda", dtype=torch.bfloat16)
    call = (query, weight, key, scale, table, requests, visible, low)
    got, want = ours.index_scores(*call), reference.index_scores(*call)
    assert torch.equal(got.isfinite(), want.isfinite()) and torch.equal(got.isnan(), want.isnan())
    seen = want.isfinite()
    error = ((got[seen].double() - want[seen].double()).norm() / want[seen].double().norm()).item()
    assert error < 1e-4, error
    for k, blocks, size in ((512, 40, 8), (64, 3, 4)):
        chosen = reference.candidate_blocks(want, visible, size, blocks)
        assert torch.equal(ours.candidate_blocks(want, visible, size, blocks), chosen)
        for candidates in (None, chosen):
            assert torch.equal(
                ours.top_groups(want, visible, k, candidates), reference.top_groups(want, visible, k, candidates)
            )


def test_index_scores_of_pages_beyond_two_gigabytes(tables):
    ours, reference = tables
    key, scale = pages(40_000, 1024)  # 71 kB a page
    assert key.stride(0) * 39_999 > 1 << 31
    table = torch.tensor([[39_999, 3, 39_000]], device="cuda")
    visible = torch.tensor([3072, 3000], device="cuda")
    query = torch.randn(2, 32, 128, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(2, 32, device="cuda", dtype=torch.bfloat16)
    call = (query, weight, key, scale, table, torch.zeros(2, dtype=torch.int64, device="cuda"), visible, True)
    assert_close(ours.index_scores(*call), reference.index_scores(*call), 32)


def test_ties_and_equal_scores(tables):
    ours, reference = tables
    scores = torch.randint(-3, 3, (7, 40_000), device="cuda").to(torch.bfloat16)
    visible = torch.tensor([0, 1, 511, 512, 513, 30_000, 40_000], device="cuda")
    zeros = torch.zeros_like(scores)
    for each in (scores, scores.float(), zeros, torch.where(scores > 0, zeros, -zeros)):  # both zeros are one
        assert torch.equal(ours.top_groups(each, visible, 512, None), reference.top_groups(each, visible, 512, None))


def test_a_captured_step_replays(tables):
    """Experts and indexer in a CUDA graph, replayed on new inputs."""
    ours, _ = tables
    raw = ours.prepare_experts(*experts(8, 256, 128))
    x, weights = torch.randn(6, 256, device="cuda", dtype=torch.bfloat16), torch.rand(6, 2, device="cuda")
    ids = torch.rand(6, 8, device="cuda").topk(2, -1).indices
    key, scale = pages(20, 64)
    table, requests = torch.randint(0, 20, (3, 9), device="cuda"), torch.tensor([0, 0, 1, 2, 2, 2], device="cuda")
    visible = torch.randint(1, 577, (6,), device="cuda")
    query = torch.randn(6, 32, 128, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(6, 32, device="cuda", dtype=torch.bfloat16)

    def step() -> tuple[Tensor, Tensor]:
        scores = ours.index_scores(query, weight, key, scale, table, requests, visible, True)
        chosen = ours.candidate_blocks(scores, visible, 8, 10)
        return ours.moe_experts(x, weights, ids, raw, 10.0), ours.top_groups(scores, visible, 32, chosen)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    x.normal_(), query.normal_(), visible.random_(1, 577), ids.copy_(torch.rand(6, 8, device="cuda").topk(2).indices)
    graph.replay()
    for replayed, eager in zip(out, step(), strict=True):
        assert torch.equal(replayed, eager)


@pytest.mark.parametrize(("ranks", "spare"), [(8, 32), (64, 64), (128, 128)])
@pytest.mark.parametrize("rows", [1, 300, 2731, 9000])
def test_slots_of_any_number_of_rows_and_in_a_graph(tables, ranks, spare, rows):
    """Every third expert lies on a further rank; of 9000 rows not all pairs fit registers. Some rows have no expert."""
    ours, reference = tables
    experts, per_rank = 384, (384 + spare) // ranks
    random = np.random.default_rng(rows)
    placed = random.permutation(np.concatenate((np.arange(experts), np.arange(spare) * 3 % experts)))
    while any(len(set(rank)) < per_rank for rank in placed.reshape(ranks, -1).tolist()):
        a, b = random.integers(0, len(placed), 2)
        placed[[a, b]] = placed[[b, a]]
    places = ExpertMap(placed[None], experts, ranks)
    tables_ = places.home[0, :-1].cuda(), places.shared[0].cuda(), places.replicas[0].cuda(), per_rank
    wanted = (torch.arange(experts, device="cuda") + 1.0).log() * 0.7

    def routed() -> Tensor:
        ids = (torch.rand(rows, experts, device="cuda").log().neg().log() + wanted).topk(6, largest=False).indices
        return ids.masked_fill(torch.rand(rows, 1, device="cuda") < 0.1, -1)

    ids = routed()
    for rounds in (0, 12):
        for found, right in zip(
            ours.assign_slots(ids, *tables_, rounds), reference.assign_slots(ids, *tables_, rounds), strict=True
        ):
            assert torch.equal(found, right)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ours.assign_slots(ids, *tables_, 12)
    ids.copy_(routed())
    graph.replay()
    for found, right in zip(out, reference.assign_slots(ids, *tables_, 12), strict=True):
        assert torch.equal(found, right)


@pytest.mark.parametrize("profile", ["model", "deepinfer"])
@pytest.mark.parametrize("tokens", [3, 700])
def test_experts_that_follow_each_other_wait(profile, tokens):
    """Their kernels overlap, most of all in a graph: four layers in a row, each of which reads what the one before
    made, have the bits they have one at a time."""
    ops = select("cuda", profile=profile)
    count, hidden, inner, topk = 11, 320, 288, 4
    layers = [ops.prepare_experts(*experts(count, hidden, inner)) for _ in range(4)]
    x = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16)
    chosen = [torch.rand(tokens, count + 3, device="cuda").topk(topk, -1).indices for _ in layers]
    chosen = [torch.where(ids < count, ids, -1) for ids in chosen]
    weights = torch.rand(tokens, topk, device="cuda")

    def step(pause: Callable[[], None]) -> list[Tensor]:
        outputs: list[Tensor] = []
        for layer, ids in zip(layers, chosen, strict=True):
            rows = outputs[-1].to(x.dtype) if outputs else x
            outputs.append(ops.moe_experts(rows, weights, ids, layer, 10.0))
            pause()
        return outputs

    alone = step(torch.cuda.synchronize)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = step(lambda: None)
    for _ in range(5):
        for output in outputs:
            output.fill_(torch.nan)
        graph.replay()
        for output, want in zip(outputs, alone, strict=True):
            assert torch.equal(output, want)


# ---- attention at the released width ---------------------------------------------------------------------------------


def attention(rows: int, heads: int, chosen: int | None, context: int = 3000, per_request: int = 4) -> dict[str, Any]:
    """A call with ``rows`` verified rows, ``per_request`` a request; NaN bytes wherever nothing may be read."""
    r = Random(rows * 1000 + heads, torch.bfloat16)
    row = torch.arange(rows)
    request, fresh = row // per_request, row % per_request
    start = r.ints(0, context, rows // per_request + 1)
    start[0] = 0
    positions = start[request] + fresh
    ring = r.window(rows // per_request + 2, 134, 512)
    for each, first in enumerate(start.tolist()):
        ring[each, first:] = 255  # positions that nobody has written yet
    args: dict[str, Any] = {
        "q": r.normal(rows, heads, 512) * 2,
        "window": r.window(rows, 512),
        "positions": positions,
        "fresh": fresh,
        "row_slots": request,
        "window_floor": torch.zeros_like(row),
        "ring": ring,
        "window_len": 128,
        **dict.fromkeys(("latent", "latent_scale", "page_table", "requests", "selected")),
        "sink": r.normal(heads, dtype=torch.float32) * 3,
        "scale": 512**-0.5,
        "block_future": None,
    }
    if chosen is not None:
        groups = 64
        requests = rows // per_request + 1
        wide = -(-context // groups)
        # On the GPU before it is cut: a copy there would lay the views out anew.
        pool = torch.full((requests * wide + 1, groups * (256 + 32) + 64), 255, dtype=torch.uint8, device="cuda")
        latent, latent_scale = (
            pool[:, a : a + groups * n].unflatten(1, (groups, n)) for a, n in ((0, 256), (groups * 256, 32))
        )
        values, scales = r.latents(requests * wide, groups, 512)
        latent[1:], latent_scale[1:] = values.cuda(), scales.cuda()
        selected = r.ints(0, context, rows, chosen)
        selected[r.mask(rows, chosen)] = -1
        selected[::3, chosen // 3 :] = -1
        args |= {
            "latent": latent,
            "latent_scale": latent_scale,
            "page_table": r.distinct(requests * wide, requests * wide).view(requests, wide) + 1,
            "requests": request,
            "selected": selected,
        }
    return {name: value.cuda() if isinstance(value, Tensor) else value for name, value in args.items()}


ATTENTION_ROWS = ("q", "window", "positions", "fresh", "row_slots", "window_floor", "requests", "selected")


@pytest.mark.parametrize("heads", [64, 128])
@pytest.mark.parametrize("chosen", [None, 0, 12, 512, 1100])
def test_attention_of_ragged_rows(tables, heads, chosen):
    """Fewer and more rows than multiprocessors, from position 0 on, batch and ring, any number of selected groups."""
    ours, reference = tables
    args = attention(300 if heads == 64 else 40, heads, chosen)
    assert attention_cpp.served(*(args[name] for name in ("q", "window", "ring", "latent", "latent_scale", "selected")))
    got = ours.sparse_attention(**args)
    want = reference.sparse_attention(**args)
    assert_close(got, want, 4)
    error = ((got - want).float().norm() / want.float().norm()).item()
    assert error < 5e-4, error
    again = ours.sparse_attention(**args)
    assert torch.equal(got, again)
    for rows in (1, 4, 39):
        few = {
            name: value[:rows] if name in ATTENTION_ROWS and value is not None else value
            for name, value in args.items()
        }
        assert torch.equal(ours.sparse_attention(**few), got[:rows]), rows


@pytest.mark.parametrize("where", ["q", "window", "latent"])
def test_attention_keeps_a_nan_where_it_is(tables, where):
    ours, reference = tables
    args = attention(40, 64, 512)
    if where == "q":
        args["q"][7, 5, 100] = torch.nan
    elif where == "window":
        args["window"][7, 3] = 0x7F
    else:
        group = int(args["selected"][7].max())  # one that a row has selected
        args["latent_scale"][args["page_table"][1, group // 64], group % 64, 3] = 0x7F
    got, want = ours.sparse_attention(**args), reference.sparse_attention(**args)
    assert want.isnan().any() and not want.isnan().all()
    assert_close(got, want, 4)


def test_attention_of_a_draft_block_and_of_no_key(tables):
    ours, reference = tables
    args = attention(40, 64, None)
    args["block_future"] = 3 - args["fresh"]
    args["window_floor"] = (args["positions"] - args["fresh"] - 128).clamp(min=0)
    assert_close(ours.sparse_attention(**args), reference.sparse_attention(**args), 4)
    args["block_future"] = None
    args["window_floor"] = torch.where(args["fresh"] % 2 == 0, 1 << 20, 0)
    got = ours.sparse_attention(**args)
    assert_close(got, reference.sparse_attention(**args), 4)
    assert not got[0::2].any() and got[1::2].any()


def test_attention_of_extreme_logits_and_sinks(tables):
    """Logits of hundreds, a sink far above and far below them, keys of very different size."""
    ours, reference = tables
    args = attention(40, 64, 512)
    args["q"] *= 30
    args["sink"][::3], args["sink"][1::3] = 500.0, -torch.inf
    args["window"][::5, 512:] = 128
    args["window"][1::5, 512:] = 100
    assert_close(ours.sparse_attention(**args), reference.sparse_attention(**args), 8)


# ---- the network -----------------------------------------------------------------------------------------------------


def test_every_op_has_a_kernel():
    assert set(select("cuda").choices.values()) == {"cuda"}


@pytest.mark.parametrize("profile", ["model", "deepinfer"])
def test_network_agrees_with_the_reference(tiny, profile):
    """Other legal orders of summation, and the arithmetic of the fast class, move logits a little, and now and then an
    expert or a selected group flips. A random network makes much of that: noise of 3e-4 on every product already takes
    its logits about as far as leaving out the profile's rounding does, and more noise no further."""
    ours, reference = V41.load(tiny, "auto", profile, device="cuda"), V41.load(tiny, profile=profile)
    for op in ("linear", "grouped_linear", "moe_experts"):
        assert ours.ops.choices[op] == {"model": "cuda", "deepinfer": "cuda-fast"}[profile]
    ids = torch.randint(10, reference.config.vocab_size - 10, (300,), generator=torch.Generator().manual_seed(3))
    assert torch.equal(ours.engram_rows(ids).cpu(), reference.engram_rows(ids))
    got, want = ours.logits(ids).cpu(), reference.logits(ids)
    unrounded = V41.load(tiny, profile="float32").logits(ids)
    error, rounding = ((a - want).norm(dim=-1) / want.norm(dim=-1) for a in (got, unrounded))
    same, kept = ((a.argmax(-1) == want.argmax(-1)).double().mean() for a in (got, unrounded))
    print(f"\n{profile}: logits off by {error.median():.2e} (median), {error.max():.2e} (most); same token {same:.3f}")
    print(f"rounding alone: {rounding.median():.2e}, {rounding.max():.2e}; {kept:.3f}")
    assert error.median() < 1.25 * rounding.median() and same > kept - 0.05


@pytest.mark.parametrize("profile", ["model", "deepinfer"])
def test_chunks_do_not_change_a_bit(tiny, profile):
    model = V41.load(tiny, "auto", profile, device="cuda")
    ids = torch.randint(10, model.config.vocab_size - 10, (260,), generator=torch.Generator().manual_seed(4))
    whole = model.session(300).extend(ids)
    for chunk in (16, 1):
        assert torch.equal(whole, model.session(300).extend(ids, chunk=chunk))
