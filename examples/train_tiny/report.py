"""Every figure of the model card, from the shipped files alone.

    python examples/train_tiny/report.py --json FILE

A few minutes on one core: the network runs on the reference ops, as served.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from calibrate import calibration_error
from heldout import CONTEXT, HeldOut, chat_prompts, code_prompts
from masters import load_masters
from speculate import Verified, accept_by_position, accept_length, speculate
from torch import Tensor
from training_memory import batch_step
from training_ops import TrainingOps, Unquantised

from deepinfer_plugin.model import V41
from deepinfer_plugin.model.weights import checkpoint_bytes
from deepinfer_plugin.speculative.calibration import Calibration, calibration_of

CHECKPOINT = Path(__file__).parent / "checkpoint"
PROMPTS, TOKENS = 24, 64  # continuations of each kind, and their length


def perplexity(losses: list[Tensor]) -> float:
    return math.exp(float(torch.cat(losses).mean()))


def nll(logits: Tensor, ids: Tensor) -> Tensor:
    """Of every scored token of a sequence."""
    return F.cross_entropy(logits[CONTEXT - 1 : -1].float(), ids[CONTEXT:], reduction="none")


def code_losses(model: V41, held_out: HeldOut) -> list[Tensor]:
    return [nll(model.logits(ids), ids) for ids in torch.from_numpy(held_out.code).long()]


def chat_losses(model: V41, held_out: HeldOut) -> list[Tensor]:
    losses = []
    for index in range(len(held_out.chats)):
        ids, answer = (torch.from_numpy(part) for part in held_out.chats[index])
        losses.append(nll(model.logits(ids.long()), ids.long())[answer[CONTEXT:]])
    return losses


def verifications(model: V41, prompts: list[list[int]]) -> list[Verified]:
    return [step for prompt in prompts for step in speculate(model, prompt, TOKENS)[1]]


@torch.no_grad()
def bf16_losses(path: Path, held_out: HeldOut) -> list[Tensor]:
    """The same weights on the training ops, without any cast of activations, window, latents or index keys."""
    ops = TrainingOps(Unquantised())
    network = load_masters(path, ops, "cpu", path)
    network.dspark = None
    network.prepare()
    losses = []
    for ids in torch.from_numpy(held_out.code).long():
        step = batch_step(network.config, ids[None])
        losses.append(nll(network.logits(network(step.rows, step.pages, step.state)), ids))  # type: ignore[arg-type]
    return losses


def figures(path: Path) -> dict[str, Any]:
    model, held_out = V41.load(path), HeldOut.load(path)
    code_steps = verifications(model, code_prompts(held_out.code, PROMPTS))
    chat_steps = verifications(model, chat_prompts(held_out.chats, PROMPTS))
    steps, block = code_steps + chat_steps, model.config.draft_block

    def baseline(log_probability: np.ndarray) -> float:
        return math.exp(-log_probability.mean())

    return {
        "ppl": perplexity(code_losses(model, held_out)),
        "ppl_3gram": baseline(held_out.code_counts.log_probability()),
        "ppl_bf16": perplexity(bf16_losses(path, held_out)),
        "ppl_chat": perplexity(chat_losses(model, held_out)),
        "ppl_3gram_chat": baseline(held_out.chat_counts.log_probability()),
        "accept_len_code": accept_length(code_steps),
        "accept_len_chat": accept_length(chat_steps),
        "accept_by_position": accept_by_position(steps, block),
        "accept_by_position_code": accept_by_position(code_steps, block),
        "accept_by_position_chat": accept_by_position(chat_steps, block),
        "verifications": len(steps),
        "ece_before": calibration_error(steps, Calibration.neutral(block)),
        "ece_after": calibration_error(steps, calibration_of(path, None, block)),
        "checkpoint_bytes": checkpoint_bytes(path),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINT)
    args = parser.parse_args()
    found = figures(args.checkpoint)
    for name, value in found.items():
        shown = [round(v, 3) for v in value] if isinstance(value, list) else round(value, 4)
        print(f"{name:26} {shown}")
    args.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
