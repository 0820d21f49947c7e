"""What the ranks of ``test_rebalancing`` do: decode and draft while experts move."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from deepinfer_plugin.eplb import balancer
from deepinfer_plugin.eplb.balancer import Balancer, Terms
from deepinfer_plugin.eplb.decide import Decision, Request, decide, shuffle
from deepinfer_plugin.model import V41
from deepinfer_plugin.model.config import V41Config
from deepinfer_plugin.model.layout import Layout
from deepinfer_plugin.model.parallel import Alone, Ranks
from deepinfer_plugin.model.torch_group import TorchGroup

SKEW = 3.0  # on the selection bias of a few experts
WANTED = 3


class Inline:
    """A ``Solver`` that answers at once."""

    def __init__(self, work: Callable[[Request], Decision]):
        self.work = work

    def ask(self, request: Callable[[], Request]) -> None:
        self.found = self.work(request())

    def answer(self) -> Decision:
        return self.found


def shuffling() -> Inline:
    seeds = iter(range(1000))
    return Inline(lambda request: shuffle(request, next(seeds)))


@dataclass
class Way:
    """``size``: ranks of an attention group; ``chunk``: bytes that travel at a time; ``skewed``: few experts are wanted
    and our policy moves them, else they move at random."""

    ranks: int
    size: int
    redundant: int
    chunk: int
    drafting: bool = True
    skewed: bool = False


WAYS = {
    "2 ranks, replicas": Way(2, 1, 4, 1 << 20),
    "4 ranks, no spare slot, chunks smaller than an expert": Way(4, 2, 0, 40_000, drafting=False),
    "4 ranks, skewed": Way(4, 2, 4, 1 << 20, skewed=True),
}
STEPS, INTERVAL = 18, 8


@dataclass
class Decoded:
    tokens: list[int]
    drafts: list[list[int]]
    placements: dict[str, list[NDArray[np.int64]]]  # of every set, before every step
    metrics: dict[str, Any]
    held: bool  # the slots hold the experts that the map says, in the end


def skew(model: V41) -> None:
    """The first experts of every layer are chosen most of the time."""
    for layer in (*model.network.layers, *model.network.mtp):
        layer.ffn.gate.bias.data[:WANTED] += SKEW


def decode(model: V41, prompt: list[int], drafting: bool, before: Callable[[], object] = lambda: None) -> tuple:
    """Greedy tokens after a prompt and the drafts beside them, a step at a time."""
    session = model.session(len(prompt) + STEPS + model.config.draft_block + 1)
    session.extend(prompt)
    tokens, drafts = [], []
    for _ in range(STEPS):
        before()
        tokens.append(session.next_token())
        if drafting:
            drafts.append(session.draft(tokens[-1]).tokens[0].tolist())
        session.extend([tokens[-1]])
    return tokens, drafts


def follow(rank: int, path: Path, prompts: list[list[int]]) -> dict[str, Decoded]:
    """Every way that this rank takes part in."""
    groups = {}
    for members in ((0, 1), (2, 3), (0, 1, 2, 3)):
        made = dist.new_group(members)
        if rank in members:
            groups[members] = TorchGroup(made)
    found, whole = {}, V41.load(path)
    for name, way in WAYS.items():
        if rank < way.ranks:
            found[name] = _follow(rank, path, way, groups, prompts[rank // way.size], whole)
        dist.barrier()
    return found


def _follow(rank: int, path: Path, way: Way, groups: dict, prompt: list[int], whole: V41) -> Decoded:
    first = rank // way.size * way.size
    group = groups[tuple(range(first, first + way.size))] if way.size > 1 else Alone()
    layout = Layout.trivial(V41Config.load(path), way.ranks, way.redundant)
    ranks = Ranks(group, groups[tuple(range(way.ranks))], layout=layout, check=True)
    model = V41.load(path, parallel=ranks)
    if way.skewed:
        skew(model)
    balancer.CARRY = 3
    balanced = Balancer(
        model.network, Terms(INTERVAL, way.chunk), (lambda: Inline(decide)) if way.skewed else shuffling
    )
    balanced.start()
    placements: dict[str, list[NDArray[np.int64]]] = {name: [] for name in balanced.sets}

    def note() -> None:
        for name, each in balanced.sets.items():
            placements[name].append(each.places.placement.copy())

    tokens, drafts = decode(model, prompt, way.drafting, note)
    note()
    metrics = {name: each.metrics for name, each in balanced.sets.items()}
    return Decoded(tokens, drafts, placements, metrics, _holds_what_it_says(model, whole, rank))


def _holds_what_it_says(model: V41, whole: V41, rank: int) -> bool:
    for here, there in zip(model.network.modules(), whole.network.modules(), strict=True):
        if not hasattr(here, "loaded"):
            continue
        own = here.map.placement[here.layer].reshape(here.map.ranks, -1)[rank]
        for slot, expert in enumerate(own):
            mine, right = here.ops.read_expert(here.prepared, slot), there.ops.read_expert(there.prepared, expert)
            if not all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(mine, right, strict=True)):
                return False
    return True
