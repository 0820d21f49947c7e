"""Which experts lie in which slots: of every MoE layer, for the network and for its draft stages apart.

A layer has as many *slots* as experts, or more: then some experts lie in several, as replicas. Rank r holds the slots
r * n .. (r + 1) * n - 1. A rank never holds an expert twice, and every expert lies somewhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .config import V41Config

TARGET, DRAFT = "target", "draft"  # the two sets of experts


class LayoutError(ValueError):
    """A layout that does not fit the model; ``problems`` has every finding, with what is legal."""

    def __init__(self, problems: list[str]):
        self.problems = problems
        super().__init__("\n".join(problems))


def expert_sets(config: V41Config) -> dict[str, tuple[int, int]]:
    """Name of each set -> its MoE layers, the experts of one."""
    draft = config.dspark
    return {TARGET: (config.num_layers, config.experts), DRAFT: (draft.stages, draft.experts) if draft else (0, 0)}


def slots_of_rank(experts: int, ranks: int, redundant: int) -> int:
    """Slots of each rank that hold ``experts`` and at least ``redundant`` replicas."""
    return -(-(experts + redundant) // ranks)


@dataclass(frozen=True, eq=False)
class Layout:
    """The expert in every slot, int64 [layers, slots of all ranks] a set."""

    target: NDArray[np.int64]
    draft: NDArray[np.int64]

    @classmethod
    def trivial(cls, config: V41Config, ranks: int, redundant: int = 0) -> Layout:
        """Experts in order, then from the first again until ``redundant`` slots of a layer hold replicas: more of them
        where the slots would not divide among ``ranks``."""
        return cls(
            *(
                np.tile(np.arange(slots_of_rank(experts, ranks, redundant) * ranks) % max(experts, 1), (layers, 1))
                for layers, experts in expert_sets(config).values()
            )
        )

    def __getitem__(self, name: str) -> NDArray[np.int64]:
        return {TARGET: self.target, DRAFT: self.draft}[name]

    def held(self, name: str, layer: int, rank: int, ranks: int) -> list[int]:
        """The experts in a rank's slots of a layer, in order."""
        return self[name][layer].reshape(ranks, -1)[rank].tolist()

    def check(self, config: V41Config, ranks: int) -> None:
        """
        Raises:
            LayoutError: it is not one of this model on ``ranks`` ranks.
        """
        found = [
            f"{name} experts: {problem}"
            for name, (layers, experts) in expert_sets(config).items()
            if layers
            for problem in _problems(np.asarray(self[name]), layers, experts, ranks)
        ]
        if found:
            raise LayoutError(found)


def _problems(placed: NDArray[Any], layers: int, experts: int, ranks: int) -> Iterator[str]:
    if placed.ndim != 2 or placed.dtype.kind not in "iu":
        yield "not a table of expert numbers; legal: a list of slots for every layer, all of one length"
        return
    if placed.shape[0] != layers:
        yield f"{placed.shape[0]} layers; legal: {layers}"
        return
    physical = placed.shape[1]
    if physical % ranks or not experts <= physical <= experts * ranks:
        yield f"{physical} slots a layer; legal: multiples of {ranks} from {experts} to {experts * ranks}"
        return
    for layer, slots in enumerate(placed):
        if slots.min() < 0 or slots.max() >= experts:
            yield f"layer {layer}: expert {slots.min() if slots.min() < 0 else slots.max()}; legal: 0 to {experts - 1}"
            return
        missing = np.setdiff1d(np.arange(experts), slots)
        if missing.size:
            yield f"layer {layer}: expert {missing[0]} is in no slot; legal: every one in at least one"
            return
        for rank, own in enumerate(slots.reshape(ranks, -1)):
            values, times = np.unique(own, return_counts=True)
            if times.max() > 1:
                yield f"layer {layer}: rank {rank} holds expert {values[times.argmax()]} twice; legal: once"
                return
