"""Triton kernels that begin while the one before them ends (programmatic dependent launch).

A step is some two thousand small kernels, and the time between one's end and the next one's start is lost on each. A
kernel launched with ``OVERLAP`` may start when all programs of the one before have, and stands still in
``after_previous`` until that one has ended and what it wrote is there. So that must be the first thing it does: before
any read or write of memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .formats import INTERPRET

OVERLAP = {} if INTERPRET.value else {"launch_pdl": True}


@triton.jit
def after_previous():
    if not INTERPRET:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
