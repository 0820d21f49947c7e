"""Providers of ops, and the choice among them.

A provider is a name, a reason why it cannot serve a device (or None), and the ops it has there. ``select`` chooses
one provider per op, once, at start; nothing falls back later.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from . import ascend, blackwell, cuda, identity, reference
from .ascend import flashmla, tiles
from .ops import OP_NAMES, PREPARED_FOR, Ops


@dataclass(frozen=True)
class Provider:
    """One source of implementations.

    name: as in ``select(provider=...)`` and in tables.
    unavailable: device -> why nothing here runs on it, or None.
    ops: device -> op name -> implementation, for that device's capability. An implementation takes the arguments of
        the ``Ops`` method of its name, with prepared weights replaced by what the provider's own prepare function
        returned. A provider that has an op that reads prepared weights has the prepare function too.
    """

    name: str
    unavailable: Callable[[torch.device], str | None]
    ops: Callable[[torch.device], Mapping[str, Callable[..., Any]]]
    device: str | None = None  # the only device type it is for, if there is one
    check: Callable[[Ops], None] | None = None  # asked when a table with its ops is made for an accelerator
    profiles: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # op -> the only rounding profiles it serves
    special: bool = False  # a few ops that another one has too: automatic choice takes them in their profiles or never


_PROVIDERS: list[Provider] = [
    Provider("cuda-fast", cuda.unavailable, cuda.fast_ops, "cuda", profiles=cuda.FAST_PROFILES, special=True),
    Provider("cuda", cuda.unavailable, cuda.ops, "cuda", identity.check),
    Provider("blackwell", blackwell.unavailable, blackwell.ops, "cuda", identity.check, blackwell.PROFILES),
    Provider("ascend", ascend.unavailable, ascend.ops, "npu", identity.check),
    Provider("ascend-tilelang", tiles.unavailable, tiles.ops, "npu", identity.check),
    Provider("ascend-flashmla", flashmla.unavailable, flashmla.ops, "npu", identity.check),
    Provider("reference", lambda device: None, lambda device: reference.OPS),
]


def register(provider: Provider) -> None:
    """Add a provider; the newest is preferred, the reference comes last.

    Raises:
        ValueError: the name is taken.
    """
    if provider.name in {known.name for known in _PROVIDERS}:
        raise ValueError(f"kernel provider {provider.name!r} is registered already")
    _PROVIDERS.insert(0, provider)


def unregister(name: str) -> None:
    """Forget a provider. Op tables that were selected before keep it."""
    _PROVIDERS[:] = [provider for provider in _PROVIDERS if provider.name != name]


def providers() -> tuple[Provider, ...]:
    """All registered providers, in order of preference."""
    return tuple(_PROVIDERS)


def select(
    device: torch.device | str = "cpu",
    provider: str = "auto",
    force: Mapping[str, str] | None = None,
    *,
    profile: str | None = None,
    check: bool = True,
) -> Ops:
    """Choose a provider for every op.

    Args:
        device: where the tensors will be.
        provider: "auto" takes, op by op, the most preferred provider that has it; a name takes that provider for all
            its ops. On a CPU the reference fills every gap. On any other device it never does by itself: a torch
            reference in float64 is right but so slow that running it there must be asked for.
        force: op -> provider name, before all else.
        profile: the rounding profile of the model; None: not known, anything goes but what is special.
        check: on an accelerator, ask the providers' own checks, which use it; False for a process that must not.

    Raises:
        ValueError: an unknown provider or op, a provider that cannot serve the device or lacks a forced op, ops that
            nobody serves, or one that does not round as ``profile`` does; the message names them and what is legal. On
            an accelerator also ``IdentityError``: the mHC ops were asked for known results and gave others.
    """
    device, force = torch.device(device), dict(force or {})
    known = {candidate.name: candidate for candidate in _PROVIDERS}
    if provider != "auto" and provider not in known:
        raise ValueError(f"kernel provider {provider!r} is unknown; legal: auto, {', '.join(known)}")
    for op, name in force.items():
        if op not in OP_NAMES:
            hint = f"; its layout follows {', '.join(PREPARED_FOR[op])}" if op in PREPARED_FOR else ""
            raise ValueError(f"op {op!r} cannot be forced{hint}; legal: {', '.join(OP_NAMES)}")
        if name not in known:
            raise ValueError(f"kernel provider {name!r} forced for {op} is unknown; legal: {', '.join(known)}")
    tables, reasons = _available(device)
    legal = ", ".join(tables)
    for name in ({provider} - {"auto"}) | set(force.values()):
        if name in reasons:
            raise ValueError(f"kernel provider {name!r} cannot serve {device}: {reasons[name]}; legal: {legal}")

    order = _order(device, provider, tables)
    choices = {op: found for op in OP_NAMES if (found := _first(order, op, tables, profile))} | force
    for op, name in force.items():
        if op not in tables[name]:
            able = ", ".join(other for other, ops in tables.items() if op in ops)
            raise ValueError(f"kernel provider {name!r} has no {op} on {device}; legal: {able or 'none'}")
    if missing := [op for op in OP_NAMES if op not in choices]:
        raise ValueError(
            f"no kernel provider{' among ' * bool(order)}{', '.join(order)} serves {', '.join(missing)} on {device}; "
            "choose 'reference' for them to run them slowly"
        )
    for op, name in choices.items():
        served = known[name].profiles.get(op)
        if profile is not None and served is not None and profile not in served:
            raise ValueError(
                f"{op} of kernel provider {name!r} does not round as profile {profile!r} does; legal profiles there: "
                f"{', '.join(served)}"
            )
    ops = Ops(device, choices, tables)
    if check and device.type != "cpu":
        for verify in {known[name].check for name in choices.values()} - {None}:
            assert verify is not None
            verify(ops)
    return ops


Tables = Mapping[str, Mapping[str, Callable[..., Any]]]


def _available(device: torch.device) -> tuple[Tables, dict[str, str]]:
    """Ops of each provider that serves the device, in order of preference, and why the others do not."""
    reasons = {p.name: reason for p in _PROVIDERS if (reason := p.unavailable(device)) is not None}
    return {p.name: p.ops(device) for p in _PROVIDERS if p.name not in reasons}, reasons


def _order(device: torch.device, provider: str, tables: Tables) -> list[str]:
    """Providers to ask for an op, in turn."""
    if provider != "auto":
        return [provider, "reference"] if device.type == "cpu" else [provider]
    return [name for name in tables if name != "reference" or device.type == "cpu"]


def _first(order: list[str], op: str, tables: Tables, profile: str | None = None) -> str | None:
    passed_over = {known.name for known in _PROVIDERS if known.special and profile not in known.profiles.get(op, ())}
    return next((name for name in order if name not in passed_over and op in tables[name]), None)


@dataclass(frozen=True)
class TableRow:
    """One op of the table that ``deepinfer doctor`` prints."""

    op: str
    chosen: str | None  # None: nobody serves it on this device unless forced
    available: Mapping[str, bool]  # provider -> whether it has the op on this device


def table(device: torch.device | str = "cpu", profile: str | None = None) -> tuple[list[TableRow], dict[str, str]]:
    """Op x provider on a device under automatic choice for a rounding profile, and why providers that are not available
    are not."""
    device = torch.device(device)
    tables, reasons = _available(device)
    order = _order(device, "auto", tables)
    have: dict[str, Mapping[str, Any]] = {p.name: tables.get(p.name, {}) for p in _PROVIDERS}
    rows = [
        TableRow(op, _first(order, op, tables, profile), {name: op in ops for name, ops in have.items()})
        for op in OP_NAMES
    ]
    return rows, reasons
