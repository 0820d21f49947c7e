"""What runs on the device: bit-equal to the CPU, and without a word from the host."""

from __future__ import annotations

import pytest
import torch

from deepinfer_plugin.speculative.acceptance import distribution, draw, verify, verify_chosen
from deepinfer_plugin.speculative.planner import allocate, survival
from deepinfer_plugin.speculative.randomness import DRAFT, uniform

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
K, V = 5, 129_280


def requests(count: int = 64):
    torch.manual_seed(0)
    rows = torch.randint(1, K + 2, (count,))
    cu_rows = torch.cat([torch.zeros(1, dtype=torch.int64), rows.cumsum(0)])
    total = int(cu_rows[-1])
    base = torch.randn(V) * 4  # target and head agree enough to accept some drafts
    target = base + torch.randn(total, V) * 0.5
    probs = distribution(target, torch.full((total,), 0.8), None, torch.full((total,), 0.9))
    head = distribution(base + torch.randn(K, V) * 0.5, torch.full((K,), 0.8))
    seeds, positions = torch.arange(count), torch.arange(count) * 7
    noise = uniform(seeds[:, None], positions[:, None] + torch.arange(K), DRAFT, 3)
    drafts = torch.stack([draw(head[j].expand(count, -1), noise[:, j]) for j in range(K)], 1)
    return probs, cu_rows, drafts, head.expand(count, -1, -1), seeds, positions


def test_equal_to_the_cpu_and_never_waiting():
    confidences, limits = torch.rand(512, K), torch.randint(0, K + 1, (512,))
    contexts = torch.randint(0, 100_000, (512,))
    block, chosen = requests(), torch.randint(0, V, (400,))
    gpu = [tensor.cuda() for tensor in (confidences, limits, contexts, chosen, *block)]

    def everything(confidences, limits, contexts, chosen, *block):
        survivals, broken = survival(confidences)
        lengths = allocate(survivals, 1400, limits, contexts, 3e-6)
        return survivals, broken, lengths, verify(*block).tokens, verify_chosen(chosen, block[1], block[2]).tokens

    everything(*gpu)  # first calls load kernels
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = everything(*gpu)
        distribution(gpu[4], gpu[4].new_ones(len(gpu[4])), None, gpu[4].new_full((len(gpu[4]),), 0.9))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for mine, wanted in zip(found, everything(confidences, limits, contexts, chosen, *block), strict=True):
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
