"""Engram: n-gram hash tables whose rows are gated into the residual streams before the attention of a few layers."""

from __future__ import annotations

from torch import Tensor, nn

from deepinfer_plugin.kernels import Ops

from .config import V41Config
from .engram_table import EngramTable
from .layers import FP8, SCALE, Linear, blocks, parameter
from .parallel import Parallel
from .step import Step


class TableRows(nn.Module):
    """The hash table of one layer: FP8 rows with a UE8M0 scale per 32 channels, kept as stored and dequantised on
    lookup. Many ranks divide it by rows."""

    def __init__(self, rows: int, size: int, parallel: Parallel):
        super().__init__()
        self.total, rows = rows, len(parallel.place.experts.part(rows))
        self.weight = parameter(rows, size, dtype=FP8)
        self.scale = parameter(rows, blocks(size), dtype=SCALE)


class Engram(nn.Module):
    """A token's 2- to 4-grams fetch rows of the table; one projection turns them into a key per stream and one
    value; a stream takes the value as far as it agrees with its key. Tokens inside an image neither look up nor
    are looked back at."""

    multipliers: Tensor
    primes: Tensor
    offsets: Tensor

    def __init__(self, ops: Ops, config: V41Config, table: EngramTable, index: int, parallel: Parallel):
        super().__init__()
        assert config.engram is not None
        self.ops, self.eps, self.streams = ops, config.norm_eps, config.hc_mult
        self.pad_class = table.pad_class
        engram = config.engram
        self.embed = TableRows(engram.rows[index], engram.head_dim, parallel)
        self.wkv = Linear(ops, engram.columns * engram.head_dim, (config.hc_mult + 1) * config.hidden_size)
        self.q_weight = parameter(config.hc_mult, config.hidden_size)
        self.k_weight = parameter(config.hc_mult, config.hidden_size)
        device = self.q_weight.device  # the table itself is made on the host
        self.register_buffer("multipliers", table.multipliers[index].to(device), persistent=False)
        self.register_buffer("primes", table.primes[index].to(device), persistent=False)
        self.register_buffer("offsets", table.offsets[index].to(device), persistent=False)

    def rows(self, classes: Tensor, step: Step) -> Tensor:
        """Table rows int64 [R, columns] of each token; ``classes`` int64 [R], -1 for tokens inside an image."""
        rows = step.rows
        return self.ops.engram_hash(
            classes,
            rows.positions,
            rows.fresh,
            rows.row_slots,
            step.state.ngrams,
            self.multipliers,
            self.primes,
            self.offsets,
            self.pad_class,
        )

    def forward(self, streams: Tensor, classes: Tensor, step: Step) -> Tensor:
        held, rows = self.embed, self.rows(classes, step)
        table, scale, rows = step.exchange.lookup(held.weight, held.scale, held.total, rows)
        found = self.ops.engram_gather(rows, table, scale, streams.dtype)
        return self.ops.engram_gate(streams, self.wkv(found), self.q_weight, self.k_weight, self.eps, classes >= 0)
