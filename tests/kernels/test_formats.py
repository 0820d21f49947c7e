"""Number formats against exact rational arithmetic."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from deepinfer_plugin.kernels.reference import formats

E2M1 = [Fraction(v) for v in ("0", "1/2", "1", "3/2", "2", "3", "4", "6")]


def e4m3(code: int) -> Fraction | None:
    """Value of an e4m3 byte; None for NaN."""
    sign, exponent, mantissa = -1 if code & 0x80 else 1, code >> 3 & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return None
    if exponent == 0:
        return sign * Fraction(mantissa, 8) * Fraction(2) ** -6
    return sign * (1 + Fraction(mantissa, 8)) * Fraction(2) ** (exponent - 7)


E4M3 = [v for code in range(127) if (v := e4m3(code)) is not None]


def nearest(x: Fraction, grid: list[Fraction]) -> int:
    """Code of the grid value nearest to |x|; of two equally near the even code; beyond the grid its last."""
    magnitude = min(abs(x), grid[-1])
    return min(range(len(grid)), key=lambda code: (abs(grid[code] - magnitude), code % 2))


def exponent_of_scale(amax: Fraction, largest: int) -> int:
    """Smallest k with amax <= largest * 2^k."""
    k = math.floor(math.log2(amax / largest)) - 2
    while amax > largest * Fraction(2) ** k:
        k += 1
    return k


def exact(x: Tensor) -> list[Fraction]:
    return [Fraction(v) for v in x.double().flatten().tolist()]


def floats(limit: float = 2.0**100, small: float = 2.0**-120) -> st.SearchStrategy[float]:
    """float32 values over many binades, zeros included."""
    finite = st.floats(-limit, limit, width=32)
    return st.one_of(
        finite,
        st.builds(
            lambda m, e, s: s * m * 2.0**e, st.integers(0, 255), st.integers(-20, 8), st.sampled_from([1.0, -1.0])
        ),
        st.just(0.0),
    ).map(lambda v: 0.0 if abs(v) < small else v)


def block(size: int) -> st.SearchStrategy[Tensor]:
    return st.lists(floats(), min_size=size, max_size=size).map(torch.tensor)


BF16 = st.sampled_from([torch.bfloat16, torch.float32])

# ---- all codes -------------------------------------------------------------------------------------------


def test_every_e4m3_code_decodes():
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    values = formats.fp8_dequant(codes.view(formats.E4M3).view(8, 32), torch.full((8, 1), 127, dtype=torch.uint8))
    for code, value in enumerate(values.flatten().tolist()):
        want = e4m3(code)
        assert math.isnan(value) if want is None else Fraction(value) == want


def test_every_e8m0_code_decodes():
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    values = formats.e8m0_value(codes).double().tolist()
    assert all(values[code] == 2.0 ** (code - 127) for code in range(255)) and math.isnan(values[255])
    assert formats.e8m0_value(codes.view(formats.E8M0))[:255].equal(formats.e8m0_value(codes)[:255])


def test_every_e2m1_pair_decodes_low_nibble_first():
    values = formats.e2m1_values(torch.arange(256, dtype=torch.int32).to(torch.uint8)).view(256, 2)
    for byte in range(256):
        for value, nibble in zip(values[byte].tolist(), (byte & 15, byte >> 4), strict=True):
            want = float(E2M1[nibble & 7])
            assert abs(value) == want and (math.copysign(1, value) < 0) == (nibble >= 8)


def test_every_finite_fp8_code_survives_a_cast():
    """A block that holds 448 has scale 1, so every code is its own image."""
    codes = torch.tensor([c for c in range(256) if e4m3(c) is not None], dtype=torch.int32).to(torch.uint8)
    values = codes.view(formats.E4M3).float()
    rows = torch.zeros(len(codes), 32)
    rows[:, 0], rows[:, 1] = values, 448.0
    cast, scale = formats.fp8_cast(rows)
    assert (scale.view(torch.uint8) == 127).all()
    assert torch.equal(cast[:, 0].contiguous().view(torch.uint8), codes)


@pytest.mark.parametrize("name", ["mxfp4", "latent"])
def test_every_fp4_code_survives_a_cast(name):
    size = 32 if name == "mxfp4" else 16
    cast, dequant = getattr(formats, f"{name}_cast"), getattr(formats, f"{name}_dequant")
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    rows = torch.zeros(256, size)
    rows[:, :2] = formats.e2m1_values(codes).view(256, 2)
    rows[:, 2] = 6.0
    packed, scale = cast(rows)
    assert torch.equal(packed[:, 0], codes) and torch.equal(dequant(packed, scale), rows)


def test_ties_go_to_the_even_code():
    grid = torch.tensor([float(v) for v in E2M1])
    middle = (grid[1:] + grid[:-1]) / 2
    row = torch.zeros(2, 32)
    row[0, :7], row[1, :7], row[:, 31] = middle, -middle, 6.0
    codes = formats.mxfp4_cast(row)[0]
    low, high = codes & 15, codes >> 4
    got = torch.stack((low, high), -1).flatten(-2)[:, :7]
    assert (got[0] & 7).tolist() == [0, 2, 2, 4, 4, 6, 6]
    assert (got[1] & 7).tolist() == [0, 2, 2, 4, 4, 6, 6] and (got[1] >= 8).all()
    nudge = torch.nextafter(middle, torch.tensor(10.0))
    row[0, :7] = nudge
    got = torch.stack((formats.mxfp4_cast(row)[0] & 15, formats.mxfp4_cast(row)[0] >> 4), -1).flatten(-2)[0, :7]
    assert got.tolist() == [1, 2, 3, 4, 5, 6, 7]


# ---- scales ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fp8", "mxfp4", "latent", "fp8_weight"])
def test_zero_blocks_stay_zero(name):
    cast, dequant = getattr(formats, f"{name}_cast"), getattr(formats, f"{name}_dequant")
    for sign in (1.0, -1.0):
        values, scale = cast(torch.zeros(32, 64) * sign)
        back = dequant(values, scale)
        assert torch.equal(back, torch.zeros(32, 64))
    expected = {"fp8": 127 - 22, "fp8_weight": 127 - 22, "mxfp4": 1, "latent": 1}[name]
    assert (scale.view(torch.uint8) == expected).all()


@pytest.mark.parametrize("largest", [448, 6])
def test_scale_at_powers_of_two(largest):
    """amax exactly at, one step below and one step above largest * 2^k, in every binade."""
    cast = formats.fp8_cast if largest == 448 else formats.mxfp4_cast
    lowest = -22 if largest == 448 else -126
    for k in range(lowest, 118):
        at = torch.tensor(largest * 2.0**k)
        row = torch.zeros(3, 32)
        row[:, 5] = torch.stack(
            (torch.nextafter(at, torch.zeros(())), at, torch.nextafter(at, torch.tensor(torch.inf)))
        )
        scale = cast(row)[1].view(torch.uint8).flatten().tolist()
        assert scale == [127 + k, 127 + k, 128 + k], k


def test_amax_floors():
    tiny = torch.full((1, 32), 1e-30)
    assert formats.fp8_cast(tiny)[1].view(torch.uint8).item() == 127 - 22  # 2^ceil(log2(1e-4 / 448))
    assert formats.mxfp4_cast(torch.full((1, 32), 2.0**-140))[1].view(torch.uint8).item() == 1
    assert formats.latent_cast(torch.full((1, 16), 1e-9))[1].float().item() == 2.0**-9


def test_latent_scale_saturates():
    packed, scale = formats.latent_cast(torch.tensor([[1e6, -3000.0] + [2688.0] * 14]))
    assert scale.float().item() == 448
    assert formats.latent_dequant(packed, scale).tolist() == [[2688.0, -2688.0] + [2688.0] * 14]


@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["fp8", "mxfp4", "index", "latent"])
def test_a_bad_number_makes_its_block_nan_and_no_other(name, bad, dtype):
    size = 16 if name == "latent" else 32
    x = torch.randn(3, 4 * size, generator=torch.Generator().manual_seed(0)).to(dtype)
    clean = x.clone()
    x[1, size + 3] = bad
    cast, dequant = getattr(formats, f"{name}_cast"), getattr(formats, f"{name}_dequant")
    got, want = dequant(*cast(x)), dequant(*cast(clean))
    assert got[1, size : 2 * size].isnan().all()
    want[1, size : 2 * size] = torch.nan
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_fp8_round_trip_is_cast_and_back(bad, dtype):
    x = torch.randn(5, 96, generator=torch.Generator().manual_seed(0)).to(dtype) * 100
    x[2, 40] = bad
    want = formats.fp8_dequant(*formats.fp8_cast(x))
    torch.testing.assert_close(formats.fp8_round_trip(x), want, rtol=0, atol=0, equal_nan=True)


def test_shapes_are_refused():
    with pytest.raises(ValueError, match=r"multiple of 32, got shape \(2, 40\)"):
        formats.fp8_cast(torch.zeros(2, 40))
    with pytest.raises(ValueError, match="multiple of 16"):
        formats.latent_cast(torch.zeros(2, 40))


# ---- against rational arithmetic -------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(block(32), BF16)
def test_fp8_is_the_nearest_value(x, dtype):
    x = x.to(dtype)
    values, scale = formats.fp8_cast(x[None])
    amax = max(max(abs(v) for v in exact(x)), Fraction(torch.tensor(1e-4).item()))
    k = exponent_of_scale(amax, 448)
    assert scale.view(torch.uint8).item() == k + 127
    codes = values.view(torch.uint8).flatten().tolist()
    assert [code & 127 for code in codes] == [nearest(v / Fraction(2) ** k, E4M3) for v in exact(x)]
    assert [code >= 128 for code in codes] == torch.signbit(x).tolist()


@settings(max_examples=60, deadline=None)
@given(block(32), BF16)
def test_mxfp4_is_the_nearest_value(x, dtype):
    x = x.to(dtype)
    packed, scale = formats.mxfp4_cast(x[None])
    k = exponent_of_scale(max(max(abs(v) for v in exact(x)), 6 * Fraction(2) ** -126), 6)
    assert scale.view(torch.uint8).item() == k + 127
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten().tolist()
    assert [code & 7 for code in codes] == [nearest(v / Fraction(2) ** k, E2M1) for v in exact(x)]
    assert [code >= 8 for code in codes] == torch.signbit(x).tolist()


@settings(max_examples=60, deadline=None)
@given(st.lists(floats(limit=3000.0), min_size=16, max_size=16).map(torch.tensor))
def test_latent_is_the_nearest_value(x):
    x = x.to(torch.bfloat16)  # float32 quotients may round once more next to a midpoint
    packed, scale = formats.latent_cast(x[None])
    amax = min(max(max(abs(v) for v in exact(x)), 6 * Fraction(2) ** -9), Fraction(2688))
    assert scale.view(torch.uint8).item() == nearest(amax / 6, E4M3)
    s = E4M3[scale.view(torch.uint8).item()]
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten().tolist()
    assert [code & 7 for code in codes] == [nearest(v / s, E2M1) for v in exact(x)]


@settings(max_examples=50, deadline=None)
@given(block(64), BF16)
def test_power_of_two_formats_are_idempotent(x, dtype):
    """What a cast leaves is representable: casting again changes nothing."""
    x = x.to(dtype)[None]
    for name in ("fp8", "mxfp4"):
        cast, dequant = getattr(formats, f"{name}_cast"), getattr(formats, f"{name}_dequant")
        once = dequant(*cast(x))
        assert torch.equal(dequant(*cast(once)), once)


@settings(max_examples=50, deadline=None)
@given(block(32))
def test_dequantised_values_fit_bf16(x):
    for name in ("fp8", "mxfp4", "latent"):
        cast, dequant = getattr(formats, f"{name}_cast"), getattr(formats, f"{name}_dequant")
        back = dequant(*cast(x[None]))
        assert torch.equal(back.to(torch.bfloat16).float(), back)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 70), st.integers(1, 70), st.integers(0, 1000))
def test_weight_tiles(n, k, seed):
    """A 32x32 tile has one scale, from its own values only, edge tiles included."""
    w = torch.randn(n, k, generator=torch.Generator().manual_seed(seed)) * torch.exp2(torch.arange(k) % 9.0)
    values, scale = formats.fp8_weight_cast(w)
    assert values.shape == (n, k) and scale.shape == (-(-n // 32), -(-k // 32))
    back = formats.fp8_weight_dequant(values, scale)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            tile = (slice(32 * i, 32 * i + 32), slice(32 * j, 32 * j + 32))
            amax = max(exact(w[tile].abs().amax())[0], Fraction(torch.tensor(1e-4).item()))
            assert scale.view(torch.uint8)[i, j].item() == exponent_of_scale(amax, 448) + 127
            error = (back[tile] - w[tile]).abs()
            assert (error <= w[tile].abs() * 2.0**-4 + 2.0 ** (exponent_of_scale(amax, 448) - 10)).all()


def test_strided_and_higher_rank_inputs():
    x = torch.randn(3, 5, 64, generator=torch.Generator().manual_seed(0))
    for name in ("fp8", "mxfp4", "latent"):
        cast, dequant = getattr(formats, f"{name}_cast"), getattr(formats, f"{name}_dequant")
        values, scale = cast(x)
        flat_values, flat_scale = cast(x.flatten(0, 1))
        assert torch.equal(values.flatten(0, 1).view(torch.uint8), flat_values.view(torch.uint8))
        assert torch.equal(scale.flatten(0, 1).view(torch.uint8), flat_scale.view(torch.uint8))
        turned = cast(x.transpose(0, 1))
        assert torch.equal(dequant(*turned), dequant(values, scale).transpose(0, 1))
