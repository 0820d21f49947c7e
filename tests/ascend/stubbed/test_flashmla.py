"""The FlashMLA adapter where the real torch_npu is: shapes of the released model on ``meta``, no plain operation that
torch_npu would hand to the CPU, no result without a device."""

from __future__ import annotations

import pytest
import torch

from deepinfer_plugin.kernels.ascend import flashmla

from .. import flash_mla
from ..test_flashmla import arguments
from .test_adapters import BF16, HEADS, ROWS, D, Recorder, attention, has_kernel, on_device


@pytest.fixture(autouse=True)
def there():
    with flash_mla.installed():
        yield


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("name", ["window_attention", "attention", "attention draft"])
def test_shapes_and_dtypes(name, rows):
    got = flashmla.sparse_attention(*attention(rows, name == "attention", name == "attention draft"))
    assert got.shape == (rows, HEADS, D) and got.dtype == BF16


def test_every_plain_operation_has_an_npu_kernel_sparse_attention(monkeypatch):
    given, inside = arguments(3), Recorder()
    monkeypatch.setattr(flashmla, "attend", lambda q, *_, **__: q)
    numbers = given["selected"] >= 0
    with inside:
        flashmla.sparse_attention(**given)
        flashmla._numbers(numbers)
    missing = {seen for seen in inside.seen if seen.startswith("aten::") and not has_kernel(seen)}
    assert inside.seen and not missing, f"torch_npu would hand {', '.join(sorted(missing))} to the CPU"


def test_compute_raises_on_the_stub_sparse_attention():
    with pytest.raises(RuntimeError, match="aclnn"):
        flashmla.sparse_attention(**{name: on_device(value) for name, value in arguments(2).items()})


def test_without_cann_it_does_not_serve():
    assert "CANN" in str(flashmla.unavailable(torch.device("npu")))
