"""Drafting stops where it does not pay, costs little while it is tried again, and comes back where it does."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from deepinfer_plugin.model.parallel import Single
from deepinfer_plugin.speculative.pause import FIRST, LAST, Pause
from deepinfer_plugin.speculative.planner import FEW, LAG
from deepinfer_plugin.speculative.schedule import Schedule
from deepinfer_plugin.speculative.step_cost import Curve, StepCost


def run(pause, advantage, rounds, sees_newest=False):
    """Rounds that had drafts, if drafting has this advantage whenever it is tried."""
    had, drafts = [], True
    for _ in range(rounds):
        had.append(drafts)
        drafts = pause.after(advantage if drafts else None, sees_newest)
    return had


@pytest.mark.parametrize("advantage", [1.0, 1.01, 3.0])
def test_what_pays_is_never_paused(advantage):
    assert all(run(Pause(LAG), advantage, 500))


@pytest.mark.parametrize(("sees_newest", "trial"), [(True, 1), (False, LAG + 1)])
@pytest.mark.parametrize("advantage", [0.99, 0.5])
def test_what_does_not_pay_is_tried_ever_more_seldom(advantage, sees_newest, trial):
    had = run(Pause(LAG), advantage, 4000, sees_newest)
    stop = had.index(False)
    assert stop < 50 and not any(had[stop : stop + FIRST])
    starts = [index for index in range(1, len(had)) if had[index] and not had[index - 1]]
    assert np.diff(starts).tolist()[:4] == [2 * FIRST + trial, 4 * FIRST + trial, LAST + trial, LAST + trial]
    assert sum(had[1000:]) / len(had[1000:]) == pytest.approx(trial / (LAST + trial), rel=0.1)


@pytest.mark.parametrize("sees_newest", [True, False])
def test_it_comes_back(sees_newest):
    pause = Pause(LAG)
    run(pause, 0.5, 500, sees_newest)
    had = run(pause, 2.0, 500, sees_newest)
    assert all(had[LAST + LAG + 2 :])


@pytest.mark.parametrize(("running", "soon"), [(16, False), (9, False), (31, False), (8, True), (32, True), (1, True)])
@pytest.mark.parametrize("sees_newest", [True, False])
def test_another_load_is_tried_soon(running, soon, sees_newest):
    """A long pause at 16 requests says little about 1 or 32."""
    pause = Pause(LAG)
    while not (pause.paused and pause._left == LAST):
        pause.after(0.5, sees_newest, running=16)
    waited = 0
    while not pause.after(None, sees_newest, running=running):
        waited += 1
    assert waited <= FIRST if soon else waited > LAST // 2


def test_a_load_that_swings_is_not_tried_all_the_time():
    pause, drafts = Pause(LAG), True
    had = []
    for index in range(4000):
        had.append(drafts)
        drafts = pause.after(0.5 if drafts else None, True, running=1 + 3 * (index // 2 % 2))
    assert sum(had[1000:]) / 3000 <= 1 / (FIRST + 1) + 0.01


def test_noise_does_not_pause():
    random, pause = np.random.default_rng(0), Pause(LAG)
    drafts = [pause.after(float(advantage)) for advantage in random.normal(1.5, 0.4, 1000)]
    assert all(drafts)


def test_rounds_without_drafts_of_their_own_do_not_count():
    """Requests that may not verify drafts."""
    pause = Pause(LAG)
    assert all(pause.after(None) for _ in range(100)) and not pause.paused


class TestSchedule:
    CURVE = Curve((1, 64), (1.0, 1.63), padded=False)  # a row costs a hundredth of a step

    def serve(self, right, logit, drafting, rounds, requests=4):
        """A schedule whose requests have ``right`` of 5 drafts right, with confidences of ``logit``, where drafting
        takes ``drafting`` of a step. Returns the share of rounds that drafted, late."""
        schedule = Schedule(StepCost(self.CURVE), requests + 1, 5, "cpu")
        slots = torch.arange(1, requests + 1)
        host, drafted = slots.tolist(), []
        for _ in range(rounds):
            if schedule.drafts:
                schedule.drafted(slots, host, host, torch.full((requests, 5), logit))
            else:
                schedule.skipped(host)
            drafted.append(schedule.drafts)
            rows = schedule.rows(slots, host, host, [5] * requests, [100] * requests, [False] * requests)
            assert drafted[-1] or rows.lengths.tolist() == [1] * requests, "there is nothing to verify"
            schedule.verified(), schedule.sampled(), schedule.ended()
            done = schedule.running[-1]  # whose clock is this loop's, which takes no time, not the curve's
            done.verified.seconds = done.sampled.seconds = done.start.seconds + float(self.CURVE.at(rows.total))
            done.end.seconds = done.sampled.seconds + drafting
            schedule.learn([min(right, length - 1) for length in rows.lengths.tolist()])
        return sum(drafted[rounds // 2 :]) / (rounds - rounds // 2)

    @pytest.mark.parametrize("requests", [4, FEW + 1])
    def test_good_drafts(self, requests):
        assert self.serve(right=5, logit=3.0, drafting=0.3, rounds=200, requests=requests) == 1

    @pytest.mark.parametrize("requests", [4, FEW + 1])
    def test_drafts_that_are_always_wrong(self, requests):
        assert self.serve(right=0, logit=-3.0, drafting=0.3, rounds=400, requests=requests) < 0.1

    def test_drafts_that_only_look_good(self):
        assert self.serve(right=0, logit=3.0, drafting=0.3, rounds=2000) < 0.05

    def test_good_drafts_that_cost_more_than_they_bring(self):
        assert self.serve(right=1, logit=3.0, drafting=3.0, rounds=400) < 0.05


def test_a_group_does_what_its_first_rank_decides():
    """Clocks differ between ranks, and so do plans; the rows, and whether to draft, are the first rank's."""

    class Follower(Single):
        def agree(self, value):
            return (4, False)

        def agree_tensor(self, x):
            return torch.tensor([1, 3])

    schedule = Schedule(StepCost(Curve((1, 2), (1.0, 1.1), padded=False)), 3, 5, "cpu", parallel=Follower())
    schedule.drafted(torch.tensor([1, 2]), [1, 2], [1, 2], torch.full((2, 5), 9.0))
    rows = schedule.rows(torch.tensor([1, 2]), [1, 2], [1, 2], [5, 5], [10, 10], [False, True])
    assert (rows.total, rows.lengths.tolist(), schedule.drafts) == (4, [1, 3], False)
    assert (schedule.running[-1].plan.total, schedule.running[-1].lengths.tolist()) == (4, [1, 3])
