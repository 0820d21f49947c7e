"""The network's ``Parallel`` over SGLang's process groups."""

from __future__ import annotations

import logging
import os
import platform
import zlib
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from sglang.srt.runtime_context import get_parallel

from deepinfer_plugin.kernels.ascend import dispatch
from deepinfer_plugin.model.captured import Captured
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
        travelling=exchange_of(everyone.device_group),
        fixed=fixed_of(world, torch.get_default_device()),
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


def fixed_of(world: TorchGroup, device: torch.device) -> partial[Captured] | None:
    """What a forward that is captured sends between ranks, where they can write to each other's memory; None on GPUs
    that cannot, which a warning says, and on other devices. All ranks call it."""
    if device.type != "cuda":
        return None
    from deepinfer_plugin.kernels.cuda.peers import PeerMemory

    memory, problem = None, _unreachable(world, device)
    if problem is None:
        try:
            memory = PeerMemory(world.device_group, device)
        except RuntimeError as error:
            problem = str(error).partition("\n")[0]
        if any(failed for (failed,) in world.host_gather([problem is not None])):
            problem = problem or "another rank failed to map it"
    if problem is not None:
        logger.warning("no CUDA graphs, steps run op by op: ranks cannot write to each other's memory: %s", problem)
        return None
    return partial(Captured, peers=memory)


def _unreachable(world: TorchGroup, device: torch.device) -> str | None:
    """Why ranks cannot map each other's memory, as far as that can be asked before it is tried; alike on all ranks."""
    visible = {_name(index): index for index in range(torch.cuda.device_count())}
    everybody = world.host_gather([zlib.crc32(platform.node().encode()), _name(device)])
    own = visible[_name(device)]
    others = [visible[name] for _, name in everybody if name in visible and visible[name] != own]
    refused = not all(torch.cuda.can_device_access_peer(own, other) for other in others)
    if any(refusal for (refusal,) in world.host_gather([refused])):
        return "there is no peer access between their GPUs"
    return "they are on several hosts" if len({host for host, _ in everybody}) > 1 else None


def _name(device: torch.device | int) -> int:
    """A number that tells a GPU from others, in whatever order a process sees them."""
    return zlib.crc32(str(torch.cuda.get_device_properties(device).uuid).encode())


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
