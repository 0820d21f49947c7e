"""What stands where a served model has pages and state: boxes that carry float tensors, and their gradients, from one
layer to the next.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from deepinfer_plugin.model.config import V41Config
from deepinfer_plugin.model.memory import StateLayout
from deepinfer_plugin.model.rows import Rows
from deepinfer_plugin.model.step import Step


@dataclass
class Box:
    """A place to write one tensor. ``ratio``: tokens per row of it."""

    ratio: int = 1
    value: Tensor | None = None


@dataclass
class Source:
    """Latents and index keys of a KV source; the scales are inside the values."""

    ratio: int
    latent: Box
    key: Box
    latent_scale: Box = field(default_factory=Box)
    key_scale: Box = field(default_factory=Box)


@dataclass(frozen=True)
class PageSize:
    page_size: int


class Pages:
    """Each sequence is one page."""

    def __init__(self, config: V41Config, length: int):
        self.layout = PageSize(length)
        self.sources = [Source(ratio, Box(ratio), Box(ratio)) for ratio in config.source_ratios]


class State:
    """Every sequence has a slot. Nothing precedes it, so the look-back of Engram is empty."""

    def __init__(self, config: V41Config, sequences: int, device: torch.device):
        self.layout = StateLayout.of(config)
        self.rings = [Box() for _ in range(self.layout.rings)]
        self.tags = self.rings
        self.tails = [Box() for _ in range(self.layout.tails)]
        self.ngrams = torch.full((sequences, max(1, self.layout.ngram_length)), -1, device=device)


@functools.cache
def _rows(sequences: int, length: int, device: torch.device) -> Rows:
    table = torch.zeros(sequences, 1, dtype=torch.int64, device=device)
    tokens = torch.zeros(sequences * length, dtype=torch.int64, device=device)
    return Rows.build(tokens, [0] * sequences, [length] * sequences, list(range(sequences)), table)


def batch_step(config: V41Config, tokens: Tensor) -> Step:
    """The step of whole sequences, tokens int64 [sequences, length]."""
    sequences, length = tokens.shape
    rows = replace(_rows(sequences, length, tokens.device), token_ids=tokens.flatten())
    return Step(rows, Pages(config, length), State(config, sequences, tokens.device))  # type: ignore[arg-type]
