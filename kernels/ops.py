"""The op table: everything the network asks of a device, one documented method per op.

A method checks its arguments against the contract in its docstring, then calls the provider that was chosen for the
op when the table was made (``kernels.select``). T and R count rows. Activations are bfloat16, with the rounding
points of the contracts, or float32, a debugging profile in which activations are never rounded or cast below float32;
key, index and weight formats are the same in both. The result of a row does not depend on the other rows of the
batch, to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from .contracts.attention import AttentionOps
from .contracts.base import OpError, OpTable, Prepared
from .contracts.engram import DraftOps, EngramOps
from .contracts.linear import LinearOps
from .contracts.memory import MemoryOps
from .contracts.moe import MoeOps
from .contracts.streams import StreamOps

__all__ = ["OP_NAMES", "PREPARED_FOR", "SEQUENCES", "OpError", "Ops", "Prepared"]

# Layouts are made for the ops that read them: an op's provider also prepares its weights.
PREPARED_FOR: Mapping[str, tuple[str, ...]] = {
    "prepare_linear": ("linear",),
    "prepare_dense": ("dense", "moe_gate", "markov"),
    "prepare_grouped": ("grouped_linear",),
    "prepare_experts": ("moe_experts",),
    "replace_expert": ("moe_experts",),
    "read_expert": ("moe_experts",),
}

# Ops that are some others in sequence. They are not chosen by themselves: where one provider serves all of those and
# has the op too, it is run, else they are. It may answer NotImplemented for what it does not take.
SEQUENCES: dict[str, tuple[str, ...]] = {"hc_site": ("hc_expand", "hc_mix", "hc_collapse", "rms_norm")}


class Ops(LinearOps, StreamOps, MemoryOps, AttentionOps, MoeOps, EngramOps, DraftOps):
    """The ops of one device. ``choices`` says which provider serves each op."""

    def __init__(
        self, device: torch.device, choices: Mapping[str, str], tables: Mapping[str, Mapping[str, Callable[..., Any]]]
    ):
        """``choices``: op -> provider name; ``tables``: provider name -> its ops. Use ``kernels.select``."""
        self.device = device
        self.choices = dict(choices)
        self._run = {op: tables[provider][op] for op, provider in choices.items()}
        for op, parts in SEQUENCES.items():
            table = tables[choices[parts[0]]]
            if op in table and all(choices[part] == choices[parts[0]] for part in parts):
                self._run[op] = table[op]
        self._prepare = {
            prepare: {choices[op]: tables[choices[op]][prepare] for op in readers}
            for prepare, readers in PREPARED_FOR.items()
        }

    def expert_views(self, experts: Prepared, slot: int) -> tuple[torch.Tensor, ...] | None:
        """Contiguous views of all that the provider's layout keeps of the expert in ``slot``: copied as they are into
        those of a slot elsewhere, with the same provider and sizes, they move it, as ``read_expert`` and
        ``replace_expert`` would. None where a layout has no such views."""
        views = getattr(experts.data[self.choices["moe_experts"]], "views", None)
        return None if views is None else views(slot)


OP_NAMES: tuple[str, ...] = tuple(
    name
    for area in Ops.__bases__
    for name in vars(area)
    if not name.startswith("_") and name not in {*PREPARED_FOR, *SEQUENCES} and issubclass(area, OpTable)
)
