"""``deepinfer plan DIR``: the memory that serving a checkpoint takes, from its config and the headers of its shards.

For this machine and with a server's own defaults, unless told otherwise. No weight is read. What a forward needs for
its activations is not counted. Exit code 0: it fits. 2: it does not, or DIR is no checkpoint.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict
from math import inf, nan
from pathlib import Path
from typing import TYPE_CHECKING

from .. import arguments
from ..conflicts import PAGE_SIZES

if TYPE_CHECKING:
    from ..model.config import V41Config
    from ..runtime.memory_plan import MemoryPlan


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser("plan", help="say what memory serving a checkpoint takes", description=__doc__)
    parser.add_argument("dir", metavar="DIR", type=Path, help="checkpoint directory: config, index and shards")
    parser.add_argument(
        "--page-size",
        type=int,
        choices=PAGE_SIZES,
        default=arguments.PAGE_SIZE,
        help=f"tokens of a page (default {arguments.PAGE_SIZE})",
    )
    # A refusal names the server's flags, so they are legal here too.
    parser.add_argument(
        "--running",
        "--max-running-requests",
        type=int,
        metavar="N",
        help=f"requests that run at a time (default {arguments.RUNNING_REQUESTS}, without an accelerator "
        f"{arguments.RUNNING_REQUESTS_CPU})",
    )
    parser.add_argument(
        "--tokens",
        "--max-total-tokens",
        type=int,
        metavar="N",
        help="keep no more tokens of prefix (default: what memory holds, without an accelerator 256 MiB of them)",
    )
    parser.add_argument(
        "--ranks",
        "--tp-size",
        type=int,
        default=1,
        metavar="N",
        help="divide the model among N accelerators; what is said is then of one of them (default 1)",
    )
    parser.add_argument(
        "--groups",
        "--attn-dp-size",
        type=int,
        default=1,
        metavar="N",
        help="attention groups among the ranks, each with requests of its own (default 1)",
    )
    parser.add_argument(
        "--redundant",
        "--ep-num-redundant-experts",
        type=int,
        default=0,
        metavar="N",
        help="replicas of experts in every layer, of the network and of the draft stages (default 0)",
    )
    parser.add_argument(
        "--enable-eplb", action="store_true", dest="balanced", help="count what moving experts takes, with the weights"
    )
    parser.add_argument(
        "--memory-gib",
        type=_memory,
        metavar="X",
        dest="memory",
        help="memory of an NVIDIA GPU (default: all that this machine's accelerator has, or without one the machine)",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object, sizes in bytes")
    parser.set_defaults(run=run)


def _memory(gibibytes: str) -> int:
    """Bytes."""
    try:
        size = float(gibibytes) * 2**30
    except ValueError:
        size = nan
    if not 1 <= size < inf:
        raise argparse.ArgumentTypeError(f"{gibibytes} is not supported; legal: a positive number of GiB")
    return int(size)


def run(args: argparse.Namespace) -> int:
    from ..model.checkpoint import Checkpoint
    from ..model.config import V41Config
    from ..model.place import check_place
    from ..ranks import RankCounts
    from ..runtime.memory_plan import plan, token_extra, weight_bytes_of
    from ..settings import Settings

    device, memory = ("cuda", args.memory) if args.memory is not None else _this_machine()
    on_cpu = device == "cpu"
    running, tokens = args.running, args.tokens
    if running is None:
        running = arguments.default_running(on_cpu)
    try:
        config = V41Config.load(args.dir)
        if args.groups < 1 or args.ranks < 1 or args.ranks % args.groups:
            raise ValueError(f"--groups {args.groups}: it must divide --ranks {args.ranks}")
        ranks = RankCounts(args.ranks, args.groups)
        check_place(config, ranks.group_size, ranks.total, args.redundant)
        place = ranks.largest(config, args.redundant)
        part = Checkpoint.open(args.dir, config).part(place, config)
        running = running // ranks.groups or min(running, 1)  # of one group
        if on_cpu:
            memory //= ranks.total
        if tokens is None and on_cpu:
            cap = Settings.read().cpu_kv_mib << 20
            tokens = arguments.cpu_tokens(config, args.page_size, running, None, cap)
        sizes = plan(
            config,
            page_size=args.page_size,
            running_requests=running,
            weight_bytes=weight_bytes_of(part, config, device, args.balanced),
            budget_bytes=memory,
            max_tokens=tokens,
            token_extra=token_extra(on_cpu),
        )
    except (ValueError, OSError) as error:
        print(f"deepinfer plan: {error}", file=sys.stderr)
        return 2
    longest = arguments.context_length(config, args.page_size, sizes.tokens) or config.max_position
    print(_json(sizes, memory, longest, config) if args.json else _text(sizes, memory, longest, config))
    return 0


def _this_machine() -> tuple[str, int]:
    """The type of the device that weights would go to, and the bytes of its memory."""
    import torch

    if torch.accelerator.is_available():
        device = torch.accelerator.current_accelerator()
        assert device is not None
        return device.type, torch.accelerator.get_memory_info()[1]
    return "cpu", os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _text(sizes: MemoryPlan, memory: int, longest: int, config: V41Config) -> str:
    from ..runtime.memory_plan import JUNK_PAGES, JUNK_SLOTS, gib

    requests, pages = sizes.running_requests, sizes.tokens // sizes.page_size
    fits = "fits" if longest == config.max_position else f"does not fit; requests of up to {longest} tokens are served"
    inputs = f"inputs  {gib(sizes.input_bytes):>12}  {sizes.token_extra} bytes a token of the pages"
    lines = [
        f"weights {gib(sizes.weight_bytes):>12}",
        f"state   {gib(sizes.state_bytes):>12}  {sizes.slot_bytes} bytes x ({requests} requests + {JUNK_SLOTS} slot "
        "for padding)",
        f"pages   {gib(sizes.pool_bytes):>12}  {sizes.page_bytes} bytes x ({pages} pages + {JUNK_PAGES} for padding)",
        *([inputs] if sizes.token_extra else []),
        f"total   {gib(sizes.total_bytes):>12}  of {gib(memory)}",
        "",
        f"prefix  {sizes.tokens} tokens at {sizes.token_bytes:g} bytes, {sizes.page_size} a page",
        f"context {config.max_position} tokens, the longest of this model: {fits}",
    ]
    return "\n".join(lines)


def _json(sizes: MemoryPlan, memory: int, longest: int, config: V41Config) -> str:
    derived = ("token_bytes", "state_bytes", "pool_bytes", "input_bytes", "total_bytes")
    found = asdict(sizes) | {name: getattr(sizes, name) for name in derived}
    found |= {"memory_bytes": memory, "longest_request": longest, "max_position": config.max_position}
    return json.dumps(found, indent=2)
