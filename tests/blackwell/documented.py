"""The library functions that the blackwell provider calls, computed on a CPU as their interfaces describe them.

A reading of the public interfaces of deepinfer-gemm 2.8.2 and deepinfer-flashmla 1.0.0: argument names, shapes, dtypes
and layouts that the libraries assert are asserted here, what they leave undefined is poison. A test that passes says
that the provider is right if the reading is; nothing here has met the hardware.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from deepinfer_plugin.kernels.reference import formats

ALIGNMENT = 8  # of an expert's rows; few, for the interpreter runs every one of them
SMS = 148


def _scales(packed: Tensor, rows: int, k: int, groups: int | None = None) -> Tensor:
    """Scales that were packed in advance: checks their layout -> float64 [..., rows, K/32]."""
    words = -(-k // 128)
    assert packed.dtype == torch.int32 and packed.shape == (*([] if groups is None else [groups]), rows, words)
    assert packed.stride(-2) == 1 or rows == 1
    assert packed.stride(-1) >= -(-rows // 4) * 4 and packed.stride(-1) % 4 == 0
    if groups is not None:
        assert packed.stride(-3) == packed.stride(-1) * packed.shape[-1]
    byte = torch.empty(packed.shape, dtype=packed.dtype).copy_(packed).view(torch.uint8)[..., : k // 32]
    return formats.e8m0_value(byte).to(torch.float64)


def _fp8(operand: tuple[Tensor, Tensor], recipe: tuple[int, int]) -> Tensor:
    values, packed = operand
    assert recipe == (1, 32) and values.dtype == torch.float8_e4m3fn and values.stride(-1) == 1
    rows, k = values.shape
    return values.to(torch.float64) * _scales(packed, rows, k).repeat_interleave(32, -1)


def fp8_fp4_gemm_nt(a: Any, b: Any, d: Tensor, *, recipe_a: tuple[int, int], recipe_b: tuple[int, int]) -> None:
    left, right = _fp8(a, recipe_a), _fp8(b, recipe_b)
    assert d.shape == (left.shape[0], right.shape[0]) and d.stride(1) == 1 and d.dtype == torch.bfloat16
    d.copy_((left @ right.T).to(torch.float32))


def get_mk_alignment_for_contiguous_layout() -> int:
    return ALIGNMENT


def m_grouped_fp8_fp4_gemm_nt_contiguous(
    a: Any,
    b: Any,
    d: Tensor,
    grouped_layout: Tensor,
    *,
    recipe_a: tuple[int, int],
    recipe_b: tuple[int, int],
    use_psum_layout: bool,
) -> None:
    left, (packed, scales) = _fp8(a, recipe_a), b
    groups, n, half = packed.shape
    assert use_psum_layout and recipe_b == (1, 32) and packed.dtype == torch.int8 and packed.is_contiguous()
    assert grouped_layout.dtype == torch.int32 and grouped_layout.shape == (groups,) and grouped_layout.is_contiguous()
    assert d.shape == (left.shape[0], n) and d.dtype == torch.bfloat16 and left.shape[1] == 2 * half
    values = formats.e2m1_values(packed.view(torch.uint8)).to(torch.float64)
    right = values * _scales(scales, n, 2 * half, groups).repeat_interleave(32, -1)
    d.fill_(torch.nan)
    end = 0
    for group, following in enumerate(grouped_layout.tolist()):
        start, end = -(-end // ALIGNMENT) * ALIGNMENT, following
        assert start <= end <= left.shape[0]
        d[start:end] = (left[start:end] @ right[group].T).to(torch.float32)


def get_num_sms() -> int:
    return SMS


def get_paged_mqa_logits_metadata(context_lens: Tensor, block_kv: int, num_sms: int, indices: Tensor) -> Tensor:
    for each in (context_lens, indices):
        assert each.dtype == torch.int32 and each.is_contiguous()
    assert context_lens.shape == (indices.shape[0], 1) and block_kv in (32, 64, 128) and num_sms == SMS
    assert indices.data_ptr() % 8 == 0
    return torch.zeros(num_sms + 1, 2, dtype=torch.int32)


def fp8_fp4_paged_mqa_logits(
    q: Any,
    fused_kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    schedule_meta: Tensor,
    max_context_len: int,
    indices: Tensor,
) -> Tensor:
    values, scales = q
    rows, one, heads, half = values.shape
    assert one == 1 and half == 64 and values.dtype == torch.int8 and values.is_contiguous()
    assert scales.shape == (rows, 1, heads) and scales.dtype == torch.int32 and scales.is_contiguous()
    assert weights.shape == (rows, heads) and weights.dtype == torch.bfloat16 and weights.stride(1) == 1
    assert weights.stride(0) * 2 % 16 == 0
    blocks, block, one, width = fused_kv_cache.shape
    assert one == 1 and width == 68 and fused_kv_cache.dtype == torch.uint8
    assert fused_kv_cache.stride(1) == width and fused_kv_cache.stride(3) == 1 and fused_kv_cache.stride(0) % 4 == 0
    assert fused_kv_cache.data_ptr() % 16 == 0
    assert block_table.shape[0] == rows and block_table.dtype == torch.int32 and block_table.stride(1) == 1
    assert schedule_meta.shape == (SMS + 1, 2) and indices.shape == (rows,)

    def dequantise(codes: Tensor, byte: Tensor) -> Tensor:
        scale = formats.e8m0_value(byte).to(torch.float64).repeat_interleave(32, -1)
        return formats.e2m1_values(codes.view(torch.uint8)).to(torch.float64) * scale

    query = dequantise(values[:, 0], scales[:, 0].contiguous().view(torch.uint8).view(rows, heads, 4))
    section = fused_kv_cache.as_strided((blocks, block * width), (fused_kv_cache.stride(0), 1))
    codes, byte = section.split([block * 64, block * 4], 1)
    keys = dequantise(codes.reshape(blocks, block, 64), byte.reshape(blocks, block, 4))
    logits = torch.full((rows, max_context_len), torch.nan, dtype=torch.bfloat16)
    for row, seen in enumerate(context_lens[:, 0].tolist()):
        pages = block_table[row, : -(-seen // block)].long()
        reachable = keys[pages].flatten(0, 1)[:seen]
        score = (query[row] @ reachable.T).relu() * weights[row].to(torch.float64)[:, None]
        logits[row, :seen] = score.sum(0).to(torch.float32)
    return logits


def get_mla_metadata() -> tuple[Any, None]:
    return object(), None


def flash_mla_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    block_table: None,
    cache_seqlens: None,
    head_dim_v: int,
    tile_scheduler_metadata: Any,
    *,
    softmax_scale: float,
    indices: Tensor,
    attn_sink: Tensor,
    extra_k_cache: Tensor | None,
    extra_indices_in_kvcache: Tensor | None,
    enable_batch_invariant: bool,
) -> tuple[Tensor, Tensor]:
    rows, one, heads, size = q.shape
    assert one == 1 and heads in (64, 128) and size == head_dim_v == 512 and q.dtype == torch.bfloat16
    assert attn_sink.shape == (heads,) and attn_sink.dtype == torch.float32 and enable_batch_invariant
    assert (extra_k_cache is None) == (extra_indices_in_kvcache is None)

    def chosen(cache: Tensor, ids: Tensor, width: int) -> tuple[Tensor, Tensor]:
        assert cache.dtype == torch.uint8 and cache.shape[2:] == (1, width) and cache.stride(1) == width
        assert ids.shape[:2] == (rows, 1) and ids.dtype == torch.int32 and ids.shape[2] % 64 == 0
        flat = cache.reshape(-1, width)
        assert int(ids.min()) >= -1 and int(ids.max()) < flat.shape[0]
        return flat[ids[:, 0].long().clamp(min=0)], ids[:, 0] >= 0

    packed, present = chosen(k_cache, indices, 528)
    values, byte = packed.split([512, 16], -1)
    keys = values.contiguous().view(torch.float8_e4m3fn).to(torch.float64)
    keys = keys * formats.e8m0_value(byte).to(torch.float64).repeat_interleave(32, -1)
    if extra_k_cache is not None:
        assert extra_indices_in_kvcache is not None
        packed, there = chosen(extra_k_cache, extra_indices_in_kvcache, 288)
        latents = formats.latent_dequant(*(part.contiguous() for part in packed.split([256, 32], -1)))
        keys, present = torch.cat((keys, latents.to(torch.float64)), 1), torch.cat((present, there), 1)
    logits = q[:, 0].to(torch.float64) @ keys.mT * softmax_scale
    logits = logits.masked_fill(~present[:, None], -torch.inf)
    sink = attn_sink.to(torch.float64)[:, None].expand(rows, heads, 1)
    weight = torch.softmax(torch.cat((logits, sink), -1), -1)[..., :-1]
    out = weight @ torch.where(present[..., None], keys, 0)
    return out.to(torch.float32).to(torch.bfloat16)[:, None], torch.logsumexp(logits, -1).mT


FUNCTIONS = {
    "deep_gemm": (
        fp8_fp4_gemm_nt,
        get_mk_alignment_for_contiguous_layout,
        m_grouped_fp8_fp4_gemm_nt_contiguous,
        get_num_sms,
        get_paged_mqa_logits_metadata,
        fp8_fp4_paged_mqa_logits,
    ),
    "flash_mla": (get_mla_metadata, flash_mla_with_kvcache),
}


@contextmanager
def installed() -> Iterator[None]:
    """The libraries can be imported inside."""
    before = {name: sys.modules.get(name) for name in FUNCTIONS}
    for name, functions in FUNCTIONS.items():
        module = ModuleType(name)
        module.__dict__.update({function.__name__: function for function in functions})
        sys.modules[name] = module
    try:
        yield
    finally:
        for name, module in before.items():
            sys.modules.pop(name)
            if module is not None:
                sys.modules[name] = module
