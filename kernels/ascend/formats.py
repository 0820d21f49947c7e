"""The number formats in plain torch operations that an NPU has: integers and float32, no float64, no FP8 arithmetic.

FP8 is cast by torch_npu's MX quantisation, whose second scale rule with a lower bound of the maximum is DeepSeek's
(scale 2^ceil(log2(amax / 448)), amax at least 1e-4, a block with a NaN or an infinity gets a NaN scale). The FP4
formats have no vendor op with these rules: their scales are made by integer arithmetic on float32 bits, which is exact.
Narrow values are decoded through tables, because conversion of FP8 tensors is missing in some CANN builds.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .vendor import op

BLOCK = 32
LATENT_BLOCK = 16
FP8_AMAX_FLOOR = 1e-4
_FP4_FLOOR = 6.0 * 2.0**-126
_LATENT_FLOOR = 6.0 * 2.0**-9
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

_tables: dict[tuple[str, torch.device], Tensor] = {}


def _table(name: str, device: torch.device) -> Tensor:
    """float32 values by byte, made once a device: [256], for "pairs" [256, 2]."""
    if (name, device) not in _tables:
        byte = torch.arange(256, device="cpu")
        if name == "e4m3":
            table = byte.to(torch.uint8).view(torch.float8_e4m3fn).to(torch.float32)
        elif name == "e8m0":
            table = byte.to(torch.uint8).view(torch.float8_e8m0fnu).to(torch.float32)
        else:  # low nibble first
            values = torch.tensor(_E2M1 + tuple(-v for v in _E2M1), dtype=torch.float32, device="cpu")
            table = torch.stack((values[byte & 15], values[byte >> 4]), -1)
        _tables[name, device] = table.to(device)
    return _tables[name, device]


def _look_up(name: str, packed: Tensor) -> Tensor:
    return _table(name, packed.device).index_select(0, packed.reshape(-1).to(torch.int32))


def e4m3_value(packed: Tensor) -> Tensor:
    """e4m3 values, or their bytes, as float32."""
    return _look_up("e4m3", packed.view(torch.uint8)).view(packed.shape)


def e8m0_value(packed: Tensor) -> Tensor:
    """UE8M0 scales, or their bytes, as float32; 255 is NaN."""
    return _look_up("e8m0", packed.view(torch.uint8)).view(packed.shape)


def e2m1_value(packed: Tensor) -> Tensor:
    """uint8 [..., K/2] -> float32 [..., K]."""
    return _look_up("pairs", packed).view(*packed.shape[:-1], 2 * packed.shape[-1])


def scaled(values: Tensor, scale: Tensor) -> Tensor:
    """float32 [..., K] times [..., K / block], each scale over its run of channels."""
    return (values.unflatten(-1, (scale.shape[-1], -1)) * scale[..., None]).flatten(-2)


# ---- FP8 -----------------------------------------------------------------------------------------------------------


def mx_quant(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., K], bf16 or float32 -> e4m3 [..., K] and scale bytes in vendor layout, uint8 [..., ceil(K/64), 2]."""
    return op("npu_dynamic_mx_quant")(
        x.contiguous(),
        axis=-1,
        round_mode="rint",
        dst_type=torch.float8_e4m3fn,
        block_size=BLOCK,
        scale_alg=1,
        max_low_bound=FP8_AMAX_FLOOR,
    )


def fp8_cast(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., K] -> bytes of e4m3 [..., K] and of UE8M0 scales [..., K/32]."""
    values, scale = mx_quant(x)
    return values.view(torch.uint8), scale.view(torch.uint8).flatten(-2)[..., : x.shape[-1] // BLOCK]


def fp8_dequant(values: Tensor, scale: Tensor) -> Tensor:
    """Bytes [..., K] and [..., K / block] -> float32 [..., K]."""
    return scaled(e4m3_value(values), e8m0_value(scale))


def fp8_weight_dequant(weight: Tensor, scale: Tensor) -> Tensor:
    """e4m3 [N, K], UE8M0 [ceil(N/32), ceil(K/32)] -> float32 [N, K]."""
    n, k = weight.shape
    full = e8m0_value(scale).repeat_interleave(BLOCK, -1)[:, :k].repeat_interleave(BLOCK, -2)[:n]
    return e4m3_value(weight) * full


# ---- FP4 -----------------------------------------------------------------------------------------------------------


def _e2m1_codes(x: Tensor) -> Tensor:
    """int32 codes of scaled float32 values; a midpoint belongs to the even code, beyond 6 saturates."""
    m = x.abs()
    code = (m > 0.25).to(torch.int32)
    for boundary, inclusive in ((0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False)):
        code = code + ((m >= boundary) if inclusive else (m > boundary)).to(torch.int32)
    return code + (x.contiguous().view(torch.int32) < 0).to(torch.int32) * 8


def _pack(codes: Tensor) -> Tensor:
    return (codes[..., 0::2] + codes[..., 1::2] * 16).to(torch.uint8)


def index_cast(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., K] -> packed e2m1 uint8 [..., K/2], UE8M0 bytes uint8 [..., K/32]: scale 2^ceil(log2(amax / 6))."""
    blocks = x.to(torch.float32).unflatten(-1, (-1, BLOCK))
    bits = blocks.abs().amax(-1).clamp(min=_FP4_FLOOR).view(torch.int32)
    # 6 is 1.5 x 2^2: the exponent goes up where the significand is above 1.5, then down by 2.
    exponent = ((bits + 0x3FFFFF) >> 23) - 2
    broken = bits >= 0x7F800000
    byte = torch.where(broken, 255, exponent)
    inverse = ((254 - exponent) << 23).view(torch.float32)  # a power of two: the product is the quotient
    inverse = torch.where(broken, 0.0, inverse)
    codes = _e2m1_codes(blocks * inverse[..., None])
    return _pack(codes.flatten(-2)), byte.to(torch.uint8)


def index_dequant(packed: Tensor, scale: Tensor) -> Tensor:
    """Bytes [..., K/2] and [..., K/32] -> float32 [..., K]."""
    return scaled(e2m1_value(packed), e8m0_value(scale))


def latent_cast(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., D] -> packed e2m1 uint8 [..., D/2], e4m3 scale bytes uint8 [..., D/16]: RNE(clamp(amax) / 6)."""
    blocks = x.to(torch.float32).unflatten(-1, (-1, LATENT_BLOCK))
    amax = blocks.abs().amax(-1)
    broken = amax.view(torch.int32) >= 0x7F800000
    amax = torch.where(broken, 1.0, amax).clamp(_LATENT_FLOOR, 448.0 * 6.0)
    quotient = amax / torch.full_like(amax, 6.0)  # by a tensor: a number may become a product with its reciprocal
    exponent = ((quotient.view(torch.int32) >> 23) - 127).clamp(min=-6)
    step = ((exponent + 124) << 23).view(torch.float32)
    eighths = torch.round(quotient / step).to(torch.int32)  # 8..16, below the smallest normal 1..8
    byte = torch.where(broken, 127, ((exponent + 6) << 3) + eighths).to(torch.uint8)
    codes = _e2m1_codes(blocks / e4m3_value(byte)[..., None])
    return _pack(codes.flatten(-2)), byte


def latent_dequant(packed: Tensor, scale: Tensor) -> Tensor:
    """Bytes [..., D/2] and [..., D/16] -> float32 [..., D]."""
    return scaled(e2m1_value(packed), e4m3_value(scale))
