"""Compiling kernels before they are needed, without a GPU.

Inside ``compiling`` the ops of this provider run on tensors that have no memory (PyTorch's meta device): they do all
they do for a GPU but launch nothing, so whatever a model would launch is compiled, in the very variants it would ask
for. Triton's kernels go to Triton's own cache, those in CUDA C++ to ours.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from ..ops import OP_NAMES, Ops
from . import CAPABILITY, FAST_PROFILES, MULTIPROCESSORS, every_fast_op, every_op, jit
from .jit import SHARED_BYTES

THREADS = 1024  # of a block


@dataclass
class Kernels:
    """What was asked for inside ``compiling``: names of Triton kernels, one an entry for each variant, and sources."""

    triton: list[str] = field(default_factory=list)
    sources: set[jit.Source] = field(default_factory=set)
    compiled: int = 0  # of all, what was in no cache

    @property
    def count(self) -> int:
        return len(self.triton) + len(self.sources)


class _Driver:
    """A Triton driver that loads nothing and launches nothing."""

    device = -1  # compiled kernels are kept by device: no real one may find these

    def __init__(self, capability: tuple[int, int]):
        self.capability, self.utils = capability, self

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 10 * self.capability[0] + self.capability[1], 32)

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": SHARED_BYTES, "multiprocessor_count": MULTIPROCESSORS}

    def load_binary(self, name: str, kernel: bytes, shared: int, device: int) -> tuple[None, None, int, int, int]:
        return None, None, 0, 0, THREADS

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        return lambda *args, **named: None


@contextmanager
def compiling(capability: tuple[int, int] = CAPABILITY) -> Iterator[Kernels]:
    """Ops that run inside, on meta tensors, compile for a GPU of that compute capability.

    Raises:
        RuntimeError: Triton was told to interpret its kernels (TRITON_INTERPRET), so there is nothing to compile.
    """
    from triton import knobs
    from triton.runtime import driver

    if knobs.runtime.interpret:
        raise RuntimeError("TRITON_INTERPRET is set: kernels are interpreted, not compiled")
    found = Kernels()

    def source(asked: jit.Source) -> None:
        if asked not in found.sources:
            found.compiled += not jit.cached(asked)
            jit.cubin(asked)
            found.sources.add(asked)

    def listener(*, src: Any, cache_hit: bool, **rest: Any) -> None:
        found.triton.append(src.name)
        found.compiled += not cache_hit

    before = driver._active
    driver.set_active(_Driver(capability))
    try:
        with knobs.compilation.scope(), jit.instead_of_launching(source):
            knobs.compilation.listener = listener
            yield found
    finally:
        driver._active = before


def ops(profile: str | None = None) -> Ops:
    """The op table of this folder's providers for meta tensors, chosen as ``select`` does for Hopper; for use inside
    ``compiling``."""
    choices = {op: "cuda-fast" if profile in FAST_PROFILES.get(op, ()) else "cuda" for op in OP_NAMES}
    return Ops(torch.device("meta"), choices, {"cuda": every_op(), "cuda-fast": every_fast_op()})
