"""Fixtures of the op tests: every provider that can serve a device of this machine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from deepinfer_plugin.kernels import Ops, providers, select

DEVICES = [torch.device(name) for name in ("cpu", *["cuda"] * torch.cuda.is_available())]
PROVIDERS = [
    pytest.param((device, provider), id=provider.name if device.type == "cpu" else f"{device.type}-{provider.name}")
    for device in DEVICES
    for provider in providers()
    if provider.unavailable(device) is None and not provider.special  # a few ops, and some not to these tolerances
]


class OnDevice:
    """An op table of another device, for tests that hold their tensors on the CPU: arguments are copied there, views
    with the memory around them, results and what an op writes are copied back. An op that is not a write must leave
    its arguments alone."""

    def __init__(self, ops: Ops):
        self._ops, self.choices, self.device = ops, ops.choices, ops.device

    def __getattr__(self, name: str) -> Any:
        op = getattr(self._ops, name)

        def call(*args: Any, **named: Any) -> Any:
            moved: list[tuple[Tensor, Tensor]] = []

            def move(value: Any) -> Any:
                if not isinstance(value, Tensor) or value.device.type == self.device.type:
                    return value
                memory = torch.empty(0, dtype=value.dtype).set_(value.untyped_storage())
                there = memory.to(self.device).as_strided(value.shape, value.stride(), value.storage_offset())
                moved.append((value, there))
                return there

            result = op(*map(move, args), **{key: move(value) for key, value in named.items()})
            for here, there in moved:
                if name.endswith("_write"):
                    here.copy_(there)
                elif not name.startswith("prepare_") and name != "rope":  # which may take its argument's memory
                    assert torch.equal(_bytes(there.cpu()), _bytes(here)), f"{name} wrote to an argument"
            if isinstance(result, tuple):
                return tuple(each.cpu() for each in result)
            return result.cpu() if isinstance(result, Tensor) else result

        return call


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().reshape(-1).view(torch.uint8)


@pytest.fixture(scope="session", params=PROVIDERS)
def ops(request: pytest.FixtureRequest) -> Ops | OnDevice:
    device, provider = request.param
    table = select(device, provider.name)
    return table if device.type == "cpu" else OnDevice(table)


@pytest.fixture(scope="session")
def reference() -> Ops:
    return select("cpu", "reference")


@pytest.fixture(params=[torch.bfloat16, torch.float32], ids=["bf16", "float32"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param
