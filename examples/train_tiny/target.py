"""Training of the network: next-token cross-entropy, the indexers' losses, and gates kept even by their biases."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
import torch.nn.functional as F
from batches import Batch
from optimiser import Optimiser
from recording import Figures, Recorded
from settings import Setting
from torch import Tensor, nn
from training_memory import batch_step
from training_ops import TrainingOps

from deepinfer_plugin.model.indexer import Indexer
from deepinfer_plugin.model.network import Network

DENSE = 0.2  # of the steps read every visible group, while the indexers learn which ones matter
BALANCE = 0.6  # of the steps move the gates' biases; later the experts may grow apart
BIAS_STEP = 1e-3
Report = Callable[[int, Figures], None]


def forward(network: Network, ops: TrainingOps, batch: Batch) -> Tensor:
    """float32 logits [rows, vocab] of a batch; weights must be prepared."""
    ops.sequences = batch.sequences
    step = batch_step(network.config, batch.inputs)
    return network.logits(network(step.rows, step.pages, step.state))


def isolate_indexers(network: Network) -> None:
    """An indexer learns from what it is given and does not bend it: its inputs carry no gradient."""

    def detach(module: nn.Module, args: tuple) -> tuple:
        return tuple(arg.detach() if isinstance(arg, Tensor) else arg for arg in args)

    for module in network.modules():
        if isinstance(module, Indexer):
            module.register_forward_pre_hook(detach)


def train_target(
    network: Network, ops: TrainingOps, batches: Iterator[Batch], setting: Setting, report: Report
) -> None:
    """``report(step, figures)`` after every step; reading a figure waits for the device."""
    isolate_indexers(network)
    network.dspark = None
    named = [(name, p) for name, p in network.named_parameters() if not name.startswith("mtp.")]
    optimiser = Optimiser(named, setting.target_lr)

    def one_step(inputs: Tensor, targets: Tensor, weights: Tensor, dense: bool, balanced: bool) -> Figures:
        ops.dense_groups, ops.losses, ops.loads = dense, [], []
        network.prepare()
        logits = forward(network, ops, Batch(inputs, targets, weights))
        losses = F.cross_entropy(logits, targets.flatten(), reduction="none")
        loss = (losses * weights.flatten()).sum() / weights.sum()
        index_loss = torch.stack(ops.losses).mean()
        (loss + index_loss).backward()
        norm = optimiser.step()
        if balanced:
            balance(ops.loads)
        return {"loss": loss.detach(), "index": index_loss.detach(), "norm": norm}

    recorded, steps = Recorded(one_step), setting.target_steps
    for step in range(steps):
        optimiser.set_rate(step, steps)
        report(step, recorded(next(batches), step < DENSE * steps, step < BALANCE * steps))
    ops.dense_groups = False


@torch.no_grad()
def balance(loads: list[tuple[Tensor, Tensor]]) -> None:
    """An expert that got less than its share becomes a little easier to choose; no loss is involved."""
    for bias, counts in loads:
        share = counts.float()
        bias += BIAS_STEP * torch.sign(share.mean() - share)


@torch.no_grad()
def evaluate(network: Network, ops: TrainingOps, batches: Iterable[Batch], least: float = 0.5) -> float:
    """Mean negative log-likelihood of the targets whose weight is at least ``least``."""
    total = count = 0.0
    for batch in batches:
        losses = F.cross_entropy(forward(network, ops, batch), batch.targets.flatten(), reduction="none")
        keep = batch.weights.flatten() >= least
        total += float(losses[keep].sum())
        count += float(keep.sum())
    return total / count
