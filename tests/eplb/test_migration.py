"""Experts move so that none is ever missing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_plugin.eplb.migration import rounds

from .placements import shuffled, sizes


def by_rank(placement, ranks):
    return [[sorted(rank) for rank in layer.reshape(ranks, -1).tolist()] for layer in placement]


@settings(max_examples=80, deadline=None)
@given(sizes(), st.integers(0, 2**32 - 1))
def test_every_expert_keeps_a_replica_and_all_arrive(size, seed):
    layers, experts, physical, ranks = size
    random = np.random.default_rng(seed)
    now, target = (shuffled(random, layers, experts, physical, ranks) for _ in range(2))
    slots, before = physical // ranks, now.copy()
    found = rounds(now, target, ranks)
    for moves in found:
        assert moves, "a round moves something"
        assert len({move.source // slots for move in moves}) == len(moves), "a rank sends once"
        assert len({move.slot // slots for move in moves}) == len(moves), "and receives once"
        for move in moves:
            assert now[move.layer, move.source] == move.expert, "it lies where it is read"
            assert move.source // slots != move.slot // slots
        for move in moves:
            now[move.layer, move.slot] = move.expert
        for layer in now:
            assert len(set(layer.tolist())) == experts, "no expert is missing"
            assert all(len(set(rank)) == slots for rank in layer.reshape(ranks, -1).tolist()), "none is on a rank twice"
    assert by_rank(now, ranks) == by_rank(target, ranks)
    new = sum(
        len(set(want) - set(have))
        for layer in zip(by_rank(before, ranks), by_rank(target, ranks), strict=True)
        for have, want in zip(*layer, strict=True)
    )
    assert sum(map(len, found)) == new, "what stays on a rank does not travel"


def test_a_swap_without_a_spare_place_is_one_round():
    (moves,) = rounds(np.array([[0, 1]]), np.array([[1, 0]]), 2)
    assert {(move.expert, move.source, move.slot) for move in moves} == {(0, 0, 1), (1, 1, 0)}


def test_a_circle_that_crosses_a_rank_twice_is_two():
    """Rank 0 changes one expert with each of the others."""
    found = rounds(np.array([[0, 1, 2, 3, 4, 5]]), np.array([[2, 4, 0, 3, 1, 5]]), 3)
    assert sorted(map(len, found)) == [2, 2]


def test_layers_share_a_round():
    current = np.array([[0, 1, 2, 3], [0, 1, 2, 3]])
    target = np.array([[1, 0, 2, 3], [0, 1, 3, 2]])
    (moves,) = rounds(current, target, 4)
    assert len(moves) == 4


def test_other_experts_are_refused():
    with pytest.raises(ValueError, match="layer 0: the placements hold different experts"):
        rounds(np.array([[0, 1]]), np.array([[0, 2]]), 2)
    with pytest.raises(ValueError, match=r"shapes \(1, 2\) and \(1, 3\)"):
        rounds(np.array([[0, 1]]), np.array([[0, 1, 2]]), 1)
