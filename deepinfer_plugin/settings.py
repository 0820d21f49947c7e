"""Every switch of this package in one frozen object, and nowhere else.

A field ``exact_prefix`` is the flag ``--deepinfer-exact-prefix`` and the variable ``DEEPINFER_EXACT_PREFIX``; the
flag wins. Flags exist on SGLang's command line; variables also reach ``Engine(**kwargs)`` and library use.
``ServerArgs`` carries the flags as plain strings, because it is unpickled in SGLang's child processes before plugins
load there.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

SPECULATION = ("auto", "off", "fixed", "scheduled")
ATTRIBUTE = "_deepinfer_flags"  # where ServerArgs carries them: field name -> text


class SettingsError(ValueError):
    """A switch has a value that means nothing; names the switch and what is legal."""


class _Illegal(ValueError):
    """What would have been legal."""


def _flag(text: str) -> bool:
    values = {"1": True, "true": True, "on": True, "0": False, "false": False, "off": False}
    if text.lower() not in values:
        raise _Illegal("1 or 0")
    return values[text.lower()]


def _profile(text: str) -> str:
    from .model.profiles import PROFILES

    if text not in PROFILES:
        raise _Illegal(", ".join(PROFILES))
    return text


def _speculation(text: str) -> str:
    if text not in SPECULATION:
        raise _Illegal(", ".join(SPECULATION))
    return text


def _provider(text: str) -> str:
    from .kernels import providers

    legal = ("auto", *(provider.name for provider in providers() if not provider.special))  # those have a few ops only
    if text not in legal:
        raise _Illegal(", ".join(legal))
    return text


def _mebibytes(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise _Illegal("a positive number of MiB")
    return int(text)


def _kibibytes(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise _Illegal("a positive number of KiB")
    return int(text)


def _seconds(text: str) -> int:
    if not text.isdecimal():
        raise _Illegal("a number of seconds, 0 or more")
    return int(text)


def _pairs(text: str) -> tuple[tuple[str, str], ...]:
    pairs = [tuple(part.strip() for part in item.split("=")) for item in text.split(",") if item.strip()]
    if not all(len(pair) == 2 and all(pair) for pair in pairs):
        raise _Illegal("op=provider,op=provider,...")
    return tuple((op, provider) for op, provider in pairs)


def _names(text: str) -> frozenset[str]:
    return frozenset(name.strip() for name in text.split(",") if name.strip())


def _hooks(text: str) -> frozenset[str]:
    from .patches import HOOKS

    names, legal = _names(text), [hook.name for hook in HOOKS]
    if not names <= set(legal):
        raise _Illegal(f"names among {', '.join(legal)}")
    return names


def _switch(
    default: Any, parse: Callable[[str], Any], text: str, metavar: str | None = None, on_command_line: bool = True
) -> Any:
    return field(default=default, metadata={"parse": parse, "help": text, "metavar": metavar, "flag": on_command_line})


@dataclass(frozen=True)
class Settings:
    exact_prefix: bool = _switch(
        False,
        _flag,
        "Recompute every prompt from its first token instead of reusing cached prefixes with a replayed window.",
    )
    profile: str = _switch(
        "model",
        _profile,
        "Rounding profile: model, deepinfer (on Hopper with the fast, less exact experts) or float32.",
        "NAME",
    )
    provider: str = _switch("auto", _provider, "Where ops come from: auto or the name of one provider.", "NAME")
    ops: tuple[tuple[str, str], ...] = _switch((), _pairs, "Provider of single ops.", "OP=PROVIDER,...")
    cpu_kv_mib: int = _switch(
        256, _mebibytes, "Prefix memory on a machine without accelerator when --max-total-tokens is unset.", "MIB"
    )
    speculation: str = _switch(
        "auto",
        _speculation,
        "Speculative decoding with the checkpoint's own draft head: off, fixed (every draft is verified), scheduled "
        "(as many drafts as pay, by their confidences and the measured cost of a step) or auto (scheduled if there is "
        "a draft head and no other argument excludes it).",
        "NAME",
    )
    calibration: str | None = _switch(
        None,
        str,
        "Calibration of the draft head's confidences; without it, dspark_calibration.json of the checkpoint if there "
        "is one.",
        "FILE",
    )
    check_ranks: bool = _switch(
        False, _flag, "Compare, before every forward, what the ranks of an attention group are about to run."
    )
    rank_patience_s: int = _switch(
        20,
        _seconds,
        "How long a rank waits for another one before it ends the server; 0: for ever.",
        "SECONDS",
    )
    expert_chunk_kib: int = _switch(
        4096,
        _kibibytes,
        "What a rank sends, and receives, between two forwards at most while experts are rebalanced (--enable-eplb).",
        "KIB",
    )
    expert_layout: str | None = _switch(
        None,
        str,
        "Where a balancer keeps which experts lie where, for the next start; without it a file in the cache folder.",
        "FILE",
    )
    # For tests: every decision moves experts at random, whatever it costs.
    shuffle_experts: bool = _switch(False, _flag, "Move experts at random.", on_command_line=False)
    debug: bool = _switch(False, _flag, "Check on every forward that each state row holds the position it should.")
    # Hooks go in before the command line is read, so this one is a variable only.
    disable_hooks: frozenset[str] = _switch(
        frozenset(), _hooks, "Hooks into SGLang not to install.", on_command_line=False
    )

    @classmethod
    def read(cls, flags: Mapping[str, str] | None = None, environ: Mapping[str, str] | None = None) -> Settings:
        """From flags (field name -> text) over environment variables over defaults.

        Raises:
            SettingsError: a value is not legal, or a ``DEEPINFER_*`` variable is not a switch.
        """
        flags, environ = flags or {}, os.environ if environ is None else environ
        known = {_variable(switch.name) for switch in fields(cls)}
        for name in environ:
            if name.startswith("DEEPINFER_") and name not in known:
                raise SettingsError(f"{name} is not a setting; legal: {', '.join(sorted(known))}")
        values = {}
        for switch in fields(cls):
            for source, text in (
                (_option(switch.name), flags.get(switch.name)),
                (_variable(switch.name), environ.get(_variable(switch.name))),
            ):
                if text is None:
                    continue
                try:
                    values[switch.name] = switch.metadata["parse"](text)
                except _Illegal as legal:
                    raise SettingsError(f"{source}={text!r} is not supported; legal: {legal}") from None
                break
        return cls(**values)

    @classmethod
    def of(cls, server_args: Any) -> Settings:
        """The settings of a server."""
        return cls.read(getattr(server_args, ATTRIBUTE, None))

    @classmethod
    def current(cls) -> Settings:
        """The settings of the server this process belongs to; the environment alone outside one."""
        from sglang.srt.runtime_context import get_context

        try:
            return cls.of(get_context().server_args)
        except ValueError:  # nothing published
            return cls.read()


def from_command_line(server_args: Any) -> bool:
    """Whether a command line was parsed into these arguments, as a server's are; an ``Engine``'s are keywords."""
    return getattr(server_args, ATTRIBUTE, None) is not None


def disabled_hooks(environ: Mapping[str, str] | None = None) -> frozenset[str]:
    """Names in ``DEEPINFER_DISABLE_HOOKS``, unchecked: installing hooks must not fail for those who do not serve our
    model."""
    return _names((os.environ if environ is None else environ).get(_variable("disable_hooks"), ""))


def add_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("deepinfer", "Only with --model-impl deepinfer.")
    for switch in fields(Settings):
        if not switch.metadata["flag"]:
            continue
        is_flag = switch.metadata["parse"] is _flag
        bare: dict[str, Any] = {"nargs": "?", "const": "1"} if is_flag else {}
        group.add_argument(
            _option(switch.name),
            dest=_destination(switch.name),
            metavar="1|0" if is_flag else switch.metadata["metavar"],
            help=f"{switch.metadata['help']} Variable {_variable(switch.name)}; default {switch.default or 'none'}.",
            default=None,
            **bare,
        )


def take_flags(namespace: argparse.Namespace) -> dict[str, str]:
    """The given flags, as text by field name."""
    values = {switch.name: getattr(namespace, _destination(switch.name), None) for switch in fields(Settings)}
    return {name: str(text) for name, text in values.items() if text is not None}


def _variable(name: str) -> str:
    return f"DEEPINFER_{name.upper()}"


def _option(name: str) -> str:
    return f"--deepinfer-{name.replace('_', '-')}"


def _destination(name: str) -> str:
    return f"deepinfer_{name}"
