"""Forwards of several ranks that are captured: sizes known before, padded, and still the bits of one rank. Ranks are
threads here, and a capture is a function that runs again."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

from deepinfer_plugin.eplb.migration import rounds
from deepinfer_plugin.eplb.mover import Mover
from deepinfer_plugin.model import V41
from deepinfer_plugin.model.captured import Captured
from deepinfer_plugin.model.config import V41Config
from deepinfer_plugin.model.layout import TARGET
from deepinfer_plugin.model.memory import PagePool, StatePool
from deepinfer_plugin.model.parallel import Alone, Ranks
from deepinfer_plugin.model.rows import Rows
from deepinfer_plugin.runtime.graphs import DraftGraphs, EagerDraft, EagerStep, StepGraphs

from ..eplb.placements import shuffled
from ..runtime.test_graphs import Captures, tensors
from .forms import PLANS, Form, sequence
from .peers import GatheredPeers
from .threads import Meeting, ThreadGroup, run

PAGE, COUNTS = 64, (1, 4, 42)
DRAFTING = [[0, 1], [1], [], [0]]  # sequences of each group that draft after each forward

FORMS = {
    "EP2": Form(2, 2, heads=False),
    "TP2xEP2": Form(2, 2),
    "DP2xEP2": Form(2, 1),
    "DP2xTP2xEP4": Form(4, 2),
    "DP4xEP4, replicas": Form(4, 1, redundant=5),
}


def follow(step, drafter, config, group):
    """The plan of an attention group, with drafts after every forward."""
    table, done, found = (1 + torch.arange(8)).view(2, 4), [0, 0], []
    for forward in PLANS[group]:
        ids = [sequence(config, group, s)[done[s] : done[s] + count] for s, count in forward]
        rows = Rows.none("cpu")
        if forward:
            counts = [count for _, count in forward]
            width = step.width(sum(counts), 4)
            which = [s for s, _ in forward]
            rows = Rows.build(torch.cat(ids), [done[s] for s in which], counts, [2 - s for s in which], table[which])
            assert width >= 4
        found.append(step(rows))
        for s, count in forward:
            done[s] += count
        who = [s for s in DRAFTING[group] if done[s]]
        inputs = ([17 + s for s in who], [done[s] for s in who], [2 - s for s in who])
        found += tensors(drafter(*(torch.tensor(each, dtype=torch.int64) for each in inputs)))
    return found


def memories(model):
    return PagePool.allocate(model.page_layout, 9), StatePool(model.state_layout, 3)


def parallel(form, rank, meetings, config):
    """One rank of a form, whose groups meet at ``meetings``, the last of which is everybody's."""
    group = ThreadGroup(meetings[rank // form.size], rank % form.size) if form.size > 1 else Alone()
    world = ThreadGroup(meetings[-1], rank)
    fixed = partial(Captured, peers=GatheredPeers(world))
    return Ranks(group, world, split_heads=form.heads, layout=form.layout(config), check=True, fixed=fixed)


def on_ranks(form, path, body):
    """What ``body(rank, model)`` returns on each rank."""
    config = V41Config.load(path)
    groups = [Meeting(form.size) for _ in range(form.ranks // form.size)]

    def one(rank, everybody):
        with torch.inference_mode():
            model = V41.load(path, parallel=parallel(form, rank, [*groups, everybody], config), page_size=PAGE)
            return body(rank, model)

    return run(form.ranks, one)


@pytest.fixture(scope="module")
def alone(tiny):
    model, known = V41.load(tiny, page_size=PAGE), {}

    def of(group):
        if group not in known:
            pages, state = memories(model)
            with torch.inference_mode():
                step, drafter = EagerStep(model.network, pages, state), EagerDraft(model.network.dspark, pages, state)
                known[group] = follow(step, drafter, model.config, group)
        return known[group]

    return of


@pytest.mark.parametrize("name", FORMS)
def test_the_bits_are_those_of_one_rank(name, tiny, alone):
    """Groups of other rows, without rows, and with more than were captured, when all run op by op."""
    form = FORMS[name]

    def body(rank, model):
        pages, state = memories(model)
        captures = Captures()
        step = StepGraphs(captures, model.network, pages, state, COUNTS, (4,))
        drafter = DraftGraphs(captures, model.network.dspark, pages, state, (1, 2))
        found = follow(step, drafter, model.config, rank // form.size)
        return found, [each.replays for each in captures.all]

    outcomes = on_ranks(form, tiny, body)
    for rank, (found, replays) in enumerate(outcomes):
        right = alone(rank // form.size)
        assert len(found) == len(right)
        for index, (mine, theirs) in enumerate(zip(found, right, strict=True)):
            assert torch.equal(mine, theirs), f"rank {rank}, result {index}"
        assert replays == outcomes[0][1], "all ranks replay the same"
        assert sum(replays[: len(COUNTS)]) >= 2 and sum(replays[len(COUNTS) :]) >= 5


def decode(step, config, tokens):
    """Hidden states of a prompt of 9 tokens and ``tokens`` more of one sequence."""
    ids, table, found = sequence(config, 0, 0), torch.tensor([[1, 2]]), []
    for at, count in [(0, 9), *((9 + index, 1) for index in range(tokens))]:
        found.append(step(Rows.build(ids[at : at + count], [at], [count], [1], table)))
    return found


@pytest.mark.parametrize("redundant", [0, 4])
def test_experts_that_move_are_found_by_what_was_captured(redundant, tiny):
    """And padding is not counted, nor sent anywhere."""
    form, tokens = Form(2, 2, redundant=redundant), 14
    model = V41.load(tiny, page_size=PAGE)
    with torch.inference_mode():
        right = decode(EagerStep(model.network, *memories(model)), model.config, tokens)

    def body(rank, model):
        network, places = model.network, model.network.expert_maps[TARGET]
        places.counts = torch.zeros(len(places.placement), places.experts, dtype=torch.int64)
        step = StepGraphs(Captures(), network, *memories(model), (9,), (2,))
        target = shuffled(np.random.default_rng(7), *places.placement.shape[:1], places.experts,
                          places.placement.shape[1], 2)  # fmt: skip
        before = places.placement.copy()
        layers = [block.ffn.experts for block in network.layers]
        mover = Mover(layers, places, network.parallel.world, layers[0].expert_bytes)
        mover.begin(rounds(places.placement, target, 2)[:5])
        counted = []

        def between():
            mover.step()
            counted.append(places.counts.sum(1).tolist())

        network.parallel.between = between
        found = decode(step, model.config, tokens)
        peers = network.parallel.fixed.keywords["peers"]
        assert (places.placement != before).any() and places.forwards >= tokens
        return found, counted, peers.travelled

    for found, counted, travelled in on_ranks(form, tiny, body):
        for mine, theirs in zip(found, right, strict=True):
            assert torch.equal(mine, theirs)
        choices = model.config.experts_per_token
        assert counted[1] == [9 * choices] * model.config.num_layers
        assert counted[2] == [choices] * model.config.num_layers
        rows = 9 + tokens
        lookups = len(model.config.engram.layers) * 2 * 9 * model.config.engram.columns * (tokens + 3)
        assert travelled <= rows * choices * model.config.num_layers + lookups
