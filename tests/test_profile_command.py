"""``deepinfer profile``: what it prints and writes, and that a server starts with the curve it leaves behind."""

from __future__ import annotations

import functools
import json
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from deepinfer_plugin.cache import cache_directory
from deepinfer_plugin.model import V41
from deepinfer_plugin.model.checkpoint import INDEX
from deepinfer_plugin.model.memory import PagePool, StatePool
from deepinfer_plugin.runtime import threads
from deepinfer_plugin.runtime.graphs import EagerStep
from deepinfer_plugin.speculative import profile_step
from deepinfer_plugin.speculative.step_cost import Curve, CurveCache


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """A cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def profile(deepinfer):
    return functools.partial(deepinfer, "profile", "--device", "cpu")


@pytest.fixture(scope="module")
def model(tiny):
    return V41.load(tiny)


@pytest.fixture
def cache(model):
    return CurveCache(cache_directory(), profile_step.key(EagerStep(model.network, None, None)))


def without_drafts(tiny, path):
    """A copy of ``tiny`` that has no draft head."""
    shutil.copytree(tiny, path)
    raw = json.loads((path / "config.json").read_text())
    text = raw["text_config"]
    text["compress_ratios"] = text["compress_ratios"][: text["num_hidden_layers"]]
    text["num_nextn_predict_layers"] = 0
    (path / "config.json").write_text(json.dumps(raw))
    weight_map = {}
    for shard in sorted(path.glob("*.safetensors")):
        tensors = {name: tensor for name, tensor in load_file(shard).items() if not name.startswith("mtp.")}
        save_file(tensors, shard)
        weight_map |= dict.fromkeys(tensors, shard.name)
    (path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return path


def test_what_it_tells(profile, tiny, tmp_path, cache):
    file = tmp_path / "profile.json"
    code, out, _ = profile(tiny, "--rows", "12,1,2", "--json", file)
    found, curve = json.loads(file.read_text()), cache.load()
    assert code == 0 and curve is not None
    assert curve.rows == (1, 2, 12) and not curve.padded
    assert (found["rows"], found["seconds"]) == ([1, 2, 12], list(curve.seconds))
    assert (found["device"], found["profile"]) == ("cpu, 1 threads", "model")
    assert found["ops"]["linear"] == "reference"
    assert found["drafting"]["block"] == 5 and found["drafting"]["requests"] == [1, 2]
    assert all(0 < seconds < 10 for seconds in found["drafting"]["seconds"])
    assert found["cache"] == str(cache.path)
    for text in (curve.table(), curve.plot(), str(cache.path), "up to 12 rows", "drafting a block of 5 tokens"):
        assert text in out
    for requests, seconds in zip(found["drafting"]["requests"], found["drafting"]["seconds"], strict=True):
        assert f"{requests:>8} {seconds * 1e3:>9.3f}\n" in out


def test_the_next_server_starts_with_it(profile, tiny, model, cache, monkeypatch):
    """As the worker asks for a curve. The one before is measured anew, however young it is."""
    cache.store(Curve((1, 1000), (5.0, 6.0), padded=False))
    monkeypatch.setattr(profile_step, "ROWS_CPU", (1, 6))
    assert profile(tiny)[0] == 0
    monkeypatch.setattr(profile_step, "measure", lambda *args, **kwargs: pytest.fail("measured again"))
    pages, state = PagePool.allocate(model.page_layout, 1), StatePool(model.state_layout, 1)
    curve = profile_step.step_curve(EagerStep(model.network, pages, state), 6, cache_directory())
    assert curve.rows == (1, 6) and max(curve.seconds) < 5


def test_nothing_is_kept_on_request(profile, tiny, tmp_path):
    file = tmp_path / "profile.json"
    code, out, _ = profile(tiny, "--rows", "1", "--no-cache", "--json", file)
    assert code == 0 and "servers" not in out and json.loads(file.read_text())["cache"] is None
    assert not cache_directory().exists()


def test_a_cache_that_cannot_be_written(profile, tiny, tmp_path):
    (tmp_path / "cache").write_text("a file, not a directory")
    code, out, _ = profile(tiny, "--rows", "1")
    assert code == 0 and "rows" in out and "servers" not in out


def test_without_a_draft_head(profile, tiny, tmp_path):
    file = tmp_path / "profile.json"
    code, out, _ = profile(without_drafts(tiny, tmp_path / "mute"), "--rows", "1,2", "--json", file)
    found = json.loads(file.read_text())
    assert code == 0 and "no draft head" in out and "drafting" not in out
    assert found["rows"] == [1, 2] and found["drafting"] is None and found["cache"] is None


def test_it_runs_as_a_server_would(profile, tiny, tmp_path, monkeypatch):
    """Threads, ops and rounding decide which curve is whose."""
    counts = []
    monkeypatch.setattr(torch, "set_num_threads", counts.append)
    monkeypatch.setattr(threads, "LARGE_HIDDEN", 1)
    monkeypatch.setenv("DEEPINFER_PROFILE", "float32")
    monkeypatch.setenv("DEEPINFER_OPS", "linear=reference")
    file = tmp_path / "profile.json"
    assert profile(tiny, "--rows", "1", "--no-cache", "--json", file)[0] == 0
    assert counts == [len(os.sched_getaffinity(0))]
    assert json.loads(file.read_text())["profile"] == "float32"
    monkeypatch.setenv("DEEPINFER_OPS", "linear=nobody")
    code, _, err = profile(tiny, "--rows", "1")
    assert code == 2 and "nobody" in err and "reference" in err


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--rows", "1,x"], ["--rows", "1,x", "positive numbers"]),
        (["--rows", "0,1"], ["--rows", "0,1", "positive numbers"]),
        (["--json", "nowhere/profile.json"], ["--json", "nowhere/profile.json", "directory"]),
        (["--device", "tpu"], ["--device", "tpu", "cpu", "cuda"]),
    ],
)
def test_illegal_arguments(profile, tiny, argv, words):
    code, out, err = profile(tiny, *argv)
    assert (code, out) == (2, "") and all(word in err for word in words), err


def test_no_checkpoint(profile, tiny, tmp_path, monkeypatch):
    code, out, err = profile(tmp_path / "nowhere")
    assert (code, out) == (2, "") and err.startswith(
        f"deepinfer profile: {tmp_path}/nowhere/config.json does not exist"
    )
    copy = shutil.copytree(tiny, tmp_path / "cut")
    (copy / "model-00002-of-00003.safetensors").unlink()
    code, out, err = profile(copy)
    assert (code, out) == (2, "") and "model-00002-of-00003.safetensors: file is missing" in err
    monkeypatch.setenv("DEEPINFER_PROFILE", "exact")
    code, out, err = profile(tiny)
    assert (code, out) == (2, "") and "DEEPINFER_PROFILE='exact' is not supported; legal: " in err
