"""The ``deepinfer`` command. A subcommand is a module with ``add_parser(subparsers)``, which sets ``run(args) -> exit
code``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from . import build, doctor, plan, profile, tiny


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="deepinfer", description="DeepSeek-V4.1-Flash for SGLang.")
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in (build, doctor, plan, profile, tiny):
        command.add_parser(subparsers)
    args = parser.parse_args(argv)
    return args.run(args) or 0
