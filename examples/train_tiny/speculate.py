"""Greedy speculative decoding with the library model, as a server without a schedule does it: every block of drafts is
verified whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from deepinfer_plugin.model import V41


@dataclass(frozen=True)
class Verified:
    """One verification. ``accepted`` drafts, all before the first that differs from the network's choice;
    ``confidence`` raw, of every draft of the block.
    """

    accepted: int
    confidence: list[float]


@torch.inference_mode()
def speculate(model: V41, prompt: Sequence[int], count: int) -> tuple[list[int], list[Verified]]:
    """At least ``count`` tokens after ``prompt`` unless it ends before; the same that ``generate`` yields.
    Verifications that reach the
    end of the sequence are not counted: their block had no chance to be accepted whole.
    """
    block, eos = model.config.draft_block, model.config.eos_token_id
    session = model.session(len(prompt) + count + 2 * block + 2)
    session.extend(torch.tensor(prompt))
    tokens = [session.next_token()]
    steps: list[Verified] = []
    while len(tokens) < count and eos not in tokens:
        draft = session.draft(tokens[-1])
        drafts = draft.tokens[0].tolist()
        hidden = session.extend([tokens[-1], *drafts])
        chosen = model.network.logits(hidden).argmax(-1).tolist()
        accepted = next((j for j in range(block) if drafts[j] != chosen[j]), block)
        session.tokens = session.tokens[: session.length - (block - accepted)]
        tokens += chosen[: accepted + 1]
        if eos not in chosen[: accepted + 1] and draft.confidence is not None:
            steps.append(Verified(accepted, draft.confidence[0].tolist()))
    end = tokens.index(eos) + 1 if eos in tokens else len(tokens)
    return tokens[:end], steps


def accept_length(steps: list[Verified]) -> float:
    """Mean tokens a verification yields: the accepted drafts and the one token that the network adds."""
    return 1 + sum(step.accepted for step in steps) / len(steps)


def accept_by_position(steps: list[Verified], block: int) -> list[float]:
    """How often draft j is accepted when all before it were."""
    reached = [sum(step.accepted >= j for step in steps) for j in range(block + 1)]
    return [reached[j + 1] / max(1, reached[j]) for j in range(block)]
