"""A refusal is an answer, not a crash: one that nobody catches ends its process with exit code 1 and its text alone.

Everything else that is raised, here or in SGLang, keeps its traceback.
"""

from __future__ import annotations

import sys
from types import TracebackType


def kinds() -> tuple[type[Exception], ...]:
    """The errors whose text says what is wrong and what would be right."""
    from .conflicts import ConflictError
    from .model.checkpoint import CheckpointError
    from .model.config import ConfigError
    from .model.engram_table import EngramError
    from .patches import HookError
    from .runtime.memory_plan import CapacityError
    from .settings import SettingsError
    from .speculative.calibration import CalibrationError

    return (
        CalibrationError,
        CapacityError,
        CheckpointError,
        ConfigError,
        ConflictError,
        EngramError,
        HookError,
        SettingsError,
    )


def print_plainly() -> None:
    """From now on, in this process, when nobody catches one."""
    before, refusals = sys.excepthook, kinds()
    if getattr(before, "__module__", None) == __name__:
        return

    def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if issubclass(kind, refusals):
            print(f"error: {error}", file=sys.stderr)
        else:
            before(kind, error, trace)

    sys.excepthook = report
