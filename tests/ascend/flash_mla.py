"""DeepSeek's FlashMLA 1.0.0 as its documentation describes it, on a CPU: the names and arguments of its decoding call,
what its Ascend build insists on, and the result. On ``meta`` only shapes. What the adapter is tested against where
there is no device: a reading of documents, not of the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from unittest.mock import patch

import torch
from torch import Tensor

from deepinfer_plugin.kernels.reference import formats

FP8, FP4 = 528, 288  # bytes of a row of the cache


class FlashMLASchedMeta:
    """Made for one shape of call; this stub keeps nothing in it."""


def get_mla_metadata(*args, **kwargs) -> tuple[FlashMLASchedMeta, None]:
    return FlashMLASchedMeta(), None


def flash_mla_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    block_table: Tensor | None,
    cache_seqlens: Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: FlashMLASchedMeta,
    num_splits: None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = True,
    indices: Tensor | None = None,
    attn_sink: Tensor | None = None,
    extra_k_cache: Tensor | None = None,
    extra_indices_in_kvcache: Tensor | None = None,
    topk_length: Tensor | None = None,
    extra_topk_length: Tensor | None = None,
    enable_batch_invariant: bool = False,
) -> tuple[Tensor, Tensor]:
    assert isinstance(tile_scheduler_metadata, FlashMLASchedMeta) and num_splits is None
    assert not causal and is_fp8_kvcache and head_dim_v == 512 and softmax_scale is not None
    batch, queries, heads, size = q.shape
    assert batch > 0 and queries == 1 and (heads, size) == (64, 512) and q.dtype == torch.bfloat16
    assert q.stride(-1) == 1 and indices is not None and indices.shape[:2] == (batch, 1)
    _cache(k_cache, indices, FP8)
    assert (extra_k_cache is None) == (extra_indices_in_kvcache is None)
    assert attn_sink is not None and attn_sink.shape == (heads,)
    assert attn_sink.dtype == torch.float32 and attn_sink.is_contiguous()
    if extra_k_cache is not None:
        _cache(extra_k_cache, extra_indices_in_kvcache, FP4)
    out = torch.empty(batch, 1, heads, head_dim_v, dtype=q.dtype, device=q.device)
    lse = torch.empty(batch, 1, heads, device=q.device).transpose(1, 2)
    if q.device.type == "meta":
        return out, lse
    keys, there = _rows(k_cache, indices, FP8)
    if extra_k_cache is not None:
        more, also = _rows(extra_k_cache, extra_indices_in_kvcache, FP4)
        keys, there = torch.cat((keys, more), 1), torch.cat((there, also), 1)
    logits = torch.einsum("bhd,bkd->bhk", q[:, 0].double(), keys) * softmax_scale
    logits = logits.masked_fill(~there[:, None], -torch.inf)
    sink = attn_sink.double().expand(batch, heads)[..., None]
    p = torch.softmax(torch.cat((logits, sink), -1), -1)[..., :-1]
    out[:, 0] = torch.einsum("bhk,bkd->bhd", p, keys)
    lse[:, :, 0] = torch.logsumexp(logits, -1).float()
    return out, lse


def _cache(cache: Tensor, indices: Tensor, width: int) -> None:
    """What the host side checks of a cache and of the rows that are asked of it."""
    assert cache.dim() == 4 and cache.shape[2:] == (1, width) and cache.dtype == torch.uint8
    assert cache.shape[1] > 1 and cache.stride(1) == width and cache.stride(-1) == 1
    assert indices.dtype == torch.int32 and indices.dim() == 3 and indices.stride(-1) == 1
    assert indices.shape[2] > 0 and indices.shape[2] % 64 == 0


def _rows(cache: Tensor, indices: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """float64 [batch, K, 512] of the rows asked for, zero where -1, and whether each is there."""
    rows = cache.flatten(0, 2)
    number = indices[:, 0].long()
    assert number.min() >= -1 and number.max() < rows.shape[0]
    taken = rows[number.clamp(min=0)]
    if width == FP8:
        keys = formats.fp8_dequant(
            taken[..., :512].contiguous().view(torch.float8_e4m3fn),
            taken[..., 512:].contiguous().view(torch.float8_e8m0fnu),
        )
    else:
        keys = formats.latent_dequant(taken[..., :256].contiguous(), taken[..., 256:].contiguous())
    return keys.double().masked_fill((number < 0)[..., None], 0.0), number >= 0


@contextmanager
def installed(ascend: bool = True) -> Iterator[ModuleType]:
    """``import flash_mla`` finds this; ``flash_mla.npu``, the Ascend build, only with ``ascend``."""
    module = ModuleType("flash_mla")
    module.get_mla_metadata, module.flash_mla_with_kvcache = get_mla_metadata, flash_mla_with_kvcache
    module.__path__ = []
    build = ModuleType("flash_mla.npu") if ascend else None  # None: importing it fails
    with patch.dict("sys.modules", {"flash_mla": module, "flash_mla.npu": build}):
        yield module
