"""The indexer: scores of compressed groups, candidate blocks, and the top groups of each row."""

from __future__ import annotations

import torch
from torch import Tensor

from . import formats
from .numeric import row_chunks, tree_sum

# Keys of the selection order, in float64 beyond every float32 score.
_LOWEST_CANDIDATE = -1e39  # a score of -inf or NaN that is nevertheless reachable
_OTHER = -1e40  # reachable, but outside the candidate blocks


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
    rows, heads = query.shape[:2]
    groups = key.shape[1]
    out = torch.full((rows, page_table.shape[1] * groups), -torch.inf, dtype=query.dtype, device=query.device)
    if rows == 0:
        return out
    packed, scale = formats.index_cast(query)
    query = formats.index_dequant(packed, scale).to(torch.float64)
    order = torch.argsort(requests, stable=True)
    ids, counts = torch.unique_consecutive(requests[order], return_counts=True)
    for request, members in zip(ids.tolist(), order.split(counts.tolist()), strict=True):
        reach = min(int(visible[members].max()), out.shape[1])
        if reach <= 0:
            continue
        pages = page_table[request, : -(-reach // groups)]
        keys = formats.index_dequant(key[pages], key_scale[pages]).flatten(0, 1)[:reach].to(torch.float64)
        for part in row_chunks(members.shape[0], heads * reach * 8):
            at = members[part]
            score = _score(query[at], weight[at], keys, low_precision)
            hidden = torch.arange(reach, device=score.device) >= visible[at, None]
            out[at, :reach] = score.masked_fill_(hidden, -torch.inf)
    return out


def _score(query: Tensor, weight: Tensor, keys: Tensor, low_precision: bool) -> Tensor:
    """query float64 [n, heads, size], keys float64 [reach, size] -> [n, reach] in the dtype of ``weight``."""
    dot = (query.flatten(0, 1) @ keys.mT).view(*query.shape[:2], -1)
    if low_precision and weight.dtype == torch.bfloat16:
        terms = dot.to(torch.bfloat16).clamp_(min=0) * weight[..., None]
        return terms.to(torch.float64).sum(1).to(torch.bfloat16)
    terms = dot.clamp_(min=0) * weight.to(torch.float64)[..., None]
    return tree_sum(terms.mT).to(weight.dtype)


def candidate_blocks(scores: Tensor, visible: Tensor, block_size: int, blocks: int) -> Tensor:
    rows, groups = scores.shape
    if rows == 0 or groups == 0:
        return torch.zeros(rows, groups, dtype=torch.bool, device=scores.device)
    count = -(-groups // block_size)
    reachable = torch.arange(groups, device=scores.device) < visible[:, None]
    best = torch.full((rows, count * block_size), -torch.inf, dtype=torch.float64, device=scores.device)
    best[:, :groups] = _selection_key(scores, reachable)
    best = best.unflatten(-1, (count, block_size)).amax(-1).clamp_(max=torch.finfo(torch.float64).max)
    last = (visible[:, None].clamp(max=groups) - 1) // block_size  # ranks above all, scores of infinity too
    best = best.masked_fill(torch.arange(count, device=scores.device) == last, torch.inf)
    order = torch.sort(best, dim=-1, descending=True, stable=True).indices[:, :blocks]
    chosen = torch.zeros(rows, count, dtype=torch.bool, device=scores.device).scatter_(1, order, True)
    return chosen.repeat_interleave(block_size, 1)[:, :groups] & reachable


def top_groups(scores: Tensor, visible: Tensor, k: int, candidates: Tensor | None) -> Tensor:
    rows, groups = scores.shape
    result = torch.full((rows, k), -1, dtype=torch.int64, device=scores.device)
    width = min(groups, int(visible.max())) if rows and groups else 0
    if width <= 0:
        return result
    scores = scores[:, :width]
    reachable = torch.arange(width, device=scores.device) < visible[:, None]
    key = _selection_key(scores, reachable)
    if candidates is not None:
        key = torch.where(candidates[:, :width] | ~reachable, key, _OTHER)
    taken = min(k, width)
    ranked = torch.sort(key, dim=-1, descending=True, stable=True)
    absent = ranked.values[:, :taken] == -torch.inf
    ids = ranked.indices[:, :taken].masked_fill(absent, width).sort(-1).values
    result[:, :taken] = ids.masked_fill_(ids == width, -1)
    return result


def _selection_key(scores: Tensor, reachable: Tensor) -> Tensor:
    """float64: the score; a NaN or -inf score of a reachable group ranks below all others; unreachable is -inf."""
    key = scores.to(torch.float64).nan_to_num(nan=_LOWEST_CANDIDATE, posinf=torch.inf, neginf=_LOWEST_CANDIDATE)
    return key.masked_fill_(~reachable, -torch.inf)
