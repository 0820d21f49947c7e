"""Batches of about the same number of tokens, drawn at random on the device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from corpus import Chats, Corpus
from settings import Setting
from torch import Tensor

CODE_SHARE, DRAFT_CODE_SHARE = 0.6, 0.75  # of the batches; drafts of conversations are learned sooner
LONG_SHARE = 0.2  # of the code batches have the largest length
PROMPT_WEIGHT = 0.1  # what a conversation asks counts little, what it answers counts whole


class Batch(NamedTuple):
    """inputs, targets int64 and weights float32, all [sequences, length]."""

    inputs: Tensor
    targets: Tensor
    weights: Tensor

    @property
    def sequences(self) -> int:
        return self.inputs.shape[0]


class Code:
    """Windows of the source text at any offset."""

    def __init__(self, ids: np.ndarray, device: torch.device):
        self.ids = torch.from_numpy(ids.astype(np.int32)).to(device)

    def at(self, offsets: Tensor, length: int) -> Batch:
        ids = self.ids[offsets[:, None].to(self.ids.device) + torch.arange(length + 1, device=self.ids.device)].long()
        return Batch(ids[:, :-1], ids[:, 1:], torch.ones_like(ids[:, 1:], dtype=torch.float32))

    def draw(self, sequences: int, length: int, generator: torch.Generator) -> Batch:
        return self.at(torch.randint(len(self.ids) - length, (sequences,), generator=generator), length)


class Conversations:
    """Whole conversations, each in the smallest length that holds it."""

    def __init__(self, chats: Chats, lengths: tuple[int, ...], device: torch.device):
        self.ids = torch.from_numpy(chats.ids.astype(np.int32)).to(device)
        self.answer = torch.from_numpy(chats.answer).to(device)
        self.starts = torch.from_numpy(chats.starts)
        sizes = np.diff(chats.starts) - 1  # rows that predict something
        place = np.searchsorted(lengths, sizes)
        self.buckets = {length: torch.from_numpy(np.flatnonzero(place == i)) for i, length in enumerate(lengths)}

    def at(self, which: Tensor, length: int) -> Batch:
        device = self.ids.device
        first, last = self.starts[which].to(device)[:, None], self.starts[which + 1].to(device)[:, None]
        places = first + torch.arange(length + 1, device=device)
        exists = places < last
        ids = self.ids[places.clamp(max=len(self.ids) - 1)].long() * exists
        answer = self.answer[places.clamp(max=len(self.ids) - 1)]
        weights = exists * torch.where(answer, 1.0, PROMPT_WEIGHT)
        return Batch(ids[:, :-1], ids[:, 1:], weights[:, 1:])

    def draw(self, sequences: int, length: int, generator: torch.Generator) -> Batch:
        bucket = self.buckets[length]
        return self.at(bucket[torch.randint(len(bucket), (sequences,), generator=generator)], length)

    def each(self, tokens: int, generator: torch.Generator) -> Iterator[Batch]:
        """A batch of every length that conversations have."""
        for length, bucket in self.buckets.items():
            if len(bucket):
                yield self.draw(tokens // length, length, generator)


class Batches:
    """Training batches: code, and conversations of one length, in fixed shares."""

    def __init__(self, corpus: Corpus, setting: Setting, device: torch.device, code_share: float, seed: int):
        self.setting, self.code_share = setting, code_share
        self.code = Code(corpus.code["train"], device)
        self.chats = Conversations(corpus.chats["train"], setting.lengths, device)
        self.generator = torch.Generator().manual_seed(seed)
        tokens = [len(self.chats.buckets[length]) * length for length in setting.lengths]
        self.shares = torch.tensor(tokens, dtype=torch.float64)

    def draw(self) -> Batch:
        lengths, tokens, generator = self.setting.lengths, self.setting.batch_tokens, self.generator
        kind, long = torch.rand(2, generator=generator).tolist()
        if kind < self.code_share:
            length = lengths[-1] if long < LONG_SHARE else lengths[max(0, len(lengths) - 2)]
            return self.code.draw(tokens // length, length, generator)
        length = lengths[int(torch.multinomial(self.shares, 1, generator=generator))]
        return self.chats.draw(tokens // length, length, generator)
