from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_plugin.speculative.planner import LAG, LaggedSurvival, Planner, allocate, survival
from deepinfer_plugin.speculative.step_cost import Curve, StepCost

K = 5
INFINITY = float("inf")


def line(rows: int, fixed: float = 10.0, each: float = 1.0) -> Curve:
    return Curve(tuple(range(1, rows + 1)), tuple(fixed + each * n for n in range(1, rows + 1)), padded=True)


def planner(curve: Curve | None) -> Planner:
    return Planner(StepCost(curve), K)


def certain(count: int, value: float = 1.0) -> np.ndarray:
    return np.full((count, K), value, dtype=np.float32)


class TestSurvival:
    def test_products(self):
        found, broken = survival(torch.tensor([[0.5, 0.5, 1.0, 0.0, 1.0]]))
        assert found.tolist() == [[0.5, 0.25, 0.25, 0.0, 0.0]] and broken == 0

    def test_nan_counts_as_zero_and_is_counted(self):
        found, broken = survival(torch.tensor([[0.5, torch.nan, 1.0], [torch.nan, torch.nan, 0.5]]))
        assert found.tolist() == [[0.5, 0, 0], [0, 0, 0]] and broken == 3

    def test_never_increases(self):
        found, _ = survival(torch.rand(500, K) * 1.2 - 0.1)
        assert (found[:, 1:] <= found[:, :-1]).all() and found.min() >= 0 and found.max() <= 1


def by_hand(scores, total, limits):
    """Take the best draft that is left, lower index first, until the total is spent."""
    rows = [1] * len(scores)
    items = sorted(
        ((-scores[b][j], b * K + j) for b in range(len(scores)) for j in range(K) if j < limits[b]),
    )
    for _, index in items[: total - len(scores)]:
        rows[index // K] += 1
    return rows


@st.composite
def batches(draw):
    count = draw(st.integers(1, 6))
    confidence = st.sampled_from([0.0, 0.25, 0.5, 1.0])  # few values: many ties
    confidences = [[draw(confidence) for _ in range(K)] for _ in range(count)]
    limits = [draw(st.integers(0, K)) for _ in range(count)]
    contexts = [draw(st.sampled_from([0, 1, 4])) for _ in range(count)]
    return (
        confidences,
        draw(st.integers(count, count * (K + 1) + 2)),
        limits,
        contexts,
        draw(st.sampled_from([0.0, 0.125])),
    )


class TestAllocate:
    @given(batches())
    @settings(max_examples=300, deadline=None)
    def test_best_drafts_first_as_prefixes(self, batch):
        confidences, total, limits, contexts, price = batch
        survivals, _ = survival(torch.tensor(confidences))
        rows = allocate(survivals, total, torch.tensor(limits), torch.tensor(contexts), price).tolist()
        scores = (survivals - price * torch.tensor(contexts)[:, None]).tolist()
        # by_hand takes drafts one by one without asking for prefixes: equality shows that they are prefixes.
        assert rows == by_hand(scores, total, limits)
        assert sum(rows) == min(total, len(rows) + sum(limits))

    def test_inside_a_tie_the_lower_index_wins(self):
        assert allocate(torch.ones(3, K), 3 + 7).tolist() == [6, 3, 1]

    def test_survival_zero_still_fills_the_total(self):
        assert allocate(torch.zeros(2, K), 5).tolist() == [4, 1]

    def test_a_request_without_drafts_keeps_its_anchor(self):
        survivals = torch.tensor([[0.9] * K, [0.0] * K])
        assert allocate(survivals, 12, limits=torch.tensor([K, 0])).tolist() == [6, 1]

    def test_every_request_has_its_anchor(self):
        assert allocate(torch.rand(7, K), 7).tolist() == [1] * 7
        with pytest.raises(ValueError, match="7 requests need a row each, got 6"):
            allocate(torch.rand(7, K), 6)


class TestLag:
    def lagged(self, at: int) -> LaggedSurvival:
        known = LaggedSurvival(8, K)
        known.record(at, np.array([2, 3]), np.array([20, 30]), np.array([[0.5] * K, [0.25] * K]))
        return known

    def read(self, known, round, slots=(3, 2), owners=(30, 20), drafted=(True, True), finished=None):
        arrays = np.array(slots), np.array(owners), np.array(drafted)
        return known.read(round, *arrays, None if finished is None else np.array(finished))[:, 0].tolist()

    def test_exactly_two_rounds(self):
        known = self.lagged(at=10)
        assert self.read(known, 10 + LAG) == [0.25, 0.5]
        assert self.read(known, 10 + LAG - 1) == [1, 1]
        assert self.read(known, 10 + LAG + 1) == [1, 1]
        assert self.read(known, 10 + 3 * LAG) == [1, 1]  # the same page of the ring, another round

    def test_batch_order_may_change_and_a_slot_may_change_hands(self):
        assert self.read(self.lagged(at=0), LAG, slots=(2, 3, 4), owners=(20, 31, 4), drafted=(True, True, False)) == [
            0.5,
            1,  # another request in slot 3
            0,  # nothing known, nothing drafted
        ]

    def test_finished(self):
        assert self.read(self.lagged(at=0), LAG, finished=(True, False)) == [0, 0.5]


class TestTotal:
    def best_by_hand(self, plan_of: Planner, survivals: np.ndarray) -> int:
        expected = np.sort(plan_of._expect(survivals, None), axis=None)[::-1]
        count = len(survivals)
        rates = [
            (count + expected[:extra].sum()) / plan_of.cost.curve.at(np.array([count + extra]))[0]
            for extra in range(expected.size + 1)
        ]
        return count + int(np.argmax(rates))

    @pytest.mark.parametrize("seed", range(20))
    def test_global_maximum_on_any_curve(self, seed):
        random = np.random.default_rng(seed)
        count = int(random.integers(1, 40))
        rows = np.unique(random.integers(1, 6 * count + 10, 12))
        curve = Curve(tuple(rows.tolist()), tuple((random.random(len(rows)) + 0.5).tolist()), padded=bool(seed % 2))
        survivals = random.beta(3, 1, (count, K)).cumprod(1).astype(np.float32)
        mine = planner(curve)
        found = mine.plan(survivals).total
        twin = planner(curve)
        wanted = self.best_by_hand(twin, survivals)
        if found != wanted:  # scores are compared in steps of 2**-15: only a tie may be decided differently
            plan = planner(curve).plan(survivals)
            seconds = curve.at(np.array([wanted]))[0]
            expected = np.sort(planner(curve)._expect(survivals), axis=None)[::-1]
            assert plan.tokens / plan.seconds == pytest.approx(
                (count + expected[: wanted - count].sum()) / seconds, rel=1e-4
            )

    def test_a_staircase_is_climbed_to_the_last_row_before_a_step(self):
        curve = Curve((4, 8, 12), (10e-3, 10.1e-3, 18e-3), padded=True)
        assert planner(curve).plan(certain(2, 0.6)).total == 8
        steep = Curve((4, 8, 12), (10e-3, 18e-3, 26e-3), padded=True)
        assert planner(steep).plan(certain(2, 0.6)).total == 4

    def test_beyond_a_bump(self):
        """Rows 5..9 are slow, 10..12 fast again: stopping at the first loss would stay at 4."""
        times = [10.0] * 4 + [19.0] * 5 + [12.0] * 3
        curve = Curve(tuple(range(1, 13)), tuple(times), padded=True)
        assert planner(curve).plan(certain(2, 0.9)).total == 12

    def test_certain_and_hopeless_drafts(self):
        assert planner(line(60)).plan(certain(4)).total == 24
        mine = planner(line(60))
        for _ in range(500):  # what is usual starts undecided and has to see for itself
            plan = mine.plan(certain(4, 0.0))
        assert plan.total == 4 and plan.tokens == pytest.approx(4, abs=0.1)

    def test_budget_shrinks_with_load(self):
        survivals = np.array([[0.9, 0.7, 0.5, 0.35, 0.2]], dtype=np.float32)
        drafts = [
            planner(line(3000, 200)).plan(survivals.repeat(count, 0)).total / count for count in (1, 32, 128, 500)
        ]
        assert drafts == sorted(drafts, reverse=True) and drafts[0] > 5 and drafts[-1] < 3

    def test_draining_batch(self):
        mine = planner(line(60))
        for count in range(8, 0, -1):
            plan = mine.plan(certain(count, 0.8))
            assert count <= plan.total <= 6 * count
            assert int(allocate(torch.full((count, K), 0.8), plan.total).sum()) == plan.total

    def test_limits(self):
        limits = np.array([0, 2, 5, 9])
        plan = planner(line(60)).plan(certain(4), limits=limits)
        assert plan.total == 4 + 0 + 2 + 5 + 5
        assert planner(line(60)).plan(certain(4), limits=np.zeros(4, int)).total == 4

    @pytest.mark.parametrize("curve", [None, Curve((8, 16, 32), (10e-3, 10e-3, 10.05e-3), padded=True)])
    def test_refuses_to_guess(self, curve, caplog):
        mine = planner(curve)
        with caplog.at_level(logging.WARNING):
            plans = [mine.plan(certain(3, 0.01), limits=np.array([K, K, 0])) for _ in range(5)]
        assert all(plan.total == 3 + 2 * K for plan in plans) and np.isnan(plans[0].seconds)
        assert [record.getMessage() for record in caplog.records] == [
            "speculation is unprofiled, verify all: "
            + ("no step-cost curve" if curve is None else "the step-cost curve is flat, rows look free")
        ]
        assert mine.cost.profiled is False


class TestNewest:
    """Plans of a host that knows the drafts at hand."""

    def test_stops_where_rows_no_longer_pay(self):
        confident, doubtful = (certain(1, chance).cumprod(1) for chance in (0.95, 0.15))
        curve = line(60, fixed=3)
        assert planner(curve).plan(confident, newest=True).total > planner(curve).plan(doubtful, newest=True).total == 1

    def test_what_is_usual_says_nothing(self):
        curve = Curve((4, 24), (10e-3, 15e-3), padded=True)
        mine = planner(curve)
        for _ in range(300):
            mine.plan(certain(4, 0.1))
        plan = mine.plan(certain(4, 0.8), newest=True)
        assert plan.total == 24 and plan.tokens == pytest.approx(4 * 5, rel=0.02)
        assert mine.plan(certain(4, 0.8)).tokens < plan.tokens

    def test_agrees_with_the_global_maximum_on_a_smooth_curve(self):
        random = np.random.default_rng(0)
        for _ in range(50):
            survivals = random.beta(3, 1, (3, K)).cumprod(1).astype(np.float32)
            rates = []
            mine = planner(line(60, fixed=12))
            gains = np.sort(mine.reliability(survivals), axis=None)[::-1]
            for extra in range(16):
                rates.append((3 + gains[:extra].sum()) / (12 + 3 + extra))
            plan = mine.plan(survivals, newest=True)
            assert plan.tokens / plan.seconds == pytest.approx(max(rates), rel=2e-3)

    def test_limits_contexts_and_no_curve(self):
        limits, contexts = np.array([0, 2, K]), np.array([1_000, 1_000, 90_000])
        newest = certain(3)
        assert planner(line(60)).plan(newest, limits=limits, newest=True).total == 3 + 2 + K
        assert planner(None).plan(newest, limits=limits, newest=True).total == 3 + 2 + K
        mine = planner(Curve((1, 400), (10e-3, 20e-3), padded=False, row_context=1e-7, request_context=0.0))
        mine.plan(newest, contexts, newest=True)
        plan = mine.plan(newest, contexts, newest=True)
        rows = allocate(torch.from_numpy(newest), plan.total, contexts=torch.from_numpy(contexts), price=plan.price)
        assert rows.tolist() == [6, 6, 1]
        seconds = 10e-3 + 12 * 10e-3 / 399 + 1e-7 * float((rows * torch.from_numpy(contexts)).sum())
        assert plan.seconds == pytest.approx(seconds)


class TestContext:
    CURVE = Curve((1, 400), (10e-3, 20e-3), padded=False, row_context=1e-8, request_context=0.0)

    def test_long_contexts_pay_for_their_rows(self):
        contexts = np.array([1_000, 100_000] * 10)
        mine = planner(self.CURVE)
        mine.plan(certain(20, 0.7), contexts)
        plan = mine.plan(certain(20, 0.7), contexts)
        rows = allocate(torch.full((20, K), 0.7), plan.total, contexts=torch.from_numpy(contexts), price=plan.price)
        assert rows[0::2].sum() > 2 * rows[1::2].sum()
        seconds = 10e-3 + (plan.total - 1) * 10e-3 / 399 + 1e-8 * float((rows * torch.from_numpy(contexts)).sum())
        assert plan.seconds == pytest.approx(seconds, rel=1e-6)

    def test_limits_hold_however_dear_a_row_is(self):
        curve = Curve((1, 400), (10e-3, 20e-3), padded=False, row_context=1e-5, request_context=0.0)
        contexts, limits = np.array([100_000, 100_000, 10]), np.array([2, 0, K])
        mine = planner(curve)
        for _ in range(3):
            plan = mine.plan(certain(3), contexts, limits)
        assert plan.total == 3 + K and plan.tokens == pytest.approx(3 + K, rel=0.2)

    def test_no_ranking_by_context_before_its_price_is_known(self):
        curve = Curve((1, 400), (10e-3, 20e-3), padded=False)
        mine = planner(curve)
        for _ in range(64):
            mine.cost.observe(60, 20, 15e-3, 3 * 1_000_000, 1_000_000)
        assert mine.cost.row_context > 0 and not mine.cost.context_split_known
        contexts = np.array([1_000, 100_000] * 10)
        assert [mine.plan(certain(20, 0.7), contexts).price for _ in range(3)] == [0, 0, 0]

    def test_few_requests_are_drawn_towards_what_is_usual(self):
        usual, odd = certain(1, 0.9), certain(1, 0.05)
        mine = planner(line(60))
        for _ in range(500):
            mine.plan(usual)
        assert mine.plan(odd).tokens > 1 + 5 * 0.2
        many = planner(line(6000))
        for _ in range(500):
            many.plan(certain(400, 0.9))
        assert many.plan(certain(400, 0.05)).tokens < 400 * (1 + 5 * 0.06)


def test_confidence_that_proves_wrong_is_discounted():
    mine = planner(line(4000, 300))
    promised = certain(100, 0.9)
    before = mine.plan(promised)
    for _ in range(50):
        mine.reliability.observe(promised, np.full(100, K), np.full(100, 1))
    after = mine.plan(promised)
    assert after.total < before.total and after.tokens < before.tokens
