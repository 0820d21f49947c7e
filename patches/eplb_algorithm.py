"""``--eplb-algorithm deepinfer``: our placement for SGLang's own expert load balancing, for any MoE model.

SGLang takes any text as the algorithm and looks it up in a closed enum; the name and the call that it selects are
answered here. SGLang's dispatch splits tokens evenly over replicas unless it is ``lp``, and the placement is made for
the one it will meet. Placements come from floating point, so all ranks take rank 0's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .hook import Hook

ALGORITHM = "deepinfer"


def compute_algorithm(original: Callable[..., Any], raw_algorithm: str, *args: Any, **kwargs: Any) -> Any:
    return ALGORITHM if raw_algorithm == ALGORITHM else original(raw_algorithm, *args, **kwargs)


def rebalance_experts(original: Callable[..., Any], *args: Any, algorithm: Any, **kwargs: Any) -> Any:
    return _place(*args, **kwargs) if algorithm == ALGORITHM else original(*args, algorithm=algorithm, **kwargs)


def _place(
    tokens_per_expert: Any,
    num_physical_experts: int,
    num_local_physical_experts: int,
    num_groups: int | None,
    num_nodes: int,
) -> tuple[Any, Any, Any]:
    """SGLang's three tables, int64: physical to logical [layers, physical], logical to physical [layers, experts, most
    replicas] padded with -1, replicas [layers, experts]. tokens_per_expert: [steps, layers, experts]."""
    import torch
    from sglang.srt.eplb.expert_location import get_global_expert_location_metadata
    from sglang.srt.runtime_context import get_exec

    from ..eplb.policy import place

    counts = tokens_per_expert.cpu().numpy()
    served = counts.sum(axis=(1, 2)) > 0  # the recorder's ring may not be full
    counts = counts[served] if served.any() else counts[:1]
    metadata = get_global_expert_location_metadata()
    current = None if metadata is None else metadata.physical_to_logical_map_cpu.numpy()
    if current is not None and current.shape != (counts.shape[1], num_physical_experts):
        current = None
    ranks = num_physical_experts // num_local_physical_experts
    even_split = get_exec().moe.ep_dispatch_algorithm != "lp"
    placed = place(counts, num_physical_experts, ranks, num_nodes, current, even_split=even_split)
    physical_to_logical = torch.from_numpy(placed).to(tokens_per_expert.device)
    if torch.distributed.is_initialized():
        torch.distributed.broadcast(physical_to_logical, src=0)
    physical_to_logical = physical_to_logical.cpu()
    replicas = torch.zeros(counts.shape[1:], dtype=torch.int64)
    replicas.scatter_add_(1, physical_to_logical, torch.ones_like(physical_to_logical))
    # Sorted by expert, the replicas of one stand in a row; their places in it number them.
    experts, physical = physical_to_logical.sort(dim=1, stable=True)
    first = (replicas.cumsum(1) - replicas).gather(1, experts)
    which = torch.arange(num_physical_experts) - first
    logical_to_physical = torch.full((*replicas.shape, int(replicas.max())), -1)
    logical_to_physical[torch.arange(len(experts))[:, None], experts, which] = physical
    return physical_to_logical, logical_to_physical, replicas


NAME = Hook(
    "eplb_name",
    "sglang.srt.eplb.eplb_algorithms.compute_algorithm",
    compute_algorithm,
    "--eplb-algorithm deepinfer is not known without it",
    required=False,
)
REBALANCE = Hook(
    "eplb_rebalance",
    "sglang.srt.eplb.eplb_algorithms.rebalance_experts",
    rebalance_experts,
    "--eplb-algorithm deepinfer places nothing without it",
    required=False,
)
