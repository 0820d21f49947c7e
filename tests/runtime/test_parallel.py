"""Which exchange the ranks of a server use: the vendor's ops on an Ascend that has them, memory of peers in captured
forwards on GPUs that can write to it, else that of every device."""

from __future__ import annotations

import platform
import zlib
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from deepinfer_plugin.kernels.ascend import dispatch
from deepinfer_plugin.kernels.cuda import peers
from deepinfer_plugin.model.captured import Captured
from deepinfer_plugin.model.dispatched import Dispatched
from deepinfer_plugin.runtime import parallel
from deepinfer_plugin.runtime.parallel import exchange_of, fixed_of


@pytest.fixture
def made(monkeypatch):
    """An Ascend as torch shows it; the process groups that were made."""
    made = []

    def new_group(ranks, backend):
        names = SimpleNamespace(get_hccl_comm_name=lambda rank: f"communicator of rank {rank}")
        made.append((ranks, backend))
        return SimpleNamespace(_get_backend=lambda device: names)

    monkeypatch.setattr(torch, "npu", SimpleNamespace(is_available=lambda: True), raising=False)
    monkeypatch.setattr(torch, "device", lambda name: name)
    monkeypatch.setattr(dispatch, "there", lambda: True)
    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [0, 1, 2, 3])
    monkeypatch.setattr(dist, "get_rank", lambda group=None: 6 if group is None else 2)
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 4)
    monkeypatch.setenv("HCCL_BUFFSIZE", "16")
    return made


def test_an_ascend_with_the_ops(made):
    """A communicator of its own: the ops allow nothing else in theirs."""
    exchange = exchange_of("everyone")
    assert made == [([0, 1, 2, 3], "hccl")] and exchange.func is Dispatched
    courier = exchange.keywords["courier"]
    assert (courier.name, courier.rank, courier.size) == ("communicator of rank 6", 2, 4)
    assert courier.buffer == 16 << 20


def test_an_ascend_without_them(made, monkeypatch):
    monkeypatch.setattr(dispatch, "there", lambda: False)
    assert exchange_of("everyone") is None and made == []


def test_another_device():
    assert exchange_of("everyone") is None


# ---- captured forwards -----------------------------------------------------------------------------------------------


class TwoHosts:
    """A ``Group`` of this rank and one that says ``theirs`` in turn."""

    rank, size, device_group = 0, 2, "everyone"

    def __init__(self, *theirs):
        self.theirs = list(theirs)

    def host_gather(self, numbers):
        return [list(numbers), self.theirs.pop(0)]


@pytest.fixture
def gpus(monkeypatch):
    """Two GPUs with peer access; ``made``: what memory of peers was made of."""
    found = SimpleNamespace(made=[], access=True, error=None)

    def memory(group, device):
        found.made.append((group, device))
        if found.error is not None:
            raise found.error
        return "memory"

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=number(index)))
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda here, there: found.access)
    monkeypatch.setattr(peers, "PeerMemory", memory)
    return found


def number(device):
    return getattr(device, "index", device)


def named(index):
    return parallel._name(index)


GPU, HOST = torch.device("cuda", 0), zlib.crc32(platform.node().encode())


def test_gpus_that_write_to_each_other_capture(gpus, caplog):
    fixed = fixed_of(TwoHosts([HOST, named(1)], [0], [0]), GPU)
    assert fixed.func is Captured and fixed.keywords == {"peers": "memory"} and gpus.made == [("everyone", GPU)]
    assert not caplog.records and fixed_of(TwoHosts(), torch.device("cpu")) is None


@pytest.mark.parametrize(
    ("theirs", "access", "error", "why"),
    [
        ([[HOST, 1], [0], [0]], False, None, "there is no peer access between their GPUs"),
        ([[HOST, 1], [1], [0]], True, None, "there is no peer access between their GPUs"),
        ([[HOST + 1, 7], [0], [0]], True, None, "they are on several hosts"),
        ([[HOST, 1], [0], [1]], True, None, "another rank failed to map it"),
        ([[HOST, 1], [0], [0]], True, RuntimeError("CUDA: no\nat ..."), "CUDA: no"),
    ],
)
def test_gpus_that_cannot_run_op_by_op(theirs, access, error, why, gpus, caplog):
    """Which one warning says, on every rank."""
    gpus.access, gpus.error = access, error
    theirs = [[HOST, named(1)] if said == [HOST, 1] else said for said in theirs]
    assert fixed_of(TwoHosts(*theirs), GPU) is None
    (record,) = caplog.records
    assert record.levelname == "WARNING" and record.getMessage().endswith(f"each other's memory: {why}")
