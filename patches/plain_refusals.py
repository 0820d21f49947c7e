"""A refusal that only the scheduler can make, of memory that turned out too small, is logged by its text alone.

SGLang logs every exception of a scheduler with its traceback, which buries the one line that says what to change.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from .hook import Hook


def get_exception_traceback(original: Callable[..., str], *args: Any, **kwargs: Any) -> str:
    from ..refusals import kinds

    error = sys.exc_info()[1]
    return str(error) if isinstance(error, kinds()) else original(*args, **kwargs)


HOOK = Hook(
    "plain_refusals",
    "sglang.srt.managers.scheduler.get_exception_traceback",
    get_exception_traceback,
    "a pool that does not fit is reported at the end of a traceback",
    required=False,
)
