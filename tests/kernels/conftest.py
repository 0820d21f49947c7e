"""Fixtures of the op tests: every provider that can serve the device under test."""

from __future__ import annotations

import pytest
import torch

from deepinfer_plugin.kernels import Ops, providers, select

DEVICE = torch.device("cpu")
PROVIDERS = [provider.name for provider in providers() if provider.unavailable(DEVICE) is None]


@pytest.fixture(scope="session", params=PROVIDERS)
def ops(request: pytest.FixtureRequest) -> Ops:
    return select(DEVICE, request.param)


@pytest.fixture(scope="session")
def reference() -> Ops:
    return select(DEVICE, "reference")


@pytest.fixture(params=[torch.bfloat16, torch.float32], ids=["bf16", "float32"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param
