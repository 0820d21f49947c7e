"""Which exchange the ranks of a server use: the vendor's ops on an Ascend that has them, else that of every device."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from deepinfer_plugin.kernels.ascend import dispatch
from deepinfer_plugin.model.dispatched import Dispatched
from deepinfer_plugin.runtime.parallel import exchange_of


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
