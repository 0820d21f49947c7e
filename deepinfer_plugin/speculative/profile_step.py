"""The step-cost curve of a served network: from the disk if it was measured here before, else measured now."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from deepinfer_plugin.model.layout import TARGET
from deepinfer_plugin.model.rows import Rows
from deepinfer_plugin.runtime.graphs import NARROWEST, EagerStep

from .step_cost import Curve, CurveCache, measure, measure_context

logger = logging.getLogger(__name__)

ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
ROWS_CPU = (1, 2, 4, 8, 16, 32, 64)  # a row there costs milliseconds, and beyond these its price no longer changes
CONTEXT = NARROWEST - 64  # tokens, for the price of a longer one: in the same graphs as short ones


def key(step: EagerStep) -> dict[str, str]:
    """Everything the time of a step depends on."""
    network, device = step.network, step.network.norm.weight.device
    config = hashlib.sha256(repr(network.config).encode()).hexdigest()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu, {torch.get_num_threads()} threads"
    return {
        "model": config,
        "device": name,
        "ops": json.dumps(network.ops.choices, sort_keys=True),
        "profile": network.profile.name,
        "captured": json.dumps([*step.rows, *step.widths[:1]]),  # all is measured with the narrowest tables
        "ranks": f"{network.parallel.place.heads.of} of heads, {network.parallel.place.experts.of} of experts",
        "slots": str(network.expert_maps[TARGET].slots),
        "version": metadata.version("deepinfer_plugin"),
    }


def usual_rows(device: torch.device, most: int) -> tuple[int, ...]:
    """Row counts worth measuring if no step has more than ``most``."""
    usual = ROWS_CPU if device.type == "cpu" else ROWS
    most = min(most, usual[-1])
    return (*(rows for rows in usual if rows < most), most)


def step_curve(step: EagerStep, most: int, directory: Path) -> Curve:
    """The curve for steps of up to ``most`` rows, from ``directory`` or measured and kept there."""
    device, parallel = step.network.norm.weight.device, step.network.parallel
    cache = CurveCache(directory, key(step))
    rows = step.rows or usual_rows(device, most)
    # One rank's file and one rank's clock: a step takes all of them equally long, and a measurement needs all.
    known = parallel.agree_everywhere(cache.load())
    if known is not None and known.rows[-1] >= rows[-1]:
        logger.info("step cost, measured before (%s):\n%s", cache.path, known.table())
        return known
    curve = parallel.agree_everywhere(measure_step(step, rows))
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


def measure_step(step: EagerStep, rows: Sequence[int]) -> Curve:
    """Seconds of a forward and its logits at these row counts, and what context adds. Every row is its own request or
    one of a block, and runs in the junk slot and the junk page: nothing a request owns is touched."""
    network, config, device = step.network, step.network.config, step.network.norm.weight.device
    generator = torch.Generator().manual_seed(0)

    def run(count: int, each: int = 1, context: int = 0) -> float:
        """A step of ``count`` rows, ``each`` of a request that has ``context`` tokens before them."""
        tokens = torch.randint(config.vocab_size, (count,), generator=generator).to(device)
        requests = count // each
        columns = step.width(count, -(-(context + each) // step.pages.layout.page_size))
        table = torch.zeros(requests, columns, dtype=torch.int64, device=device)
        batch = Rows.build(tokens, [context] * requests, [each] * requests, [0] * requests, table)
        return timed(lambda: network.logits(step(batch)), device)

    curve = measure(run, rows, padded=bool(step.rows))
    width = config.draft_block + 1
    wide = min(4 * width, rows[-1]) // width * width
    if width > 1 and wide:
        longest = config.max_position
        if step.widths:  # a server's may be shorter than the model's
            longest = min(longest, step.widths[0] * step.pages.layout.page_size)
        curve = measure_context(curve, run, wide, config.draft_block, min(CONTEXT, longest - width))
    return curve
