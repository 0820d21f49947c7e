"""When to move, what it is worth, and who works it out."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest

from deepinfer_plugin.eplb.decide import Request, decide, shuffle
from deepinfer_plugin.eplb.solver import ChildSolver, SolverFailed, SolverProcess

from .placements import shuffled


def request_of(skew, ranks=4, experts=8, spare=4, **changes):
    random = np.random.default_rng(1)
    wanted = random.permuted(np.tile((np.arange(experts) + 1.0) ** -skew, (2, 1)), axis=1)
    counts = random.multinomial(300, wanted / wanted.sum(axis=1, keepdims=True), size=(40, 2))
    current = np.tile(np.arange(experts + spare) % experts, (2, 1))
    known = {"interval": 1000, "step_s": 0.05, "call_s": 0.001, "calls_per_round": 2}
    return Request(counts, ranks, current, None, **(known | changes))


def moved(request, decision):
    placed = request.current.copy()
    for moves in decision.rounds:
        for move in moves:
            placed[move.layer, move.slot] = move.expert
    return placed


def test_a_skewed_router_is_worth_a_move():
    request = request_of(skew=1.5)
    found = decide(request)
    assert found.rounds and found.forecast > 1.2 * found.balance
    assert found.cost_s == len(found.rounds) * 2 * 0.001 < found.gain_s
    later = decide(replace(request, current=moved(request, found), previous=request.current))
    assert not later.rounds and later.balance == pytest.approx(found.forecast)
    assert 0.1 < later.real_gain < 0.7


def test_what_costs_more_than_it_gains_is_left():
    request = request_of(skew=1.5, interval=1, step_s=0.01)
    found = decide(replace(request, call_s=10.0))
    assert not found.rounds and found.cost_s > found.gain_s > 0
    assert decide(replace(request, call_s=1e-9)).rounds


@pytest.mark.parametrize(("even", "balance"), [(False, 1.0), (True, 10 / 13)])
def test_what_the_split_mends_is_no_reason_to_move(even, balance):
    """Expert 0 on both ranks, and rank 0 busy enough with expert 1: nothing has to move."""
    counts = np.tile([10, 8, 2], (5, 1, 1))
    current = np.array([[0, 1, 0, 2]])
    found = decide(Request(counts, 2, current, None, 100, 0.05, 10.0, 2, even_split=even))
    assert not found.rounds and found.balance == pytest.approx(balance, abs=0.01)


@pytest.mark.parametrize("spare", [0, 4])
def test_nobody_asked_for_anything(spare):
    request = replace(request_of(skew=0.0, spare=spare), counts=np.zeros((3, 2, 8), dtype=np.int32))
    found = decide(request)
    assert not found.rounds and found.balance == found.forecast == 1.0 and found.gain_s == 0


def test_an_expert_is_never_put_on_a_rank_twice():
    """With nearly as many slots as experts on every rank the policy may find no other place."""
    for seed in range(20):
        random = np.random.default_rng(seed)
        request = request_of(skew=1.5, experts=7, spare=11, ranks=3, call_s=1e-9)
        request = replace(request, current=shuffled(random, 2, 7, 18, 3))
        for rank in moved(request, decide(request)).reshape(6, 6):
            assert len(set(rank.tolist())) == 6


def test_shuffling_moves_whatever_it_costs():
    for spare in (0, 4):
        request = request_of(skew=0.0, spare=spare, interval=1, call_s=1.0)
        found = shuffle(request, 1)
        assert found.rounds and found.cost_s > found.gain_s
        placed = moved(request, found)
        assert all(len(set(layer.tolist())) == 8 for layer in placed)
        assert all(len(set(rank.tolist())) == (8 + spare) // 4 for rank in placed.reshape(8, -1))


def answered(solver):
    deadline = time.monotonic() + 60
    while (found := solver.answer()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found


def test_a_process_of_its_own_decides_alike_and_says_when_it_cannot():
    process, request = SolverProcess(), request_of(skew=1.5)
    solver = ChildSolver(process)
    try:
        assert solver.answer() is None
        solver.ask(lambda: request)
        found, right = answered(solver), decide(request)
        assert found == right
        solver.ask(lambda: replace(request, counts=-request.counts))
        with pytest.raises(SolverFailed, match="counts: negative or not finite"):
            answered(solver)
        process.process.kill()
        solver.ask(lambda: request)
        with pytest.raises(SolverFailed, match="process has ended"):
            answered(solver)
    finally:
        process.close()
