"""The one-kernel casts of training against the formats they stand for, bit by bit."""

import pytest
import torch

from deepinfer_plugin.kernels.reference import formats

CASES = {
    "fp8": (formats.E4M3_MAX, formats.fp8_round_trip),
    "fp8_tiles": (formats.E4M3_MAX, lambda w: formats.fp8_weight_dequant(*formats.fp8_weight_cast(w))),
    "mxfp4": (formats.E2M1_MAX, lambda x: formats.mxfp4_dequant(*formats.mxfp4_cast(x))),
    "latent": (formats.E2M1_MAX, lambda x: formats.latent_dequant(*formats.latent_cast(x))),
}


@pytest.mark.parametrize("size", [1e-7, 1e-3, 1.0, 40.0, 3e4])
@pytest.mark.parametrize("name", CASES)
def test_equal_to_the_bit(name, size):
    import round_trips

    largest, expected = CASES[name]
    x = torch.randn(256, 96, generator=torch.Generator().manual_seed(0)) * size
    x *= torch.exp(2 * torch.randn(256, 1, generator=torch.Generator().manual_seed(1)))
    x[:3] = 0
    for values in (x,) if name == "fp8_tiles" else (x, x.bfloat16()):
        assert torch.equal(
            getattr(round_trips, name)(values, round_trips.constant(largest, x.device)), expected(values)
        )


def test_ties_go_to_the_even_code():
    import round_trips

    grid = torch.arange(-8, 8, 0.125).view(4, 32)
    found = round_trips.mxfp4(grid, round_trips.constant(formats.E2M1_MAX, grid.device))
    assert torch.equal(found, formats.mxfp4_dequant(*formats.mxfp4_cast(grid)))
