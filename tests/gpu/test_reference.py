"""The torch reference on an NVIDIA GPU, against itself on the CPU: what a kernel of ours is going to be compared with
there."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from deepinfer_plugin.kernels import select
from deepinfer_plugin.model import V41

from ..kernels.cases import BUILDERS, Case, Weights, make
from ..kernels.test_contract import assert_close

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU"),
]


def on_gpu(case: Case) -> Case:
    def move(value):
        if isinstance(value, Weights):
            return Weights(value.prepare, tuple(move(arg) for arg in value.args))
        return value.cuda() if isinstance(value, Tensor) else value

    return Case(case.op, {name: move(value) for name, value in case.args.items()}, case.rows, case.written, case.ulps)


@pytest.fixture(scope="module")
def tables():
    return select("cuda", "reference"), select("cpu", "reference")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "float32"])
@pytest.mark.parametrize("name", BUILDERS)
def test_op_agrees_with_the_cpu(tables, name, dtype):
    gpu, cpu = tables
    for rows in (1, 33, 300):
        case = make(name, dtype, rows, seed=rows)
        for actual, expected in zip(on_gpu(case).run(gpu), case.run(cpu), strict=True):
            assert actual.device.type == "cuda"
            assert_close(actual.cpu(), expected, case.ulps)


@pytest.mark.parametrize("profile", ["model", "deepinfer", "float32"])
def test_network_agrees_with_the_cpu(tiny, profile):
    gpu, cpu = V41.load(tiny, profile=profile, device="cuda"), V41.load(tiny, profile=profile)
    ids = torch.randint(10, cpu.config.vocab_size - 10, (300,), generator=torch.Generator().manual_seed(3))
    assert torch.equal(gpu.engram_rows(ids).cpu(), cpu.engram_rows(ids))
    expected = cpu.logits(ids)
    error = (gpu.logits(ids).cpu() - expected).norm(dim=-1) / expected.norm(dim=-1)
    print(f"\n{profile}: relative error of logits, median {error.median():.2e}, max {error.max():.2e}")
    assert error.median() <= 1e-5
    assert gpu.generate(ids[:100], 24, ignore_eos=True) == cpu.generate(ids[:100], 24, ignore_eos=True)


def test_chunks_do_not_change_a_bit(tiny):
    model = V41.load(tiny, device="cuda")
    ids = torch.randint(10, model.config.vocab_size - 10, (260,), generator=torch.Generator().manual_seed(4))
    whole, parts = model.session(300).extend(ids), model.session(300).extend(ids, chunk=16)
    assert torch.equal(whole, parts)
