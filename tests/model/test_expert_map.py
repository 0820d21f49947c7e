"""Which replica computes what: whole numbers, the same on every rank."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_plugin.eplb.policy import Split
from deepinfer_plugin.model.expert_map import ExpertMap, quotas

from ..eplb.placements import shuffled, sizes


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 9), st.integers(1, 6), st.sampled_from([1, 50, 100_000]), st.integers(0, 2**32 - 1))
def test_quotas_are_whole_and_less_than_one_off(experts, most, rows, seed):
    random = np.random.default_rng(seed)
    there = np.arange(most) < random.integers(1, most + 1, (experts, 1))
    shares = (random.random((experts, most)) ** random.choice([0.0, 1.0, 9.0]) + 1e-9) * there
    shares, there = torch.from_numpy(shares / shares.sum(1, keepdims=True)), torch.from_numpy(there)
    counts = torch.from_numpy(random.integers(0, rows + 1, experts))
    found = quotas(shares, there, counts)
    assert torch.equal(found.sum(1), counts) and (found >= 0).all() and not found[~there].any()
    assert ((found - shares * counts[:, None]).abs() < 1 + 1e-6).all()


@settings(max_examples=40, deadline=None)
@given(sizes(), st.integers(0, 40), st.booleans(), st.integers(0, 2**32 - 1))
def test_rows_go_to_replicas_in_proportion_to_weights(size, rows, weighed, seed):
    layers, experts, physical, ranks = size
    random = np.random.default_rng(seed)
    places = ExpertMap(shuffled(random, layers, experts, physical, ranks), experts, ranks)
    weights = random.uniform(0.1, 1.0, (layers, ranks)) if weighed else np.ones((layers, ranks))
    if weighed:
        places.weigh(weights)
    split, chosen = Split.of(places.placement, experts, ranks), min(experts, 2)
    exact = split.shares(torch.from_numpy(np.log(weights))[:, None].float())[:, 0]
    ids = torch.zeros(rows, chosen, dtype=torch.int64)
    for row in ids:
        row.copy_(torch.from_numpy(random.permutation(experts)[:chosen]))
    for layer in range(layers):
        slots = places.assign(layer, ids)
        held = torch.from_numpy(places.placement[layer])
        assert slots.shape == ids.shape and torch.equal(held[slots], ids)
        counts = torch.bincount(ids.flatten(), minlength=experts)
        took = torch.bincount(slots.flatten(), minlength=physical)
        assert ((took - exact[layer] * counts[held]).abs() < 1 + 1e-3).all()


@settings(max_examples=30, deadline=None)
@given(sizes(), st.integers(0, 2**32 - 1))
def test_moves_and_weights_change_the_map_in_place(size, seed):
    layers, experts, physical, ranks = size
    random = np.random.default_rng(seed)
    old, new = (shuffled(random, layers, experts, physical, ranks) for _ in range(2))
    weights = random.uniform(0.1, 1.0, (layers, ranks))
    places, fresh = ExpertMap(old, experts, ranks), ExpertMap(new, experts, ranks)
    where = places.replicas.data_ptr(), places.shares.data_ptr()
    places.weigh(weights)
    places.move((layer, slot, new[layer, slot]) for layer, slot in zip(*(old != new).nonzero(), strict=True))
    fresh.weigh(weights)
    assert torch.equal(places.replicas, fresh.replicas) and torch.equal(places.shares, fresh.shares)
    assert (places.placement == new).all() and where == (places.replicas.data_ptr(), places.shares.data_ptr())
