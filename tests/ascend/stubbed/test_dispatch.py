"""Expert outputs over ranks where the real torch_npu is: shapes and names of its ops on ``meta``, with ranks that have
no rows; no plain operation that torch_npu would hand to the CPU; no result without a device."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from deepinfer_plugin.kernels.ascend import dispatch
from deepinfer_plugin.kernels.reference import split
from deepinfer_plugin.model.dispatched import TAIL, Dispatched
from deepinfer_plugin.model.expert_map import ExpertMap
from deepinfer_plugin.model.parallel import Alone, Ranks

from .test_adapters import BF16, EXPERTS, F32, I64, TOPK, H, Recorder, has_kernel, t

SIZE = 8


class Member(Alone):
    """One of eight whose others answer as it does itself."""

    def __init__(self, rank: int):
        self.rank, self.size = rank, SIZE

    def all_gather(self, x):
        return x.expand(SIZE, *x.shape)


class Every:
    """Experts that give back what they get, some of them in two slots."""

    def __init__(self, device: str):
        self.map = ExpertMap(np.arange(EXPERTS + SIZE)[None] % EXPERTS, EXPERTS, SIZE)
        for table in ("home", "shared", "replicas"):
            setattr(self.map, table, getattr(self.map, table).to(device))
        self.slots = self.map.slots
        self.ops = SimpleNamespace(choices={"assign_slots": "ascend"}, assign_slots=split.assign_slots)

    def assign(self, ids):
        return self.map.assign(self.ops, 0, ids)

    def __call__(self, x, weights, ids):
        assert x.shape[0] == weights.shape[0] == ids.shape[0] and weights.dtype == F32 and ids.dtype == I64
        return (x * (ids >= 0)).to(F32) * weights


class Loop:
    """A courier that brings every row back to who sent it, and room for the rows of others."""

    def rows(self, hidden, dtype):
        return 40

    def send(self, x, ranks, live):
        return torch.nn.functional.pad(x, (0, 0, 0, 40 * (SIZE - 1))), live.sum()[None], None

    def back(self, results, ranks, live, sent):
        return results[: ranks.shape[0]]


def given(count: int, device: str) -> tuple[torch.Tensor, ...]:
    ids = torch.arange(count * TOPK, device=device).view(count, TOPK) % EXPERTS
    return torch.empty(count, H, dtype=BF16, device=device), torch.empty(count, TOPK, device=device), ids


def exchange(rank: int, counts: list[int], courier) -> Dispatched:
    return Dispatched(Ranks(Alone(), Member(rank)), counts, courier)


@pytest.mark.parametrize("counts", [[6] * 8, [0, 1, 0, 64, 3, 0, 0, 2], [0, 0, 0, 0, 0, 0, 0, 1]])
@pytest.mark.parametrize("rank", [0, 3, 7])
def test_shapes_and_dtypes_with_idle_ranks(rank, counts):
    courier = dispatch.Dispatch("experts", rank, SIZE, 16 << 20)
    result = exchange(rank, counts, courier).routed(Every("meta"), *given(counts[rank], "meta"))
    assert result.shape == (counts[rank], H) and result.dtype == F32


@pytest.mark.parametrize("rows", [1, 78, 512])
def test_the_ops_themselves(rows):
    courier, width = dispatch.Dispatch("experts", 5, SIZE, 16 << 20), H + TAIL
    ranks, live = t(rows, dtype=torch.int32), t(rows, dtype=torch.bool)
    arrived, counts, sent = courier.send(t(rows, width), ranks, live)
    assert arrived.shape == (rows * SIZE, width) and arrived.dtype == BF16
    assert counts.shape == (1,) and counts.dtype == I64
    assert courier.back(arrived, ranks, live, sent).shape == (rows, width)
    assert dispatch.there()


def test_what_is_wrong_is_refused():
    courier = dispatch.Dispatch("experts", SIZE, SIZE, 16 << 20)
    with pytest.raises(RuntimeError, match="ep_rank_id"):
        courier.send(t(4, H), t(4, dtype=torch.int32), t(4, dtype=torch.bool))


def test_every_plain_operation_has_an_npu_kernel():
    inside = Recorder()
    with inside:
        exchange(2, [5, 0, 20, 7, 0, 0, 0, 1], Loop()).routed(Every("cpu"), *given(20, "cpu"))
    missing = {seen for seen in inside.seen if seen.startswith("aten::") and not has_kernel(seen)}
    assert inside.seen and not missing, f"torch_npu would hand {', '.join(sorted(missing))} to the CPU"


def test_compute_raises_on_the_stub():
    courier = dispatch.Dispatch("experts", 0, SIZE, 16 << 20)
    device = {"device": "npu"}
    with pytest.raises(RuntimeError):
        courier.send(
            torch.empty(4, H, dtype=BF16, **device),
            torch.empty(4, dtype=torch.int32, **device),
            torch.empty(4, dtype=torch.bool, **device),
        )
