from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from deepinfer_plugin.speculative.calibration import Calibration, CalibrationError, Reliability, calibration_of


def file(tmp_path, text):
    path = tmp_path / "calibration.json"
    path.write_text(text)
    return path


def test_calibration(tmp_path):
    read = Calibration.read(file(tmp_path, '{"temperatures": [1, 2.0, 0.5], "biases": [0, 0, -1]}'), 3)
    assert read.temperatures == (1.0, 2.0, 0.5) and read.biases == (0.0, 0.0, -1.0)
    found = read.confidences(torch.tensor([[2.0, 2.0, 2.0], [1e9, -1e9, torch.nan]]))
    assert found[0].tolist() == pytest.approx([1 / (1 + math.exp(-x)) for x in (2, 1, 3)])
    assert found[1, 0] == 1 and 0 < found[1, 1] < 1e-20 and found[1, 2].isnan()
    unbiased = Calibration.read(file(tmp_path, '{"temperatures": [1, 1, 1]}'), 3)
    assert unbiased == Calibration.neutral(3)


def test_where_a_calibration_comes_from(tmp_path):
    assert calibration_of(tmp_path, None, 3) == Calibration.neutral(3)
    (tmp_path / "dspark_calibration.json").write_text('{"temperatures": [2, 2, 2]}')
    named = tmp_path / "other.json"
    named.write_text('{"temperatures": [3, 3, 3]}')
    assert calibration_of(tmp_path, None, 3).temperatures[0] == 2
    assert calibration_of(tmp_path, str(named), 3).temperatures[0] == 3
    with pytest.raises(CalibrationError, match="absent"):
        calibration_of(tmp_path, str(tmp_path / "absent.json"), 3)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"temperatures": 1}',
        '{"temperatures": [1, 1]}',
        '{"temperatures": [1, 0, 1]}',
        '{"temperatures": [1, -1, 1]}',
        '{"temperatures": [1, NaN, 1]}',
        '{"temperatures": [1, true, 1]}',
        '{"temperatures": [1, "1", 1]}',
        '{"temperatures": [1, 1, 1], "biases": [0, 0]}',
        '{"temperatures": [1, 1, 1], "biases": [0, Infinity, 0]}',
        '{"temperatures": [1, 1, 1], "biases": 0}',
    ],
)
def test_refused(tmp_path, text):
    with pytest.raises(CalibrationError, match=r"calibration\.json: .*3 (positive )?numbers"):
        Calibration.read(file(tmp_path, text), 3)


def test_a_file_must_exist(tmp_path):
    with pytest.raises(CalibrationError, match="absent"):
        Calibration.read(tmp_path / "absent.json", 3)


def rounds(reliability, predict, really, count=400, requests=16, seed=0):
    """Drafts of one position whose survival is ``really(x)`` where the head says ``predict(x)``."""
    random = np.random.default_rng(seed)
    for _ in range(count):
        x = random.random((requests, 1))
        accepted = (random.random((requests, 1)) < really(x)).sum(axis=1)
        reliability.observe(predict(x), np.ones(requests, int), accepted)


def test_calibrated_head():
    reliability = Reliability()
    assert reliability.error == 0
    rounds(reliability, lambda x: x, lambda x: x)
    assert reliability.error < 0.025
    grid = np.linspace(0, 1, 50)
    assert np.abs(reliability(grid) - grid).max() < 0.08


def test_overconfident_head():
    reliability = Reliability()
    rounds(reliability, lambda x: np.sqrt(x), lambda x: x)
    assert reliability.error == pytest.approx(1 / 6, abs=0.02)  # mean of sqrt(x) - x
    grid = np.linspace(0.1, 0.95, 20)
    assert np.abs(reliability(grid) - grid**2).max() < 0.1


def test_map_is_increasing_keeps_zero_and_believes_an_unseen_head():
    reliability = Reliability()
    grid = np.linspace(0, 1, 400)
    assert np.abs(reliability(grid) - grid).max() <= 0.5 / Reliability.BINS + 1e-3
    rounds(reliability, lambda x: x, lambda x: np.full_like(x, 0.1), count=100)
    rounds(reliability, lambda x: 0.9 + x / 10, lambda x: np.full_like(x, 0.1), count=100)
    found = reliability(grid)
    assert found[0] == 0 and (np.diff(found) >= 0).all()
    assert found[-1] < 0.25  # nothing unseen below may prop it up


def test_requests_that_sample_are_judged_apart():
    """And neither tells anything about the other."""
    reliability, sure = Reliability(), np.full((2, 5), 0.9)
    for _ in range(200):
        reliability.observe(sure, np.array([5, 5]), np.array([5, 1]), np.array([False, True]))
    found = reliability(sure, np.array([False, True]))
    assert found[0] == pytest.approx([1.0] * 5, abs=0.03) and found[1] == pytest.approx([0.2] * 5, abs=0.1)
    assert reliability(sure).tolist() == found[[0, 0]].tolist()
    assert reliability.error == pytest.approx((0.1 + 0.7) / 2, abs=0.01)
    fresh = Reliability()
    for _ in range(200):
        fresh.observe(sure[:1], np.array([5]), np.array([1]), np.array([True]))
    assert fresh(sure, np.array([False, True]))[0] == pytest.approx([0.9] * 5, abs=1 / 16)


def test_only_verified_drafts_are_evidence():
    reliability = Reliability()
    reliability.observe(np.full((3, 5), 0.5), np.array([0, 2, 5]), np.array([0, 1, 5]))
    assert reliability.samples.sum() == 7 and reliability.survived.sum() == 6
    reliability.observe(np.full((3, 5), 0.5), np.zeros(3, int), np.zeros(3, int))
    assert reliability.samples.sum() == 7


def test_old_evidence_fades():
    reliability = Reliability()
    rounds(reliability, lambda x: x, lambda x: np.zeros_like(x), count=1000)
    rounds(reliability, lambda x: x, lambda x: x, count=4000)
    assert reliability.error < 0.03
    assert reliability.samples.sum() < 1.1 * Reliability.MEMORY
