"""Placement and split: what always holds, and what they are for."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_plugin.eplb.policy import PolicyError, Split, forecast, forecast_cost, lp_bound, place

scipy = pytest.mark.skipif(importlib.util.find_spec("scipy") is None, reason="scipy is not installed")


def skewed(steps, layers, experts, seed=0, tokens=4000):
    random = np.random.default_rng(seed)
    popularity = random.permuted(np.tile((np.arange(experts) + 1.0) ** -0.7, (layers, 1)), axis=1)
    return random.multinomial(tokens, popularity / popularity.sum(axis=1, keepdims=True), size=(steps, layers))


def loads(counts, placement, ranks, balanced=True):
    """[layers, steps, ranks]"""
    split = Split.of(placement, counts.shape[2], ranks)
    tokens = torch.from_numpy(counts.transpose(1, 0, 2).copy())
    return split.loads(tokens, split.balance(tokens) if balanced else None).numpy()


def held(placement, ranks):
    """Layer -> rank -> the experts it holds."""
    return [[set(rank) for rank in layer.reshape(ranks, -1).tolist()] for layer in placement]


@st.composite
def problems(draw):
    """Counts with zeros, ties and experts that nobody wants; any legal number of replicas; perhaps a placement."""
    ranks = draw(st.sampled_from([1, 2, 3, 4, 8]))
    experts = draw(st.integers(1, 12))
    legal = [count for count in range(experts, experts * ranks + 1) if count % ranks == 0]
    physical = draw(st.sampled_from(legal))
    steps, layers = draw(st.integers(1, 20)), draw(st.integers(1, 3))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    counts = random.integers(0, draw(st.sampled_from([1, 3, 1000])), (steps, layers, experts))
    counts *= random.random(counts.shape) < draw(st.sampled_from([0.1, 1.0]))
    current = None
    if draw(st.booleans()):
        spare = random.integers(0, experts, (layers, physical - experts))
        every = np.concatenate([np.tile(np.arange(experts), (layers, 1)), spare], axis=1)
        current = random.permuted(every, axis=1)
    nodes = draw(st.sampled_from([n for n in range(1, ranks + 1) if ranks % n == 0]))
    return counts, physical, ranks, nodes, current


# ---- placement -----------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(problems(), st.booleans())
def test_a_placement_is_complete_and_no_worse_than_the_current_one(problem, even_split):
    counts, physical, ranks, nodes, current = problem
    placement = place(counts, physical, ranks, nodes, current, even_split=even_split)
    layers, experts = counts.shape[1:]
    assert placement.shape == (layers, physical) and placement.dtype == np.int64
    for layer in placement:
        assert (np.bincount(layer, minlength=experts) > 0).all(), "every expert has a place, every place an expert"
    assert (placement == place(counts, physical, ranks, nodes, current, even_split=even_split)).all()
    if current is not None:
        window = forecast(counts)
        before, after = (forecast_cost(window, placed, ranks, even_split) for placed in (current, placement))
        assert (after <= before * (1 + 1e-5)).all()


def test_nothing_moves_when_nothing_changes():
    counts = skewed(40, 4, 32)
    for physical, ranks in ((32, 4), (40, 4), (48, 8)):
        first = place(counts, physical, ranks)
        assert (place(counts, physical, ranks, current=first) == first).all()


def test_few_experts_move_after_a_small_change_and_keep_their_slots():
    old = place(skewed(40, 4, 32, seed=1), 40, 8)
    counts = skewed(40, 4, 32, seed=1)
    counts[:, :, 3] = counts[:, :, 3] * 6 // 5
    new = place(counts, 40, 8, current=old)
    for layer in range(4):
        for before, after in zip(old[layer].reshape(8, -1), new[layer].reshape(8, -1), strict=True):
            stays = [expert for expert in before.tolist() if expert in after.tolist()]
            assert all(after[np.flatnonzero(before == expert)[0]] == expert for expert in stays)
    fresh = place(counts, 40, 8)

    def moved(placement):
        return sum(
            len(now - was)
            for a, b in zip(held(placement, 8), held(old, 8), strict=True)
            for now, was in zip(a, b, strict=True)
        )

    assert moved(new) < moved(fresh) / 2


def test_a_high_price_keeps_the_placement():
    old = place(skewed(20, 2, 16, seed=1), 24, 4)
    counts = skewed(20, 2, 16, seed=2)
    assert (place(counts, 24, 4, current=old, price=10.0) == old).all()
    assert (place(counts, 24, 4, current=old, price=0.0) != old).any()


def test_experts_rather_come_from_the_same_node():
    """Of those that move, more find their expert on their own node when nodes are given."""
    counts, old = skewed(20, 16, 64, seed=2), place(skewed(20, 16, 64, seed=1), 72, 8)

    def from_afar(placement):
        near = [[set(half) for half in layer.reshape(2, -1).tolist()] for layer in old]
        return sum(
            len(now - near[layer][rank // 4])
            for layer, ranks in enumerate(held(placement, 8))
            for rank, now in enumerate(ranks)
        )

    assert from_afar(place(counts, 72, 8, 2, old)) < from_afar(place(counts, 72, 8, 1, old))


def test_replicas_go_to_different_ranks_and_connect_them_all():
    """One replica more than a tree needs: load can flow from every rank to every other one."""
    placement = place(skewed(20, 4, 32), 40, 8)
    for layer in placement:
        ranks_of = [set((np.flatnonzero(layer == expert) // 5).tolist()) for expert in range(32)]
        assert sum(map(len, ranks_of)) == 40, "no rank holds an expert twice"
        reached: set[int] = {0}
        for _ in range(8):
            reached |= set().union(*(ranks for ranks in ranks_of if ranks & reached))
        assert reached == set(range(8))


def test_busy_experts_get_the_replicas():
    counts = np.full((10, 1, 8), 10)
    counts[:, 0, 6] = 60
    placement = place(counts, 12, 4)
    assert (placement == 6).sum() == 4, "one on every rank"
    assert loads(counts, placement, 4).max() == pytest.approx(130 / 4, rel=0.01)


def test_newer_steps_count_more():
    counts = np.ones((20, 1, 4), dtype=np.int64)
    counts[:10, 0, 0] = counts[10:, 0, 3] = 100
    placement = place(counts, 6, 2)
    assert (placement == 3).sum() == 2
    window = forecast(counts)
    assert window.shape == (20, 1, 4) and window[-1].sum() > window[0].sum()


def test_no_tokens_at_all():
    placement = place(np.zeros((3, 2, 8)), 12, 4)
    assert all((np.bincount(layer, minlength=8) > 0).all() for layer in placement)
    assert (place(np.zeros((3, 2, 8)), 12, 4, current=placement) == placement).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"physical": 10}, "physical=10 is not divisible by ranks=4; legal: multiples of 4"),
        ({"physical": 4}, "physical=4 for 8 experts; legal: 8 to 32"),
        ({"physical": 36}, "physical=36 for 8 experts; legal: 8 to 32"),
        ({"ranks": 0}, "ranks=0"),
        ({"nodes": 3}, "nodes=3 does not divide ranks=4"),
        ({"counts": np.ones((3, 8))}, r"counts: shape \(3, 8\) is not supported; legal: \[steps, layers, experts\]"),
        ({"counts": np.ones((0, 2, 8))}, "counts: shape"),
        ({"counts": np.full((1, 2, 8), -1)}, "counts: negative or not finite"),
        ({"counts": np.full((1, 2, 8), np.nan)}, "counts: negative or not finite"),
        ({"current": np.zeros((2, 8), int)}, r"current: shape \(2, 8\) is not supported; legal: \(2, 12\)"),
        (
            {"current": np.zeros((2, 12), int)},
            "current: experts out of range or without a replica; legal: every one of 0 to 7",
        ),
        ({"current": np.arange(24).reshape(2, 12)}, "current: experts out of range"),
    ],
)
def test_what_does_not_fit_is_refused(arguments, message):
    with pytest.raises(PolicyError, match=message):
        place(**{"counts": np.ones((3, 2, 8)), "physical": 12, "ranks": 4, **arguments})


# ---- split ---------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(problems())
def test_nothing_is_lost_and_no_step_worse_than_by_even_shares(problem):
    counts, physical, ranks, nodes, current = problem
    placement = place(counts, physical, ranks, nodes) if current is None else current
    split = Split.of(placement, counts.shape[2], ranks)
    tokens = torch.from_numpy(counts.transpose(1, 0, 2).copy())
    weights = split.balance(tokens)
    taken, even = split.loads(tokens, weights), split.loads(tokens)
    for loads_ in (taken, even):
        assert (loads_ >= 0).all()
        torch.testing.assert_close(loads_.sum(2), tokens.sum(2).float(), rtol=1e-4, atol=1e-2)
    assert (taken.amax(2) <= even.amax(2) * (1 + 1e-5) + 1e-3).all()
    assert torch.equal(weights, split.balance(tokens)), "the same again"


def test_steps_and_layers_do_not_meet():
    counts = skewed(6, 3, 16)
    placement = place(counts, 24, 8)
    tokens = torch.from_numpy(counts.transpose(1, 0, 2).copy())
    together = Split.of(placement, 16, 8).balance(tokens)
    for layer in range(3):
        split = Split.of(placement[layer : layer + 1], 16, 8)
        for step in range(6):
            alone = split.balance(tokens[layer : layer + 1, step : step + 1])
            torch.testing.assert_close(
                split.loads(tokens[layer : layer + 1, step : step + 1], alone),
                split.loads(tokens[layer : layer + 1, step : step + 1], together[layer : layer + 1, step : step + 1]),
                rtol=1e-3,
                atol=0.1,
            )


def test_a_rank_that_cannot_be_helped_does_not_spoil_the_others():
    """Expert 0 alone fills rank 0; ranks 1 and 2 can still meet in the middle."""
    placement = np.array([[0, 1, 2, 3, 3, 4]])
    counts = torch.tensor([[[1000, 0, 10, 50, 20]]])
    split = Split.of(placement, 5, 3)
    load = split.loads(counts, split.balance(counts))[0, 0]
    assert load[0] == 1000 and load.sum() == 1080


def test_it_balances_what_even_shares_do_not():
    counts = skewed(30, 4, 64, tokens=20_000)
    placement = place(counts[:15], 80, 16)
    mean = counts[15:].sum(axis=2).T / 16
    balanced, even = (loads(counts[15:], placement, 16, how).max(axis=2) / mean for how in (True, False))
    assert balanced.mean() - 1 < 0.25 * (even.mean() - 1)


# ---- the bound -----------------------------------------------------------------------------------------------------


@scipy
def test_the_bound_of_small_cases():
    assert lp_bound(np.array([60, 20, 20]), np.array([0, 1, 0, 2]), 2) == pytest.approx(50)
    assert lp_bound(np.array([60, 20, 0]), np.array([0, 1, 1, 2]), 2) == pytest.approx(60), "expert 0 cannot be split"


@scipy
def test_the_split_comes_near_the_bound():
    counts = skewed(4, 4, 64, tokens=20_000)
    placement = place(counts, 80, 16)
    found = loads(counts, placement, 16).max(axis=2).T
    mean = counts.sum(axis=2) / 16
    bound = np.array([[lp_bound(*pair, 16) for pair in zip(step, placement, strict=True)] for step in counts])
    assert (found >= bound * (1 - 1e-5)).all()
    assert ((found - bound) / mean).mean() < 0.002


@pytest.mark.skipif(importlib.util.find_spec("scipy") is not None, reason="scipy is installed")
def test_the_bound_says_what_it_lacks():
    with pytest.raises(ModuleNotFoundError, match="scipy"):
        lp_bound(np.array([1]), np.array([0]), 1)
