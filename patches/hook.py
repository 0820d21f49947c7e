"""What a hook is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Hook:
    """A function put around one of SGLang's, where it offers no registry.

    ``around(original, *args, **kwargs)`` must call straight through for any model but ours. Everything it needs of
    SGLang or torch it imports when called: hooks are installed in every process, also in those that never run one.
    """

    name: str  # what DEEPINFER_DISABLE_HOOKS calls it
    target: str  # dotted path of the function or method
    around: Callable[..., Any]
    why: str
    required: bool = True  # False: without it the model is served, only less well
