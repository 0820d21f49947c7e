"""What a seed draws depends on the row alone, follows the probabilities, and is what SGLang's kernels would draw."""

from __future__ import annotations

import struct

import pytest
import torch
from chi_square import p_value

from deepinfer_plugin.patches import seeded_sampling
from deepinfer_plugin.runtime.seeded_draw import ROWS, draw, filtered, hash32

VOCABULARY = 50


def murmur3(data):
    """MurmurHash3 x86 32 with seed 0, of whole words."""
    state = 0
    for (word,) in struct.iter_unpack("<I", data):
        word = word * 0xCC9E2D51 % 2**32
        word = (word << 15 | word >> 17) % 2**32 * 0x1B873593 % 2**32
        state ^= word
        state = ((state << 13 | state >> 19) % 2**32 * 5 + 0xE6546B64) % 2**32
    state ^= len(data)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        state = (state ^ state >> shift) * factor % 2**32
    return state ^ state >> 16


def test_the_hash_is_murmurs():
    assert murmur3(b"test") == 0xBA6BD213, "a published value"
    seeds = [0, 1, -1, 42, 2**63 - 1, -(2**63), 0x0123456789ABCDEF]
    positions = [0, 1, 127, 2**31, 2**32 - 1, 5, 1_048_575]
    tokens = [0, 1, 129_279, 77]
    found = hash32(torch.tensor(seeds), torch.tensor(positions), torch.tensor(tokens))
    expected = [
        [murmur3(struct.pack("<QII", seed % 2**64, position, token)) for token in tokens]
        for seed, position in zip(seeds, positions, strict=True)
    ]
    assert found.tolist() == expected


def rows(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    probs = torch.softmax(2 * torch.randn(count, VOCABULARY, generator=generator), -1)
    seeds = torch.randint(-(2**62), 2**62, (count,), generator=generator)
    return probs, seeds, torch.randint(0, 4096, (count,), generator=generator)


def test_a_row_alone_draws_what_it_draws_in_a_batch():
    probs, seeds, positions = rows(2 * ROWS + 3)
    together = draw(probs, seeds, positions)
    alone = [draw(probs[i : i + 1], seeds[i : i + 1], positions[i : i + 1]).item() for i in range(len(probs))]
    assert together.tolist() == alone
    assert draw(probs[:0], seeds[:0], positions[:0]).tolist() == []
    other = draw(probs, seeds + 1, positions), draw(probs, seeds, positions + 1)
    assert all(not torch.equal(together, each) for each in other)


def test_draws_follow_the_probabilities():
    """Over seeds at one position, and over positions of one seed."""
    probs, count = rows(1)[0], 20_000
    numbers, same = torch.arange(count), torch.full((count,), 7)
    for seeds, positions in ((numbers, same), (same, numbers)):
        counts = torch.bincount(draw(probs.expand(count, -1), seeds, positions), minlength=VOCABULARY)
        assert p_value(counts, count * probs[0].double()) > 1e-4


def test_what_is_excluded_is_never_drawn():
    probs = rows(1)[0].expand(2000, -1).clone()
    probs[:, ::2] = 0
    assert (draw(probs, torch.arange(2000), torch.zeros(2000, dtype=torch.int64)) % 2 == 1).all()


LIMITS = [  # top_k, top_p, min_p and the ranks that they leave of 0.4, 0.3, 0.2, 0.1
    (1 << 30, 1.0, 0.0, 4),
    (2, 1.0, 0.0, 2),
    (1, 1.0, 0.0, 1),
    (1 << 30, 0.65, 0.0, 2),
    (1 << 30, 0.75, 0.0, 3),
    (1 << 30, 1.0, 0.6, 2),
    (3, 0.95, 0.3, 3),
]


@pytest.mark.parametrize(("top_k", "top_p", "min_p", "left"), LIMITS)
def test_limits(top_k, top_p, min_p, left):
    probs = torch.tensor([[0.1, 0.4, 0.2, 0.3]])
    ranked, order = filtered(probs, *(torch.tensor([each]) for each in (top_k, top_p, min_p)))
    assert order.tolist() == [[1, 3, 2, 0]]
    assert ranked[0, :left].tolist() == probs[0, order[0, :left]].tolist() and not ranked[0, left:].any()


def test_a_top_p_of_one_excludes_nothing():
    """The probabilities of a large vocabulary may add up to more than 1."""
    probs = torch.tensor([[0.6, 0.5, 0.01]])
    ranked, _ = filtered(probs, torch.tensor([1 << 30]), torch.tensor([1.0]), torch.tensor([0.0]))
    assert (ranked > 0).all()


def test_outside_a_server_sglang_draws_as_it_does():
    """The real question whose model it is, where no server's arguments are known."""
    assert seeded_sampling._ours() is False
    called = []
    seeded_sampling.enable_batch_invariant_mode(lambda: called.append(1))
    assert called == [1]


def test_a_neighbour_with_limits_changes_nothing(monkeypatch):
    """SGLang samples a batch in another way as soon as one of its requests has a limit."""
    monkeypatch.setattr(seeded_sampling, "_ours", lambda: True)
    probs, seeds, positions = rows(40, seed=1)
    free = seeded_sampling.sampling_from_probs(None, probs, sampling_seed=seeds, positions=positions)
    top_ks, top_ps, min_ps = torch.full((40,), 1 << 30), torch.ones(40), torch.zeros(40)
    top_ks[::4], top_ps[1::4], min_ps[2::4] = 3, 0.5, 0.2
    limits = (top_ks, top_ps, min_ps, True, seeds, positions)
    found = seeded_sampling.limited_sampling_from_probs(None, probs, *limits)
    assert found.dtype == free.dtype == torch.int32
    assert torch.equal(found[3::4], free[3::4])
    tokens, ranked, order, weights = seeded_sampling.limited_sampling_from_probs(
        None, probs, *limits, return_filtered_probs=True
    )
    assert torch.equal(tokens, found)
    places = (order == tokens[:, None]).nonzero()[:, 1:]
    assert torch.equal(ranked.gather(1, places)[:, 0], weights) and (weights > 0).all()


def test_without_a_seed_or_our_model_sglang_draws(monkeypatch):
    for ours, seed in ((True, None), (False, torch.tensor([1]))):
        monkeypatch.setattr(seeded_sampling, "_ours", lambda ours=ours: ours)
        assert seeded_sampling.sampling_from_probs(lambda *args, **options: "its", None, seed, None) == "its"
        original = lambda *args, **options: (len(args), options)  # noqa: E731
        found = seeded_sampling.limited_sampling_from_probs(original, 0, 1, 2, 3, False, seed, 4, max_top_k=5)
        assert found == (7, {"return_filtered_probs": False, "max_top_k": 5})
    called = []
    for ours in (True, False):
        monkeypatch.setattr(seeded_sampling, "_ours", lambda ours=ours: ours)
        seeded_sampling.enable_batch_invariant_mode(lambda: called.append(1))
    assert called == [1]
