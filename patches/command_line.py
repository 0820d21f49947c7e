"""Our flags on SGLang's command line.

``ServerArgs`` is generated once from fixed fields and has no way to add one. Its parser and its constructor from
parsed arguments are wrapped instead; an attribute with a leading underscore is not a field and travels to child
processes with the rest.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from ..settings import ATTRIBUTE, add_flags, take_flags
from .hook import Hook


def add_cli_args(original: Callable[..., None], parser: argparse.ArgumentParser) -> None:
    original(parser)
    add_flags(parser)


def from_cli_args(original: Callable[..., Any], cls: type, args: argparse.Namespace) -> Any:
    server_args = original(cls, args)
    setattr(server_args, ATTRIBUTE, take_flags(args))
    return server_args


ADD = Hook(
    "add_flags",
    "sglang.srt.server_args.ServerArgs.add_cli_args",
    add_cli_args,
    "--deepinfer-* flags are unknown without it; DEEPINFER_* variables still work",
    required=False,
)
TAKE = Hook(
    "take_flags",
    "sglang.srt.server_args.ServerArgs.from_cli_args",
    from_cli_args,
    "--deepinfer-* flags have no effect without it; DEEPINFER_* variables still work",
    required=False,
)
