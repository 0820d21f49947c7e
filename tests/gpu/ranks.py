"""What the ranks of ``test_ranks`` do, on two GPUs over NCCL; on a CPU over gloo to see that it would run there."""

from __future__ import annotations

from typing import Any

import ranks_gpu
import torch
from ranks_gpu import EACH, Memories, part_of
from torch import Tensor

from deepinfer_plugin.eplb.migration import rounds
from deepinfer_plugin.eplb.mover import Mover
from deepinfer_plugin.model.layout import TARGET
from deepinfer_plugin.model.network import Network
from deepinfer_plugin.model.rows import Rows
from deepinfer_plugin.model.step import Step
from deepinfer_plugin.model.torch_group import TorchGroup
from deepinfer_plugin.runtime.graphs import DraftGraphs, EagerDraft, EagerStep, Graphs, StepGraphs

from ..runtime.test_graphs import Captures

# Requests of each of two groups in every forward; a single group runs the first's. The last fit no graph.
PLAN = [(6, 4), (5, 0), (0, 1), (2, 6), (7, 1)]
MOST, COUNTS = 7, (2 * EACH, 6 * EACH)
CHUNK = 1 << 20


def graphs(device: str) -> Any:
    return Graphs() if device == "cuda" else Captures()


def follow(network: Network, memories: Memories, ways: tuple[Any, Any], group: int) -> list[Tensor]:
    """Hidden states, logits and drafts of the plan of an attention group. ways: of a step, and of drafting."""
    step, drafter = ways
    device, found = memories.before.device, []
    memories.reset()
    for at, counts in enumerate(PLAN):
        rows = Rows.none(device)
        if count := counts[group]:
            everybody = memories.rows(network.config, 2 * MOST * EACH, len(PLAN) - at)
            rows = part_of(everybody, group * MOST, group * MOST + count)
        hidden = step(rows)
        found += [hidden, network.logits(hidden)]
        draft = drafter(rows.token_ids[rows.last], rows.positions[rows.last] + 1, rows.slots)
        found += [draft.tokens, draft.confidence]
    return [each.clone() for each in found]


def forms(rank: int, device: str, config: Any) -> dict[str, bool]:
    """Of every form and way: whether the bits are those of one rank. Where heads are divided on GPUs, whose products
    split their sums by how many outputs they have: those of the same ranks op by op."""
    world = TorchGroup()
    peers, memories = ranks_gpu.peers_of(world, device), Memories(config, 2 * MOST, device)
    right: dict[int, list[Tensor]] = {}
    equal = {}
    for name in ("EP1", "EP2", "DP2xEP2", "TP2", "TP2xEP2"):
        form = ranks_gpu.FORMS[name]
        network = ranks_gpu.build(config, ranks_gpu.parallel_of(form, world, peers), device)
        memory = memories.pages, memories.state
        eager = EagerStep(network, *memory), EagerDraft(network.dspark, *memory)
        captures, widths = graphs(device), (-(-ranks_gpu.CONTEXT // ranks_gpu.step.PAGE),)
        captured = (
            StepGraphs(captures, network, *memory, COUNTS, widths),
            DraftGraphs(captures, network.dspark, *memory, (2, MOST)),
        )
        group = rank if form is not None and form.size == 1 else 0
        for way, ways in (("op by op", eager), ("captured", captured)):
            if form is None:
                found = {group: follow(network, memories, ways, group) for group in range(2)}
                right = right or found
            else:
                found = {group: follow(network, memories, ways, group)}
                if name.startswith("TP") and device == "cuda" and way == "op by op":
                    right = found
            for which, results in found.items():
                pairs = zip(results, right[which], strict=True)
                equal[f"{name}, {way}, group {which}"] = all(torch.equal(mine, theirs) for mine, theirs in pairs)
        equal["finite"] = all(bool(each.isfinite().all()) for each in right[group])
        del network, eager, captured
    return equal


def layer(rank: int, device: str, config: Any) -> list[bool]:
    """Whether the routed experts of one layer give the bits of one rank: op by op, and as they are captured."""
    world = TorchGroup()
    peers, memories = ranks_gpu.peers_of(world, device), Memories(config, 1, device)
    x = torch.randn(2 * 12, config.hidden_size, generator=torch.Generator().manual_seed(3)).to(device, torch.bfloat16)
    rows = memories.rows(config, EACH, 0)
    right, equal = None, []
    for name in ("EP1", "EP2", "DP2xEP2"):
        form = ranks_gpu.FORMS[name]
        parallel = ranks_gpu.parallel_of(form, world, peers)
        network = ranks_gpu.build(config, parallel, device)
        mine = x if form is None or form.size == 2 else x.chunk(2)[rank]
        live = torch.tensor([len(mine)], device=device)
        forward = parallel.meet(len(mine), ())
        for exchange in (parallel.exchange(forward), parallel.captured(len(mine), live)):
            found = network.layers[3].ffn(mine, Step(rows, memories.pages, memories.state, exchange=exchange))
            right = found if right is None else right
            equal.append(torch.equal(found, right if len(mine) == len(x) else right.chunk(2)[rank]))
        del network
    return equal


def moved(rank: int, device: str, config: Any) -> dict[str, Any]:
    """Experts of all layers change ranks, a chunk between two replays."""
    world, form = TorchGroup(), ranks_gpu.FORMS["TP2xEP2"]
    memories = Memories(config, 2, device)
    network = ranks_gpu.build(config, ranks_gpu.parallel_of(form, world, ranks_gpu.peers_of(world, device)), device)
    widths = (-(-ranks_gpu.CONTEXT // ranks_gpu.step.PAGE),)
    step = StepGraphs(graphs(device), network, memories.pages, memories.state, (2 * EACH,), widths)
    rows = memories.rows(config, 2 * EACH, 0)
    layers, places = [block.ffn.experts for block in network.layers], network.expert_maps[TARGET]
    size = layers[0].expert_bytes

    def held() -> dict[tuple[int, int], Tensor]:
        """(layer, expert) -> bytes, of every slot of this rank."""
        found = {}
        for index, each in enumerate(layers):
            own = places.placement[index].reshape(2, -1)[rank]
            for slot in (0, each.slots - 1):
                found[index, int(own[slot])] = torch.empty(size, dtype=torch.uint8, device=device)
                each.read(slot, found[index, int(own[slot])])
        return found

    def results() -> Tensor:
        memories.reset()
        return step(rows)

    before, first = held(), results()
    target = places.placement.copy()
    target[:, [0, -1]] = target[:, [-1, 0]]  # first slot of the first rank, last of the last: they change places
    mover = Mover(layers, places, world, CHUNK)
    mover.begin(rounds(places.placement, target, 2))
    equal, sent, calls = [], [], 0
    while mover.busy:
        sent.append(mover.step())
        calls += 1
        if calls % 7 == 0 or not mover.busy:
            equal.append(torch.equal(results(), first))
    after = held()
    everything: list[Any] = [None, None]
    torch.distributed.all_gather_object(everything, {key: value.cpu() for key, value in before.items()})
    known = everything[0] | everything[1]
    same = [torch.equal(value.cpu(), known[key]) for key, value in after.items() if key in known]
    return {
        "equal": equal,
        "same": same,
        "moved": sorted(after) != sorted(before),
        "sent": max(sent) // 2,
        "bytes": sum(sent),
        "wanted": 2 * len(layers) * size,
    }
