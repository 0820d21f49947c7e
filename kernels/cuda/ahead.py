"""Every CUDA C++ kernel a model can ask for, so that they can be compiled before they are needed."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from . import experts, index, jit


def sources(
    *,
    hidden: int,
    expert_sets: tuple[tuple[int, int, int], ...],
    index_heads: int,
    index_head_dim: int,
    groups_per_page: tuple[int, ...],
    block_size: int,
) -> Iterator[jit.Source]:
    """Sources of a model's kernels.

    Args:
        hidden: channels of the model.
        expert_sets: (experts on this device, their inner channels, chosen per token) of every kind of MoE layer.
        index_heads, index_head_dim: of the indexer.
        groups_per_page: compressed groups of a page, one per ratio.
        block_size: groups of a candidate block.
    """
    for groups in groups_per_page:
        for low in (True, False):
            yield index.ScoresKernels(index_head_dim, index_heads, groups, torch.bfloat16, low, True).scores.source
    for held in index.HELD:
        for block in (0, block_size):
            yield index.select_kernel(wide=False, block=block, held=held, vector=True).source
    for count, inner, topk in expert_sets:
        for tiling in (experts.FEW, experts.MANY):
            for rows, channels, gated in ((2 * inner, hidden, True), (hidden, inner, False)):
                shape = (count, -(-rows // experts.ROWS), -(-channels // experts.CHANNELS), 0)
                product = experts.Product(torch.empty(shape, device="meta"), torch.empty(count, device="meta"), False)
                out = experts.padded(inner) if gated else hidden
                yield product.kernel(tiling, topk, gated, out)[0].source
