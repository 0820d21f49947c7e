"""``deepinfer profile DIR``: what a step of so many rows costs on this machine, which is what drafts are scheduled by.

Loads the checkpoint without a server, measures anew whatever was measured before, and leaves the curve where servers
on this machine look for it. A curve belongs to a rounding profile and a choice of ops: what a server is given as
``--deepinfer-*`` flags, this command takes as ``DEEPINFER_*`` variables. Exit code 2: DIR is no checkpoint.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import arguments
from ..conflicts import DEVICES

if TYPE_CHECKING:
    from ..model.v41 import V41
    from ..runtime.graphs import EagerDraft
    from ..speculative.step_cost import Curve


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser("profile", help="measure the cost of a step on this machine", description=__doc__)
    parser.add_argument("dir", metavar="DIR", type=Path, help="checkpoint directory")
    parser.add_argument("--rows", type=_rows, metavar="N,N,...", help="row counts (default: those a server measures)")
    parser.add_argument("--device", choices=DEVICES, help="default: cuda if there is one, else cpu")
    parser.add_argument("--json", type=_file, metavar="FILE", help="write the timings there too, in seconds")
    parser.add_argument("--no-cache", action="store_true", help="leave no curve for servers")
    parser.set_defaults(run=run)


def _rows(text: str) -> tuple[int, ...]:
    counts = text.split(",")
    if not all(count.isdecimal() and int(count) > 0 for count in counts):
        raise argparse.ArgumentTypeError(f"{text} is not supported; legal: positive numbers separated by commas")
    return tuple(sorted({int(count) for count in counts}))


def _file(text: str) -> Path:
    """Checked now, not after minutes of measuring."""
    if not Path(text).parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is not supported; legal: a file in a directory that exists")
    return Path(text)


def run(args: argparse.Namespace) -> int:
    import torch

    from ..cache import cache_directory
    from ..model.memory import PagePool, StatePool
    from ..runtime import graphs
    from ..speculative.profile_step import key, measure_step, usual_rows
    from ..speculative.step_cost import CurveCache

    try:
        model = _load(args.dir, args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except (ValueError, OSError) as error:
        print(f"deepinfer profile: {error}", file=sys.stderr)
        return 2
    network, block = model.network, model.config.draft_block
    # The junk page and the junk slot, in which every row runs.
    pages, state = PagePool.allocate(model.page_layout, 1, model.device), StatePool(model.state_layout, 1, model.device)
    with torch.no_grad():
        if model.device.type == "cpu":
            step = graphs.EagerStep(network, pages, state)
            drafter = graphs.EagerDraft(network.dspark, pages, state) if block else None
            curve = measure_step(step, args.rows or usual_rows(model.device, sys.maxsize))
        else:  # as a server with default flags captures them
            rows = args.rows or graphs.row_counts(arguments.RUNNING_REQUESTS * (block + 1))
            requests = graphs.row_counts(max(1, rows[-1] // (block + 1)))
            widths = graphs.table_widths(graphs.NARROWEST, model.page_layout.page_size)
            captures = graphs.Graphs()
            step = graphs.StepGraphs(captures, network, pages, state, rows, widths)
            drafter = graphs.DraftGraphs(captures, network.dspark, pages, state, requests) if block else None
            curve = measure_step(step, rows)
        drafting = _drafting_curve(drafter, curve) if block else None

    cache = CurveCache(cache_directory(), key(step))
    print(f"{args.dir} on {cache.key['device']}\n\n{curve.table()}\n\n{curve.plot()}\n")
    if drafting is None:
        print("no draft head: servers schedule nothing and need no curve")
    else:
        print(f"drafting a block of {block} tokens\n{'requests':>8} {'ms':>9}")
        for requests, seconds in zip(drafting.rows, drafting.seconds, strict=True):
            print(f"{requests:>8} {seconds * 1e3:>9.3f}")
    kept = drafting is not None and not args.no_cache
    if kept:
        cache.store(curve)
        kept = cache.load() == curve  # else why not has been logged
    if kept:
        whose = f", if they verify up to {curve.rows[-1]} rows a step," if args.rows else ""
        print(f"\nservers on this machine{whose} start with this curve for the next {cache.max_age / 3600:g} hours:")
        print(cache.path)
    if args.json:
        found: dict[str, Any] = {**cache.key, "ops": network.ops.choices, **vars(curve), "drafting": None}
        if drafting is not None:
            found["drafting"] = {"block": block, "requests": drafting.rows, "seconds": drafting.seconds}
        found["cache"] = str(cache.path) if kept else None
        args.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return 0


def _load(path: Path, device: str) -> V41:
    """The checkpoint as a server on this machine runs it.

    Raises:
        ConfigError, CheckpointError, EngramError: it is not one. SettingsError, ValueError: a variable is wrong.
    """
    import torch

    from ..model.v41 import V41
    from ..settings import Settings

    settings = Settings.read()
    force = dict(settings.ops)
    model = V41.load(path, settings.provider, settings.profile, device=device, force=force, progress=True)
    if device == "cpu":
        from ..runtime.threads import compute_threads

        torch.set_num_threads(compute_threads(model.config.hidden_size, len(os.sched_getaffinity(0))))
    return model


def _drafting_curve(drafter: EagerDraft, curve: Curve) -> Curve:
    """Seconds of drafting a block for so many requests, which are the ``rows`` of the result: up to as many as can
    verify whole blocks in the largest step of ``curve``."""
    import torch

    from ..speculative.profile_step import timed
    from ..speculative.step_cost import measure

    config, device = drafter.dspark.config, drafter.state.rings.device
    generator = torch.Generator().manual_seed(0)

    def run(requests: int) -> float:
        anchors = torch.randint(config.vocab_size, (requests,), generator=generator).to(device)
        positions = torch.full((requests,), config.window, device=device)
        slots = torch.zeros(requests, dtype=torch.int64, device=device)
        return timed(lambda: drafter(anchors, positions, slots), device)

    most = max(1, curve.rows[-1] // (config.draft_block + 1))
    return measure(run, [rows for rows in curve.rows if rows < most] + [most], padded=False)
