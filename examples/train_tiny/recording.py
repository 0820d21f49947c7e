"""Steps recorded once and replayed: thousands of small kernels without the time it takes to launch them one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

WARM_UPS = 2  # steps run as written before a recording: kernels are compiled and states are made in them
Figures = dict[str, Tensor]


class Recorded:
    """``step(*tensors, *phase)`` as a CUDA graph per shape of its tensors and per phase; on a CPU it is just called.

    A step must not wait for the device. What it returns is overwritten by the next step of the same shape and phase.
    """

    def __init__(self, step: Callable[..., Figures]):
        self.step = step
        self.graphs: dict[Any, tuple[torch.cuda.CUDAGraph, list[Tensor], Figures]] = {}
        self.pool: Any = (
            None  # all graphs share their memory: one runs at a time, and nothing passes from one to another in it
        )

    def __call__(self, tensors: Iterable[Tensor], *phase: bool) -> Figures:
        tensors = list(tensors)
        if not tensors[0].is_cuda:
            return self.step(*tensors, *phase)
        key = (*(tensor.shape for tensor in tensors), *phase)
        if key not in self.graphs:
            self.graphs[key] = self._record(tensors, phase)
        graph, inputs, figures = self.graphs[key]
        for own, given in zip(inputs, tensors, strict=True):
            own.copy_(given)
        graph.replay()
        return figures

    def _record(
        self, tensors: list[Tensor], phase: tuple[bool, ...]
    ) -> tuple[torch.cuda.CUDAGraph, list[Tensor], Figures]:
        inputs = [tensor.clone() for tensor in tensors]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                self.step(*inputs, *phase)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            figures = self.step(*inputs, *phase)
        self.pool = graph.pool()
        return graph, inputs, figures
