"""The step-cost curve of a served network: from the disk if it was measured here before, else measured now."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from deepinfer_plugin.model.memory import PagePool, StatePool
from deepinfer_plugin.model.network import Network
from deepinfer_plugin.model.rows import Rows

from .step_cost import Curve, CurveCache, measure, measure_context

logger = logging.getLogger(__name__)

ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
ROWS_CPU = (1, 2, 4, 8, 16, 32, 64)  # a row there costs milliseconds, and beyond these its price no longer changes
CONTEXT = 4096  # tokens, for the price of a longer one


def cache_directory() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "deepinfer_plugin"


def key(network: Network, device: torch.device) -> dict[str, str]:
    """Everything the time of a step depends on."""
    config = hashlib.sha256(repr(network.config).encode()).hexdigest()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu, {torch.get_num_threads()} threads"
    return {
        "model": config,
        "device": name,
        "ops": json.dumps(network.ops.choices, sort_keys=True),
        "profile": network.profile.name,
        "version": metadata.version("deepinfer_plugin"),
    }


def usual_rows(device: torch.device, most: int) -> tuple[int, ...]:
    """Row counts worth measuring if no step has more than ``most``."""
    usual = ROWS_CPU if device.type == "cpu" else ROWS
    most = min(most, usual[-1])
    return (*(rows for rows in usual if rows < most), most)


def step_curve(network: Network, pages: PagePool, state: StatePool, most: int, directory: Path) -> Curve:
    """The curve for steps of up to ``most`` rows, from ``directory`` or measured and kept there."""
    device = network.norm.weight.device
    cache = CurveCache(directory, key(network, device))
    known, rows = cache.load(), usual_rows(device, most)
    if known is not None and known.rows[-1] >= rows[-1]:
        logger.info("step cost, measured before (%s):\n%s", cache.path, known.table())
        return known
    curve = measure_step(network, pages, state, rows)
    logger.info("step cost, measured now:\n%s", curve.table())
    cache.store(curve)
    return curve


def timed(work: Callable[[], Any], device: torch.device) -> float:
    """Seconds until the device has done ``work`` and nothing else."""
    wait: Any = torch.get_device_module(device).synchronize
    wait()
    start = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - start


def measure_step(network: Network, pages: PagePool, state: StatePool, rows: Sequence[int]) -> Curve:
    """Seconds of a forward and its logits at these row counts, and what context adds. Every row is its own request or
    one of a block, and runs in the junk slot and the junk page: nothing a request owns is touched."""
    device, config = network.norm.weight.device, network.config
    generator = torch.Generator().manual_seed(0)

    def run(count: int, each: int = 1, context: int = 0) -> float:
        """A step of ``count`` rows, ``each`` of a request that has ``context`` tokens before them."""
        tokens = torch.randint(config.vocab_size, (count,), generator=generator).to(device)
        requests = count // each
        columns = -(-(context + each) // pages.layout.page_size)
        table = torch.zeros(requests, columns, dtype=torch.int64, device=device)
        step = Rows.build(tokens, [context] * requests, [each] * requests, [0] * requests, table)
        return timed(lambda: network.logits(network(step, pages, state)), device)

    curve = measure(run, rows, padded=False)
    width = config.draft_block + 1
    wide = min(4 * width, rows[-1]) // width * width
    if width > 1 and wide:
        curve = measure_context(curve, run, wide, config.draft_block, min(CONTEXT, config.max_position - width))
    return curve
