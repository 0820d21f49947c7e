"""The held-out text that a checkpoint ships: its figures then repeat on machines with another standard library."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from corpus import Chats, Corpus
from ngram import Counts, Trigrams
from safetensors.numpy import load_file, save_file

FILE = "heldout.safetensors"
WINDOW = 512  # tokens of source text per window
CONTEXT = 2  # the first tokens of a window or conversation are not scored: a 3-gram needs two
PROMPT = 160  # tokens of source text before a continuation


def windows(code: np.ndarray, count: int) -> np.ndarray:
    """int [count, WINDOW], spread evenly over the text."""
    starts = np.linspace(0, len(code) - WINDOW, count).astype(int)
    return np.stack([code[start : start + WINDOW] for start in starts])


def code_prompts(code: np.ndarray, count: int) -> list[list[int]]:
    """Of ``windows``: the beginnings of ``count`` of them."""
    return code[np.linspace(0, len(code) - 1, count).astype(int), :PROMPT].tolist()


def chat_prompts(chats: Chats, count: int, longest: int = 700) -> list[list[int]]:
    """Conversations up to one of their answers, in turn the first, the second, ..."""
    prompts: list[list[int]] = []
    for index in np.linspace(0, len(chats) - 1, 4 * count).astype(int):
        ids, answer = chats[index]
        begins = np.flatnonzero(answer[1:] & ~answer[:-1]) + 1
        begin = begins[len(prompts) % len(begins)]
        if begin <= longest and len(prompts) < count:
            prompts.append(ids[:begin].tolist())
    return prompts


@dataclass(frozen=True)
class HeldOut:
    """``code`` int32 [windows, WINDOW]. Conversations laid end to end: ``chat`` int32, ``answer`` bool, sample i from
    ``starts[i]``. The counts of the 3-gram model are of the scored tokens in order: of every window, and of the
    answers.
    """

    code: np.ndarray
    chat: np.ndarray
    answer: np.ndarray
    starts: np.ndarray
    code_counts: Counts
    chat_counts: Counts

    @property
    def chats(self) -> Chats:
        return Chats(self.chat, self.answer, self.starts)

    @classmethod
    def of(cls, corpus: Corpus, vocab: int, code_windows: int = 32, conversations: int = 60) -> HeldOut:
        """The 3-gram model of the source text is trained on source text, that of the conversations on conversations."""
        code = windows(corpus.code["report"], code_windows).astype(np.int64)
        report = corpus.chats["report"]
        picked = [report[index] for index in np.linspace(0, len(report) - 1, conversations).astype(int)]
        chat, answer = (np.concatenate(part) for part in zip(*picked, strict=True))
        starts = np.cumsum([0] + [len(ids) for ids, _ in picked])
        contexts, tokens = zip(*(_scored(window, np.ones(WINDOW, bool)) for window in code), strict=True)
        code_counts = Trigrams(corpus.code["train"], vocab).counts(np.concatenate(contexts), np.concatenate(tokens))
        contexts, tokens = zip(*(_scored(ids, flags) for ids, flags in picked), strict=True)
        chat_counts = Trigrams(corpus.chats["train"].ids, vocab).counts(
            np.concatenate(contexts), np.concatenate(tokens)
        )
        return cls(code, chat.astype(np.int64), answer, starts, code_counts, chat_counts)

    def save(self, path: Path) -> None:
        arrays = {
            "code": self.code.astype(np.int32),
            "chat": self.chat.astype(np.int32),
            "answer": self.answer,
            "starts": self.starts,
        }
        for part, counts in (("code", self.code_counts), ("chat", self.chat_counts)):
            arrays |= {f"{part}_counts.{name}": value for name, value in counts.arrays().items()}
        save_file(arrays, path / FILE)

    @classmethod
    def load(cls, path: Path) -> HeldOut:
        arrays = load_file(path / FILE)
        counts = {
            part: Counts(
                **{name.split(".")[1]: value for name, value in arrays.items() if name.startswith(f"{part}_counts.")}
            )
            for part in ("code", "chat")
        }
        text = {name: arrays[name] for name in ("code", "chat", "answer", "starts")}
        return cls(**text, code_counts=counts["code"], chat_counts=counts["chat"])


def _scored(ids: np.ndarray, flags: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Contexts [n, 2] and tokens [n] of the flagged tokens from place CONTEXT on."""
    at = np.flatnonzero(flags[CONTEXT:]) + CONTEXT
    return np.stack([ids[at - 2], ids[at - 1]], 1), ids[at]
