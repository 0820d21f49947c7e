"""Index scores: ``deep_gemm.fp8_fp4_paged_mqa_logits`` straight from the page pool.

A page holds the keys of a source and right behind them their scales, which is the layout that the library reads; the
pool's other sections lie in its stride. It rounds a score once, at the end.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import reference
from . import libraries
from .casts import cast_fp4

CHANNELS = 128
GROUPS = (32, 64, 128)  # of a page


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
    if query.dtype == torch.float32:
        return reference.index.index_scores(query, weight, key, key_scale, page_table, requests, visible, low_precision)
    rows, heads, channels = query.shape
    groups = key.shape[1]
    width = page_table.shape[1] * groups
    if low_precision:
        raise ValueError(
            "index_scores: low_precision=True (profile model) is not served on Blackwell, where scores are rounded "
            "once; legal: False (profile deepinfer)"
        )
    if channels != CHANNELS or heads % 8 or groups not in GROUPS:
        raise ValueError(
            f"index_scores: {heads} heads of {channels} channels and pages of {groups} groups are not served on "
            f"Blackwell; legal: a multiple of 8 heads, {CHANNELS} channels, {', '.join(map(str, GROUPS))} groups"
        )
    if not rows or not width:
        return torch.empty(rows, width, dtype=query.dtype, device=query.device)
    library = libraries.deep_gemm()
    seen, request = visible.to(torch.int32)[:, None].contiguous(), requests.to(torch.int32)
    values, scales = cast_fp4(query)
    schedule = library.get_paged_mqa_logits_metadata(seen, groups, library.get_num_sms(), request)
    scores = library.fp8_fp4_paged_mqa_logits(
        (values[:, None], scales[:, None]),
        _section(key, key_scale),
        weight.contiguous(),
        seen,
        page_table.index_select(0, requests).to(torch.int32),
        schedule,
        width,
        request,
    )
    # What lies beyond the last visible group was not written.
    group = torch.arange(width, device=query.device)
    return torch.where(group < visible[:, None], scores, -torch.inf)


def _section(key: Tensor, key_scale: Tensor) -> Tensor:
    """Keys and scales of every page as one section: uint8 [pages, groups, 1, bytes of a key and its scales], a view.

    Raises:
        ValueError: they do not lie in a page one behind the other.
    """
    pages, groups, half = key.shape
    width = half + key_scale.shape[2]
    behind = key_scale.data_ptr() - key.data_ptr() == groups * half and key_scale.stride(0) == key.stride(0)
    if key.stride()[1:] != (half, 1) or key_scale.stride()[1:] != (width - half, 1) or not behind:
        raise ValueError("index_scores: a page must hold the keys of a source and right behind them their scales")
    return key.as_strided((pages, groups, 1, width), (key.stride(0), width, width, 1))
