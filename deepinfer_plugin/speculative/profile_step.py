"""The step-cost curve of a served network: from the disk if it was measured here before, else measured now."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from deepinfer_plugin.model.memory import PagePool, StatePool
from deepinfer_plugin.model.network import Network
from deepinfer_plugin.model.rows import Rows

from .step_cost import Curve, CurveCache, measure

logger = logging.getLogger(__name__)

ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)


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


def step_curve(network: Network, pages: PagePool, state: StatePool, most: int, directory: Path) -> Curve:
    """Seconds of a forward and its logits for up to ``most`` rows, each a request of one token that runs in the junk
    slot and the junk page: nothing a request owns is touched."""
    device = network.norm.weight.device
    cache = CurveCache(directory, key(network, device))
    known = cache.load()
    counts = [rows for rows in ROWS if rows < most] + [most]
    if known is not None and known.rows[-1] >= most:
        logger.info("step cost, measured before (%s):\n%s", cache.path, known.table())
        return known
    generator = torch.Generator().manual_seed(0)
    wait: Any = torch.get_device_module(device).synchronize

    def run(count: int) -> float:
        tokens = torch.randint(network.config.vocab_size, (count,), generator=generator).to(device)
        table = torch.zeros(count, 1, dtype=torch.int64, device=device)
        rows = Rows.build(tokens, [0] * count, [1] * count, [0] * count, table)
        wait()
        start = time.perf_counter()
        network.logits(network(rows, pages, state))
        wait()
        return time.perf_counter() - start

    curve = measure(run, counts, padded=False)
    logger.info("step cost, measured now:\n%s", curve.table())
    cache.store(curve)
    return curve
