from __future__ import annotations

import json
import logging
import time
from dataclasses import replace

import numpy as np
import pytest

from deepinfer_plugin.speculative.step_cost import Curve, CurveCache, StepCost, measure, measure_context, trimmed_mean

GRAPHS = Curve((4, 8, 16), (10e-3, 12e-3, 20e-3), padded=True)
EAGER = Curve((4, 8, 16), (10e-3, 12e-3, 20e-3), padded=False)


class TestCurve:
    def test_captured_counts_are_a_staircase(self):
        assert GRAPHS.at(np.array([1, 4, 5, 8, 9, 16])).tolist() == [10e-3, 10e-3, 12e-3, 12e-3, 20e-3, 20e-3]

    def test_samples_are_joined_by_lines(self):
        assert EAGER.at(np.array([1, 4, 6, 12])) == pytest.approx([10e-3, 10e-3, 11e-3, 16e-3])

    @pytest.mark.parametrize("curve", [GRAPHS, EAGER])
    def test_beyond_the_last_count(self, curve):
        assert curve.at(np.array([17, 26])) == pytest.approx([21e-3, 30e-3])
        assert Curve((4, 8), (2.0, 1.0), True).at(np.array([100])).tolist() == [1.0]
        assert Curve((4,), (2.0,), True).at(np.array([1, 100])).tolist() == [2.0, 2.0]

    @pytest.mark.parametrize(
        ("rows", "seconds"),
        [
            ((), ()),
            ((0, 1), (1.0, 1.0)),
            ((2, 2), (1.0, 1.0)),
            ((1, 2), (1.0,)),
            ((1,), (0.0,)),
            ((1,), (float("nan"),)),
        ],
    )
    def test_nonsense_is_refused(self, rows, seconds):
        with pytest.raises(ValueError, match="a curve needs"):
            Curve(rows, seconds, True)

    def test_flat(self):
        assert Curve((1, 9), (10e-3, 10.05e-3), True).flat and not GRAPHS.flat

    def test_rendering(self):
        table = GRAPHS.table().splitlines()
        assert table[0].split() == ["rows", "ms", "us/row"]
        assert table[2].split()[:3] == ["8", "12.000", "500.0"] and table[3].endswith("#" * 40)
        plot = GRAPHS.plot(width=16, height=10).splitlines()
        assert plot[1].split()[0] == "20.00" and plot[1].endswith("|" + " " * 8 + "#" * 8)
        assert plot[10].endswith("|" + "#" * 16) and plot[-1].split() == ["rows", "1", "16"]


class TestMeasuring:
    def test_trimmed_mean(self):
        assert trimmed_mean([5.0, 1.0, 2.0, 100.0, 3.0]) == pytest.approx(10 / 3)
        assert trimmed_mean([1.0, 3.0]) == 2.0

    def test_warms_up_repeats_and_drops_outliers(self):
        calls: list[int] = []

        def run(rows: int) -> float:
            calls.append(rows)
            return 1.0 if calls.count(rows) in (1, 3) else rows * 1e-3  # the warm-up and one of five are slow

        assert measure(run, [8, 16], padded=True) == Curve((8, 16), (8e-3, 16e-3), True)
        assert calls == [8, 16] * 6, "they take turns: what else runs on the machine meets both"

    def test_more_rows_never_look_faster_in_an_eager_step(self):
        times = {1: 5.0, 2: 3.0, 4: 4.0, 8: 9.0}
        assert measure(times.__getitem__, list(times), padded=False).seconds == (4.0, 4.0, 4.0, 9.0)
        assert measure(times.__getitem__, list(times), padded=True).seconds == (5.0, 3.0, 4.0, 9.0)

    def test_context_is_told_apart_by_shape(self):
        def run(rows: int, each: int, context: int) -> float:
            return float(EAGER.at(np.array([rows]))[0]) + (3e-9 * rows + 7e-9 * (rows // each)) * context

        found = measure_context(EAGER, run, rows=48, block=5, context=32_000)
        assert (found.row_context, found.request_context) == pytest.approx((3e-9, 7e-9))
        assert "3.000 us a row, 7.000 us a request" in found.table()
        cost = StepCost(found)
        assert cost.context_split_known and cost.row_context == found.row_context


KEY = {"model": "abc", "device": "cpu", "parallel": "tp1", "version": "0.1.0"}


class TestCache:
    def cache(self, directory, **changes):
        return CurveCache(directory, KEY | changes)

    def test_round_trip(self, tmp_path):
        for curve in (GRAPHS, Curve((1, 2), (1.0, 2.0), False, 3e-9, 0.0)):
            self.cache(tmp_path / "new" / "folder").store(curve)
            assert self.cache(tmp_path / "new" / "folder").load() == curve
        assert len(list((tmp_path / "new" / "folder").iterdir())) == 1  # nothing temporary stays

    @pytest.mark.parametrize("change", [{"model": "abd"}, {"device": "gpu"}, {"parallel": "tp2"}, {"version": "0.2.0"}])
    def test_another_setup_is_another_curve(self, tmp_path, change):
        self.cache(tmp_path).store(GRAPHS)
        assert self.cache(tmp_path, **change).load() is None

    def test_expires(self, tmp_path, monkeypatch):
        cache = self.cache(tmp_path)
        cache.store(GRAPHS)
        now = time.time()
        for later, known in ((3600, True), (25 * 3600, False), (-3600, False)):
            monkeypatch.setattr(time, "time", lambda later=later: now + later)
            assert (cache.load() is not None) == known

    @pytest.mark.parametrize(
        "content",
        ["", "{", "[]", "null", '{"format": 1}', '{"format": 99}', "\udcff".encode(errors="surrogateescape")],
    )
    def test_a_damaged_file_is_ignored_with_one_line(self, tmp_path, caplog, content):
        cache = self.cache(tmp_path)
        cache.path.write_bytes(content if isinstance(content, bytes) else content.encode())
        with caplog.at_level(logging.WARNING):
            assert cache.load() is None
        assert len(caplog.records) == 1 and str(cache.path) in caplog.text

    @pytest.mark.parametrize(("field", "value"), [("rows", [8, 4]), ("seconds", [1, 2]), ("rows", "x"), ("made", None)])
    def test_a_file_with_wrong_values_is_ignored(self, tmp_path, caplog, field, value):
        cache = self.cache(tmp_path)
        cache.store(GRAPHS)
        cache.path.write_text(json.dumps(json.loads(cache.path.read_text()) | {field: value}))
        with caplog.at_level(logging.WARNING):
            assert cache.load() is None
        assert len(caplog.records) == 1

    def test_no_file_is_no_news(self, tmp_path, caplog):
        assert self.cache(tmp_path).load() is None and not caplog.records

    def test_a_folder_that_cannot_be_written(self, tmp_path, caplog):
        (tmp_path / "file").write_text("")
        self.cache(tmp_path / "file").store(GRAPHS)
        assert len(caplog.records) == 1


class TestCorrections:
    def serve(self, cost, depths, row_context, request_context, noise=0.01):
        random = np.random.default_rng(0)
        for _ in range(256):
            requests, depth = int(random.integers(4, 12)), float(random.choice(depths))
            tokens = int(random.integers(1_000, 50_000)) * requests
            rows = round(requests * depth)
            base = float(cost.curve.at(np.array([rows]))[0])
            seconds = base + row_context * tokens * rows / requests + request_context * tokens
            if random.random() < 0.1:
                seconds *= 5  # something else ran
            seconds *= 1 + noise * random.standard_normal()
            cost.observe(rows, requests, seconds, tokens * rows // requests, tokens)

    @pytest.mark.parametrize(("row", "request_"), [(2e-8, 0.0), (0.0, 5e-8), (2e-8, 5e-8)])
    def test_rows_and_requests_are_told_apart_when_depth_varies(self, row, request_):
        cost = StepCost(EAGER)
        self.serve(cost, [1, 2, 4, 6], row, request_)
        assert cost.context_split_known
        assert cost.row_context == pytest.approx(row, abs=3e-9)
        assert cost.request_context == pytest.approx(request_, abs=1e-8)

    def test_a_constant_depth_tells_their_sum_only(self):
        cost = StepCost(EAGER)
        self.serve(cost, [4], 2e-8, 4e-8)
        assert not cost.context_split_known
        assert 4 * cost.row_context + cost.request_context == pytest.approx(4 * 2e-8 + 4e-8, rel=0.1)

    def test_a_known_split_survives_a_constant_depth(self):
        cost = StepCost(Curve((4, 8, 16), (10e-3, 12e-3, 20e-3), False, 2e-8, 0.0))
        self.serve(cost, [4], 2e-8, 4e-8)
        assert cost.row_context == 2e-8 and cost.request_context == pytest.approx(4e-8, rel=0.2)

    @pytest.mark.parametrize(("step", "draft"), [(1.5, 1.5), (1.5, 0.4), (0.7, 1.0)])
    def test_short_contexts_tell_what_a_step_and_a_draft_cost(self, step, draft):
        cost, random = StepCost(replace(EAGER, row_context=1e-8, request_context=0.0)), np.random.default_rng(0)
        rows = np.arange(6, 17)
        real = step * EAGER.at(np.array([6])) + draft * (EAGER.at(rows) - EAGER.at(np.array([6])))
        for each in random.integers(0, len(rows), 300):
            seconds = real[each] * (1 + 0.02 * random.standard_normal()) + 1e-8 * int(rows[each]) * 100
            cost.observe(int(rows[each]), 6, seconds, 100 * int(rows[each]), 600)
        assert cost.steps(6, 16) == pytest.approx(real, rel=0.05) and cost.draft_price == pytest.approx(draft, abs=0.1)
        assert (cost.row_context, cost.request_context) == (1e-8, 0.0), "100 tokens cost less than a step's noise"

    def test_a_price_of_context_outlives_a_busy_machine(self):
        cost = StepCost(replace(EAGER, row_context=1e-8, request_context=0.0))
        for busy in (False, True) * 8:  # for 16 steps at a time, which happen to be deeper
            for rows in (12, 14, 16, 18) * 4 if busy else (4, 6, 8, 10) * 4:
                seconds = float(EAGER.at(np.array([rows]))[0]) + 1e-8 * rows * 4_000
                cost.observe(rows, 2, seconds + 30e-3 * busy, 4_000 * rows, 8_000)
        assert cost.row_context == pytest.approx(1e-8)

    def test_steps_include_the_sampler(self):
        cost = StepCost(GRAPHS)
        assert cost.steps(2, 5).tolist() == [10e-3, 10e-3, 10e-3, 12e-3]
        for seconds in (1e-3, 1e-3, 9e-3, 1e-3):
            cost.sampling.observe(2, seconds)
        assert cost.sampling(2) == cost.sampling(7) == 1e-3  # too few of its own: the median of all
        for _ in range(9):
            cost.sampling.observe(8, 4e-3)
        assert cost.sampling(8) == 4e-3 and cost.sampling(7) == 4e-3
        cost.sampling.observe(2, 1e-3)
        assert cost.sampling(2) == 1e-3
        assert cost.steps(2, 4) == pytest.approx([11e-3] * 3)
        cost.drafting.observe(2, 2e-3)
        cost.between.observe(2, 3e-3)
        assert cost.steps(2, 4) == pytest.approx([16e-3] * 3)

    def test_profiled(self):
        assert StepCost(GRAPHS).profiled
        assert not StepCost(None).profiled and StepCost(None).why_unprofiled == "no step-cost curve"
        StepCost(None).observe(4, 4, 1.0, 10, 10)
