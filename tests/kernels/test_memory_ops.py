"""Writes to rings, tails, pages and n-gram tails, and the ops that read them: chunks and rejections leave no trace."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from deepinfer_plugin.kernels import select
from deepinfer_plugin.kernels.reference import formats

from .cases import Random

D = 64


def spans(chunks: list[int]) -> list[tuple[int, int]]:
    ends = torch.tensor(chunks).cumsum(0).tolist()
    return [(end - n, end) for n, end in zip(chunks, ends, strict=True)]


CHUNKS = st.lists(st.integers(1, 9), min_size=1, max_size=8)


# ---- window rings -------------------------------------------------------------------------------------------


def test_window_pack_is_the_fp8_format(ops, dtype):
    kv = Random(0, dtype).normal(9, D, spread=2)
    packed = ops.window_pack(kv)
    values, scale = formats.fp8_cast(kv)
    assert torch.equal(packed[:, :D], values.view(torch.uint8)) and torch.equal(packed[:, D:], scale.view(torch.uint8))
    kv[3, 40] = torch.nan
    assert ops.window_pack(kv)[3, D:].tolist()[1] == 255


def test_window_write_places_and_tags(ops):
    packed = Random(0, torch.float32).window(5, D)
    ring, tags = torch.zeros(4, 7, D + 2, dtype=torch.uint8), torch.full((4, 7), -1, dtype=torch.int32)
    keep = torch.tensor([True, True, False, True, True])
    positions, slots = torch.tensor([6, 7, 8, 1_000_000, 13]), torch.tensor([1, 1, 1, 2, 3])
    ops.window_write(packed, slots, positions, keep, ring, tags)
    want = torch.full((4, 7), -1, dtype=torch.int32)
    for row, (slot, p) in enumerate(zip(slots.tolist(), positions.tolist(), strict=True)):
        if keep[row]:
            assert torch.equal(ring[slot, p % 7], packed[row])
            want[slot, p % 7] = p
    assert torch.equal(tags, want) and (ring[want < 0] == 0).all()


def test_ids_of_rows_that_are_not_kept_are_not_looked_at(ops):
    """A row that is not kept may carry any id."""
    packed = Random(0, torch.float32).window(2, D)
    wild, keep = torch.tensor([1, 1 << 50]), torch.tensor([True, False])
    ring, tags = torch.zeros(2, 7, D + 2, dtype=torch.uint8), torch.full((2, 7), -1, dtype=torch.int32)
    ops.window_write(packed, wild, torch.tensor([3, 4]), keep, ring, tags)
    assert torch.equal(ring[1, 3], packed[0]) and tags.sum() == 3 - 13
    values, scales = torch.zeros(2, 8, D // 2, dtype=torch.uint8), torch.zeros(2, 8, D // 16, dtype=torch.uint8)
    ops.latent_write(torch.ones(2, D), values, scales, wild, wild, keep)
    assert values[1, 1].any() and not values[0].any()
    values, scales = torch.zeros(2, 8, D // 2, dtype=torch.uint8), torch.zeros(2, 8, D // 32, dtype=torch.uint8)
    ops.index_key_write(torch.ones(2, D), values, scales, wild, wild, keep)
    assert values[1, 1].any() and not values[0].any()
    tail = torch.zeros(2, 7, 2, D)
    ops.tail_write(torch.ones(2, D), torch.ones(2, D), torch.tensor([3, 4]), wild, keep, tail)
    assert tail[1, 3].all() and tail.sum() == 2 * D
    ngrams = torch.full((2, 9), -1)
    ops.ngram_write(torch.tensor([5, 6]), torch.tensor([3, 4]), wild, keep, ngrams)
    assert ngrams[1, 3] == 5 and ngrams.sum() == 5 - 17


# ---- pages --------------------------------------------------------------------------------------------------


def pool(pages: int, groups: int, *widths: int) -> tuple[Tensor, list[Tensor]]:
    """A pool of pages with sections of odd offsets, and the strided views into it."""
    memory = torch.full((pages, 3 + groups * sum(widths) + 5), 170, dtype=torch.uint8)
    views, offset = [], 3
    for width in widths:
        views.append(memory[:, offset : offset + groups * width].unflatten(1, (groups, width)))
        offset += groups * width
    return memory, views


@pytest.mark.parametrize("groups", [1, 64])
def test_page_writes_touch_only_their_group(ops, dtype, groups):
    r = Random(0, dtype)
    memory, (latent, latent_scale, key, key_scale) = pool(6, groups, D // 2, D // 16, D // 2, D // 32)
    before = memory.clone()
    rows = r.normal(5, D)
    page_ids, at = torch.tensor([5, 0, 3, 3, 1]), torch.tensor([0, 0, 0, groups - 1, groups - 1])
    keep = torch.tensor([True, False, groups > 1, True, True])
    ops.latent_write(rows, latent, latent_scale, page_ids, at, keep)
    packed, scale = formats.latent_cast(rows)
    for row in range(5):
        if keep[row]:
            assert torch.equal(latent[page_ids[row], at[row]], packed[row])
            assert torch.equal(latent_scale[page_ids[row], at[row]], scale.view(torch.uint8)[row])
    ops.index_key_write(rows, key, key_scale, page_ids, at, keep)
    packed, scale = formats.index_cast(rows)
    for row in range(5):
        if keep[row]:
            assert torch.equal(key[page_ids[row], at[row]], packed[row])
            assert torch.equal(key_scale[page_ids[row], at[row]], scale.view(torch.uint8)[row])
    changed = (memory != before).any(1)
    assert changed.tolist() == [False, True, False, True, False, True]
    for view in (latent, latent_scale, key, key_scale):
        for page, group in zip(page_ids[keep].tolist(), at[keep].tolist(), strict=True):
            view[page, group] = 170
    assert torch.equal(memory, before)


# ---- compressor pairs ---------------------------------------------------------------------------------------


def pooled(value: Tensor, score: Tensor, p: int, dtype: torch.dtype) -> Tensor:
    weight = torch.softmax(score[p - 1 : p + 1].double(), 0)
    return (value[p - 1 : p + 1].double() * weight).sum(0).to(dtype)


@settings(max_examples=40, deadline=None)
@given(CHUNKS, st.integers(2, 9), st.sampled_from([torch.bfloat16, torch.float32]))
def test_pairs_across_any_chunking(chunks, length, dtype):
    ops, total = select(), sum(chunks)
    r = Random(total, torch.float32)
    value, score = r.normal(total, D), r.normal(total, D) * 5
    tail = torch.full((2, length, 2, D), torch.nan)
    got = []
    for a, b in spans(chunks):
        positions, slots = torch.arange(a, b), torch.ones(b - a, dtype=torch.int64)
        got.append(ops.compress_pair(value[a:b], score[a:b], positions, positions - a, slots, tail, dtype))
        keep = torch.arange(b - a, 0, -1) <= length
        ops.tail_write(value[a:b], score[a:b], positions, slots, keep, tail)
    whole = torch.cat(got)
    for p in range(total):
        if p % 2:
            torch.testing.assert_close(whole[p], pooled(value, score, p, dtype), rtol=1e-6, atol=1e-7)
        else:
            assert torch.equal(whole[p], torch.zeros(D, dtype=dtype))
    one_shot = ops.compress_pair(
        value, score, torch.arange(total), torch.arange(total), torch.ones(total, dtype=torch.int64), tail, dtype
    )
    assert torch.equal(one_shot[1::2], whole[1::2])


def test_pair_with_extreme_scores(ops, dtype):
    """The larger score takes all; nothing overflows; a NaN stays in its channel."""
    value = torch.tensor([[1.0] * D, [3.0] * D])
    score = torch.zeros(2, D)
    score[0, :5] = torch.tensor([3e38, -3e38, -torch.inf, torch.inf, torch.nan])
    one = torch.ones(2, dtype=torch.int64)
    tail = torch.zeros(2, 7, 2, D)
    got = ops.compress_pair(value, score, torch.arange(2), torch.arange(2), one, tail, dtype)[1]
    assert got[:3].tolist() == [1.0, 3.0, 3.0] and got[3:5].isnan().all() and (got[5:] == 2.0).all()


def test_a_pair_reads_the_row_before_only_of_its_own_request(ops):
    value, score = torch.tensor([[1.0] * D, [3.0] * D, [5.0] * D]), torch.zeros(3, D)
    tail = torch.zeros(3, 7, 2, D)
    tail[2, 4, 0] = 7.0
    got = ops.compress_pair(
        value, score, torch.tensor([0, 1, 5]), torch.tensor([0, 1, 0]), torch.tensor([1, 1, 2]), tail, torch.float32
    )
    assert (got[1] == 2.0).all() and (got[2] == 6.0).all()


# ---- n-grams ------------------------------------------------------------------------------------------------

MULTIPLIERS = torch.tensor([3, 5_000_000_000_001, 7, (1 << 46) + 1])
PRIMES = torch.tensor([[101, 103], [107, 109], [113, 127]])
OFFSETS = torch.tensor([0, 101, 204, 311, 420, 533])
PAD = 6


def hashes(classes: list[int], p: int) -> list[int]:
    """Python integers: the look-back latches to pad at the start and at a dead token."""
    seen, dead = [], False
    for back in range(4):
        dead = dead or p - back < 0 or classes[p - back] < 0
        seen.append(PAD if dead else classes[p - back])
    rolling, out = seen[0] * int(MULTIPLIERS[0]), []
    for i in range(1, 4):
        rolling ^= seen[i] * int(MULTIPLIERS[i])
        out += [rolling % int(prime) + int(OFFSETS[2 * (i - 1) + h]) for h, prime in enumerate(PRIMES[i - 1])]
    return out


@settings(max_examples=60, deadline=None)
@given(CHUNKS, st.data(), st.integers(3, 9))
def test_hashes_across_any_chunking(chunks, data, length):
    ops, total = select(), sum(chunks)
    classes = data.draw(st.lists(st.integers(-1, 20) | st.integers(99_000, 99_091), min_size=total, max_size=total))
    ngrams, tensor, got = torch.full((2, length), 12345), torch.tensor(classes), []
    for a, b in spans(chunks):
        positions, slots = torch.arange(a, b), torch.ones(b - a, dtype=torch.int64)
        got.append(
            ops.engram_hash(tensor[a:b], positions, positions - a, slots, ngrams, MULTIPLIERS, PRIMES, OFFSETS, PAD)
        )
        ops.ngram_write(tensor[a:b], positions, slots, torch.arange(b - a, 0, -1) <= length, ngrams)
    assert torch.cat(got).tolist() == [hashes(classes, p) for p in range(total)]


def test_a_dead_row_is_all_pad_and_cuts_its_successors(ops):
    classes = [4, 5, -1, 9]
    rows = torch.arange(4)
    got = ops.engram_hash(
        torch.tensor(classes), rows, rows, torch.zeros(4, dtype=torch.int64), torch.full((1, 9), 3),
        MULTIPLIERS, PRIMES, OFFSETS, PAD,
    )  # fmt: skip
    assert got[2].tolist() == hashes([PAD, PAD, PAD, PAD], 3)
    assert got[3].tolist() == hashes([PAD, PAD, PAD, 9], 3)
    assert got[0].tolist() == hashes([PAD, PAD, PAD, 4], 3)


# ---- rejected rows ------------------------------------------------------------------------------------------


def test_overwriting_rejected_rows_leaves_no_trace(ops, dtype):
    """Six rows run, two accepted, six more run from there: reads equal those of a run without the rejected rows."""
    r = Random(0, torch.float32)
    total, length = 12, 9
    value, score = r.normal(total, D), r.normal(total, D)
    wrong_value, wrong_score = r.normal(6, D), r.normal(6, D)

    def run(first: list[tuple[Tensor, Tensor, int]]) -> Tensor:
        tail = torch.full((1, length, 2, D), torch.nan)
        for v, s, a in first:
            positions = torch.arange(a, a + len(v))
            ops.tail_write(v, s, positions, torch.zeros_like(positions), torch.ones(len(v), dtype=torch.bool), tail)
        positions = torch.arange(5, 11)
        return ops.compress_pair(
            value[5:11], score[5:11], positions, positions - 5, torch.zeros_like(positions), tail, dtype
        )

    clean = run([(value[:5], score[:5], 0)])
    dirty = run([(value[:3], score[:3], 0), (wrong_value, wrong_score, 3), (value[3:5], score[3:5], 3)])
    assert torch.equal(clean, dirty) and clean.isfinite().all()
