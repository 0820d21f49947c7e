"""The balancer of a server."""

from __future__ import annotations

import threading
from pathlib import Path

from sglang.srt.runtime_context import get_context, get_observability

from deepinfer_plugin.eplb import layout_file
from deepinfer_plugin.eplb.balancer import Balancer, Terms
from deepinfer_plugin.eplb.export import Exporter
from deepinfer_plugin.eplb.solver import ChildSolver, SolverProcess
from deepinfer_plugin.expert_arguments import ExpertArguments
from deepinfer_plugin.model.config import V41Config
from deepinfer_plugin.model.layout import Layout
from deepinfer_plugin.model.network import Network
from deepinfer_plugin.model.torch_group import TorchGroup
from deepinfer_plugin.settings import Settings


def layout_of_server(settings: Settings, config: V41Config, world: TorchGroup) -> Layout | None:
    """Where experts lie at first, the same on every rank: rank 0 reads the file. None: as without any flag."""
    given = ExpertArguments.of(get_context().server_args)
    if given.as_usual:
        return None
    return world.from_first(given.layout(config, world.size, settings) if world.rank == 0 else None)


def balancer_of_server(network: Network, settings: Settings) -> Balancer | None:
    """None without ``--enable-eplb``. Nothing moves before it is started."""
    given = ExpertArguments.of(get_context().server_args)
    if not given.balanced:
        return None
    config, ranks = network.config, network.parallel.place.experts
    path = Path(settings.expert_layout or layout_file.default_path(config, ranks.of, given.redundant))

    def keep(layout: Layout) -> None:  # a folder over a network may take its time
        threading.Thread(target=layout_file.write, args=(path, layout, config), name="eplb-layout").start()

    process = SolverProcess(shuffled=settings.shuffle_experts)
    balancer = Balancer(
        network, Terms(given.interval, settings.expert_chunk_kib << 10), lambda: ChildSolver(process), settled=keep
    )
    if ranks.index == 0 and get_observability().enable_metrics:
        balancer.report = Exporter({name: each.metrics for name, each in balancer.sets.items()}).update
    return balancer
