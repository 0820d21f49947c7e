"""Which slot computes what: the same on every rank, whatever moves."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_plugin.kernels import select
from deepinfer_plugin.model.expert_map import ExpertMap

from ..eplb.placements import shuffled, sizes

OPS = select("cpu", "reference")


@settings(max_examples=40, deadline=None)
@given(sizes(), st.integers(0, 40), st.booleans(), st.integers(0, 2**32 - 1))
def test_rows_go_to_slots_that_hold_their_experts(size, rows, counted, seed):
    layers, experts, physical, ranks = size
    random = np.random.default_rng(seed)
    places = ExpertMap(shuffled(random, layers, experts, physical, ranks), experts, ranks)
    if counted:
        places.counts = torch.full((layers, experts), -1)
    ids = np.argsort(random.random((rows, experts)), axis=1)[:, : min(experts, 2)]
    for layer in range(layers):
        slots = places.assign(OPS, layer, torch.from_numpy(ids))
        assert slots.dtype == torch.int64 and (places.placement[layer][slots.numpy()] == ids).all()
        if counted:
            assert places.counts[layer].tolist() == np.bincount(ids.ravel(), minlength=experts).tolist()
    assert places.forwards == 1


@settings(max_examples=30, deadline=None)
@given(sizes(), st.integers(0, 2**32 - 1))
def test_moves_change_the_map_in_place(size, seed):
    layers, experts, physical, ranks = size
    random = np.random.default_rng(seed)
    old, new = (shuffled(random, layers, experts, physical, ranks) for _ in range(2))
    places, fresh = ExpertMap(old, experts, ranks), ExpertMap(new, experts, ranks)
    tables = places.home, places.shared, places.replicas
    where = [table.data_ptr() for table in tables]
    places.move((layer, slot, new[layer, slot]) for layer, slot in zip(*(old != new).nonzero(), strict=True))
    for table, other, at in zip(tables, (fresh.home, fresh.shared, fresh.replicas), where, strict=True):
        assert torch.equal(table, other) and table.data_ptr() == at
    assert (places.placement == new).all()
