"""The torch_npu ops that the provider calls, computed on a CPU as their documentation describes them.

What the adapters are tested against where there is no device. It is a reading of documents, not of the device: a test
that passes here says that the provider is right if the documents are. Shapes, dtypes and argument names are checked
against the real torch_npu by the stubbed tier.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from deepinfer_plugin.kernels.ascend import vendor
from deepinfer_plugin.kernels.reference import formats

from .exchange import npu_moe_distribute_combine_v2, npu_moe_distribute_dispatch_v2


def npu_dynamic_mx_quant(
    x: Tensor,
    *,
    axis: int,
    round_mode: str,
    dst_type: Any,
    block_size: int,
    scale_alg: int,
    max_low_bound: float,
) -> tuple[Tensor, Tensor]:
    """Second scale rule: 2^ceil(log2(max(amax, bound) / largest)), 255 for a block with a NaN or an infinity."""
    assert (axis, round_mode, dst_type, block_size) == (-1, "rint", torch.float8_e4m3fn, 32)
    k = x.shape[-1]
    blocks = x.to(torch.float64).unflatten(-1, (-1, block_size))
    amax = blocks.abs().amax(-1)
    broken = ~amax.isfinite()
    amax = torch.where(broken, 1.0, amax)
    if scale_alg == 1:
        exponent = torch.ceil(torch.log2(amax.clamp(min=max(max_low_bound, 2.0**-126)) / 448))
    else:
        exponent = torch.floor(torch.log2(amax.clamp(min=2.0**-126))) - 8
    values = (blocks / torch.exp2(exponent)[..., None]).clamp(-448, 448).to(torch.float32).to(torch.float8_e4m3fn)
    byte = torch.where(broken, 255, exponent + 127).to(torch.uint8)
    if byte.shape[-1] % 2:
        byte = torch.nn.functional.pad(byte, (0, 1))
    assert k % block_size == 0
    return values.flatten(-2), byte.unflatten(-1, (-1, 2))


def _unpair(pairs: Tensor, k: int) -> Tensor:
    """[..., n, ceil(K/64), 2] bytes -> float64 [..., n, K]."""
    scale = formats.e8m0_value(pairs.contiguous().view(torch.uint8).flatten(-2)[..., : k // 32])
    return scale.to(torch.float64).repeat_interleave(32, -1)


def npu_quant_matmul(
    x1: Tensor,
    x2: Tensor,
    scale: Tensor,
    *,
    scale_dtype: int,
    pertoken_scale: Tensor,
    pertoken_scale_dtype: int,
    output_dtype: torch.dtype,
    group_sizes: Sequence[int],
) -> Tensor:
    assert scale_dtype == pertoken_scale_dtype == vendor.E8M0 and list(group_sizes) == [1, 1, 32]
    k = x1.shape[-1]
    left = x1.to(torch.float64) * _unpair(pertoken_scale, k)
    right = x2.t().to(torch.float64) * _unpair(scale.transpose(0, 1), k)
    return (left @ right.t()).to(output_dtype)


def npu_transpose_quant_batchmatmul(
    x1: Tensor,
    x2: Tensor,
    *,
    dtype: torch.dtype,
    x1_scale: Tensor,
    x2_scale: Tensor,
    group_sizes: Sequence[int],
    perm_x1: Sequence[int],
    perm_x2: Sequence[int],
    perm_y: Sequence[int],
) -> Tensor:
    """x1 [T, G, K], x2 [G, K, N], scales [T, G, K/64, 2] and [G, K/64, N, 2] -> [T, G, N]."""
    assert (list(perm_x1), list(perm_x2), list(perm_y)) == ([1, 0, 2], [0, 1, 2], [1, 0, 2])
    k = x1.shape[-1]
    left = (x1.to(torch.float64) * _unpair(x1_scale.view(torch.uint8), k)).permute(*perm_x1)
    right = x2.mT.to(torch.float64) * _unpair(x2_scale.view(torch.uint8).transpose(1, 2), k)
    return (left @ right.mT).permute(*perm_y).to(dtype)


def npu_format_cast(x: Tensor, acl_format: int, *, customize_dtype: torch.dtype, input_dtype: int) -> Tensor:
    """A layout of memory: what the tensor holds stays the same."""
    assert (acl_format, input_dtype) == (vendor.FRACTAL_NZ, vendor.E2M1_PAIR)
    return x.clone()


def npu_grouped_matmul(
    x: Sequence[Tensor],
    weight: Sequence[Tensor],
    *,
    antiquant_scale: Sequence[Tensor],
    per_token_scale: Sequence[Tensor],
    group_list: Tensor,
    group_list_type: int,
    group_type: int,
    split_item: int,
    output_dtype: torch.dtype,
    weight_dtype: int,
    per_token_scale_dtype: int,
) -> list[Tensor]:
    """Rows of x up to group_list[0] times the first weight, and so on; rows beyond the last group are not written."""
    assert (group_list_type, group_type, split_item) == (0, 0, 2)
    assert (weight_dtype, per_token_scale_dtype) == (vendor.E2M1_PAIR, vendor.E8M0)
    [values], [packed], [pairs], [token_scale] = x, weight, antiquant_scale, per_token_scale
    k = values.shape[-1]
    left = values.to(torch.float64) * _unpair(token_scale, k)
    out = torch.full((values.shape[0], packed.shape[-1]), torch.nan, dtype=output_dtype)
    first = 0
    for expert, last in enumerate(group_list.tolist()):
        right = formats.e2m1_values(packed[expert].t()).to(torch.float64) * _unpair(pairs[expert].transpose(0, 1), k)
        out[first:last] = (left[first:last] @ right.t()).to(output_dtype)
        first = last
    return [out]


def npu_moe_gating_top_k(
    x: Tensor,
    k: int,
    *,
    bias: Tensor,
    k_group: int,
    group_count: int,
    norm_type: int,
    routed_scaling_factor: float,
    eps: float,
) -> tuple[Tensor, Tensor, None]:
    assert (k_group, group_count, norm_type) == (1, 1, 2)
    scores = torch.sqrt(torch.nn.functional.softplus(x.to(torch.float64))).to(torch.float32)
    ids = torch.sort((scores + bias).nan_to_num(nan=-torch.inf), dim=-1, descending=True, stable=True).indices[:, :k]
    chosen = scores.gather(1, ids).to(torch.float64)
    weights = chosen / (chosen.sum(-1, keepdim=True) + eps) * routed_scaling_factor
    return weights.to(torch.float32), ids.to(torch.int32), None


def npu_rms_norm(x: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    wide = x.to(torch.float64)
    rstd = 1 / torch.sqrt((wide * wide).mean(-1, keepdim=True) + epsilon)
    return (wide * rstd * gamma.to(torch.float64)).to(x.dtype), rstd.to(torch.float32)


def npu_mhc_sinkhorn(x: Tensor, *, eps: float, num_iters: int) -> tuple[Tensor, None, None]:
    comb = torch.softmax(x.to(torch.float64), -1) + eps
    comb = comb / (comb.sum(-2, keepdim=True) + eps)
    for _ in range(num_iters - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    return comb.to(x.dtype), None, None


OPS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        npu_dynamic_mx_quant,
        npu_format_cast,
        npu_grouped_matmul,
        npu_mhc_sinkhorn,
        npu_moe_distribute_combine_v2,
        npu_moe_distribute_dispatch_v2,
        npu_moe_gating_top_k,
        npu_quant_matmul,
        npu_rms_norm,
        npu_transpose_quant_batchmatmul,
    )
}


@contextmanager
def installed(**replaced: Callable[..., Any]):
    """The provider's modules see these ops, some of them perhaps replaced, instead of torch_npu's."""
    from deepinfer_plugin.kernels.ascend import dispatch, experts, formats, gate, linear, norm_rope, streams

    modules = (dispatch, experts, formats, gate, linear, norm_rope, streams)
    originals = [module.op for module in modules]
    table = OPS | replaced
    for module in modules:
        module.op = table.__getitem__
    try:
        yield
    finally:
        for module, original in zip(modules, originals, strict=True):
            module.op = original
