"""The stock kernels that ours are measured against, on the same inputs: SGLang 0.5.23's own path on Hopper.

Each maker returns the call to time and its relative error against float32 arithmetic on the same operands.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from cuda_timing import relative
from torch import Tensor

from deepinfer_plugin.kernels.reference import formats

Made = tuple[Callable[[], Any], float | None]


def index_decode(
    query: Tensor, weight: Tensor, key: Tensor, scale: Tensor, table: Tensor, owner: Tensor, visible: Tensor
) -> Made:
    """SGLang's Triton kernel over FP4 pages."""
    from sglang.kernels.ops.attention.dsv4.fp4_indexer import fp4_index_logits_paged

    page = key.shape[1]
    memory = torch.cat((key.flatten(1), scale.flatten(1)), 1).contiguous()
    location = (table[:, :, None] * page + torch.arange(page, device=key.device)).flatten(1).to(torch.int32)
    lengths = visible.to(torch.int32)
    context = location.shape[1]

    def call() -> Tensor:
        return fp4_index_logits_paged(query, weight, owner, location, lengths, memory, page, context, 1, None)

    keys = formats.index_dequant(key[table[0]], scale[table[0]]).flatten(0, 1)
    expected = (torch.einsum("hd,nd->hn", query[0].float(), keys).relu() * weight[0].float()[:, None]).sum(0)
    reach = int(visible[0])
    return call, relative(call()[0, :reach], expected[:reach])


def index_prefill(
    query: Tensor, weight: Tensor, key: Tensor, scale: Tensor, table: Tensor, owner: Tensor, visible: Tensor
) -> Made:
    """SGLang's prefill on Hopper: keys dequantised to bf16, einsum over [rows, heads, groups] a gigabyte at a time,
    relu, weighted sum; here without its top-k."""
    keys = formats.index_dequant(key[table[0]], scale[table[0]]).flatten(0, 1).to(torch.bfloat16)
    step = max(1, (1 << 30) // (query.shape[1] * keys.shape[0] * 2))
    group = torch.arange(keys.shape[0], device=key.device)

    def call() -> Tensor:
        parts = []
        for first in range(0, query.shape[0], step):
            part = slice(first, first + step)
            score = torch.einsum("bhd,nd->bhn", query[part], keys)
            score = (score.relu() * weight[part, :, None]).sum(1).float()
            parts.append(score.masked_fill(group >= visible[part, None], -torch.inf))
        return parts[-1]

    return call, None


INDEXER = {
    "index_decode": {"SGLang, Triton": index_decode},
    "index_prefill": {"SGLang, einsum": index_prefill},
}


def experts_flashinfer(fp8: bool) -> Callable[..., Made]:
    """FlashInfer's grouped MXFP4 experts as SGLang runs them on Hopper: bf16 activations (its default), or FP8 with
    ``--flashinfer-mxfp4-moe-precision fp8``. Tuned on the largest batch first."""

    def make(x: Tensor, weights: Tensor, ids: Tensor, raw: tuple[Tensor, Tensor, Tensor, Tensor]) -> Made:
        from flashinfer.autotuner import autotune

        if fp8 not in _laid_out:
            _laid_out.clear()
            _laid_out[fp8] = flashinfer_layout(fp8, *raw)
        chosen = ids.to(torch.int32)  # of all ranks: it takes its own

        def call() -> Tensor:
            return flashinfer_experts(x, weights, chosen, _laid_out[fp8], ranks=8)

        if fp8 not in _tuned:
            _tuned.add(fp8)
            with autotune(True):
                call()
        part = slice(0, min(x.shape[0], 64))
        return call, relative(call()[part], _float32_experts(x[part], weights[part], ids[part], raw))

    return make


_laid_out: dict[bool, Any] = {}
_tuned: set[bool] = set()


def flashinfer_experts(x: Tensor, weights: Tensor, ids: Tensor, layout: Any, ranks: int = 1) -> Tensor:
    """bf16 [T, H] of ids int32 [T, k] among the experts of all ranks, of which the first rank's are laid out."""
    from flashinfer.fused_moe import cutlass_fused_moe
    from flashinfer.fused_moe.core import ActivationType

    first, second, scales, limit, options = layout
    out = torch.empty_like(x)
    cutlass_fused_moe(
        input=x, token_selected_experts=ids, token_final_scales=weights, fc1_expert_weights=first,
        fc2_expert_weights=second, output_dtype=torch.bfloat16, quant_scales=scales, input_sf=None,
        swiglu_limit=limit, tp_size=1, tp_rank=0, ep_size=ranks, ep_rank=0, use_w4_group_scaling=True,
        use_mxfp8_act_scaling=False, activation_type=ActivationType.Swiglu, tune_max_num_tokens=8192,
        output=out, use_fused_finalize=True, **options,
    )  # fmt: skip
    return out


def flashinfer_layout(fp8: bool, w13: Tensor, s13: Tensor, w2: Tensor, s2: Tensor) -> Any:
    """The experts as ``flashinfer_experts`` reads them."""
    import flashinfer.fused_moe as fused

    limit = torch.full((w13.shape[0],), 10.0, device=w13.device)
    inner = w13.shape[1] // 2
    up_first = torch.cat((w13[:, inner:], w13[:, :inner]), 1).contiguous()
    bytes13 = s13.view(torch.uint8)
    scale13 = torch.cat((bytes13[:, inner:], bytes13[:, :inner]), 1)
    scale2 = s2.view(torch.uint8)
    if fp8:
        prepare = fused.preprocess_moe_weights_for_sm90_mixed_gemm_humming
        first, a, row13 = prepare(up_first, scale13)
        second, b, row2 = prepare(w2.contiguous(), scale2)
        one = torch.ones((), device=w2.device)
        scales = [
            a.view(torch.int32),
            (row13 * 64.0).contiguous(),
            one,
            b.view(torch.int32),
            (row2 * 64.0).contiguous(),
        ]
        return first, second, scales, limit, {"use_wfp4afp8_humming": True}
    weights = [fused.interleave_moe_weights_for_sm90_mixed_gemm(each.contiguous(), "fp4") for each in (up_first, w2)]
    scales = [
        fused.interleave_moe_scales_for_sm90_mixed_gemm(each, group_size=32).view(torch.int32)
        for each in (scale13, scale2)
    ]
    return *weights, scales, limit, {}


def _float32_experts(x: Tensor, weights: Tensor, ids: Tensor, raw: tuple[Tensor, Tensor, Tensor, Tensor]) -> Tensor:
    w13, s13, w2, s2 = raw
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in range(w13.shape[0]):
        token, choice = (ids == expert).nonzero(as_tuple=True)
        gate, up = (x[token].float() @ formats.mxfp4_dequant(w13[expert], s13[expert]).T).chunk(2, -1)
        hidden = torch.nn.functional.silu(gate.clamp(max=10)) * up.clamp(-10, 10)
        out.index_add_(
            0, token, hidden @ formats.mxfp4_dequant(w2[expert], s2[expert]).T * weights[token, choice, None]
        )
    return out


EXPERTS = {
    "FlashInfer W4A16 (SGLang's default)": experts_flashinfer(False),
    "FlashInfer W4A8": experts_flashinfer(True),
}
