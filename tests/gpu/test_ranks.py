"""Two ranks over NCCL, on two GPUs of a host: the bits of one rank, captured and op by op, also while experts move; the
same bits captured and op by op where heads are divided. Six layers of the released model's shapes with random weights
(``benchmarks/ranks_gpu.py``)."""

from __future__ import annotations

import pytest
import ranks_gpu
import torch

from deepinfer_plugin.kernels import cuda as provider

from . import ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < ranks_gpu.RANKS, reason="fewer than two GPUs"),
    pytest.mark.skipif(provider.unavailable(torch.device("cuda")) is not None, reason="no Hopper GPU"),
]
EXPERTS = 32


def test_the_bits_are_those_of_one_rank():
    for equal in ranks_gpu.run(ranks.forms, "cuda", ranks_gpu.cut(EXPERTS)):
        assert equal and all(equal.values()), equal


def test_the_experts_of_a_layer():
    for equal in ranks_gpu.run(ranks.layer, "cuda", ranks_gpu.cut(EXPERTS)):
        assert len(equal) == 6 and all(equal), equal


def test_experts_move():
    for found in ranks_gpu.run(ranks.moved, "cuda", ranks_gpu.cut(EXPERTS)):
        assert found["moved"] and found["same"] and all(found["same"])
        assert found["equal"] and all(found["equal"])
        assert found["sent"] <= ranks.CHUNK and found["bytes"] == found["wanted"]
