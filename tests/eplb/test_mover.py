"""At every moment a slot holds what the map says, and no step carries more than a chunk."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from deepinfer_plugin.eplb.migration import rounds
from deepinfer_plugin.eplb.mover import Mover
from deepinfer_plugin.model.expert_map import ExpertMap

from .placements import shuffled

BYTES = 50  # of an expert


class Meeting:
    """A ``Group`` whose members are threads; ``carried``: bytes that a member sent and received in each exchange."""

    def __init__(self, size):
        self.barrier, self.sent, self.carried = threading.Barrier(size, timeout=20), [None] * size, []

    def member(self, rank, size):
        def all_to_all(x, send, receive):
            assert x.shape[0] == sum(send)
            self.sent[rank] = x.split(send)
            self.carried.append((sum(send), sum(receive)))
            self.barrier.wait()
            arrived = [parts[rank] for parts in self.sent]
            assert [part.shape[0] for part in arrived] == receive
            received = torch.cat(arrived)  # now: what was sent is the sender's again after this
            self.barrier.wait()
            return received

        return SimpleNamespace(rank=rank, size=size, all_to_all=all_to_all)


class Slots:
    """The slots of a layer on a rank, in place of ``Experts``."""

    expert_bytes, ops = BYTES, SimpleNamespace(device="cpu")

    def __init__(self, experts, layer):
        self.held = torch.stack([content(layer, expert) for expert in experts])

    def read(self, slot, out):
        out.copy_(self.held[slot])

    def write(self, slot, arrived):
        self.held[slot].copy_(arrived)


def content(layer, expert):
    return torch.arange(BYTES, dtype=torch.int64).mul(7 * expert + 3).add(layer).to(torch.uint8)


@pytest.mark.parametrize("chunk", [1, 7, 25, 50, 1000])
@pytest.mark.parametrize(("experts", "physical"), [(8, 8), (8, 12), (9, 12)])
def test_slots_hold_what_the_map_says_after_every_step(chunk, experts, physical):
    layers, ranks = 2, 4
    random = np.random.default_rng(chunk)
    current, target = (shuffled(random, layers, experts, physical, ranks) for _ in range(2))
    plan, meeting = rounds(current, target, ranks), Meeting(ranks)

    def work(rank):
        places = ExpertMap(current, experts, ranks)
        held = [Slots(layer.reshape(ranks, -1)[rank], index) for index, layer in enumerate(current)]
        mover = Mover(held, places, meeting.member(rank, ranks), chunk)
        mover.begin(plan)
        placements, moved = [], 0
        while mover.busy:
            moved += mover.step()
            placements.append(places.placement.copy())
            for index, layer in enumerate(held):
                own = places.placement[index].reshape(ranks, -1)[rank]
                assert torch.equal(layer.held, torch.stack([content(index, expert) for expert in own]))
        assert mover.step() == 0
        return placements, moved, len(placements) == len(plan) * mover.calls_per_round

    with ThreadPoolExecutor(ranks) as pool:
        found = list(pool.map(work, range(ranks)))
    for placements, moved, as_many_as_promised in found:
        assert all((a == b).all() for a, b in zip(placements, found[0][0], strict=True)), "on all ranks alike"
        assert moved == BYTES * sum(map(len, plan)) and as_many_as_promised
    ends = found[0][0][-1]
    assert (np.sort(ends.reshape(layers, ranks, -1)) == np.sort(target.reshape(layers, ranks, -1))).all()
    assert max(max(pair) for pair in meeting.carried) == min(chunk, BYTES)


def test_a_chunk_of_nothing_is_refused():
    with pytest.raises(ValueError, match="chunk_bytes=0 is not supported"):
        Mover([Slots([0], 0)], ExpertMap(np.array([[0]]), 1, 1), Meeting(1).member(0, 1), 0)
