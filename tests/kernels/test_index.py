"""The indexer against a slow reading of its contract: scores, candidate blocks, top groups."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from deepinfer_plugin.kernels import select
from deepinfer_plugin.kernels.reference import formats

from .cases import make


def score(case, row: int, group: int) -> Tensor:
    args = case.args
    page = args["page_table"][args["requests"][row], group // 8]
    key = formats.index_dequant(args["key"][page, group % 8], args["key_scale"][page, group % 8]).double()
    query, weight = args["query"][row], args["weight"][row]
    total = torch.zeros((), dtype=torch.float64)
    for head in range(query.shape[0]):
        q = formats.index_dequant(*formats.index_cast(query[head])).double()
        dot = (q * key).sum()
        if query.dtype == torch.bfloat16 and args["low_precision"]:
            total += (torch.relu(dot.bfloat16()) * weight[head]).double()
        else:
            total += torch.relu(dot) * weight[head].double()
    return total.to(query.dtype)


@pytest.mark.parametrize("name", ["index_scores", "index_scores_deepinfer"])
def test_scores(ops, name, dtype):
    case = make(name, dtype, rows=9, seed=3)
    case.args["visible"][:3] = torch.tensor([0, 40, 1])
    (got,) = case.run(ops)
    assert got.shape == (9, 40) and got.dtype == dtype
    for row in range(9):
        for group in range(40):
            if group >= case.args["visible"][row]:
                assert got[row, group] == -torch.inf
            elif dtype == torch.bfloat16:
                torch.testing.assert_close(got[row, group], score(case, row, group), rtol=2.0**-7, atol=0)
            else:
                torch.testing.assert_close(got[row, group], score(case, row, group), rtol=1e-6, atol=1e-7)


def test_profiles_differ_only_by_rounding(ops):
    low, high = make("index_scores", torch.bfloat16), make("index_scores_deepinfer", torch.bfloat16)
    (a,), (b,) = low.run(ops), high.run(ops)
    seen = a.isfinite()
    assert torch.equal(seen, b.isfinite()) and (a != b).any()
    torch.testing.assert_close(a[seen].float(), b[seen].float(), rtol=0.05, atol=0.1)


def test_bytes_beyond_the_visible_groups_do_not_matter(ops, dtype):
    """Unwritten pages and pages of others may hold NaN."""
    case = make("index_scores", dtype)
    case.args["visible"].clamp_(max=20)
    (clean,) = case.run(ops)
    used = torch.zeros(12, 8, dtype=torch.bool)
    for row in range(case.count):
        pages = case.args["page_table"][case.args["requests"][row]]
        for group in range(int(case.args["visible"][row])):
            used[pages[group // 8], group % 8] = True
    case.args["key"][~used], case.args["key_scale"][~used] = 255, 255
    (poisoned,) = case.run(ops)
    assert torch.equal(clean, poisoned)


def test_nan_in_a_query_or_key_makes_its_scores_nan(ops, dtype):
    case = make("index_scores", dtype)
    case.args["visible"][:] = 40
    case.args["query"][2, 1, 5] = torch.nan
    (got,) = case.run(ops)
    assert got[2].isnan().all() and not got[:2].isnan().any() and not got[3:].isnan().any()
    case = make("index_scores", dtype)
    case.args["visible"][:] = 40
    case.args["key_scale"][case.args["page_table"][0, 1], 3, 0] = 255
    (got,) = case.run(ops)
    page = case.args["page_table"][0, 1]
    table = case.args["page_table"][case.args["requests"]]  # [rows, pages]
    hit = (table == page)[..., None] & (torch.arange(8) == 3)
    assert torch.equal(got.isnan(), hit.flatten(1))


# ---- selection ----------------------------------------------------------------------------------------------

SCORES = st.lists(
    st.sampled_from([0.0, -0.0, 1.0, 2.0, -3.0, 0.5, float("-inf"), float("nan")]), min_size=1, max_size=40
)


def rank(value: float) -> float:
    return -1e300 if value != value or value == float("-inf") else value


@settings(max_examples=200, deadline=None)
@given(SCORES, st.data())
def test_top_groups(values, data):
    """Few distinct scores, so the cut nearly always falls into a tie; NaN and -inf are last but count as reachable."""
    groups = len(values)
    visible = data.draw(st.integers(0, groups))
    k = data.draw(st.integers(1, groups + 5))
    allowed = data.draw(st.none() | st.lists(st.booleans(), min_size=groups, max_size=groups))
    dtype = data.draw(st.sampled_from([torch.bfloat16, torch.float32]))
    order = sorted(
        range(visible),
        key=lambda g: (0, -rank(values[g]), g) if allowed is None or allowed[g] else (1, 0.0, g),
    )
    want = sorted(order[:k])
    candidates = None if allowed is None else torch.tensor([allowed])
    got = select().top_groups(torch.tensor([values], dtype=dtype), torch.tensor([visible]), k, candidates)
    assert got.dtype == torch.int64 and got.tolist() == [want + [-1] * (k - len(want))]


@settings(max_examples=200, deadline=None)
@given(SCORES, st.data())
def test_candidate_blocks(values, data):
    groups = len(values)
    visible = data.draw(st.integers(0, groups))
    size, count = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 8))
    dtype = data.draw(st.sampled_from([torch.bfloat16, torch.float32]))
    reachable = -(-visible // size)
    best = [max(rank(v) for v in values[b * size : min(visible, (b + 1) * size)]) for b in range(reachable)]
    if reachable:
        best[-1] = float("inf")
    kept = sorted(range(reachable), key=lambda b: (-best[b], b))[:count]
    want = [g < visible and g // size in kept for g in range(groups)]
    got = select().candidate_blocks(torch.tensor([values], dtype=dtype), torch.tensor([visible]), size, count)
    assert got.tolist() == [want]


def test_the_newest_block_is_always_a_candidate(ops):
    scores = torch.arange(64, 0, -1.0)[None]
    got = ops.candidate_blocks(scores, torch.tensor([58]), 8, 2)
    assert got.nonzero()[:, 1].tolist() == [*range(8), 56, 57]


def test_all_equal_scores_keep_the_lowest_ids(ops, dtype):
    scores, visible = torch.zeros(3, 600, dtype=dtype), torch.tensor([600, 100, 0])
    got = ops.top_groups(scores, visible, 512, None)
    assert got[0].tolist() == list(range(512))
    assert got[1].tolist() == [*range(100), *[-1] * 412]
    assert got[2].tolist() == [-1] * 512


def test_too_few_candidates_are_filled_from_the_rest_lowest_first(ops):
    scores = torch.tensor([[9.0, 1.0, 8.0, 2.0, 7.0, 3.0]])
    candidates = torch.tensor([[False, True, False, True, False, True]])
    got = ops.top_groups(scores, torch.tensor([6]), 4, candidates)
    assert got.tolist() == [[0, 1, 3, 5]]
    got = ops.top_groups(scores, torch.tensor([6]), 2, candidates)
    assert got.tolist() == [[3, 5]]


def test_scores_beyond_every_other_are_ordered(ops):
    """Infinities and the largest finite values keep their places against the internal order keys."""
    top = torch.finfo(torch.float32).max
    scores = torch.tensor([[-top, torch.inf, torch.nan, top, -torch.inf, 0.0]])
    for k, want in (
        (1, [1]),
        (2, [1, 3]),
        (3, [1, 3, 5]),
        (4, [0, 1, 3, 5]),
        (5, [0, 1, 2, 3, 5]),
        (6, [0, 1, 2, 3, 4, 5]),
    ):
        assert ops.top_groups(scores, torch.tensor([6]), k, None).tolist() == [want]


def test_the_last_block_stays_beside_infinite_scores(ops):
    scores = torch.full((1, 12), torch.inf)
    scores[0, 11] = 0.0
    kept = ops.candidate_blocks(scores, torch.tensor([12]), 4, 2)
    assert kept[0].tolist() == [True] * 4 + [False] * 4 + [True] * 4
    assert ops.candidate_blocks(scores, torch.tensor([99]), 4, 2)[0, 8:].all(), "more reachable than there are"


def test_both_zeros_tie(ops):
    scores = torch.tensor([[-0.0, 0.0, -0.0]])
    assert ops.top_groups(scores, torch.tensor([3]), 1, None).tolist() == [[0]]
