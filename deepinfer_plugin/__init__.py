"""deepinfer_plugin: DeepSeek-V4.1-Flash for SGLang behind ``--model-impl deepinfer``.

``register`` and ``activate`` are the two entry points SGLang calls in each of its processes. Importing this package
costs nothing.
"""

from __future__ import annotations

import logging
import multiprocessing

logger = logging.getLogger(__name__)


def register() -> None:
    """Entry point ``sglang.srt.plugins``. Nothing it installs acts before someone asks for ``--model-impl
    deepinfer``."""
    from . import patches

    reason = patches.unsupported_sglang()
    if reason:
        if multiprocessing.parent_process() is None:  # once a server, not once a process
            logger.warning("deepinfer_plugin is switched off and SGLang serves its own models: %s", reason)
        return
    from . import arguments, model_impl
    from .speculative import algorithm

    # SGLang swallows what a plugin raises, so the step that verifies everything else comes first.
    arguments.register()
    model_impl.register()
    algorithm.register()
    patches.install()


def activate() -> str | None:
    """Entry point ``sglang.srt.platforms``: the class of our platform, or None where SGLang has one of its own."""
    from . import patches, platform

    return None if patches.unsupported_sglang() else platform.choose()
