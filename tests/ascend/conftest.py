"""The ascend provider on a CPU: plain operations as they are, torch_npu's as documented."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from deepinfer_plugin.kernels import OP_NAMES, Ops, ascend, select

from . import documented


def table() -> Ops:
    """The provider's op table, on a CPU, where it is never chosen by itself."""
    return Ops(torch.device("cpu"), dict.fromkeys(OP_NAMES, "ascend"), {"ascend": ascend.OPS})


@pytest.fixture(scope="session")
def ops() -> Iterator[Ops]:
    with documented.installed():
        yield table()


@pytest.fixture(scope="session")
def reference() -> Ops:
    return select("cpu", "reference")


@pytest.fixture(params=[torch.bfloat16, torch.float32], ids=["bf16", "float32"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param
