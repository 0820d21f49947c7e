"""Leaf modules: parameters under their checkpoint names, computation in the op table.

``prepare`` runs once after loading and lets the provider lay a weight out as its kernels want it. ``raw`` names the
parameters that the module itself does not read from then on.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from deepinfer_plugin.kernels import Ops

from .config import QUANT_BLOCK

FP8, SCALE = torch.float8_e4m3fn, torch.float8_e8m0fnu


def parameter(*shape: int, dtype: torch.dtype = torch.bfloat16) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)


def blocks(channels: int) -> int:
    return -(-channels // QUANT_BLOCK)


def lay_out(module: nn.Module) -> None:
    """Let the provider lay out every weight below ``module``, then drop what was loaded: in memory stays what a layout
    reads."""
    if any(getattr(each, "raw", ()) for each in module.modules()):  # not where weights are trained, within a graph
        # PyTorch would put a layout into the place of something larger that is gone, whose rest nobody could have.
        torch.cuda.empty_cache()
    for each in module.modules():
        prepare: Any = getattr(each, "prepare", None)
        if prepare is not None:
            prepare()
    for each in module.modules():
        for name in getattr(each, "raw", ()):
            setattr(each, name, None)


class FP8Weight(nn.Module):
    """FP8 weight [N, K] with one UE8M0 scale per 32x32 tile, for whoever multiplies with it."""

    raw: tuple[str, ...] = ("weight", "scale")

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.weight = parameter(outputs, inputs, dtype=FP8)
        self.scale = parameter(blocks(outputs), blocks(inputs), dtype=SCALE)


class Linear(FP8Weight):
    """Product with an FP8 weight; bf16 activations are cast to FP8/32 on the way in."""

    def __init__(self, ops: Ops, inputs: int, outputs: int):
        super().__init__(inputs, outputs)
        self.ops = ops
        self.prepared: Any = None

    def prepare(self) -> None:
        self.prepared = self.ops.prepare_linear(self.weight, self.scale)

    def forward(self, x: Tensor) -> Tensor:
        return self.ops.linear(x, self.prepared)


class JoinedLinear(nn.Module):
    """Products of one input with several FP8 weights, as one: the input is cast once, and more outputs fill a GPU
    better. The weights belong to the module that names them."""

    def __init__(self, ops: Ops, *weights: FP8Weight):
        super().__init__()
        self.ops = ops
        self.weights = weights  # in a tuple: not parameters of ours
        self.prepared: Any = None

    def prepare(self) -> None:
        weights, scales = ([getattr(each, name) for each in self.weights] for name in ("weight", "scale"))
        self.outputs = [weight.shape[0] for weight in weights]
        assert not any(rows % QUANT_BLOCK for rows in self.outputs), "a scale would be of rows of two weights"
        self.prepared = self.ops.prepare_linear(_stacked(weights), _stacked(scales))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.ops.linear(x, self.prepared).split(self.outputs, -1)


def _stacked(parts: list[Any]) -> Any:
    """Rows of all, whatever their dtype; scales are None where weights are trained."""
    if parts[0] is None:
        return None
    if parts[0].dtype.itemsize > 1:
        return torch.cat(parts)
    return torch.cat([part.view(torch.uint8) for part in parts]).view(parts[0].dtype)


class GroupedLinear(nn.Module):
    """Block-diagonal FP8 weight [groups * N, K]: group g maps x[:, g] [T, K] to N outputs."""

    raw: tuple[str, ...] = ("weight", "scale")

    def __init__(self, ops: Ops, groups: int, inputs: int, outputs: int, fp8: bool):
        super().__init__()
        self.ops, self.groups, self.fp8 = ops, groups, fp8
        self.weight = parameter(groups * outputs, inputs, dtype=FP8)
        self.scale = parameter(blocks(groups * outputs), blocks(inputs), dtype=SCALE)
        self.prepared: Any = None

    def prepare(self) -> None:
        self.prepared = self.ops.prepare_grouped(self.weight, self.scale, self.groups)

    def forward(self, x: Tensor) -> Tensor:
        return self.ops.grouped_linear(x, self.prepared, self.fp8)


class Dense(nn.Module):
    """bf16 weight [N, K]; the output is float32 where the model wants it (gates, compressors, heads)."""

    raw: tuple[str, ...] = ("weight",)

    def __init__(self, ops: Ops, inputs: int, outputs: int, out_dtype: torch.dtype | None = None):
        super().__init__()
        self.ops, self.out_dtype = ops, out_dtype
        self.weight = parameter(outputs, inputs)
        self.prepared: Any = None

    def prepare(self) -> None:
        self.prepared = self.ops.prepare_dense(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.ops.dense(x, self.prepared, self.out_dtype)


class RMSNorm(nn.Module):
    def __init__(self, ops: Ops, size: int, eps: float):
        super().__init__()
        self.ops, self.eps = ops, eps
        self.weight = parameter(size)

    def forward(self, x: Tensor) -> Tensor:
        return self.ops.rms_norm(x, self.weight, self.eps)


class Embedding(nn.Module):
    """bf16 table [vocab, size]."""

    def __init__(self, vocab: int, size: int):
        super().__init__()
        self.weight = parameter(vocab, size)

    def forward(self, ids: Tensor) -> Tensor:
        return self.weight[ids]
