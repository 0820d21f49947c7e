"""Draws that a seed decides: a pure function of a row's probabilities, its seed and its position.

SGLang's own seeded sampler hashes with compiled kernels, which a CPU does not have; it numbers candidates by rank where
any request of the batch asks for top_k, top_p or min_p and by token where none does, so what a request draws depends on
its neighbours; and it ends the server at a min_p. This one has the same hash and the same noise, always by token.
"""

from __future__ import annotations

import torch
from torch import Tensor

LOW = (1 << 32) - 1
UNIT = 1 << 40  # of probability
ROWS = 64  # hashed at a time: each token of a row's vocabulary takes a few words of 8 bytes


def draw(probs: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """int64 [R]: a token of each row, by the Gumbel-max trick.

    probs: [R, vocab] weights, 0 for tokens that may not be drawn; they need not add up to 1. seeds, positions: integers
    [R], any seed of 64 bits and the low 32 bits of a position. Each row of the result depends on its own row alone.
    """
    tokens = torch.arange(probs.shape[1], device=probs.device)
    parts = zip(probs.split(ROWS), seeds.split(ROWS), positions.split(ROWS), strict=True)
    chosen = [(gumbel(hash32(seed, at, tokens)) + part.double().log()).argmax(-1) for part, seed, at in parts]
    return torch.cat(chosen) if chosen else probs.new_empty(0, dtype=torch.int64)


def filtered(probs: Tensor, top_ks: Tensor, top_ps: Tensor, min_ps: Tensor) -> tuple[Tensor, Tensor]:
    """Probabilities [R, vocab] by rank, 0 for what a row's top_k, top_p and min_p [R] exclude, and the token at each
    rank. Of equally likely tokens the first of the vocabulary ranks first. A top_p of 1 excludes nothing, whatever
    the probabilities add up to. They are added as integers: a sum of floats may depend on the shape of the batch."""
    ranked, order = probs.sort(dim=-1, descending=True, stable=True)
    units = (ranked.double() * UNIT).round().long()
    before = units.cumsum(-1) - units
    excluded = torch.arange(ranked.shape[1], device=probs.device) >= top_ks[:, None]
    excluded |= (before > top_ps[:, None].double() * UNIT) & (top_ps[:, None] < 1)
    excluded |= ranked < ranked[:, :1] * min_ps[:, None]
    return ranked.masked_fill(excluded, 0), order


def gumbel(hashed: Tensor) -> Tensor:
    """float64 noise of 32-bit hashes; finite, so that a token of weight 0 is never drawn."""
    uniform = hashed.double() / LOW
    negative_log = uniform.log().clamp(min=torch.finfo(torch.float64).min, max=-(2.0**-32)).neg()
    return negative_log.log().neg()


def hash32(seeds: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
    """int64 [R, T] in 0 .. 2**32 - 1: MurmurHash3 (x86, 32 bits, seed 0) of the 16 bytes of seed, position and token,
    little-endian. seeds, positions: [R]; tokens: [T], the same for all rows, or [R, T]."""
    seeds = seeds.to(torch.int64)
    state = torch.zeros_like(seeds)
    for word in (seeds & LOW, seeds >> 32 & LOW, positions.to(torch.int64) & LOW):
        state = _absorb(state, _scramble(word))
    state = _absorb(state[:, None], _scramble(tokens.to(torch.int64) & LOW)) ^ 16
    state = (state ^ state >> 16) * 0x85EBCA6B & LOW
    state = (state ^ state >> 13) * 0xC2B2AE35 & LOW
    return state ^ state >> 16


def _scramble(word: Tensor) -> Tensor:
    return _rotate(word * 0xCC9E2D51 & LOW, 15) * 0x1B873593 & LOW  # the products wrap, their low 32 bits are right


def _absorb(state: Tensor, word: Tensor) -> Tensor:
    return _rotate(state ^ word, 13) * 5 + 0xE6546B64 & LOW


def _rotate(word: Tensor, bits: int) -> Tensor:
    return (word << bits | word >> 32 - bits) & LOW
