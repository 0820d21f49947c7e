"""Which slot computes which row's expert: a legal one, of the rank that suits the busiest rank, in whole rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deepinfer_plugin.kernels import OpError
from deepinfer_plugin.model.expert_map import ExpertMap

from ..eplb.placements import shuffled, sizes

MANY = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def ask(ops, placed, experts, ranks, ids, rounds=16):
    """Slots and counts for a placement [slots]; rows of each rank."""
    places = ExpertMap(np.array([placed]), experts, ranks)
    shared, replicas = places.shared[0], places.replicas[0]
    if not shared.shape[0]:
        shared, replicas = (torch.full(shape, -1, dtype=torch.int32) for shape in ((1,), (1, ranks)))
    slots, counts = ops.assign_slots(ids, places.home[0, :-1], shared, replicas, places.slots, rounds)
    assert slots.shape == ids.shape and slots.dtype == counts.dtype == torch.int64
    return slots, counts, torch.bincount(slots[slots >= 0] // places.slots, minlength=ranks)


def routed(random, experts, rows, choices, skew):
    """Expert ids [rows, choices], the first experts wanted most."""
    wanted = (np.arange(experts) + 1.0) ** -skew
    order = np.argsort(np.log(random.random((rows, experts))) / wanted, axis=1)[:, ::-1]
    return torch.from_numpy(order[:, :choices].copy())


@MANY
@given(sizes(), st.integers(0, 60), st.sampled_from([0.0, 1.0, 3.0]), st.integers(0, 2**32 - 1))
def test_every_row_has_a_slot_of_its_expert_and_no_rank_more_than_by_even_shares(ops, size, rows, skew, seed):
    _, experts, physical, ranks = size
    random = np.random.default_rng(seed)
    (placed,) = shuffled(random, 1, experts, physical, ranks)
    ids = routed(random, experts, rows, min(3, experts), skew)
    slots, counts, loads = ask(ops, placed, experts, ranks, ids)
    assert torch.equal(torch.from_numpy(placed)[slots], ids)
    assert torch.equal(counts, torch.bincount(ids.flatten(), minlength=experts)) and loads.sum() == ids.numel()
    even, _, even_loads = ask(ops, placed, experts, ranks, ids, rounds=0)
    assert loads.max() <= even_loads.max()
    times = np.bincount(placed, minlength=experts)[placed]
    took = np.bincount(even.flatten(), minlength=physical)
    assert (np.abs(took - counts.numpy()[placed] / times) <= 1).all()
    again, *_ = ask(ops, placed, experts, ranks, ids)
    assert torch.equal(again, slots)


@MANY
@given(sizes(), st.integers(1, 40), st.integers(0, 2**32 - 1))
def test_rows_of_a_rank_follow_each_other_and_only_counts_decide_how_many(ops, size, rows, seed):
    _, experts, physical, ranks = size
    random = np.random.default_rng(seed)
    (placed,) = shuffled(random, 1, experts, physical, ranks)
    ids = routed(random, experts, rows, min(2, experts), 1.0)
    slots, _, loads = ask(ops, placed, experts, ranks, ids)
    for expert in range(experts):
        of = slots.flatten()[ids.flatten() == expert]
        assert (of.diff() >= 0).all()
    shuffled_rows = torch.from_numpy(random.permutation(rows))
    assert torch.equal(ask(ops, placed, experts, ranks, ids[shuffled_rows])[2], loads)


@MANY
@given(sizes(), st.integers(0, 40), st.integers(0, 40), st.integers(0, 2**32 - 1))
def test_choices_of_no_expert_have_no_slot_and_change_no_other(ops, size, rows, none, seed):
    _, experts, physical, ranks = size
    random = np.random.default_rng(seed)
    (placed,) = shuffled(random, 1, experts, physical, ranks)
    ids = routed(random, experts, rows, min(2, experts), 1.0).flatten()
    slots, counts, _ = ask(ops, placed, experts, ranks, ids[:, None])
    among = torch.full((len(ids) + none,), -1, dtype=torch.int64)
    at = torch.from_numpy(np.sort(random.permutation(len(among))[: len(ids)]))
    among[at] = ids
    found, again, _ = ask(ops, placed, experts, ranks, among[:, None])
    assert torch.equal(found[at], slots) and torch.equal(again, counts)
    assert (found.flatten()[among < 0] == -1).all()


def test_loads_flow_over_several_ranks(ops):
    """A chain of ranks, each sharing an expert with the next: what the first has too much of reaches the last."""
    placed = [0, 4, 0, 1, 1, 2, 2, 3, 3, 5]  # five ranks; experts 0 to 3 lie on two, 4 and 5 on one
    rows = [100, 100, 100, 100, 200, 0]
    ids = torch.repeat_interleave(torch.arange(6), torch.tensor(rows))[:, None]
    even = ask(ops, placed, 6, 5, ids, rounds=0)[2]
    assert even.tolist() == [250, 100, 100, 100, 50]
    loads = ask(ops, placed, 6, 5, ids)[2]
    assert loads.max() <= 205 and loads.tolist()[1:] == pytest.approx([100] * 4, abs=30), "200 is what cannot move"


def test_hundreds_of_experts_on_many_ranks_come_close_to_perfect(ops):
    """Replicas that connect all ranks, as the policy places them: an even division leaves 10 % and more."""
    experts, ranks, random = 384, 16, np.random.default_rng(0)
    placed = np.empty((ranks, 26), dtype=np.int64)
    placed[:, :24] = random.permutation(experts).reshape(ranks, 24)
    placed[:, 24], placed[:, 25] = np.roll(placed[:, 0], 1), np.roll(placed[:, 1], 5)
    ids = routed(random, experts, 1500, 6, 0.5)
    counts = torch.bincount(ids.flatten(), minlength=experts)
    assert ask(ops, placed.ravel(), experts, ranks, ids, rounds=0)[2].max() > 1.1 * counts.sum() / ranks
    best = ask(ops, placed.ravel(), experts, ranks, ids)[2].max()
    longer = ask(ops, placed.ravel(), experts, ranks, ids, rounds=200)[2].max()
    assert longer <= best < 1.03 * longer


@pytest.mark.parametrize("rows", [0, 5])
def test_nothing_to_share(ops, rows):
    """No rows, or no expert on two ranks: a table of one row that stands for none."""
    home = torch.tensor([2, 0, 1, 3])
    table = torch.full((1,), -1, dtype=torch.int32), torch.full((1, 2), -1, dtype=torch.int32)
    ids = torch.arange(rows)[:, None] % 4
    slots, counts = ops.assign_slots(ids, home, *table, 2, 16)
    assert torch.equal(slots, home[ids]) and torch.equal(counts, torch.bincount(ids.flatten(), minlength=4))


def test_more_ranks_than_it_is_written_for(ops):
    table = torch.zeros(1, dtype=torch.int32), torch.zeros(1, 129, dtype=torch.int32)
    with pytest.raises(OpError, match=r"slots must be of 1\.\.128 ranks, got 129 ranks"):
        ops.assign_slots(torch.zeros(1, 1, dtype=torch.int64), torch.tensor([-1]), *table, 1, 16)
