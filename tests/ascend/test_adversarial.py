"""The op tests of the reference on the ascend provider: NaN, ties, empty windows, ragged batches, ids beyond 2^31.

Collected again under this folder's ``ops``. Where they ask for the last bit of a float64 sum, a float32 sum is granted
its own.
"""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch import Tensor

from ..kernels import test_attention, test_dense_ops, test_index, test_large_ids, test_memory_ops

MODULES: tuple[ModuleType, ...] = (test_attention, test_dense_ops, test_index, test_large_ids, test_memory_ops)
for _module in MODULES:
    globals().update({name: value for name, value in vars(_module).items() if not name.startswith("_")})


@pytest.fixture(autouse=True)
def float32_sums(monkeypatch):
    def assert_same(got: Tensor, want: Tensor) -> None:
        torch.testing.assert_close(got.float(), want.float(), rtol=2.0**-7, atol=2.0**-9)
        assert got.dtype == torch.float32 or (got != want).float().mean() < 0.03

    def one_step(got: Tensor, exact: Tensor, terms: Tensor | None = None) -> None:
        error = (got.double() - exact).abs()
        if got.dtype == torch.float32:
            assert (error <= (exact.abs().amax() if terms is None else terms) * 2.0**-20).all()
        else:
            assert (error <= exact.abs() * 2.0**-7 + 1e-300).all() and (
                got != exact.to(got.dtype)
            ).double().mean() < 0.01

    monkeypatch.setattr(test_attention, "assert_same", assert_same)
    monkeypatch.setattr(test_dense_ops, "one_step", one_step)
