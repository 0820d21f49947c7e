"""What the ranks of ``test_forms`` do: the same uneven forwards under every form, and drafts at the end."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from deepinfer_plugin.model import V41
from deepinfer_plugin.model.config import V41Config
from deepinfer_plugin.model.layout import Layout, expert_sets, slots_of_rank
from deepinfer_plugin.model.memory import PagePool, StatePool
from deepinfer_plugin.model.parallel import Alone, Group, Parallel, RankDivergence, Ranks
from deepinfer_plugin.model.rows import Rows
from deepinfer_plugin.model.torch_group import TorchGroup
from tests.eplb.placements import shuffled
from tests.held import held_bytes

# Per attention group: forwards, each a list of (sequence, rows). Groups have nothing to do at times, all of them once,
# and rows do not divide evenly.
Plan = list[list[tuple[int, int]]]
PLANS: list[Plan] = [
    [[(0, 70)], [(0, 1), (1, 37)], [], [(1, 3), (0, 2)], [], [(0, 1)], [(1, 5), (0, 6)]],
    [[(0, 33)], [], [(0, 1)], [(0, 6), (1, 5)], [], [(1, 40), (0, 1)], [(1, 1)]],
    [[], [], [(0, 130)], [(0, 3)], [], [(0, 1)], []],
    [[(1, 2)], [(0, 9)], [(1, 1)], [], [], [(1, 1), (0, 1)], [(0, 1)]],
]
DRAFTING = [[0, 1], [1], [], [0]]  # sequences of each group that draft at the end


@dataclass
class Outcome:
    hidden: list[Tensor]  # of each forward
    logits: list[Tensor]
    drafts: Tensor
    base_logits: Tensor
    confidence: Tensor
    weight_bytes: int


def sequence(config: Any, group: int, index: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * group + index)
    return torch.randint(10, config.vocab_size - 10, (200,), generator=generator)


def follow(model: V41, group: int) -> Outcome:
    """The plan of an attention group."""
    network, config, page = model.network, model.config, model.page_layout.page_size
    width = 1 + 200 // page
    pages = PagePool.allocate(model.page_layout, 1 + 2 * width)
    state = StatePool(model.state_layout, 3)
    table, done = (1 + torch.arange(2 * width)).view(2, width), [0, 0]
    hidden, logits = [], []
    with torch.inference_mode():
        for forward in PLANS[group]:
            ids = [sequence(config, group, s)[done[s] : done[s] + count] for s, count in forward]
            rows = Rows.build(
                torch.cat([torch.empty(0, dtype=torch.int64), *ids]),
                [done[s] for s, _ in forward],
                [count for _, count in forward],
                [2 - s for s, _ in forward],
                table[[s for s, _ in forward]],
            )
            hidden.append(network(rows, pages, state))
            logits.append(network.logits(hidden[-1]))
            for s, count in forward:
                done[s] += count
        who = DRAFTING[group]
        anchors = torch.tensor([17 + s for s in who], dtype=torch.int64)
        positions = torch.tensor([done[s] for s in who], dtype=torch.int64)
        slots = torch.tensor([2 - s for s in who], dtype=torch.int64)
        draft = network.dspark.draft(anchors, positions, slots, state, pages)
    return Outcome(hidden, logits, draft.tokens, draft.base_logits, draft.confidence, held_bytes(network))


@dataclass
class Form:
    """``heads``, ``experts``: whether they are divided; ``size``: ranks of an attention group; ``ranks``: of all."""

    ranks: int
    size: int
    heads: bool = True
    experts: bool = True
    profile: str = "model"
    redundant: int | None = None  # None: every expert once, in order; else these replicas, all of it in disorder

    def layout(self, config: V41Config) -> Layout | None:
        if self.redundant is None:
            return None
        random = np.random.default_rng(self.redundant)
        return Layout(
            *(
                shuffled(
                    random, layers, experts, slots_of_rank(experts, self.ranks, self.redundant) * self.ranks, self.ranks
                )
                for layers, experts in expert_sets(config).values()
            )
        )

    def parallel(self, rank: int, groups: dict[tuple[int, ...], Group], config: V41Config) -> Parallel:
        first = rank // self.size * self.size
        group = groups[tuple(range(first, first + self.size))] if self.size > 1 else Alone()
        world = groups[tuple(range(self.ranks))]
        layout = self.layout(config)
        return Ranks(group, world, split_heads=self.heads, split_experts=self.experts, layout=layout, check=True)


FORMS = {
    "TP2": Form(2, 2, experts=False),
    "EP2": Form(2, 2, heads=False),
    "TP2xEP2": Form(2, 2),
    "TP2xEP2, production rounding": Form(2, 2, profile="deepinfer"),
    "TP2xEP2, float32": Form(2, 2, profile="float32"),
    "DP2xEP2": Form(2, 1),
    "DP2xTP2xEP4": Form(4, 2),
    "DP4xEP4": Form(4, 1),
    "DP4": Form(4, 1, experts=False),
    "DP4xEP4, replicas": Form(4, 1, redundant=5),
    "TP2xEP2, in disorder": Form(2, 2, redundant=0),
}


def follow_all(rank: int, path: Path) -> dict[str, Outcome]:
    """Every form that this rank takes part in."""
    members = [(0, 1), (2, 3), (0, 1, 2, 3)]
    groups: dict[tuple[int, ...], Group] = {}
    for member in members:
        made = dist.new_group(member)
        if rank in member:
            groups[member] = TorchGroup(made)
    outcomes = {}
    for name, form in FORMS.items():
        if rank < form.ranks:
            model = V41.load(path, profile=form.profile, parallel=form.parallel(rank, groups, V41Config.load(path)))
            outcomes[name] = follow(model, rank // form.size)
        dist.barrier()
    return outcomes


def diverge(rank: int) -> list[str]:
    """What two ranks are told that run other tokens, other counts of rows, or are not at the same step."""
    told = []
    for groups, tokens, skipped in ((1, [5, 6 + rank], 0), (1, [5] * (1 + rank), 0), (2, [5], rank)):
        ranks = Ranks(TorchGroup() if groups == 1 else Alone(), TorchGroup(), check=True)
        table = torch.zeros(1, 1, dtype=torch.int64)
        rows = Rows.build(torch.tensor([5, 6]), [0], [2], [1], table)
        ranks.meet(rows.count, rows.parts)
        ranks.step += skipped
        rows = Rows.build(torch.tensor(tokens), [0], [len(tokens)], [1], table)
        try:
            ranks.meet(rows.count, rows.parts)
        except RankDivergence as error:
            told.append(str(error))
    return told
