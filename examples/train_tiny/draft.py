"""Training of the DSpark stages on the frozen network, with three losses: cross-entropy and total variation between
what a draft row says and what the network says at that place, and whether the confidence head foresees that both choose
the same token.

Anchors are drawn at random in each sequence. As served, a block is the anchor and noise; it sees the context window
before the anchor. The Markov head and the confidence head are told the true token before each row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from batches import Batch
from optimiser import Optimiser
from recording import Figures, Recorded
from settings import Setting
from target import Report, balance
from torch import Tensor
from training_memory import batch_step
from training_ops import TrainingOps

from deepinfer_plugin.model.block import Residual, expand_embedding
from deepinfer_plugin.model.dspark import DraftStep, DSpark
from deepinfer_plugin.model.network import Network
from deepinfer_plugin.model.rows import Rows
from deepinfer_plugin.model.step import Step

DECAY = 0.85  # weight of a draft relative to the one before it
OFF_PATH = 0.3  # weight of a draft whose earlier tokens the network itself would not have chosen
LOSSES = {"ce": 1.0, "tv": 1.0, "confidence": 0.5}


class Features:
    """Stands in for the draft head during a forward: keeps what the head's context is made of."""

    def write_context(self, features: list[Tensor], step: Step) -> None:
        self.features = features


@dataclass(frozen=True)
class Drafted:
    """What a block said and should have said, all [blocks, draft_block, ...]."""

    logits: Tensor  # float32 [.., vocab] with the Markov head
    confidence: Tensor  # float32 raw
    target: Tensor  # float32 [.., vocab] logits of the network at the same places
    tokens: Tensor  # int64, the true tokens

    def agree(self) -> Tensor:
        """bool: both choose the same token."""
        return self.logits.argmax(-1) == self.target.argmax(-1)

    def on_path(self) -> Tensor:
        """bool: every true token before this place is the one the network chooses."""
        chosen = (self.target.argmax(-1) == self.tokens).cumprod(-1).bool()
        return F.pad(chosen, (1, 0), value=True)[:, :-1]


class DraftTrainer:
    """The frozen network, its draft head on masters, and one step of both."""

    def __init__(self, network: Network, ops: TrainingOps, setting: Setting):
        assert network.dspark is not None and network.config.dspark is not None
        self.network, self.ops, self.setting = network, ops, setting
        self.head: DSpark = network.dspark
        self.features = Features()
        self.block = ops.draft_block = network.config.dspark.block_size
        network.dspark = self.features  # type: ignore[assignment]
        for name, parameter in network.named_parameters():
            parameter.requires_grad_(parameter.requires_grad and name.startswith("mtp."))
        with torch.no_grad():
            network.prepare()

    def prepare(self) -> None:
        for module in self.network.mtp.modules():
            prepare: Any = getattr(module, "prepare", None)
            if prepare is not None:
                prepare()

    def anchors(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Sequences and positions int64 [blocks] of anchors: at least one token before them, a whole block of targets
        after them that are worth saying.
        """
        length = batch.inputs.shape[1]
        count = max(1, self.setting.anchors * length // 512)
        worth = (batch.weights >= 0.5).float() + 1e-9
        worth[:, 0] = 0
        worth[:, length - self.block + 1 :] = 0
        positions = torch.multinomial(worth, count, replacement=True)
        sequences = torch.arange(batch.sequences, device=positions.device)[:, None].expand_as(positions)
        return sequences.flatten(), positions.flatten()

    def run(self, batch: Batch, sequences: Tensor, positions: Tensor) -> Drafted:
        network, ops, block = self.network, self.ops, self.block
        ops.sequences = batch.sequences
        step = batch_step(network.config, batch.inputs)
        offset = torch.arange(block, device=positions.device)
        at = positions[:, None] + offset
        with torch.no_grad():
            hidden = network(step.rows, step.pages, step.state).unflatten(0, batch.inputs.shape)
            target = network.logits(hidden[sequences[:, None], at].flatten(0, 1)).unflatten(0, at.shape)
        ops.loads = []
        self.head.write_context(self.features.features, step)
        hidden, base = self._draft(batch.inputs[sequences, positions], sequences, positions, step)
        last: Any = self.head.stages[-1]
        bias, embedding = last.markov_head(batch.inputs[sequences[:, None], at].flatten())
        confidence = last.confidence_head(hidden, embedding)
        logits = (base + bias).unflatten(0, at.shape)
        tokens = batch.targets[sequences[:, None], at]
        return Drafted(logits, confidence.unflatten(0, at.shape), target, tokens)

    def _draft(self, anchors: Tensor, sequences: Tensor, positions: Tensor, step: Step) -> tuple[Tensor, Tensor]:
        """Hidden states before the norm and base logits of all rows of all blocks, as ``DSpark.draft`` has them."""
        config, block, count = self.network.config, self.block, len(anchors)
        device, offset = anchors.device, torch.arange(block, device=anchors.device)
        tokens = torch.full((count, block), self.head.dspark.noise_token_id, dtype=torch.int64, device=device)
        tokens[:, 0] = anchors
        rows = Rows(
            token_ids=tokens.flatten(),
            positions=(positions[:, None] + offset).flatten(),
            requests=torch.arange(count, device=device)[:, None].expand(-1, block).flatten(),
            cu_rows=torch.arange(count + 1, device=device) * block,
            slots=sequences,
            page_table=torch.zeros(count, 1, dtype=torch.int64, device=device),
            window_floor=(positions - config.window).clamp(min=0)[:, None].expand(-1, block).flatten(),
            writes_pages=torch.zeros(count * block, dtype=torch.bool, device=device),
        )
        draft = DraftStep(rows, step.pages, step.state, later=(block - 1 - offset).repeat(count))
        residual = Residual(*expand_embedding(self.head.embed(rows.token_ids), config.hc_mult))
        for stage in self.head.stages:
            residual = stage(residual, draft)
        hidden = residual.collapsed(self.ops)
        last: Any = self.head.stages[-1]
        return hidden, self.head.logits(last.norm(hidden))


def losses(drafted: Drafted) -> dict[str, Tensor]:
    """The three losses, each a mean over places weighted by how much an accepted draft there is worth."""
    target = torch.softmax(drafted.target, -1)
    logp = torch.log_softmax(drafted.logits, -1)
    place = DECAY ** torch.arange(logp.shape[1], device=logp.device)
    weight = place * torch.where(drafted.on_path(), 1.0, OFF_PATH)
    each = {
        "ce": -(target * logp).sum(-1),
        "tv": 0.5 * (target - logp.exp()).abs().sum(-1),
        "confidence": F.binary_cross_entropy_with_logits(drafted.confidence, drafted.agree().float(), reduction="none"),
    }
    return {name: (value * weight).sum() / weight.sum() for name, value in each.items()}


def train_draft(trainer: DraftTrainer, batches: Iterator[Batch], setting: Setting, report: Report) -> None:
    """``report(step, figures)`` after every step; reading a figure waits for the device."""
    optimiser = Optimiser(trainer.network.named_parameters(), setting.draft_lr)

    def one_step(inputs: Tensor, targets: Tensor, weights: Tensor, sequences: Tensor, positions: Tensor) -> Figures:
        trainer.prepare()
        drafted = trainer.run(Batch(inputs, targets, weights), sequences, positions)
        each = losses(drafted)
        torch.stack([LOSSES[name] * value for name, value in each.items()]).sum().backward()
        norm = optimiser.step()
        balance(trainer.ops.loads)
        agree, path = drafted.agree(), drafted.on_path()
        accepted = (agree & path).float().sum(0) / path.float().sum(0).clamp(min=1)
        return {name: value.detach() for name, value in each.items()} | {"accepted": accepted, "norm": norm}

    recorded, steps = Recorded(one_step), setting.draft_steps
    for step in range(steps):
        optimiser.set_rate(step, steps)
        batch = next(batches)
        report(step, recorded([*batch, *trainer.anchors(batch)]))
