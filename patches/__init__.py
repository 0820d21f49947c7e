"""Hooks into SGLang that no registry offers: one file each, the list of them, and the proof that they are in place.

SGLang logs a hook that fails and serves on without it, so nobody may rely on having registered one. ``verify`` looks
at the functions themselves: when arguments are resolved, again when the model is built, and in ``deepinfer doctor``.

All were read against SGLang 0.5.23. Each can be left out by naming it in ``DEEPINFER_DISABLE_HOOKS``, to find out
whether it is to blame for something; serving then refuses to start if the hook is one it needs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib import metadata
from types import FunctionType
from typing import Any, Literal

from ..settings import disabled_hooks
from . import (
    administration,
    bad_requests,
    command_line,
    cut_character,
    eplb_algorithm,
    last_location,
    model_class,
    page_pool,
    plain_refusals,
    pool_sizes,
    replayed_tokens,
    request_facts,
    same_tokens,
    seeded_sampling,
    token_locations,
)
from .hook import Hook

SGLANG_VERSION = "0.5.23"

HOOKS: tuple[Hook, ...] = (
    command_line.ADD,
    command_line.TAKE,
    model_class.HOOK,
    pool_sizes.HOOK,
    page_pool.HOOK,
    request_facts.HOOK,
    replayed_tokens.HOOK,
    bad_requests.ANSWERS,
    bad_requests.HOOK,
    cut_character.HOOK,
    last_location.HOOK,
    token_locations.HOOK,
    eplb_algorithm.NAME,
    eplb_algorithm.REBALANCE,
    *seeded_sampling.HOOKS,
    same_tokens.HOOK,
    plain_refusals.HOOK,
    *administration.HOOKS,
)

State = Literal["in place", "switched off", "missing"]


class HookError(RuntimeError):
    """A hook that serving needs is not in place; names each with its target."""


def sglang_version() -> str | None:
    """The installed version, None if there is none. Read from the metadata: importing SGLang takes seconds."""
    try:
        return metadata.version("sglang")
    except metadata.PackageNotFoundError:
        return None


def unsupported_sglang() -> str | None:
    """Why nothing may be hooked into the installed SGLang; None if it is the supported version."""
    version = sglang_version()
    if version == SGLANG_VERSION:
        return None
    return f"it supports sglang=={SGLANG_VERSION}, installed is {version or 'none'}"


def install() -> None:
    """Register every hook that is not switched off. SGLang applies them once all plugins have registered theirs."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    off = disabled_hooks()
    for hook in HOOKS:
        if hook.name not in off:
            HookRegistry.register(hook.target, hook.around, HookType.AROUND)


def state(hook: Hook) -> State:
    """Whether calling the target runs the hook, however many other plugins wrapped the same target since."""
    if hook.name in disabled_hooks():
        return "switched off"
    try:
        target = _resolve(hook.target)
    except (ImportError, AttributeError):
        return "missing"
    return "in place" if _runs(target, hook.around) else "missing"


def verify() -> None:
    """
    Raises:
        HookError: hooks that are required are missing or switched off.
    """
    problems = [
        f"  {hook.name} ({hook.target}) is {found}: {hook.why}"
        for hook in HOOKS
        if hook.required and (found := state(hook)) != "in place"
    ]
    if problems:
        raise HookError(
            "--model-impl deepinfer cannot be served without these hooks into SGLang; `deepinfer doctor` says more\n"
            + "\n".join(problems)
        )


def _resolve(path: str) -> Any:
    """The function at a dotted path, without the descriptor that getattr would bind away."""
    import pkgutil

    parent, _, name = path.rpartition(".")
    found = inspect.getattr_static(pkgutil.resolve_name(parent), name)
    return found.__func__ if isinstance(found, classmethod | staticmethod) else found


def _runs(function: Any, wanted: Callable[..., Any]) -> bool:
    """Walk down the chain of wrappers. SGLang's wrapper of a hook holds the hook and what it wraps in closure cells; a
    wrapper that only claims to wrap something (a REPLACE) does not hold it, and ends the chain."""
    while isinstance(function, FunctionType):
        held = [cell.cell_contents for cell in function.__closure__ or ()]
        if any(item is wanted for item in held):
            return True
        below = getattr(function, "__wrapped__", None)
        function = below if any(item is below for item in held) else None
    return False
