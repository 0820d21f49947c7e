"""Experts move while ranks decode, and nobody can tell from the tokens."""

from itertools import pairwise

import numpy as np
import pytest
from heldout import HeldOut, chat_prompts, code_prompts

from deepinfer_plugin.model import V41
from tests.server.serving import TRAINED

from . import rebalancing, spawned
from .rebalancing import WAYS


@pytest.fixture(scope="module")
def prompts():
    held_out = HeldOut.load(TRAINED)
    return [prompt[:24] for prompt in code_prompts(held_out.code, 1) + chat_prompts(held_out.chats, 1)]


@pytest.fixture(scope="module")
def followed(prompts, tmp_path_factory):
    return spawned.run(rebalancing.follow, 4, tmp_path_factory.mktemp("ranks") / "ways", TRAINED, prompts)


@pytest.fixture(scope="module")
def alone(prompts):
    """Tokens and drafts of one rank, by whether the router is skewed."""
    plain, skewed = V41.load(TRAINED), V41.load(TRAINED)
    rebalancing.skew(skewed)
    return {
        False: [rebalancing.decode(plain, prompt, True) for prompt in prompts],
        True: [rebalancing.decode(skewed, prompt, True) for prompt in prompts],
    }


@pytest.mark.parametrize("name", WAYS)
def test_tokens_and_drafts_are_those_of_one_rank(name, followed, alone):
    way = WAYS[name]
    for rank in range(way.ranks):
        found, (tokens, drafts) = followed[rank][name], alone[way.skewed][rank // way.size]
        assert found.tokens == tokens, f"rank {rank}"
        assert found.drafts == drafts[: way.drafting * len(drafts)], f"rank {rank}"


@pytest.mark.parametrize("name", WAYS)
def test_experts_did_move_on_all_ranks_alike(name, followed):
    way = WAYS[name]
    first = followed[0][name]
    for rank in range(way.ranks):
        found = followed[rank][name]
        assert found.held, f"rank {rank}: a slot holds another expert than the map says"
        for set_, placements in found.placements.items():
            for step, (here, there) in enumerate(zip(placements, first.placements[set_], strict=True)):
                assert (here == there).all(), f"rank {rank}, {set_}, step {step}"
                assert (here >= 0).all() and len(np.unique(here[0])) == here.max() + 1
    changes = sum((a != b).any() for placements in first.placements.values() for a, b in pairwise(placements))
    assert changes >= 3, "in several steps, while tokens were decoded"


def test_the_drafters_map_is_its_own(followed):
    """Without drafts there are no steps of the draft set: its experts stay, whatever the network's do."""
    found = followed[0]["4 ranks, no spare slot, chunks smaller than an expert"]
    target, draft = found.placements["target"], found.placements["draft"]
    assert (target[0] != target[-1]).any() and (draft[0] == draft[-1]).all()
    both = followed[0]["2 ranks, replicas"].metrics
    assert both["target"].rebalances and both["draft"].rebalances


def test_a_skewed_router_is_balanced(followed):
    """16 experts of the network, 8 of the drafter, each set with 4 replicas."""
    for metrics in followed[0]["4 ranks, skewed"].metrics.values():
        assert metrics.rebalances and metrics.balance_forecast > metrics.balance_before
        assert metrics.predicted_gain_seconds > metrics.predicted_cost_seconds
