"""What runs on the device: bit-equal to the CPU, and without a word from the host."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch

from deepinfer_plugin.runtime.shared_noise import Draws, draft
from deepinfer_plugin.speculative.acceptance import accept
from deepinfer_plugin.speculative.planner import allocate, survival

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
K, V = 5, 129_280


def requests(count: int = 64):
    torch.manual_seed(0)
    rows = torch.randint(1, K + 2, (count,))
    cu_rows = torch.cat([torch.zeros(1, dtype=torch.int64), rows.cumsum(0)])
    drafts = torch.randint(0, 3, (count, K))
    return torch.randint(0, 3, (int(cu_rows[-1]),)), cu_rows, drafts


def drawing(count: int = 64):
    """Logits of a head, positions, and how the requests sample."""
    limits = torch.rand(3, count) / 2 + 0.5
    draws = Draws(
        torch.randint(0, 2**62, (count,)), torch.randint(1, 90, (count,)), limits[0], limits[1], limits[2] / 50
    )
    return torch.randn(count, V) * 4, torch.arange(count) * 7, draws


def test_equal_to_the_cpu_and_never_waiting():
    confidences, limits = torch.rand(512, K), torch.randint(0, K + 1, (512,))
    contexts = torch.randint(0, 100_000, (512,))
    block = requests()
    gpu = [tensor.cuda() for tensor in (confidences, limits, contexts, *block)]

    def everything(confidences, limits, contexts, *block):
        survivals, broken = survival(confidences)
        lengths = allocate(survivals, 1400, limits, contexts, 3e-6)
        return survivals, broken, lengths, accept(*block).tokens

    everything(*gpu)  # first calls load kernels
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = everything(*gpu)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for mine, wanted in zip(found, everything(confidences, limits, contexts, *block), strict=True):
        assert torch.equal(mine.cpu(), wanted)


def test_fits_a_graph():
    confidences, contexts = torch.rand(512, K, device="cuda"), torch.randint(0, 100_000, (512,), device="cuda")

    def split():
        return allocate(survival(confidences)[0], 1400, contexts=contexts, price=3e-6)

    split()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        lengths = split()
    confidences.copy_(torch.rand(512, K))
    graph.replay()
    assert torch.equal(lengths, split()) and int(lengths.sum()) == 1400


def test_drafts_are_drawn_in_a_graph():
    """What a graph draws is what the CPU draws, but for exponentials that differ in the last bit."""
    logits, positions, draws = drawing()
    on_gpu = Draws(*(getattr(draws, field.name).cuda() for field in fields(Draws)))
    given = logits.cuda(), positions.cuda()
    draft(*given, on_gpu)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = draft(*given, on_gpu)
    given[0].copy_(logits.flip(0))
    graph.replay()
    assert (found.cpu() == draft(logits.flip(0), positions, draws)).float().mean() > 0.95
