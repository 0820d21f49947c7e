"""Expert outputs by torch_npu's ops as documented: the bits of one rank, whatever ranks have rows, none included."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

from deepinfer_plugin.kernels import Ops
from deepinfer_plugin.kernels.ascend import dispatch
from deepinfer_plugin.model.dispatched import TAIL, Dispatched
from deepinfer_plugin.model.expert_map import ExpertMap
from deepinfer_plugin.model.parallel import Alone, Here, Ranks

from ..kernels.cases import Random
from ..parallel.threads import Meeting, ThreadGroup, run
from . import documented, exchange

WORLD, EXPERTS, TOPK, H, INNER = 4, 16, 3, 1024, 32
BUFFER = 1 << 20


ONCE = np.arange(EXPERTS)[None]  # where experts lie: each in one slot, in order
SPARE = np.array([[*range(4), 4, *range(4, 8), 0, *range(8, 12), 3, *range(12, 16), 0]])  # four of them twice or thrice


class Part:
    """The experts in the slots of one rank of ``WORLD``, or all of them."""

    def __init__(self, ops: Ops, weights, rank: int | None, placement=ONCE):
        self.map = ExpertMap(placement, EXPERTS, WORLD)
        self.map.counts = torch.zeros(1, EXPERTS, dtype=torch.int64)
        self.slots = self.map.slots
        held = range(EXPERTS) if rank is None else placement[0].reshape(WORLD, -1)[rank].tolist()
        self.ops, self.prepared = ops, ops.prepare_experts(*(w[list(held)].contiguous() for w in weights))

    def assign(self, ids):
        return self.map.assign(self.ops, 0, ids)

    def __call__(self, x, weights, ids):
        return self.ops.moe_experts(x, weights, ids, self.prepared, 10.0)


@pytest.fixture(scope="module")
def weights():
    r = Random(2, torch.bfloat16)
    return (*r.mxfp4(EXPERTS, 2 * INNER, H), *r.mxfp4(EXPERTS, H, INNER))


def rows(count: int, seed: int, busy: bool, dtype: torch.dtype = torch.bfloat16):
    """x, weights and expert ids; ``busy``: all of them of one rank."""
    r = Random(seed, dtype)
    pool = EXPERTS // WORLD if busy else EXPERTS
    ids = torch.rand(count, pool, generator=r.generator).argsort(1)[:, :TOPK]
    return r.normal(count, H), torch.rand(count, TOPK, generator=r.generator), ids


def routed(ops, weights, counts, busy=False, dtype=torch.bfloat16, placement=ONCE):
    """Each rank's own rows by the exchange and by one rank, for these rows of each attention group; calls made."""
    exchange.CALLS.clear()
    given = [rows(count, 10 + group, busy, dtype) for group, count in enumerate(counts)]
    size = WORLD // len(counts)
    groups = [Meeting(size) for _ in counts]

    def body(rank: int, meeting: Meeting):
        exchange.COMMUNICATORS["experts"] = meeting
        own = Alone() if size == 1 else ThreadGroup(groups[rank // size], rank % size)
        courier = dispatch.Dispatch("experts", rank, WORLD, BUFFER)
        ranks = Ranks(own, ThreadGroup(meeting, rank), travelling=partial(Dispatched, courier=courier))
        travelling = ranks.travelling(ranks, counts)
        x, w, ids = given[rank // size]
        part = Part(ops, weights, rank, placement)
        got = travelling.routed(part, x, w, ids)
        everybody = torch.bincount(torch.cat([ids.flatten() for _, _, ids in given]), minlength=EXPERTS)
        assert torch.equal(part.map.counts[0], everybody), "what a balancer sees is the same on every rank"
        want = travelling.own(Here(x.shape[0]).routed(Part(ops, weights, None), x, w, ids))
        return got, want

    with documented.installed():
        return run(WORLD, body), list(exchange.CALLS)


@pytest.mark.parametrize(
    "counts", [[5, 0, 23, 1], [0, 7], [9], [0, 0, 0, 2]], ids=["every rank its own", "pairs", "one group", "one row"]
)
@pytest.mark.parametrize("busy", [False, True], ids=["spread", "one rank's experts"])
def test_the_bits_are_those_of_one_rank(reference, weights, counts, busy):
    outcomes, calls = routed(reference, weights, counts, busy)
    for got, want in outcomes:
        assert got.dtype == torch.float32 and torch.equal(got, want)
    most = max(-(-count * len(counts) // WORLD) for count in counts)
    assert calls == [34] * -(-most * TOPK // 34), "every rank makes the same calls of the same size"


@pytest.mark.parametrize("counts", [[5, 0, 23, 1], [0, 7], [9]], ids=["every rank its own", "pairs", "one group"])
def test_replicas_share_the_rows(reference, weights, counts):
    for got, want in routed(reference, weights, counts, placement=SPARE)[0]:
        assert torch.equal(got, want)


def test_no_rows_anywhere(reference, weights):
    outcomes, calls = routed(reference, weights, [0, 0])
    assert calls == [] and all(got.shape == (0, H) for got, _ in outcomes)


def test_a_broken_row_breaks_no_other(reference, weights, monkeypatch):
    original = rows

    def broken(count, seed, busy, dtype):
        x, w, ids = original(count, seed, busy, dtype)
        x[:1] = torch.nan
        return x, w, ids

    monkeypatch.setitem(globals(), "rows", broken)
    (got, want), *_ = routed(reference, weights, [3, 2, 2, 2])[0]
    assert got[0].isnan().all() and torch.equal(got[1:], want[1:]) and not got[1:].isnan().any()


def test_what_the_ops_cannot_carry_travels_as_elsewhere(reference, weights):
    outcomes, calls = routed(reference, weights, [5, 2], dtype=torch.float32)
    assert calls == [] and all(torch.equal(got, want) for got, want in outcomes)


@pytest.mark.parametrize(
    ("hidden", "size", "mebibytes", "rows"),
    [
        (5120, 8, 16, 78),  # what the platform sets, released rows among eight
        (5120, 8, 128, 512),  # the ops' own bound
        (5120, 8, 0, 0),
        (192, 8, 16, 0),
        (5120, 1, 16, 0),
    ],
)
def test_rows_of_a_call(hidden, size, mebibytes, rows):
    courier = dispatch.Dispatch("experts", 0, size, mebibytes << 20)
    assert courier.rows(hidden + TAIL, torch.bfloat16) == rows
    assert courier.rows(hidden + TAIL, torch.float32) == 0


def test_the_buffer_is_what_the_runtime_was_told(monkeypatch):
    monkeypatch.setenv("HCCL_BUFFSIZE", "16")
    assert dispatch.buffer_bytes() == 16 << 20
    monkeypatch.delenv("HCCL_BUFFSIZE")
    assert dispatch.buffer_bytes() == 200 << 20
