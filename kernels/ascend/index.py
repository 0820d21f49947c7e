"""The indexer. Selection sorts int32 keys that order scores as the contract does, so ties and NaN do not depend on how
a device compares floats."""

from __future__ import annotations

import torch
from torch import Tensor

from . import formats, places

CHUNK_BYTES = 256 << 20  # of dequantised keys at a time
LOOP_REQUESTS = 16  # up to so many requests, keys are dequantised once a request, and scored against every row

_UNREACHABLE = -(2**31)
_OTHER = _UNREACHABLE + 1  # reachable, but outside the candidate blocks
_LOWEST = _UNREACHABLE + 2  # a score of -inf or NaN that is nevertheless reachable
_FIRST = 2**31 - 1


def index_scores(
    query: Tensor,
    weight: Tensor,
    key: Tensor,
    key_scale: Tensor,
    page_table: Tensor,
    requests: Tensor,
    visible: Tensor,
    low_precision: bool,
) -> Tensor:
    rows, pages, groups = query.shape[0], page_table.shape[1], key.shape[1]
    width = pages * groups
    if rows == 0 or width == 0:
        return torch.full((rows, width), -torch.inf, dtype=query.dtype, device=query.device)
    rounds = low_precision and query.dtype == torch.bfloat16
    query = formats.index_dequant(*formats.index_cast(query))
    # Pages beyond what a request has written may be named by anything.
    page_table = page_table.clamp(0, key.shape[0] - 1)
    group = torch.arange(groups, device=key.device)
    step = max(1, CHUNK_BYTES // (4 * groups * query.shape[-1]))  # pages

    def keys(table: Tensor) -> Tensor:
        """table [..., p] -> float32 [..., p * G, D]."""
        page, at = torch.broadcast_tensors(table[..., None], group)
        return formats.index_dequant(places.read(key, page, at), places.read(key_scale, page, at)).flatten(-3, -2)

    parts = []
    if page_table.shape[0] <= LOOP_REQUESTS:
        for first in range(0, pages, step):
            part = _score(query, weight, keys(page_table[0, first : first + step]), rounds)
            for request in range(1, page_table.shape[0]):
                other = _score(query, weight, keys(page_table[request, first : first + step]), rounds)
                part = torch.where((requests == request)[:, None], other, part)
            parts.append(part)
    else:
        step = max(1, step // rows)
        for first in range(0, pages, step):
            parts.append(_score(query, weight, keys(page_table[requests, first : first + step]), rounds))
    scores = torch.cat(parts, -1)
    hidden = torch.arange(width, device=scores.device) >= visible[:, None]
    return scores.masked_fill(hidden, -torch.inf)


def _score(query: Tensor, weight: Tensor, keys: Tensor, rounds: bool) -> Tensor:
    """query float32 [R, heads, D], keys float32 [n, D] or [R, n, D] -> [R, n] of weight's dtype."""
    if rounds:  # narrow operands are exact in bf16, and its product rounds a float32 sum once
        dot = torch.matmul(query.to(torch.bfloat16), keys.to(torch.bfloat16).mT)
        return (torch.relu(dot) * weight[..., None]).to(torch.float32).sum(1).to(torch.bfloat16)
    dot = torch.matmul(query, keys.mT)
    return (torch.relu(dot) * weight.to(torch.float32)[..., None]).sum(1).to(weight.dtype)


def _order(scores: Tensor, reachable: Tensor) -> Tensor:
    """int32 keys: larger is better."""
    bits = (scores.to(torch.float32) + 0.0).view(torch.int32)  # both zeros become one
    key = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    low = torch.isnan(scores) | (scores == -torch.inf)
    return torch.where(reachable, torch.where(low, _LOWEST, key), _UNREACHABLE)


def candidate_blocks(scores: Tensor, visible: Tensor, block_size: int, blocks: int) -> Tensor:
    rows, groups = scores.shape
    if rows == 0 or groups == 0:
        return torch.zeros(rows, groups, dtype=torch.bool, device=scores.device)
    count = -(-groups // block_size)
    reachable = torch.arange(groups, device=scores.device) < visible[:, None]
    key = torch.nn.functional.pad(_order(scores, reachable), (0, count * block_size - groups), value=_UNREACHABLE)
    best = key.unflatten(-1, (count, block_size)).amax(-1)
    last = (visible[:, None].clamp(max=groups) - 1) // block_size
    best = best.masked_fill(torch.arange(count, device=scores.device) == last, _FIRST)
    order = torch.sort(best, dim=-1, descending=True, stable=True).indices[:, :blocks]
    chosen = torch.zeros(rows, count, dtype=torch.int32, device=scores.device)
    chosen = chosen.scatter(1, order, torch.ones_like(order, dtype=torch.int32)) > 0
    return chosen.repeat_interleave(block_size, 1)[:, :groups] & reachable


def top_groups(scores: Tensor, visible: Tensor, k: int, candidates: Tensor | None) -> Tensor:
    rows, groups = scores.shape
    if rows == 0 or groups == 0:
        return torch.full((rows, k), -1, dtype=torch.int64, device=scores.device)
    reachable = torch.arange(groups, device=scores.device) < visible[:, None]
    key = _order(scores, reachable)
    if candidates is not None:
        key = torch.where(candidates | ~reachable, key, _OTHER)
    ranked = torch.sort(key, dim=-1, descending=True, stable=True)
    taken = min(k, groups)
    ids = ranked.indices[:, :taken].masked_fill(ranked.values[:, :taken] == _UNREACHABLE, groups)
    ids = torch.sort(ids, dim=-1).values
    ids = ids.masked_fill(ids == groups, -1)
    return torch.nn.functional.pad(ids, (0, k - taken), value=-1)
