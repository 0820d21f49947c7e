"""DSpark: the network drafts for itself.

Context: after every forward, the streams entering the attention of the last layers, averaged and projected, become
window keys of each draft stage. Drafting: one block of ``block_size`` rows -- the newest token, then noise -- runs
through the stages, every row seeing the context window before the block and all rows of the block; a low-rank Markov
head then adds, token by token, what the previous draft says about the next, and a confidence head estimates whether
each draft will be accepted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from deepinfer_plugin.kernels import Ops

from .attention import WindowAttention
from .block import Block, Residual, expand_embedding
from .config import V41Config
from .expert_map import ExpertMap
from .layers import Dense, Embedding, Linear, RMSNorm
from .memory import StatePool
from .parallel import OP_BY_OP, Exchange, Forward, Parallel
from .profiles import Profile
from .rows import Rows
from .step import Step


@dataclass
class DraftStep(Step):
    """A step whose rows are drafts: ``later`` int64 [R] rows of the same block that follow each row and are
    visible to it."""

    later: Tensor = dataclasses.field(kw_only=True)


@dataclass(frozen=True)
class Draft:
    """Drafts of B requests."""

    tokens: Tensor  # int64 [B, block]
    base_logits: Tensor | None  # float32 [B, block, vocab], before the Markov head; None where nobody reads them
    confidence: (
        Tensor | None
    )  # float32 [B, block] raw: sigmoid and temperature are the runtime's; None without the head


class DraftAttention(WindowAttention):
    def forward(self, x: Tensor, step: DraftStep) -> Tensor:
        rows, state = step.rows, step.state
        _, query, window = self.project(x, rows.positions)
        # Draft keys are never written to the ring: the verified tokens' context takes these positions.
        o = self.ops.sparse_attention(
            query,
            window,
            rows.positions,
            rows.fresh,
            rows.row_slots,
            rows.window_floor,
            state.rings[self.ring],
            self.window,
            None,
            None,
            None,
            None,
            None,
            self.attn_sink,
            self.scale,
            step.later,
        )
        return self.output(o, rows.positions)


class MarkovHead(nn.Module):
    """Low-rank bigram model: ``embed`` [vocab, rank] of the previous token, ``head`` [vocab, rank] of the next."""

    def __init__(self, ops: Ops, vocab: int, rank: int):
        super().__init__()
        self.ops = ops
        self.embed = Embedding(vocab, rank)
        self.head = Dense(ops, rank, vocab, torch.float32)

    def forward(self, previous: Tensor) -> tuple[Tensor, Tensor]:
        return self.ops.markov(previous, self.embed.weight, self.head.prepared)


class ConfidenceHead(nn.Module):
    def __init__(self, ops: Ops, size: int):
        super().__init__()
        self.ops = ops
        self.proj = Dense(ops, size, 1)
        self.proj.raw = ()  # the op reads it as it is stored

    def forward(self, hidden: Tensor, embedding: Tensor) -> Tensor:
        return self.ops.confidence(hidden, embedding, self.proj.weight)


class Stage(Block):
    """One draft stage. The first also owns the context projection, the last the heads."""

    def __init__(
        self, ops: Ops, config: V41Config, profile: Profile, index: int, places: ExpertMap, parallel: Parallel
    ):
        assert config.dspark is not None
        dspark = config.dspark
        attention = DraftAttention(ops, config, profile, config.num_layers + index, parallel)
        super().__init__(ops, config, attention, places, index, dspark.experts_per_token, parallel)
        if index == 0:
            self.main_proj = Linear(ops, len(dspark.target_layers) * config.hidden_size, config.hidden_size)
            self.main_norm = RMSNorm(ops, config.hidden_size, config.norm_eps)
        if index == dspark.stages - 1:
            self.norm = RMSNorm(ops, config.hidden_size, config.norm_eps)
            self.markov_head = MarkovHead(ops, config.vocab_size, dspark.markov_rank)
            self.confidence_head = ConfidenceHead(ops, config.hidden_size + dspark.markov_rank)


class DSpark:
    """The draft head over the stages of a network; shares its embedding and output head."""

    def __init__(
        self,
        config: V41Config,
        ops: Ops,
        stages: nn.ModuleList,
        embed: Callable,
        logits: Callable,
        places: ExpertMap,
        parallel: Parallel,
    ):
        assert config.dspark is not None
        self.config, self.ops, self.dspark = config, ops, config.dspark
        self.stages, self.embed, self.logits, self.parallel = stages, embed, logits, parallel
        self.places = places
        self.has_confidence = True

    def write_context(self, features: list[Tensor], step: Step) -> None:
        """Turn the target layers' mean streams ([R, H] each) of all rows of a step into window keys of every stage."""
        first: Any = self.stages[0]
        main = first.main_norm(first.main_proj(torch.cat(features, dim=-1)))
        for stage in self.stages:
            attention: Any = stage.attn
            _, key = attention.down(main)  # verified tokens ask nothing
            attention.write_window(attention.window_rows(key, step.rows.positions), step)

    def meet(self, anchors: Tensor, positions: Tensor, slots: Tensor, size: int = OP_BY_OP) -> Forward:
        """``Parallel.meet`` of the ranks that are about to draft."""
        return self.parallel.meet(anchors.shape[0] * self.dspark.block_size, (anchors, positions, slots), size)

    def draft(
        self,
        anchors: Tensor,
        positions: Tensor,
        slots: Tensor,
        state: StatePool,
        pages: Any,
        choose: Callable[[Tensor, Tensor], Tensor] | None = None,
        exchange: Exchange | None = None,
    ) -> Draft:
        """Draft one block per request.

        anchors: int64 [B] newest token of each request, not yet run through the network.
        positions: int64 [B] its position, at least 1: the context window of the positions before it must be
        in ``state``. choose: logits float32 [B, vocab] after tokens at positions int64 [B] -> token ids int64 [B];
        default: greedy. exchange: if the ranks have met (``meet``); None: they meet here.

        On many ranks all call it together, with any B, also 0: the stages have routed experts.
        """
        config, block, device = self.config, self.dspark.block_size, anchors.device
        count = anchors.shape[0]
        tokens = torch.full((count, block), self.dspark.noise_token_id, dtype=torch.int64, device=device)
        tokens[:, 0] = anchors
        offset = torch.arange(block, device=device)
        rows = Rows(
            token_ids=tokens.flatten(),
            positions=(positions[:, None] + offset).flatten(),
            requests=torch.arange(count, device=device).repeat_interleave(block),
            cu_rows=torch.arange(count + 1, device=device) * block,
            slots=slots,
            page_table=torch.zeros(count, 1, dtype=torch.int64, device=device),
            window_floor=torch.clamp(positions - config.window, min=0).repeat_interleave(block),
            writes_pages=torch.zeros(count * block, dtype=torch.bool, device=device),
        )
        if exchange is None:
            exchange = self.parallel.exchange(self.meet(anchors, positions, slots))
        step = DraftStep(rows, pages, state, exchange=exchange, later=(block - 1 - offset).repeat(count))
        residual = Residual(*expand_embedding(self.embed(rows.token_ids), config.hc_mult))
        for stage in self.stages if exchange.total else ():
            residual = stage(residual, step)
        hidden = residual.collapsed(self.ops)
        last: Any = self.stages[-1]
        base = self.logits(last.norm(hidden)).unflatten(0, (count, block))
        hidden = hidden.unflatten(0, (count, block))

        previous, drafts, confidences = anchors, [], []
        for j in range(block):
            bias, embedding = last.markov_head(previous)
            logits = base[:, j] + bias
            if self.has_confidence:
                confidences.append(last.confidence_head(hidden[:, j], embedding))
            previous = logits.argmax(dim=-1) if choose is None else choose(logits, positions + j)
            drafts.append(previous)
        return Draft(torch.stack(drafts, 1), base, torch.stack(confidences, 1) if confidences else None)
