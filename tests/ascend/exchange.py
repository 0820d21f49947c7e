"""torch_npu's expert-parallel ops as documented, between the threads of one process: the half of ``documented`` that
needs other ranks. What a rank gets and has no use for is NaN, and so is the result of a row that went nowhere."""

from __future__ import annotations

import torch
from torch import Tensor

from ..parallel.threads import Meeting

COMMUNICATORS: dict[str, Meeting] = {}
CALLS: list[int] = []  # rows of each call of rank 0


def npu_moe_distribute_dispatch_v2(
    x: Tensor,
    expert_ids: Tensor,
    group_ep: str,
    ep_world_size: int,
    ep_rank_id: int,
    moe_expert_num: int,
    *,
    x_active_mask: Tensor,
    global_bs: int,
    expert_token_nums_type: int,
) -> tuple[Tensor, ...]:
    rows, choices = expert_ids.shape
    assert 0 < rows <= 512 and 1024 <= x.shape[1] <= 8192 and 0 < choices <= 16 and expert_token_nums_type == 1
    assert global_bs == rows * ep_world_size and moe_expert_num % ep_world_size == 0
    assert expert_ids.dtype == torch.int32 and expert_ids.min() >= 0 and expert_ids.max() < moe_expert_num
    active = int(x_active_mask.sum())
    assert x_active_mask[:active].all(), "rows that go anywhere come first"
    if ep_rank_id == 0:
        CALLS.append(rows)
    everybody = COMMUNICATORS[group_ep].all(ep_rank_id, (x, expert_ids, active))
    assert len({part[0].shape for part in everybody}) == 1, "ranks differ in their rows"
    local = moe_expert_num // ep_world_size
    found = [
        (expert, source, row, choice)
        for expert in range(ep_rank_id * local, (ep_rank_id + 1) * local)
        for source, (_, ids, live) in enumerate(everybody)
        for row, choice in (ids[:live] == expert).nonzero().tolist()
    ]
    capacity = global_bs * min(local, choices)
    arrived = x.new_full((capacity, x.shape[1]), torch.nan)
    whence = torch.zeros(capacity * 128, dtype=torch.int32)
    for place, (_, source, row, choice) in enumerate(found):
        arrived[place] = everybody[source][0][row]
        whence[place * 128 : place * 128 + 3] = torch.tensor([source, row, choice])
    counts = torch.tensor([sum(f[0] == ep_rank_id * local + e for f in found) for e in range(local)])
    received = torch.full((ep_world_size * local,), len(found), dtype=torch.int32)
    nothing = torch.empty(0)
    return arrived, nothing, whence, counts, received, nothing, nothing


def npu_moe_distribute_combine_v2(
    expand_x: Tensor,
    expert_ids: Tensor,
    assist_info_for_combine: Tensor,
    ep_send_counts: Tensor,
    expert_scales: Tensor,
    group_ep: str,
    ep_world_size: int,
    ep_rank_id: int,
    moe_expert_num: int,
    *,
    x_active_mask: Tensor,
    global_bs: int,
) -> Tensor:
    local = moe_expert_num // ep_world_size
    assert expand_x.shape[0] == global_bs * min(local, expert_ids.shape[1])
    assert expert_scales.shape == expert_ids.shape and expert_scales.dtype == torch.float32
    whence = assist_info_for_combine.view(-1, 128)[: int(ep_send_counts[0]), :3].tolist()
    total = torch.zeros(expert_ids.shape[0], expand_x.shape[1])
    for results, places in COMMUNICATORS[group_ep].all(ep_rank_id, (expand_x, whence)):
        for place, (source, row, choice) in enumerate(places):
            if source == ep_rank_id:
                total[row] += expert_scales[row, choice] * results[place].float()
    return total.masked_fill(~x_active_mask[:, None], torch.nan).to(expand_x.dtype)
