"""Captured steps and drafts compute what eager ones do, to the bit, on a GPU."""

from __future__ import annotations

import dataclasses

import pytest
import torch

pytest.importorskip("sglang")  # which changes Triton when it is imported

from sglang.srt import utils as _  # noqa: F401

from deepinfer_plugin.kernels import cuda as provider
from deepinfer_plugin.model import V41
from deepinfer_plugin.runtime.graphs import DraftGraphs, EagerDraft, EagerStep, Graphs, StepGraphs

from ..runtime.test_graphs import batches, memories, tensors

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(provider.unavailable(torch.device("cuda")) is not None, reason="no Hopper GPU"),
]


@pytest.fixture(scope="module")
def model(tiny):
    return V41.load(tiny, "cuda", device="cuda", page_size=64)


@torch.inference_mode()
def test_steps_and_drafts(model):
    captures = Graphs()
    eager = EagerStep(model.network, *memories(model))
    graphs = StepGraphs(captures, model.network, *memories(model), rows=(1, 2, 4, 12, 25), widths=(2, 3))
    drafts = DraftGraphs(captures, model.network.dspark, graphs.pages, graphs.state, counts=(1, 2, 3))
    eager_drafts = EagerDraft(model.network.dspark, eager.pages, eager.state)
    for step in (eager, graphs):
        step.state.reset(torch.arange(5, device="cuda"))
    for turn in range(3):
        for rows in batches(model):
            if int(rows.positions.max()) < 128:
                rows = dataclasses.replace(rows, page_table=rows.page_table[:, :2])
            assert torch.equal(eager(rows), graphs(rows))
            assert torch.equal(eager.pages.pages[1:], graphs.pages.pages[1:])
            assert torch.equal(eager.state.rings[:, 1:], graphs.state.rings[:, 1:])
            inputs = rows.token_ids[rows.last], rows.positions[rows.last] + 1, rows.slots
            for mine, wanted in zip(tensors(drafts(*inputs)), tensors(eager_drafts(*inputs)), strict=True):
                assert torch.equal(mine, wanted), turn


@torch.inference_mode()
def test_a_graph_is_one_launch(model):
    """Nothing of a captured step waits for the device or is computed on the host."""
    graphs = StepGraphs(Graphs(), model.network, *memories(model), rows=(6,), widths=(3,))
    rows = list(batches(model))[2]
    graphs(rows)
    torch.cuda.set_sync_debug_mode("error")
    try:
        graphs(rows)
    finally:
        torch.cuda.set_sync_debug_mode("default")
