"""sparse_attention against a slow reading of its contract that knows every key a request ever had."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from deepinfer_plugin.kernels import Ops, select
from deepinfer_plugin.kernels.reference import formats
from deepinfer_plugin.kernels.reference.memory import window_unpack

from .cases import Random

D, HEADS, GROUPS = 64, 3, 8
SCALE = D**-0.5


@dataclass
class Sequence:
    """One request's whole past and future."""

    q: Tensor  # [n, HEADS, D]
    packed: Tensor  # window rows uint8 [n, W]
    slot: int
    pages: Tensor  # int64 [P]


@dataclass
class World:
    sequences: list[Sequence]
    latent: Tensor
    latent_scale: Tensor
    sink: Tensor
    window_len: int
    ring: Tensor  # uint8 [slots, L, W]
    tags: Tensor

    @classmethod
    def make(cls, dtype: torch.dtype, length: int, requests: int, window_len: int = 32, spare: int = 6, seed: int = 0):
        r = Random(seed, dtype)
        latent, latent_scale = r.latents(40, GROUPS, D)
        sequences = [
            Sequence(r.normal(length, HEADS, D) * 2, r.window(length, D), slot, r.distinct(5, 39) + 1)
            for slot in range(1, requests + 1)
        ]
        ring = torch.full((requests + 1, window_len + spare, D + D // 32), 255, dtype=torch.uint8)  # NaN until written
        tags = torch.full(ring.shape[:2], -1, dtype=torch.int32)
        return cls(sequences, latent, latent_scale, r.normal(HEADS, dtype=torch.float32), window_len, ring, tags)

    def run(self, ops: Ops, spans: list[tuple[int, int, int]], selected: list[Tensor] | None, write: bool = True):
        """One batch: (request, first position, end) per request, and selected groups [rows, K] of each."""
        q = torch.cat([self.sequences[i].q[a:b] for i, a, b in spans])
        packed = torch.cat([self.sequences[i].packed[a:b] for i, a, b in spans])
        positions = torch.cat([torch.arange(a, b) for _, a, b in spans])
        fresh = torch.cat([torch.arange(b - a) for _, a, b in spans])
        slots = torch.cat([torch.full((b - a,), self.sequences[i].slot) for i, a, b in spans])
        requests = torch.cat([torch.full((b - a,), n) for n, (_, a, b) in enumerate(spans)])
        left = torch.cat([torch.arange(b - a, 0, -1) for _, a, b in spans])
        table = torch.stack([self.sequences[i].pages for i, _, _ in spans])
        compressed = (None,) * 5
        if selected is not None:
            compressed = (self.latent, self.latent_scale, table, requests, torch.cat(selected))
        out = ops.sparse_attention(
            q, packed, positions, fresh, slots, torch.zeros_like(positions), self.ring, self.window_len, *compressed,
            self.sink, SCALE, None,
        )  # fmt: skip
        if write:
            ops.window_write(packed, slots, positions, left <= self.ring.shape[1], self.ring, self.tags)
        return out

    def keys(self, sequence: Sequence, positions: range, groups: list[int]) -> list[Tensor | None]:
        """Slots of the window at these positions, padded to 64, then of the groups; None is absent."""
        slots: list[Tensor | None] = [
            window_unpack(sequence.packed[p]) if 0 <= p < len(sequence.packed) else None for p in positions
        ]
        slots += [None] * (-len(slots) % 64)
        for g in groups:
            page, row = (int(sequence.pages[g // GROUPS]), g % GROUPS) if g >= 0 else (0, 0)
            slots.append(
                formats.latent_dequant(self.latent[page, row], self.latent_scale[page, row]) if g >= 0 else None
            )
        return slots


def oracle(q: Tensor, slots: list[Tensor | None], sink: Tensor) -> Tensor:
    """One row: online softmax over 64 slots at a time, a loop over heads and keys."""
    rounds = q.dtype == torch.bfloat16
    result = torch.zeros(HEADS, D, dtype=torch.float64)
    for h in range(HEADS):
        top, total, acc = -1e30, 0.0, torch.zeros(D, dtype=torch.float64)
        for start in range(0, len(slots), 64):
            block = [k.double() for k in slots[start : start + 64] if k is not None]
            if not block:
                continue
            keys = torch.stack(block)
            logits = ((keys @ q[h].double()) * SCALE).float().double()
            new = max(top, logits.max().item())
            p = torch.exp(logits - new)
            shrink = torch.exp(torch.tensor(top - new, dtype=torch.float64)).item()
            total = total * shrink + p.sum().item()
            acc = acc * shrink + (p.bfloat16().double() if rounds else p) @ keys
            top = new
        if top > -1e30:
            result[h] = acc / (total + torch.exp(sink[h].double() - top).item())
    return result.to(q.dtype)


def assert_same(got: Tensor, want: Tensor) -> None:
    if got.dtype == torch.bfloat16:
        torch.testing.assert_close(got.float(), want.float(), rtol=2.0**-7, atol=2.0**-9)
        assert (got != want).float().mean() < 0.01  # both are float64 inside: only a tipped rounding may differ
    else:
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("compressed", [False, True], ids=["window", "compressed"])
def test_ragged_batches_read_ring_and_batch(ops, dtype, compressed):
    """Prefill, decode and short spans of several requests in one batch, their rings filled several times over."""
    world = World.make(dtype, length=150, requests=4)
    r = Random(1, dtype)

    def selection(a: int, b: int) -> Tensor:
        return torch.stack([r.ints(-1, max(1, min(5 * GROUPS, p + 1)), 12) for p in range(a, b)])

    done = [0, 0, 0, 0]
    for step in ([40, 1, 7, 0], [1, 90, 7, 33], [6, 1, 1, 39], [50, 6, 100, 1], [1, 1, 1, 1]):
        spans = [(i, done[i], done[i] + n) for i, n in enumerate(step) if n]
        selected = [selection(a, b) for _, a, b in spans] if compressed else None
        out = world.run(ops, spans, selected)
        row = 0
        for n, (i, a, b) in enumerate(spans):
            for p in range(a, b):
                groups = selected[n][p - a].tolist() if selected else []
                slots = world.keys(world.sequences[i], range(p - world.window_len + 1, p + 1), groups)
                assert_same(out[row], oracle(world.sequences[i].q[p], slots, world.sink))
                row += 1
            done[i] = b


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=8), st.sampled_from([torch.bfloat16, torch.float32]))
def test_any_chunking_gives_the_same_bits(chunks, dtype):
    ops, length = select(), sum(chunks)
    whole = World.make(dtype, length, 1).run(ops, [(0, 0, length)], None)
    world, done, parts = World.make(dtype, length, 1), 0, []
    for chunk in chunks:
        parts.append(world.run(ops, [(0, done, done + chunk)], None))
        done += chunk
    assert torch.equal(torch.cat(parts), whole)


def test_window_floor_hides_older_keys(ops, dtype):
    """A replay starts at position 20: nothing below is read, be it in the ring or not."""
    world = World.make(dtype, 60, 1)
    sequence = world.sequences[0]
    rows = torch.arange(20, 30)
    floor = torch.full((10,), 20)
    out = ops.sparse_attention(
        sequence.q[20:30], sequence.packed[20:30], rows, rows - 20, torch.ones(10, dtype=torch.int64), floor,
        world.ring, world.window_len, None, None, None, None, None, world.sink, SCALE, None,
    )  # fmt: skip
    for p in range(20, 30):
        slots = world.keys(sequence, range(p - world.window_len + 1, p + 1), [])
        slots = [k if p - world.window_len + 1 + i >= 20 else None for i, k in enumerate(slots)]
        assert_same(out[p - 20], oracle(sequence.q[p], slots, world.sink))


@pytest.mark.parametrize("anchor", [0, 3, 31, 32, 100])
def test_draft_block_sees_itself_whole(ops, dtype, anchor):
    """Five drafts after position ``anchor``: each reads the anchor's window and all five drafts."""
    world = World.make(dtype, anchor + 6, 2)
    sequence = world.sequences[0]
    for start in range(0, anchor + 1, 30):
        world.run(ops, [(0, start, min(anchor + 1, start + 30))], None)
    at = slice(anchor + 1, anchor + 6)
    first = max(0, anchor - world.window_len + 1)
    floor = torch.full((5,), first)
    call = dict(
        row_slots=torch.ones(5, dtype=torch.int64), ring=world.ring, window_len=world.window_len,
        latent=None, latent_scale=None, page_table=None, requests=None, selected=None, sink=world.sink, scale=SCALE,
    )  # fmt: skip
    positions, offset = torch.arange(anchor + 1, anchor + 6), torch.arange(5)
    out = ops.sparse_attention(
        sequence.q[at], sequence.packed[at], positions, offset, window_floor=floor, block_future=4 - offset, **call
    )
    slots = world.keys(sequence, range(first, anchor + 6), [])
    for j in range(5):
        assert_same(out[j], oracle(sequence.q[anchor + 1 + j], slots, world.sink))
    # another request's block in the batch changes nothing
    other = world.sequences[1]
    both = ops.sparse_attention(
        torch.cat((other.q[:5], sequence.q[at])),
        torch.cat((other.packed[:5], sequence.packed[at])),
        torch.cat((offset, positions)),
        torch.cat((offset, offset)),
        window_floor=torch.cat((torch.zeros_like(floor), floor)),
        block_future=torch.cat((4 - offset, 4 - offset)),
        **call | {"row_slots": torch.tensor([2] * 5 + [1] * 5)},
    )
    assert torch.equal(both[5:], out)


def test_no_key_gives_zero_whatever_the_sink(ops, dtype):
    world = World.make(dtype, 4, 1)
    sequence = world.sequences[0]
    for sink in (0.0, -torch.inf, 80.0):
        out = ops.sparse_attention(
            sequence.q, sequence.packed, torch.arange(4), torch.arange(4), torch.ones(4, dtype=torch.int64),
            torch.full((4,), 1000), world.ring, world.window_len, None, None, None, None, None,
            torch.full((HEADS,), sink), SCALE, None,
        )  # fmt: skip
        assert torch.equal(out, torch.zeros_like(out))


def test_sink_takes_probability_without_a_value(ops, dtype):
    """One key, sink equal to its logit: half the key."""
    key = torch.zeros(1, D)
    key[0, 0] = 4.0
    packed = ops.window_pack(key)
    q = torch.zeros(1, HEADS, D, dtype=dtype)
    q[..., 0] = 2.0
    one, zero = torch.ones(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    ring = torch.zeros(2, 8, D + 2, dtype=torch.uint8)
    out = ops.sparse_attention(
        q, packed, zero, zero, one, zero, ring, 4, None, None, None, None, None, torch.full((HEADS,), 2.0), 0.25, None
    )
    assert torch.equal(out[0], (key / 2).expand(HEADS, D).to(dtype))


def test_a_selected_group_that_is_also_in_the_window_counts_twice(ops):
    x = torch.zeros(1, D)
    x[0, 0] = 6.0  # exact in both formats
    packed = ops.window_pack(x)
    latent, scale = formats.latent_cast(x)
    q = torch.zeros(1, HEADS, D)
    zero = torch.zeros(1, dtype=torch.int64)
    ring = torch.zeros(2, 8, D + 2, dtype=torch.uint8)
    pages, scales = (
        torch.zeros(2, GROUPS, D // 2, dtype=torch.uint8),
        torch.zeros(2, GROUPS, D // 16, dtype=torch.uint8),
    )
    pages[1, 0], scales[1, 0] = latent[0], scale.view(torch.uint8)[0]
    out = ops.sparse_attention(
        q, packed, zero, zero, zero, zero, ring, 4, pages, scales, torch.tensor([[1]]), zero,
        torch.tensor([[0, -1, 0]]), torch.zeros(HEADS), 0.25, None,
    )  # fmt: skip
    torch.testing.assert_close(out[0, :, 0], torch.full((HEADS,), 6.0 * 3 / 4), rtol=1e-6, atol=0)


def test_garbage_that_is_not_read_does_not_matter(ops, dtype):
    """NaN bytes in unwritten ring rows, other slots, unselected groups and unused pages change no bit."""
    results = []
    for poison in (0, 255):
        world = World.make(dtype, 50, 2)
        world.ring.fill_(poison)
        used = torch.zeros(40, GROUPS, dtype=torch.bool)
        used[world.sequences[0].pages[:2]] = True
        world.latent[~used], world.latent_scale[~used] = poison, poison
        selected = torch.tensor([[0, 3, 15, -1, -1]])
        parts = [world.run(ops, [(0, a, a + 1)], [selected]) for a in range(50)]
        results.append(torch.cat(parts))
    assert torch.equal(*results) and results[0].isfinite().all()


def test_an_absent_group_reads_nothing(ops, dtype):
    """-1 is not group 0: a page that is not written yet may hold NaN there."""
    world = World.make(dtype, 5, 1)
    nothing = [torch.full((5, 3), -1)]
    clean = world.run(ops, [(0, 0, 5)], nothing, write=False)
    world.latent.fill_(255)
    world.latent_scale.fill_(255)
    assert torch.equal(world.run(ops, [(0, 0, 5)], nothing, write=False), clean) and clean.isfinite().all()


@pytest.mark.parametrize("where", ["q", "window", "ring", "latent"])
def test_nan_reaches_only_its_readers(ops, dtype, where):
    world = World.make(dtype, 80, 1)
    selected = torch.full((40, 3), -1)
    selected[10:, 0] = 2
    world.run(ops, [(0, 0, 40)], [selected])
    clean = world.run(ops, [(0, 40, 80)], [selected], write=False)
    bad = torch.zeros(40, HEADS, dtype=torch.bool)
    if where == "q":
        world.sequences[0].q[45, 1, 3] = torch.nan
        bad[5, 1] = True
    elif where == "window":
        world.sequences[0].packed[45, -1] = 255
        bad[5 : 5 + world.window_len] = True
    elif where == "ring":
        world.ring[1, 35 % world.ring.shape[1], -1] = 255
        bad[: 35 + world.window_len - 40] = True
    else:
        world.latent_scale[world.sequences[0].pages[0], 2, 0] = 127
        bad[10:] = True
    out = world.run(ops, [(0, 40, 80)], [selected], write=False)
    assert torch.equal(out.isnan().any(-1), bad)
    assert torch.equal(out[~bad], clean[~bad])


def test_chunks_of_rows_give_the_same_bits(reference, dtype, monkeypatch):
    """The reference works through rows in pieces that fit its memory bound."""
    from deepinfer_plugin.kernels.reference import numeric

    world = World.make(dtype, 50, 1)
    selected = [torch.zeros(50, 3, dtype=torch.int64)]
    whole = world.run(reference, [(0, 0, 50)], selected, write=False)
    monkeypatch.setattr(numeric, "CHUNK_BYTES", 1 << 20)
    assert torch.equal(world.run(reference, [(0, 0, 50)], selected, write=False), whole)
