"""The whole training at the small setting: losses fall, and what comes out is a checkpoint that serves what was
trained.
"""

import json

import pytest
import torch

from deepinfer_plugin.model import V41


@pytest.fixture(scope="module")
def log(trained):
    return [json.loads(line) for line in (trained / "train.jsonl").read_text().splitlines()]


def curve(log, stage, name):
    return [line[name] for line in log if line["stage"] == stage and name in line]


def test_losses_fall(log):
    loss = curve(log, "target", "loss")
    assert sum(loss[-5:]) / 5 < 0.8 * loss[0]
    drafts = curve(log, "draft", "ce")
    assert sum(drafts[-5:]) / 5 < 0.9 * drafts[0]


def test_formats_cost_little(log):
    (served,), (bf16,) = curve(log, "target", "held_out_code_served"), curve(log, "target", "held_out_code_bf16")
    assert served == pytest.approx(bf16, rel=0.02)


def test_serves_what_was_trained(trained):
    from batches import Batch
    from corpus import CORPUS, Corpus
    from masters import load_masters
    from target import forward
    from training_ops import TrainingOps

    ids = torch.from_numpy(Corpus.load(trained / CORPUS).code["report"][:256].astype("int64"))[None]
    ops = TrainingOps()
    network = load_masters(trained, ops, "cpu", trained)
    network.dspark = None
    with torch.no_grad():
        network.prepare()
        found = forward(network, ops, Batch(ids, ids, torch.ones(ids.shape)))
    expected = V41.load(trained).logits(ids[0])
    error = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert error.median() < 0.05, "legal roundings differ by a few percent of a logit"
    assert (found.argmax(-1) == expected.argmax(-1)).float().mean() > 0.85
    losses = [float(torch.nn.functional.cross_entropy(logits[:-1], ids[0, 1:])) for logits in (found, expected)]
    assert losses[0] == pytest.approx(losses[1], abs=0.02)


def test_speculation_yields_what_generation_yields(trained):
    from corpus import CORPUS, Corpus
    from heldout import chat_prompts
    from speculate import accept_length, speculate

    model = V41.load(trained)
    (prompt,) = chat_prompts(Corpus.load(trained / CORPUS).chats["report"], 1)
    tokens, steps = speculate(model, prompt, 24)
    assert tokens[:24] == model.generate(prompt, 24)
    assert not steps or 1 <= accept_length(steps) <= 6


def test_calibration_finds_temperature_and_bias():
    """Outcomes drawn from sigmoid(raw / 2 + 0.5) are calibrated by a temperature near 2 and a bias near 0.5."""
    from calibrate import calibration_error, fit
    from speculate import Verified

    from deepinfer_plugin.speculative.calibration import Calibration

    generator = torch.Generator().manual_seed(0)
    raw = 3 * torch.randn(4000, 5, generator=generator)
    happened = torch.rand(raw.shape, generator=generator) < torch.sigmoid(raw / 2 + 0.5)
    steps = [
        Verified(int(row.cumprod(0).sum()), values.tolist()) for row, values in zip(happened.int(), raw, strict=True)
    ]
    found = fit(steps)
    assert found.temperatures == pytest.approx([2.0] * 5, rel=0.35) and found.temperatures[0] == pytest.approx(
        2, rel=0.1
    )
    assert found.biases == pytest.approx([0.5] * 5, abs=0.4) and found.biases[0] == pytest.approx(0.5, abs=0.15)
    assert calibration_error(steps, found) < 0.02 < calibration_error(steps, Calibration.neutral(5))
