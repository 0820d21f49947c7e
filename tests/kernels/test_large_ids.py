"""Ids times strides beyond 2^31 bytes. The memory is reserved, not used: only touched pages exist."""

from __future__ import annotations

import mmap

import pytest
import torch
from torch import Tensor

from deepinfer_plugin.kernels.reference import formats

from .cases import Random

D = 64


NORESERVE = 0x4000  # MAP_NORESERVE of Linux, which Python's mmap does not name before 3.13


def reserve(*shape: int, dtype: torch.dtype = torch.uint8) -> Tensor:
    """Zeros that take no memory until written."""
    size = torch.Size(shape).numel() * dtype.itemsize
    try:
        area = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE)
    except (OSError, ValueError) as error:
        pytest.skip(f"cannot reserve {size >> 30} GiB of address space: {error}")
    return torch.frombuffer(area, dtype=dtype).view(shape)


@pytest.fixture
def pages() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A pool of 5 GiB: 40,000 pages of 131,072 bytes, in each a few sections; page 32,768 starts at byte 2^32."""
    memory = reserve(40_000, 131_072)

    def section(offset: int, groups: int, width: int) -> Tensor:
        return memory[:, offset : offset + groups * width].unflatten(1, (groups, width))

    return section(0, 64, 32), section(8192, 64, 4), section(100_000, 64, 32), section(120_000, 64, 2)


FAR = torch.tensor([16_384, 29_078, 32_769, 39_999])


def test_pages_beyond_two_gib(ops, pages):
    latent, latent_scale, key, key_scale = pages
    r = Random(0, torch.bfloat16)
    rows, keep, groups = r.normal(4, D), torch.ones(4, dtype=torch.bool), torch.tensor([0, 63, 5, 63])
    ops.latent_write(rows, latent, latent_scale, FAR, groups, keep)
    ops.index_key_write(rows, key, key_scale, FAR, groups, keep)
    packed, scale = formats.latent_cast(rows)
    for row in range(4):
        assert torch.equal(latent[FAR[row], groups[row]], packed[row])
        assert torch.equal(latent_scale[FAR[row], groups[row]], scale.view(torch.uint8)[row])
    for alias in (FAR * 131_072 % 2**31 // 131_072).tolist():  # where a 32-bit offset would have landed
        assert alias in FAR.tolist() or not latent[alias].any()

    # Read back through a page table, against the same groups in a small pool.
    near_latent, near_scale, near_key, near_key_scale = (view[FAR].clone() for view in pages)
    selected = torch.tensor([[0, 127, 133, 255]])
    one, zero = torch.ones(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    ring = torch.zeros(1, 8, D + 2, dtype=torch.uint8)
    results = []
    for table, values, scales in ((FAR, latent, latent_scale), (torch.arange(4), near_latent, near_scale)):
        out = ops.sparse_attention(
            rows[None, :1], ops.window_pack(rows[:1]), one, zero, zero, one, ring, 4, values, scales, table[None], zero,
            selected, torch.zeros(1), D**-0.5, None,
        )  # fmt: skip
        results.append(out)
    assert torch.equal(*results) and results[0].any()
    query, weight, visible = r.normal(1, 2, D), r.normal(1, 2), torch.tensor([256])
    far = ops.index_scores(query, weight, key, key_scale, FAR[None], zero, visible, True)
    near = ops.index_scores(query, weight, near_key, near_key_scale, torch.arange(4)[None], zero, visible, True)
    assert torch.equal(far, near) and far.any()


def test_rings_beyond_two_gib(ops):
    slots, length = 330_000, 100
    ring = reserve(slots, length, D + 2)
    tags = reserve(slots, length, dtype=torch.int32)
    r = Random(0, torch.bfloat16)
    packed, q = r.window(2, D), r.normal(1, 3, D)
    far = torch.tensor([slots - 1, slots - 1])
    ops.window_write(packed, far, torch.tensor([98, 99]), torch.ones(2, dtype=torch.bool), ring, tags)
    assert torch.equal(ring[-1, 98:], packed) and tags[-1, 98:].tolist() == [98, 99]
    own, zero = r.window(1, D), torch.zeros(1, dtype=torch.int64)
    results = []
    for slot, memory in ((far[:1], ring), (zero, ring[-1:].clone())):
        out = ops.sparse_attention(
            q, own, torch.tensor([100]), zero, slot, zero, memory, 3, None, None, None, None, None, torch.zeros(3),
            D**-0.5, None,
        )  # fmt: skip
        results.append(out)
    assert torch.equal(*results)


def test_tails_and_ngrams_beyond_two_gib(ops):
    slots = 400_000
    tail, ngrams = reserve(slots, 7, 2, 128, dtype=torch.float32), reserve(slots, 800, dtype=torch.int64)
    slot = torch.tensor([slots - 1])
    value, score, true = torch.full((1, 128), 3.0), torch.zeros(1, 128), torch.ones(1, dtype=torch.bool)
    ops.tail_write(value, score, torch.tensor([4]), slot, true, tail)
    zero = torch.zeros(1, dtype=torch.int64)
    got = ops.compress_pair(value * 3, score, torch.tensor([5]), zero, slot, tail, torch.float32)
    assert torch.equal(got, torch.full((1, 128), 6.0))
    ops.ngram_write(torch.tensor([11]), torch.tensor([4]), slot, true, ngrams)
    got = ops.engram_hash(
        torch.tensor([5]), torch.tensor([5]), zero, slot, ngrams, torch.tensor([3, 5]), torch.tensor([[1009]]), zero, 2
    )
    assert got.item() == ((5 * 3) ^ (11 * 5)) % 1009


def test_hash_table_beyond_two_gib(ops):
    count = 20_000_000
    table, scale = reserve(count, 256).view(torch.float8_e4m3fn), reserve(count, 8).view(torch.float8_e8m0fnu)
    row = Random(0, torch.float32).normal(1, 256)
    values, scales = formats.fp8_cast(row)
    table.view(torch.uint8)[-1], scale.view(torch.uint8)[-1] = values.view(torch.uint8), scales.view(torch.uint8)
    got = ops.engram_gather(torch.tensor([[count - 1, 0]]), table, scale, torch.float32)
    assert torch.equal(got[0, :256], formats.fp8_dequant(values, scales)[0]) and not got[0, 256:].any()


def test_multipliers_fill_int64(ops):
    """The largest class times the largest multiplier stays below 2^63, and hashes are never negative."""
    vocab = 99_092
    multipliers = torch.full((4,), ((2**63 - 1) // vocab // 2 - 1) * 2 + 1)
    classes, rows = torch.full((6,), vocab - 1), torch.arange(6)
    primes = torch.tensor([[16_000_057], [16_000_061], [16_000_069]])
    offsets = torch.tensor([0, 192_003_000, 384_000_000])
    got = ops.engram_hash(
        classes, rows, rows, torch.zeros(6, dtype=torch.int64), torch.full((1, 9), -1), multipliers, primes, offsets, 2
    )
    seen = [(vocab - 1) * int(m) for m in multipliers]
    want = [(seen[0] ^ seen[1]) % 16_000_057, (seen[0] ^ seen[1] ^ seen[2]) % 16_000_061 + 192_003_000]
    assert got[5, :2].tolist() == want and (got >= 0).all()
