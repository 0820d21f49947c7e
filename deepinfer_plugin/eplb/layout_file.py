"""Where experts lie, in a file: what ``--init-expert-location`` names, and what a balancer leaves for the next start.

JSON: ``{"target": [[expert, ...], ...], "draft": ...}``, for every layer the expert in each slot; without ``draft`` its
experts lie in order. SGLang's ``{"physical_to_logical_map": ...}`` is a target.
"""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path

import numpy as np

from deepinfer_plugin.cache import cache_directory, write_whole
from deepinfer_plugin.model.config import V41Config
from deepinfer_plugin.model.layout import Layout, LayoutError, expert_sets, slots_of_rank

logger = logging.getLogger(__name__)

SGLANG = "physical_to_logical_map"


def read(source: str | Path, config: V41Config, ranks: int, redundant: int) -> Layout:
    """``source``: a .json file, or JSON text. ``redundant``: replicas of a layer at least, as the memory is planned.

    Raises:
        LayoutError: it cannot be read, or is not a layout of this model on so many ranks with so many replicas.
    """
    text = str(source)
    name = "the given JSON" if text.lstrip().startswith("{") else text
    try:
        known = json.loads(text if name != text else Path(text).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise LayoutError([f"{name}: {why}; legal: trivial, a .json file, or JSON text"]) from None
    names = [SGLANG, *expert_sets(config)]
    if not isinstance(known, dict) or not known or not known.keys() <= set(names) or {SGLANG, "target"} <= known.keys():
        given = ", ".join(known) if isinstance(known, dict) else type(known).__name__
        raise LayoutError([f"{name}: {given or 'empty'}; legal: {SGLANG}, or target and draft"])
    if SGLANG in known:
        known["target"] = known.pop(SGLANG)
    trivial = Layout.trivial(config, ranks, redundant)
    try:
        tables = {set_: np.array(known.get(set_, trivial[set_])) for set_ in expert_sets(config)}
    except ValueError:  # rows of several lengths
        raise LayoutError([f"{name}: layers of several lengths; legal: a list of slots for every layer"]) from None
    layout = Layout(**tables)
    try:
        layout.check(config, ranks)
    except LayoutError as error:
        raise LayoutError([f"{name}: {problem}" for problem in error.problems]) from None
    problems = [
        f"{name}: {set_} experts: {layout[set_].shape[1]} slots a layer; legal: {slots}, with "
        f"--ep-num-redundant-experts {redundant}"
        for set_, (layers, experts) in expert_sets(config).items()
        if layers and layout[set_].shape[1] != (slots := slots_of_rank(experts, ranks, redundant) * ranks)
    ]
    if problems:
        raise LayoutError(problems)
    return Layout(*(layout[set_].astype(np.int64) for set_ in expert_sets(config)))


def write(path: Path, layout: Layout, config: V41Config) -> None:
    """Readers see the old file or the new one. What cannot be written is logged: the next start begins in order."""
    content = json.dumps({set_: layout[set_].tolist() for set_, (layers, _) in expert_sets(config).items() if layers})
    try:
        write_whole(path, content)
    except OSError as error:
        logger.warning("cannot store where experts lie in %s: %s", path, error)


def default_path(config: V41Config, ranks: int, redundant: int) -> Path:
    """A file for every model, number of ranks and of replicas."""
    digest = hashlib.sha256(repr((config, ranks, redundant)).encode()).hexdigest()
    return cache_directory() / f"experts_{digest[:16]}.json"


def remembered(config: V41Config, ranks: int, redundant: int) -> Layout | None:
    """What the latest balancer left in the default file; None: nothing that fits."""
    path = default_path(config, ranks, redundant)
    if not path.exists():
        return None
    try:
        return read(path, config, ranks, redundant)
    except LayoutError as error:
        logger.warning("experts start in order: %s", error)
        return None
