"""How the draft head's confidences are to be read, and how true they are then.

    python examples/train_tiny/calibrate.py CHECKPOINT CORPUS

A confidence is sigmoid(raw / temperature + bias) of its position: the chance that a draft is accepted if all before it
were. Their product up to a position, the survival, is what a scheduler reads. The checkpoint format has no tensors for
this: it is a JSON file beside the weights, ``{"temperatures": [one per position], "biases": [one per position]}``.

The bias is needed because the head learned on given text and serves on what the network itself writes, which is easier
to foresee: no temperature alone can raise all confidences.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

import torch
import torch.nn.functional as F
from corpus import Corpus
from heldout import chat_prompts, code_prompts, windows
from speculate import Verified, speculate
from torch import Tensor

from deepinfer_plugin.model import V41
from deepinfer_plugin.speculative.calibration import FILE, Calibration

CANDIDATES = torch.logspace(-1, 1, 201, base=4)  # temperatures 0.25 .. 4
BIASES = torch.linspace(-2, 2, 81)
BINS = 10


def observations(steps: list[Verified]) -> tuple[Tensor, Tensor]:
    """Raw confidences float32 [steps, block] and how many drafts were accepted int64 [steps]."""
    return torch.tensor([step.confidence for step in steps]), torch.tensor([step.accepted for step in steps])


def fit(steps: list[Verified]) -> Calibration:
    """Position by position the temperature and bias under which what happened was likeliest."""
    raw, accepted = observations(steps)
    temperatures, biases = [], []
    for place in range(raw.shape[1]):
        reached = accepted >= place
        logits = raw[reached, place, None, None] / CANDIDATES[:, None] + BIASES
        happened = (accepted[reached] > place).float()[:, None, None].expand_as(logits)
        loss = F.binary_cross_entropy_with_logits(logits, happened, reduction="none").mean(0)
        temperature, bias = divmod(int(loss.argmin()), len(BIASES))
        temperatures.append(round(float(CANDIDATES[temperature]), 4))
        biases.append(round(float(BIASES[bias]), 4))
    return Calibration(tuple(temperatures), tuple(biases))


def calibration_error(steps: list[Verified], calibration: Calibration) -> float:
    """Expected calibration error of the survival: over ten bins of the predicted survival of every draft of every
    block, the mean distance between prediction and how often the draft survived.
    """
    raw, accepted = observations(steps)
    survival = calibration.confidences(raw).cumprod(-1).flatten()
    survived = (accepted[:, None] > torch.arange(raw.shape[1])).float().flatten()
    which = (survival * BINS).long().clamp(max=BINS - 1)
    zero = torch.zeros(BINS)
    gap = zero.index_add(0, which, survival) - zero.index_add(0, which, survived)
    return float(gap.abs().sum() / len(survival))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--prompts", type=int, default=40, help="of each kind")
    parser.add_argument("--tokens", type=int, default=64, help="generated after each")
    args = parser.parse_args()
    model, corpus = V41.load(args.checkpoint), Corpus.load(args.corpus)
    code = windows(corpus.code["calibration"], args.prompts)
    prompts = code_prompts(code, args.prompts) + chat_prompts(corpus.chats["calibration"], args.prompts)
    steps = [step for prompt in prompts for step in speculate(model, prompt, args.tokens)[1]]
    calibration, neutral = fit(steps), Calibration.neutral(model.config.draft_block)
    before, after = calibration_error(steps, neutral), calibration_error(steps, calibration)
    print(f"{len(steps)} verifications, error {before:.4f} -> {after:.4f}: {calibration}")
    (args.checkpoint / FILE).write_text(json.dumps(asdict(calibration), indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
