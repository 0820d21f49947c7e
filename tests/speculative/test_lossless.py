"""Scheduled verification does not change what is sampled, and a total from the newest confidences would.

A target and a draft head over a few tokens, each conditioned on the token before. The head's confidences are
adversarial: they depend on the draft before as strongly as they can. Chains of three tokens are generated through as
many rounds as it takes, in small servers with all of the scheduling on, and compared with the target's own chains.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from chi_square import p_value

from deepinfer_plugin.speculative.acceptance import distribution, draw, verify
from deepinfer_plugin.speculative.planner import LaggedSurvival, Planner, allocate, survival
from deepinfer_plugin.speculative.randomness import DRAFT, uniform
from deepinfer_plugin.speculative.step_cost import Curve, StepCost

K, V, CHAIN, CHAINS = 5, 6, 3, 20_000
SERVERS, EACH = 100, 4
ALL = SERVERS * EACH
START = 0  # the token every chain begins behind


def tables(temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """[V, V] next-token probabilities of target and head, both after the same sampling parameters."""
    generator = torch.Generator().manual_seed(1)
    logits, error = torch.randn(2, V, V, generator=generator)
    parameters = torch.full((V,), temperature), None, torch.full((V,), 0.9)
    return distribution(logits * 1.5, *parameters), distribution(logits * 1.5 + error, *parameters)


def draft(head, previous, seeds, positions, rounds):
    tokens, probs = [], []
    for j in range(K):
        probs.append(head[previous])
        previous = draw(probs[-1], uniform(seeds, positions + j, DRAFT, rounds))
        tokens.append(previous)
    return torch.stack(tokens, 1), torch.stack(probs, 1)


def confidences(drafts):
    """Undecided about the first draft, then sure after even drafts and hopeless after odd ones: of draft j the head
    knows only what came before it."""
    later = torch.where(drafts[:, :-1] % 2 == 0, 0.97, 0.01)
    return torch.cat([torch.full((len(drafts), 1), 0.5), later], 1)


def chains(temperature: float, price: float, one_by_one: bool) -> torch.Tensor:
    """int64 [CHAINS, CHAIN]: a slot that has finished its chain starts the next one."""
    target, head = tables(temperature)
    # The first row beyond the anchors costs as much as many: only a promising second draft makes the first worth it.
    curve = Curve((EACH, 3 * EACH, 4 * EACH, 6 * EACH), (1.0, 1.6, 1.8, 2.2), True)
    planners = [Planner(StepCost(curve), K) for _ in range(SERVERS)]
    lagged, slots, drafted = LaggedSurvival(ALL, K), np.arange(ALL), np.ones(EACH, bool)
    contexts = torch.arange(ALL) % EACH
    tokens = torch.full((CHAINS + ALL, CHAIN + 1), START)
    seeds, length, rounds = torch.arange(ALL), torch.ones(ALL, dtype=torch.int64), torch.zeros(ALL, dtype=torch.int64)
    following, round = ALL, 1
    sizes = set()
    while (seeds < CHAINS).any():
        anchors = tokens[seeds, length - 1]
        drafts, draft_probs = draft(head, anchors, seeds, length, rounds)
        newest, _ = survival(confidences(drafts))
        lagged.record(round - 1, slots, seeds.numpy(), newest.numpy())
        rows = torch.empty(ALL, dtype=torch.int64)
        for server, planner in enumerate(planners):
            own = slice(server * EACH, (server + 1) * EACH)
            known = lagged.read(round, slots[own], seeds[own].numpy(), drafted)
            total = (planner.plan_newest(newest[own]) if one_by_one else planner.plan(known)).total
            rows[own] = allocate(newest[own], total, contexts=contexts[own], price=price)
            sizes.add(total)
        fed = torch.cat([anchors[:, None], drafts], 1)[torch.arange(K + 1) < rows[:, None]]
        cu_rows = torch.cat([torch.zeros(1, dtype=torch.int64), rows.cumsum(0)])
        verdict = verify(target[fed], cu_rows, drafts, draft_probs, seeds, length)
        round, rounds = round + 1, rounds + 1
        for j in range(K + 1):
            going = (verdict.tokens[:, j] >= 0) & (length <= CHAIN)
            tokens[seeds[going], length[going]] = verdict.tokens[going, j]
            length += going
        ended = length > CHAIN
        seeds[ended] = torch.arange(following, following + int(ended.sum())).clamp_(max=len(tokens) - 1)
        following += int(ended.sum())
        length[ended], rounds[ended] = 1, 0
    assert len(sizes) > 2  # the schedule really varied
    return tokens[:CHAINS, 1:]


def against_target(found: torch.Tensor, temperature: float) -> float:
    target, _ = tables(temperature)
    expected = target[START][:, None, None] * target[:, :, None] * target[None]
    cells = (found[:, 0] * V + found[:, 1]) * V + found[:, 2]
    return p_value(torch.bincount(cells, minlength=V**CHAIN), expected * CHAINS)


@pytest.mark.parametrize(
    ("temperature", "price", "one_by_one"),
    [(0.7, 0.0, False), (1.0, 0.0, False), (1.0, 0.1, False), (0.7, 0.0, True), (1.0, 0.0, True)],
)
def test_scheduled_verification_samples_from_the_target(temperature, price, one_by_one):
    found = chains(temperature, price, one_by_one)
    assert against_target(found, temperature) > 1e-3
    first = torch.bincount(found[:, 0], minlength=V)
    assert p_value(first, tables(temperature)[0][START] * CHAINS) > 1e-3


@pytest.mark.parametrize(
    ("total_from", "noise", "share"),
    [
        ("earlier", "anew", 0.5),
        ("newest one by one", "anew", 0.5),
        ("newest", "anew", 0.75),
        ("earlier", "of the position", 0.75),
    ],
)
def test_what_would_bias(total_from, noise, share):
    """The lag is not a detail, and neither is fresh noise for every draft. Two tokens, target and head agree on a fair
    coin, so every draft is right. The head is undecided about the first draft and sure of the others iff the first is
    token 0. A step of two rows costs as much as one of six: the first draft is verified for the sake of those behind
    it, or not at all. With the total from these same confidences, token 0 is emitted whenever it is drafted and half
    of the times it is not. So it is if an earlier draft of the position made the total with the same noise.
    """
    seeds, positions = torch.arange(CHAINS), torch.full((CHAINS,), 10)
    coin = torch.full((CHAINS, K, 2), 0.5)

    def drafted(round: int) -> torch.Tensor:
        return torch.stack([draw(coin[:, j], uniform(seeds, positions + j, DRAFT, round)) for j in range(K)], 1)

    def total(first: int) -> int:
        planner = Planner(StepCost(Curve((1, 6), (1.0, 3.0), padded=True)), K)
        survivals = np.array([[0.5, *[0.5 if first == 0 else 0.0] * (K - 1)]], dtype=np.float32)
        if total_from == "newest one by one":
            return planner.plan_newest(torch.from_numpy(survivals)).total
        return planner.plan(survivals).total

    totals = torch.tensor([total(0), total(1)])
    assert totals.tolist() == ([6, 2] if total_from == "newest one by one" else [6, 1])
    drafts, earlier = drafted(1), drafted(0 if noise == "anew" else 1)
    rows = totals[(earlier if total_from == "earlier" else drafts)[:, 0]]
    cu_rows = torch.cat([torch.zeros(1, dtype=torch.int64), rows.cumsum(0)])
    verdict = verify(torch.full((int(cu_rows[-1]), 2), 0.5), cu_rows, drafts, coin, seeds, positions)
    zeros = float((verdict.tokens[:, 0] == 0).double().mean())
    assert zeros == pytest.approx(share, abs=0.015)
