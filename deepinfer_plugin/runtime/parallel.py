"""The network's ``Parallel`` over SGLang's process groups."""

from __future__ import annotations

import logging
import os
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from sglang.srt.runtime_context import get_parallel

from deepinfer_plugin.kernels.ascend import dispatch
from deepinfer_plugin.model.config import V41Config
from deepinfer_plugin.model.dispatched import Dispatched
from deepinfer_plugin.model.parallel import Alone, Parallel, Ranks, Single
from deepinfer_plugin.model.torch_group import TorchGroup
from deepinfer_plugin.runtime.balancing import layout_of_server
from deepinfer_plugin.runtime.watchdog import Board, Watchdog, end_server
from deepinfer_plugin.settings import Settings

logger = logging.getLogger(__name__)


def parallel_of_server(settings: Settings, config: V41Config) -> Parallel:
    """The ranks of the server this process belongs to; from here on they watch each other.

    SGLang numbers its tensor-parallel ranks attention group by attention group, which is our order. Tensors go through
    its groups of the device, numbers through those of the host.
    """
    sizes = get_parallel()
    if sizes.tp_size == 1:
        return Single()
    everyone, group = sizes.tp_group, sizes.attn_tp_group
    world = TorchGroup(everyone.device_group, everyone.cpu_group)
    if settings.rank_patience_s:
        watchdog = _watch(world, settings.rank_patience_s)
        world.waiting = watchdog.waiting
    own: Any = Alone()
    if sizes.attn_tp_size > 1:
        own = TorchGroup(group.device_group, group.cpu_group, world.waiting)
    logger.info(
        "rank %d of %d (process %d) in attention group %d: heads divided by %d, experts by %d",
        world.rank,
        world.size,
        os.getpid(),
        world.rank // own.size,
        own.size,
        world.size,
    )
    return Ranks(
        own,
        world,
        layout=layout_of_server(settings, config, world),
        check=settings.check_ranks,
        exchange=exchange_of(everyone.device_group),
    )


def exchange_of(group: Any) -> partial[Dispatched] | None:
    """How expert outputs travel among the ranks of a process group, where the device has ops for that; None: as
    elsewhere. All ranks call it: they make a communicator that the ops have for themselves."""
    runtime = getattr(torch, "npu", None)
    if runtime is None or not runtime.is_available() or not dispatch.there():
        return None
    own = dist.new_group(dist.get_process_group_ranks(group), backend="hccl")
    name = own._get_backend(torch.device("npu")).get_hccl_comm_name(dist.get_rank())
    courier = dispatch.Dispatch(name, dist.get_rank(own), dist.get_world_size(own), dispatch.buffer_bytes())
    return partial(Dispatched, courier=courier)


def _watch(world: TorchGroup, patience_s: int) -> Watchdog:
    """One machine only: ranks on others could not see the board (``--nnodes`` is refused)."""
    path = world.from_first(Board.create(world.size) if world.rank == 0 else None)
    board = Board(path, world.size)
    world.host_gather([0])  # everybody has it open
    if world.rank == 0:
        path.unlink()
    watchdog = Watchdog(board, world.rank, patience_s, lambda blame: end_server(world.rank, blame))
    watchdog.start()
    return watchdog
