"""``deepinfer tiny DIR``: a small random checkpoint in the released format, for tests and demos."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

SIZES = {
    "layers": "network layers, at least 6 (default 10)",
    "hidden": "channels of the residual streams, a multiple of 32 (default 128)",
    "heads": "attention heads, an even number (default 4)",
    "head-dim": "channels of a head and of a latent, a multiple of 32 (default 64)",
    "experts": "routed experts a layer, at least 4 (default 16)",
    "expert-dim": "inner channels of an expert, a multiple of 32 (default 64)",
    "vocab": "token ids (default 1280)",
    "max-position": "context length (default 8192)",
    "seed": "same arguments, same bytes (default 0)",
}


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser("tiny", help="write a small random checkpoint", description=__doc__)
    parser.add_argument("dir", metavar="DIR", type=Path, help="directory to write into; created if it does not exist")
    for name, text in SIZES.items():
        parser.add_argument(f"--{name}", type=int, metavar="N", help=text)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from deepinfer_plugin.model.checkpoint import checkpoint_bytes
    from deepinfer_plugin.model.tiny import write_tiny

    names = [name.replace("-", "_") for name in SIZES]
    chosen = {name: value for name in names if (value := getattr(args, name)) is not None}
    try:
        config = write_tiny(args.dir, **chosen)
    except (ValueError, OSError) as error:
        print(f"deepinfer tiny: {error}", file=sys.stderr)
        return 2
    size = f"{checkpoint_bytes(args.dir) / 1e6:.1f} MB"
    print(f"{args.dir}: {config.num_layers} layers, {config.vocab_size} token ids, {size} of random weights")
    return 0
