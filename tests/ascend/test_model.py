"""The whole tiny network on the ascend provider, torch_npu's ops as documented: every layer kind (window only, ratio 2
and ratio 1 sources, their readers, Engram, the draft stages), a prefill and decode steps after it."""

from __future__ import annotations

import pytest
import torch

from deepinfer_plugin.model import V41, v41
from deepinfer_plugin.model.checkpoint import Checkpoint
from deepinfer_plugin.runtime.memory_plan import weight_bytes_of

from ..held import held_bytes
from . import documented
from .conftest import table

LENGTH, STEPS = 150, 3  # more than a window and a page


@pytest.fixture(scope="module", params=["model", "deepinfer", "float32"])
def models(request, tiny):
    """The same checkpoint on the ascend provider and on the reference."""
    with documented.installed(), pytest.MonkeyPatch.context() as patch:
        reference = V41.load(tiny, profile=request.param)
        patch.setattr(v41, "select", lambda *_, **__: table())
        ascend = V41.load(tiny, profile=request.param)
        assert set(ascend.ops.choices.values()) == {"ascend"}
        yield ascend, reference


def prompt(model):
    generator = torch.Generator().manual_seed(7)
    return torch.randint(10, model.config.vocab_size - 10, (LENGTH + STEPS,), generator=generator)


def bounds(model) -> tuple[float, float]:
    """Relative error of a row: median and largest. In float32 nothing is rounded and only sums differ. In the bf16
    profiles a sum that tips a rounding may choose another group or expert, and the rest of that row goes its way."""
    return (1e-6, 1e-4) if model.network.profile.name == "float32" else (5e-2, 3e-1)


def test_every_layer_of_a_decode_step(models):
    """Residual streams after every layer of the rows decoded one at a time."""
    ascend, reference = models
    ids, layers = prompt(ascend), range(ascend.config.num_layers)
    got, want = ascend.streams(ids, layers, chunk=LENGTH), reference.streams(ids, layers, chunk=LENGTH)
    for layer in layers:
        error = (got[layer].float() - want[layer].float()).norm(dim=(1, 2)) / want[layer].float().norm(dim=(1, 2))
        median, largest = bounds(ascend)
        assert error.median() <= median and error.max() <= largest, (layer, error.median(), error.max())


def test_the_plan_counts_what_it_holds(models, tiny):
    """Scales that are repeated for the products are not counted."""
    ascend, _ = models
    part = Checkpoint.open(tiny, ascend.config)
    assert held_bytes(ascend.network) == pytest.approx(weight_bytes_of(part, ascend.config, "npu", False), rel=0.01)


def test_decoded_logits_and_drafts(models):
    ids = prompt(models[0])
    outputs = []
    for model in models:
        session = model.session(LENGTH + STEPS + 8)
        session.extend(ids[:LENGTH])
        rows = torch.cat([session.extend(ids[LENGTH + step : LENGTH + step + 1]) for step in range(STEPS)])
        outputs.append((model.network.logits(rows), model.draft(ids[:LENGTH]).base_logits))
    for got, want in zip(*outputs, strict=True):
        error = (got.float() - want.float()).flatten(0, -2).norm(dim=-1) / want.float().flatten(0, -2).norm(dim=-1)
        assert error.median() <= bounds(models[0])[1], error
