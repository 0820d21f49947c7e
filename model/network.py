"""The DeepSeek-V4.1-Flash text network over rows, pages and state."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from deepinfer_plugin.kernels import Ops

from .attention import Attention
from .block import Block, Residual, expand_embedding
from .config import V41Config
from .dspark import DSpark, Stage
from .engram import Engram
from .engram_table import EngramTable
from .expert_map import ExpertMap
from .layers import Dense, Embedding, RMSNorm, lay_out
from .layout import Layout, expert_sets
from .memory import PagePool, StatePool
from .moe import Experts
from .parallel import Exchange, Parallel, Single
from .place import check_place
from .profiles import Profile
from .rows import Rows
from .step import Step

Observer = Callable[[int, Tensor], None]


class Layer(Block):
    """A block of the network, with an Engram in front of its attention at a few layers."""

    def __init__(
        self,
        ops: Ops,
        config: V41Config,
        profile: Profile,
        layer: int,
        table: EngramTable | None,
        places: ExpertMap,
        parallel: Parallel,
    ):
        attention = Attention(ops, config, profile, layer, parallel)
        super().__init__(ops, config, attention, places, layer, config.experts_per_token, parallel)
        self.engram: Engram | None = None
        if config.engram is not None and layer in config.engram.layers:
            assert table is not None
            self.engram = Engram(ops, config, table, config.engram.layers.index(layer), parallel)


class Network(nn.Module):
    """Weights under their checkpoint names; ``forward`` turns rows into final hidden states and updates both memories.

    Build it inside ``torch.device(...)``, load the parameters (``parameter_slices``), then call ``prepare`` once: those
    that it lays out are None afterwards.
    ``parallel``: the other ranks, if this one is to hold a part; see ``model/parallel.py``.
    """

    token_class: Tensor

    def __init__(
        self,
        config: V41Config,
        ops: Ops,
        profile: Profile,
        table: EngramTable | None,
        parallel: Parallel | None = None,
    ):
        super().__init__()
        self.config, self.ops, self.profile = config, ops, profile
        self.parallel = parallel = parallel or Single()
        place, ranks = parallel.place, parallel.place.experts.of
        check_place(config, place.heads.of, 1 if place.layout else ranks)
        layout = place.layout or Layout.trivial(config, ranks)
        layout.check(config, ranks)
        self.expert_maps = {
            name: ExpertMap(layout[name], experts, ranks) for name, (_, experts) in expert_sets(config).items()
        }
        target, draft = self.expert_maps.values()
        self.embed = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            Layer(ops, config, profile, layer, table, target, parallel) for layer in range(config.num_layers)
        )
        self.norm = RMSNorm(ops, config.hidden_size, config.norm_eps)
        tokens = len(parallel.place.heads.part(config.vocab_size))
        self.head = Dense(ops, config.hidden_size, tokens, torch.float32)
        self.mtp = nn.ModuleList(
            Stage(ops, config, profile, stage, draft, parallel) for stage in range(config.draft_stages)
        )
        self.dspark: DSpark | None = None
        if config.dspark is not None:
            self.dspark = DSpark(config, ops, self.mtp, self.embed_tokens, self.logits, draft, parallel)
        classes = torch.zeros(config.vocab_size, dtype=torch.int64) if table is None else table.token_class
        self.register_buffer("token_class", classes.to(self.norm.weight.device), persistent=False)

    # ---- weights ------------------------------------------------------------------------------------------------

    def parameter_slices(self) -> dict[str, Tensor]:
        """Every tensor of a checkpoint, or this rank's part of it (``Place``), by its name there, as the view of our
        storage that it fills.

        Raises:
            RuntimeError: after ``prepare``.
        """
        if self.head.weight is None:
            raise RuntimeError("the weights are laid out and what was loaded is gone: load into a new network")
        views: dict[str, Tensor] = {}
        for prefix, module in self.named_modules():
            if isinstance(module, Experts):
                views |= {f"{prefix}.{name}": view for name, view in module.slices().items()}
            else:
                own: Iterator[tuple[str, nn.Parameter]] = module.named_parameters(prefix, recurse=False)
                views |= {name: value.data for name, value in own}
        return views

    def prepare(self) -> None:
        """Let the provider lay out every weight; call once, after loading. A layer at a time, so that at most one is
        in memory twice.

        Raises:
            RuntimeError: the weights are laid out already.
        """
        if self.head.weight is None:
            raise RuntimeError("the weights are laid out already")
        for part in self.children():
            for layer in part if isinstance(part, nn.ModuleList) else [part]:
                lay_out(layer)

    # ---- running ------------------------------------------------------------------------------------------------

    def embed_tokens(self, token_ids: Tensor) -> Tensor:
        return self.embed(token_ids).to(self.profile.dtype)

    def classes(self, rows: Rows) -> Tensor:
        """Engram token classes int64 [R], -1 inside an image."""
        classes = self.token_class[rows.token_ids]
        return classes if rows.image_mask is None else classes.masked_fill(rows.image_mask, -1)

    def forward(
        self,
        rows: Rows,
        pages: PagePool,
        state: StatePool,
        observe: Observer | None = None,
        exchange: Exchange | None = None,
    ) -> Tensor:
        """Final normalised hidden states [R, H] of every row.

        Writes, for the rows' positions: window rings, compressor tails, Engram look-back, draft context, and (where
        ``rows.writes_pages``) the pages. ``observe(layer, streams)`` sees the residual streams [R, hc_mult,
        H] after each layer. exchange: if the ranks have met; None: they meet here.
        """
        if exchange is None:
            exchange = self.parallel.exchange(self.parallel.meet(rows.count, rows.parts))
        step = Step(rows, pages, state, exchange=exchange)
        if not step.exchange.total:
            return self.embed_tokens(rows.token_ids)
        classes = self.classes(rows)
        targets = () if self.config.dspark is None else self.config.dspark.target_layers
        features: dict[int, Tensor] = {}
        residual = Residual(*expand_embedding(self.embed_tokens(rows.token_ids), self.config.hc_mult))
        for index, layer in enumerate(self.layers):
            engram: Any = layer.engram
            if engram is not None or index in targets:
                residual = residual.settled(self.ops)
            if engram is not None:
                residual = replace(residual, streams=engram(residual.streams, classes, step))
            if index in targets:
                features[index] = residual.streams.float().mean(dim=1).to(residual.streams.dtype)
            residual = layer(residual, step)
            if observe is not None:
                residual = residual.settled(self.ops)
                observe(index, residual.streams)
        self.ops.ngram_write(classes, rows.positions, rows.row_slots, step.keep_ngram, state.ngrams)
        if self.dspark is not None:
            self.dspark.write_context([features[target] for target in targets], step)
        return self.norm(residual.collapsed(self.ops))

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [n, vocab] of normalised hidden states [n, H]."""
        return self.parallel.columns(self.head(hidden))
