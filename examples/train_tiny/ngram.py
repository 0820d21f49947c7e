"""A 3-gram model with interpolated Kneser-Ney smoothing: what the network is measured against.

Its counts are as large as the text, so a checkpoint ships only those that its held-out tokens ask for (``Counts``); the
probabilities are computed from them.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

BITS = 16  # of a token id


@dataclass(frozen=True)
class Counts:
    """Per token w after u, v, int32 [n]: how often w follows u v; how often anything does, and how many different
    tokens; before how many tokens' pairs (v, w) stands, and all pairs (v, anything); how many different tokens follow
    v; after how many tokens w stands. ``totals``: int64 [3], different pairs, different tokens, vocabulary;
    ``discounts`` float64 [3], for w, (v, w) and (u, v, w).
    """

    uvw: np.ndarray
    uv: np.ndarray
    uv_kinds: np.ndarray
    vw: np.ndarray
    v: np.ndarray
    v_kinds: np.ndarray
    w: np.ndarray
    totals: np.ndarray
    discounts: np.ndarray

    def log_probability(self) -> np.ndarray:
        """float64 [n], natural logarithm."""
        pairs, kinds, vocab = self.totals
        d1, d2, d3 = self.discounts
        unigram = np.maximum(self.w - d1, 0) / pairs + d1 * kinds / pairs / vocab
        bigram = _interpolate(self.vw, self.v, self.v_kinds, d2, unigram)
        return np.log(_interpolate(self.uvw, self.uv, self.uv_kinds, d3, bigram))

    def arrays(self) -> dict[str, np.ndarray]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


def _interpolate(
    count: np.ndarray, total: np.ndarray, kinds: np.ndarray, discount: float, below: np.ndarray
) -> np.ndarray:
    safe = np.maximum(total, 1)
    return np.where(total > 0, np.maximum(count - discount, 0) / safe + discount * kinds / safe * below, below)


class Trigrams:
    """Counts of a training text, int [n]."""

    def __init__(self, text: np.ndarray, vocab: int):
        ids = text.astype(np.int64)
        self.vocab = vocab
        self.three, self.three_counts = np.unique(
            (ids[:-2] << 2 * BITS) | (ids[1:-1] << BITS) | ids[2:], return_counts=True
        )
        two = self.three & ((1 << 2 * BITS) - 1)  # (v, w) of every different (u, v, w): how many u stand before it
        self.two, self.two_counts = np.unique(two, return_counts=True)
        self.one, self.one_counts = np.unique(self.two & ((1 << BITS) - 1), return_counts=True)

    def counts(self, contexts: np.ndarray, tokens: np.ndarray) -> Counts:
        """contexts int [n, 2], tokens int [n]."""
        u, v = contexts.astype(np.int64).T
        w = tokens.astype(np.int64)
        uv = (u << BITS) | v
        uv_total, uv_kinds = _sums(self.three >> BITS, self.three_counts, uv)
        v_total, v_kinds = _sums(self.two >> BITS, self.two_counts, v)
        return Counts(
            uvw=_find(self.three, self.three_counts, (uv << BITS) | w),
            uv=uv_total,
            uv_kinds=uv_kinds,
            vw=_find(self.two, self.two_counts, (v << BITS) | w),
            v=v_total,
            v_kinds=v_kinds,
            w=_find(self.one, self.one_counts, w),
            totals=np.array([len(self.two), len(self.one), self.vocab]),
            discounts=np.array([_discount(c) for c in (self.one_counts, self.two_counts, self.three_counts)]),
        )


def _find(keys: np.ndarray, counts: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    at = np.searchsorted(keys, wanted).clip(max=len(keys) - 1)
    return np.where(keys[at] == wanted, counts[at], 0).astype(np.int32)


def _sums(groups: np.ndarray, counts: np.ndarray, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of the run of equal ``groups`` (ascending) that each wanted key names: the sum of its counts, and its length."""
    total = np.concatenate(([0], np.cumsum(counts)))
    first, last = np.searchsorted(groups, wanted, "left"), np.searchsorted(groups, wanted, "right")
    return (total[last] - total[first]).astype(np.int32), (last - first).astype(np.int32)


def _discount(counts: np.ndarray) -> float:
    """The usual estimate from how many things were seen once and twice."""
    once, twice = np.count_nonzero(counts == 1), np.count_nonzero(counts == 2)
    return once / (once + 2 * twice) if once else 0.5
