"""The tokenised text of a training, as it lies on disk."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

CORPUS = "corpus.npz"
SPLITS = ("train", "calibration", "report")


@dataclass(frozen=True)
class Sample:
    """Token ids of one rendered conversation; ``answer`` marks those the model has to say, ends of turns included."""

    ids: list[int]
    answer: list[bool]


@dataclass
class Chats:
    """Samples laid end to end: ``ids`` uint16, ``answer`` bool, sample i from ``starts[i]`` to ``starts[i + 1]``."""

    ids: np.ndarray
    answer: np.ndarray
    starts: np.ndarray

    @classmethod
    def of(cls, samples: list[Sample]) -> Chats:
        starts = np.cumsum([0] + [len(sample.ids) for sample in samples])
        ids = np.fromiter((token for sample in samples for token in sample.ids), np.uint16)
        answer = np.fromiter((flag for sample in samples for flag in sample.answer), bool)
        return cls(ids, answer, starts)

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        part = slice(self.starts[index], self.starts[index + 1])
        return self.ids[part], self.answer[part]


@dataclass
class Corpus:
    """``code``: split -> token ids uint16 of whole files, each ended by eos. ``chats``: split -> samples."""

    code: dict[str, np.ndarray]
    chats: dict[str, Chats]

    def save(self, file: Path) -> None:
        arrays = {f"code.{split}": ids for split, ids in self.code.items()}
        for split, chats in self.chats.items():
            arrays |= {f"chat.{split}.{name}": value for name, value in vars(chats).items()}
        np.savez_compressed(file, **arrays)

    @classmethod
    def load(cls, file: Path) -> Corpus:
        with np.load(file) as arrays:
            names = [field for field in Chats.__dataclass_fields__]
            chats = {split: Chats(*(arrays[f"chat.{split}.{name}"] for name in names)) for split in SPLITS}
            return cls({split: arrays[f"code.{split}"] for split in SPLITS}, chats)
