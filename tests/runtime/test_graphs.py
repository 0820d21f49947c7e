"""Padded steps compute what eager ones do, to the bit. Graphs themselves need a GPU (tests/gpu): here a capture is a
function that runs again."""

import dataclasses
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from deepinfer_plugin.model import V41
from deepinfer_plugin.model.memory import PagePool, StatePool
from deepinfer_plugin.model.rows import Rows
from deepinfer_plugin.runtime.graphs import (
    DraftGraphs,
    EagerDraft,
    EagerStep,
    StepGraphs,
    row_counts,
    table_widths,
    wanted,
)
from deepinfer_plugin.runtime.shared_noise import Draws
from deepinfer_plugin.speculative.profile_step import step_curve

PAGE = 64


class Replayed:
    """What a graph does: the same work on whatever its inputs hold now, into the same results."""

    def __init__(self, work):
        self.work, self.results, self.replays = work, work(), 0

    def replay(self):
        self.replays += 1
        for mine, fresh in zip(tensors(self.results), tensors(self.work()), strict=True):
            mine.copy_(fresh)


class Captures:
    def __init__(self):
        self.all = []

    def capture(self, work):
        self.all.append(Replayed(work))
        return self.all[-1], self.all[-1].results


def tensors(results):
    return [results] if isinstance(results, torch.Tensor) else [results.tokens, results.confidence]


@pytest.fixture(scope="module")
def model(tiny):
    return V41.load(tiny, page_size=PAGE)


def memories(model):
    torch.manual_seed(0)
    pages = PagePool.allocate(model.page_layout, 9, model.device)
    pages.pages.random_(0, 256)
    return pages, StatePool(model.state_layout, 5, model.device)


def batches(model):
    """Rows of growing sequences: prefills, ragged verifications, decode, of one to three requests."""
    tables = {1: [3, 5, 0], 2: [8, 1, 2], 4: [7, 0, 0]}
    generator, at = torch.Generator().manual_seed(1), dict.fromkeys(tables, 0)
    for lengths in ({1: 30, 2: 1}, {2: 30}, {1: 1, 2: 1}, {1: 6, 2: 2, 4: 1}, {4: 1}, {1: 6, 2: 6, 4: 6}, {2: 22}):
        slots = list(lengths)
        ids = torch.randint(3, model.config.vocab_size, (sum(lengths.values()),), generator=generator)
        table = torch.tensor([tables[slot] for slot in slots], device=model.device)
        yield Rows.build(ids.to(model.device), [at[slot] for slot in slots], list(lengths.values()), slots, table)
        for slot, length in lengths.items():
            at[slot] += length


def test_row_counts():
    for most in range(1, 200):
        counts = row_counts(most)
        assert counts[-1] == most and list(counts) == sorted(set(counts)) and counts[0] == 1
        assert all(b <= 2 * a for a, b in pairwise(counts))


def test_table_widths():
    assert table_widths(1 << 20, 128) == (32, 512, 8192)
    assert table_widths(4097, 64) == (64, 65)
    assert table_widths(100, 64) == (2,)


@torch.inference_mode()
def test_padded_steps_equal_eager_ones(model):
    """Whatever was in the buffers before, and in the junk slot and page."""
    captures = Captures()
    eager = EagerStep(model.network, *memories(model))
    graphs = StepGraphs(captures, model.network, *memories(model), rows=(1, 4, 12, 25), widths=(2, 3))
    for step in (eager, graphs):
        step.state.reset(torch.arange(5))
    for rows in batches(model):
        narrow = dataclasses.replace(rows, page_table=rows.page_table[:, :2])
        rows = narrow if int(rows.positions.max()) < 2 * PAGE else rows
        assert torch.equal(eager(rows), graphs(rows))
        assert torch.equal(eager.pages.pages[1:], graphs.pages.pages[1:])
        assert torch.equal(eager.state.tags[:, 1:], graphs.state.tags[:, 1:])
        assert torch.equal(eager.state.rings[:, 1:], graphs.state.rings[:, 1:])
    assert sum(each.replays for each in captures.all) == 5  # two steps have more rows than were captured


@torch.inference_mode()
def test_what_a_step_returns_stays(model):
    graphs = StepGraphs(Captures(), model.network, *memories(model), rows=(31,), widths=(3,))
    graphs.state.reset(torch.arange(5))
    first = next(batches(model))
    kept = graphs(first)
    copy = kept.clone()
    assert not torch.equal(graphs(dataclasses.replace(first, token_ids=first.token_ids + 1)), copy)
    assert torch.equal(kept, copy)


@torch.inference_mode()
def test_padded_drafts_equal_eager_ones(model):
    pages, state = memories(model)
    step = EagerStep(model.network, pages, state)
    state.reset(torch.arange(5))
    for rows in batches(model):
        step(rows)
    captures = Captures()
    eager = EagerDraft(model.network.dspark, pages, state)
    graphs = DraftGraphs(captures, model.network.dspark, pages, state, counts=(1, 2), draws=True)
    draws = Draws(
        torch.tensor([5, -6, 7]), torch.tensor([1 << 30, 1, 9]), *torch.tensor([[0.9] * 3, [1.0] * 3, [0.0] * 3])
    )
    found = set()
    for slots, anchors, positions in (([2], [7], [66]), ([4, 1], [9, 8], [8, 43]), ([1, 2, 4], [5, 6, 7], [43, 66, 8])):
        inputs = [torch.tensor(each) for each in (anchors, positions, slots)]
        for how in (None, draws.at(slice(len(slots))), None):
            drafts = graphs(*inputs, how)
            for mine, right in zip(tensors(drafts), tensors(eager(*inputs, how)), strict=True):
                assert torch.equal(mine, right)
            found.add(tuple(drafts.tokens[0].tolist()))
    assert len(found) == 6, "drawn drafts are others than greedy ones"
    assert sum(each.replays for each in captures.all) == 2 * 3


@torch.inference_mode()
def test_a_short_server_is_measured_within_its_tables(model, tmp_path):
    """Its page tables are narrower than the context that a row's price is usually measured with."""
    step = StepGraphs(Captures(), model.network, *memories(model), rows=(1, 6, 12), widths=(3,))
    curve = step_curve(step, 12, tmp_path)
    assert curve.padded and curve.rows == (1, 6, 12) and curve.row_context is not None


def runner(device="cuda", profile=torch.bfloat16, ops="cuda", peers=True, **given):
    flags = {"disable_cuda_graph": False, "disable_decode_cuda_graph": False, "cuda_graph_backend_decode": None}
    network = SimpleNamespace(
        ops=SimpleNamespace(choices={"linear": "cuda", "moe_experts": ops}),
        profile=SimpleNamespace(dtype=profile),
        parallel=SimpleNamespace(captures=peers),
    )
    server_args = SimpleNamespace(**flags | {"cuda_graph_config": None} | given)
    return SimpleNamespace(device=device, model=SimpleNamespace(network=network), server_args=server_args)


@pytest.mark.parametrize(
    ("changed", "captures"),
    [
        ({}, True),
        ({"device": "cpu"}, False),
        ({"profile": torch.float32}, False),
        ({"ops": "reference"}, False),
        ({"peers": False}, False),
        ({"disable_cuda_graph": True}, False),
        ({"disable_decode_cuda_graph": True}, False),
        ({"cuda_graph_backend_decode": "disabled"}, False),
        ({"cuda_graph_config": {"decode": {"backend": "disabled"}}}, False),
        ({"cuda_graph_config": {"prefill": {"backend": "disabled"}}}, True),
    ],
)
def test_when_to_capture(changed, captures):
    assert wanted(runner(**changed)) == captures
