"""Several ranks on the command line: which of SGLang's numbers divide this model, and how the ranks share a machine.

``--tp-size`` is the number of all ranks, ``--attn-dp-size`` (or ``--dp-size`` with ``--enable-dp-attention``) that of
the attention groups among them. Experts are always divided among all ranks, whole ones each.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .model.config import V41Config
    from .model.place import Place

BINDING = "SGLANG_CPU_OMP_THREADS_BIND"
SAME_MEMORY = "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"


@dataclass(frozen=True)
class RankCounts:
    """``total`` ranks in ``groups`` attention groups."""

    total: int = 1
    groups: int = 1

    @classmethod
    def of(cls, view: Any) -> RankCounts:
        return cls(max(view.tp_size, 1), max(view.attn_dp_size, 1))

    @property
    def group_size(self) -> int:
        return max(self.total // self.groups, 1)

    def largest(self, config: V41Config, redundant: int = 0) -> Place:
        """Of a rank that holds as much as any: where parts are not equal, the first is the largest. redundant: replicas
        of a layer's experts at least."""
        from .model.layout import Layout
        from .model.place import Place, Share

        # Asked before the number of replicas is checked: an absurd one must not fill the memory.
        redundant = min(redundant, config.experts * self.total)
        layout = Layout.trivial(config, self.total, redundant) if redundant > 0 else None
        return Place(Share(0, self.group_size), Share(0, self.total), layout)


def conflicts(view: Any, config: V41Config, redundant: int) -> Iterator[str]:
    """Numbers of ranks, and of redundant experts on them, that cannot work, with the legal ones."""
    from .model.place import PlaceError, check_place

    ranks = RankCounts.of(view)
    if view.dp_size > 1:
        yield (
            f"--dp-size {view.dp_size}: replicas are servers of their own; start as many behind SGLang's router, or "
            "add --enable-dp-attention for groups of ranks that share the experts"
        )
    if ranks.total % ranks.groups:
        legal = ", ".join(str(n) for n in range(1, ranks.total + 1) if ranks.total % n == 0)
        yield f"--attn-dp-size {ranks.groups}: it must divide --tp-size {ranks.total}; legal: {legal}"
        return
    if view.ep_size not in (1, ranks.total):
        legal = " or ".join(sorted({"1", str(ranks.total)}))
        yield f"--ep-size {view.ep_size}: experts are divided among all --tp-size {ranks.total} ranks; legal: {legal}"
    try:
        check_place(config, ranks.group_size, ranks.total, redundant)
    except PlaceError as error:
        given = f"--tp-size {ranks.total}" + (f" --attn-dp-size {ranks.groups}" if ranks.groups > 1 else "")
        given += f" --ep-num-redundant-experts {redundant}" if redundant else ""
        yield from (f"{given}: {problem}" for problem in error.problems)


def share_machine(ranks: RankCounts, cores: Sequence[int], environ: MutableMapping[str, str] = os.environ) -> None:
    """Tell SGLang, through the environment that its processes inherit, what ranks have on a machine without
    accelerators. Cores: it wants a NUMA node for each rank and refuses to start with fewer. Memory is one for all, so
    ranks that find different amounts free have only looked at different moments. What the user has set stays."""
    if ranks.total > 1:
        environ.setdefault(BINDING, "|".join(",".join(map(str, part)) for part in core_parts(ranks.total, cores)))
        environ.setdefault(SAME_MEMORY, "0")


def core_parts(ranks: int, cores: Sequence[int]) -> list[list[int]]:
    """The cores of each rank; with more ranks than cores some share one."""
    count = len(cores)
    if ranks > count:
        return [[cores[rank % count]] for rank in range(ranks)]
    return [list(cores[rank * count // ranks : (rank + 1) * count // ranks]) for rank in range(ranks)]
