"""What TileLang makes of our kernels for the Ascend 950, on a machine without one: source text of the AscendC it emits.

Needs TileLang (the ``npu`` environment). Warnings of the pipeline are failures: a race it could not order or a layout
it had to guess would only show on the device.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from tilelang.engine import lower
from tvm.ir.transform import PassContext
from tvm.target import Target

# Harmless lines of a machine without CANN.
EXPECTED = ("ASCEND_HOME_PATH environment variable is not set",)
# An id or an offset of 64 bits cut to 32: beyond 2^31 elements the guard or the address is wrong.
NARROWED = re.compile(r"\(int32_t\)\s*\(?(?:at|offset|page|slot|place|ids|group)\b")


class LoweringError(AssertionError):
    """The pipeline refused a kernel, warned, or emitted something that we do not accept."""


@contextmanager
def output() -> Iterator[Callable[[], str]]:
    """What is written to both streams, by C++ too, while the block runs."""
    sys.stdout.flush()
    sys.stderr.flush()
    saved = os.dup(1), os.dup(2)
    with tempfile.TemporaryFile("w+") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)

        def text() -> str:
            file.flush()
            file.seek(0)
            return file.read()

        try:
            yield text
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for target, original in zip((1, 2), saved, strict=True):
                os.dup2(original, target)
                os.close(original)


def source(kernel: Any, *args: torch.Tensor, **constants: Any) -> str:
    """AscendC of a kernel for these shapes.

    Raises:
        LoweringError: with what the pipeline said.
    """
    target = Target({"kind": "ascend"})
    with output() as said:
        try:
            with PassContext(opt_level=3, config=kernel.pass_configs or {}), target:
                function = kernel.get_tir(*args, **constants)
                artifact = lower(function, target=target, enable_host_codegen=False, enable_device_compile=False)
        except Exception as error:
            raise LoweringError(f"{error}\n{said()}") from error
        text = said()
    warnings = [
        line
        for line in text.splitlines()
        if re.search(r"warn|race|fatal", line, re.IGNORECASE) and not any(known in line for known in EXPECTED)
    ]
    if warnings:
        raise LoweringError("\n".join(warnings))
    emitted = str(artifact.kernel_source)
    if cut := NARROWED.search(emitted):
        raise LoweringError(f"a 64-bit number is cut to 32 bits: {cut.group()}")
    return emitted
