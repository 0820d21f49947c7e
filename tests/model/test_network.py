"""The network against itself: whatever way a sequence is cut into forwards and batches, the same bits come out."""

import random
import subprocess
import sys

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deepinfer_plugin.model import V41, indexer
from deepinfer_plugin.model.memory import PagePool, StatePool
from deepinfer_plugin.model.rows import Rows

PROFILES = ("model", "deepinfer", "float32")


def prompt(config, length, seed=0):
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(10, config.vocab_size - 10, (length,), generator=generator)


@pytest.fixture(scope="module", params=PROFILES)
def model(request, tiny):
    return V41.load(tiny, profile=request.param)


@pytest.fixture(scope="module")
def v41(tiny):
    return V41.load(tiny)


@pytest.mark.parametrize("chunk", [1, 16, 37, 128])
def test_chunks_do_not_change_a_bit(model, chunk):
    """16-row chunks over 300 tokens; single rows over the last 12, where a window and a page end."""
    ids = prompt(model.config, 300 if chunk > 1 else 134)
    whole = model.session(400).extend(ids)
    session, start = model.session(400), 0 if chunk > 1 else 122
    parts = [session.extend(ids[:start])] if start else []
    parts.append(session.extend(ids[start:], chunk=chunk))
    assert torch.equal(whole, torch.cat(parts))


def test_incremental_streams_agree_in_float32(tiny):
    """The agreement the project promises (1e-5, median) with room to spare, after every layer."""
    model = V41.load(tiny, profile="float32")
    ids, layers = prompt(model.config, 260), range(model.config.num_layers)
    whole, parts = model.streams(ids, layers), model.streams(ids, layers, chunk=16)
    for layer in layers:
        error = (whole[layer] - parts[layer]).norm(dim=(1, 2)) / whole[layer].norm(dim=(1, 2))
        assert error.median() <= 1e-5, layer


@pytest.mark.parametrize("length", [1, 2, 3, 31, 63, 64, 65, 127, 128, 129, 130, 255, 256, 257, 700])
def test_greedy_equals_one_shot(v41, length):
    ids = prompt(v41.config, length)
    generated = v41.generate(ids, 6, chunk=16, ignore_eos=True)
    full = torch.cat([ids, torch.tensor(generated)])
    assert v41.logits(full[:-1])[length - 1 :].argmax(-1).tolist() == generated


@pytest.mark.parametrize("page_size", [2, 64, 256])
def test_page_size_does_not_change_a_bit(tiny, v41, page_size):
    ids = prompt(v41.config, 300)
    other = V41.load(tiny, page_size=page_size)
    assert torch.equal(other.logits(ids), v41.logits(ids))


def run_batch(model, sequences, plan):
    """Run ``sequences`` through one pair of pools, forward by forward; ``plan`` lists (sequence, rows) pairs per
    forward."""
    page = model.page_layout.page_size
    width = 1 + max(len(s) for s in sequences) // page
    pages = PagePool.allocate(model.page_layout, 1 + width * len(sequences))
    state = StatePool(model.state_layout, len(sequences) + 1)
    # Scattered pages and slots, so that a wrong id cannot look right.
    order = 1 + torch.randperm(width * len(sequences), generator=torch.Generator().manual_seed(7))
    table, done = order.view(len(sequences), width), [0] * len(sequences)
    outputs = [[] for _ in sequences]
    for forward in plan:
        ids = torch.cat([sequences[s][done[s] : done[s] + n] for s, n in forward])
        who = [s for s, _ in forward]
        rows = Rows.build(
            ids, [done[s] for s in who], [n for _, n in forward], [len(sequences) - s for s in who], table[who]
        )
        hidden = model.network(rows, pages, state)
        for (s, n), part in zip(forward, hidden.split([n for _, n in forward]), strict=True):
            outputs[s].append(part)
            done[s] += n
    return [torch.cat(parts) for parts in outputs]


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lengths=st.lists(st.integers(1, 150), min_size=3, max_size=3), seed=st.integers(0, 2**32))
def test_batches_and_joins_do_not_change_a_bit(v41, lengths, seed):
    """Three sequences in ragged forwards, joining and leaving at random, against each alone."""
    choice = random.Random(seed)
    sequences = [prompt(v41.config, n, seed=i) for i, n in enumerate(lengths)]
    left, plan = list(lengths), []
    while any(left):
        forward = []
        for index in choice.sample(range(3), 3):
            rows = min(left[index], choice.choice([0, 1, 5, 64, 150]))
            if rows:
                forward.append((index, rows))
                left[index] -= rows
        if forward:
            plan.append(forward)
    for ids, hidden in zip(sequences, run_batch(v41, sequences, plan), strict=True):
        assert torch.equal(hidden, v41.session(len(ids)).extend(ids))


@pytest.mark.parametrize("accepted", range(6))
@pytest.mark.parametrize("start", [126, 127, 128, 129])
def test_rejected_rows_leave_no_trace(v41, start, accepted):
    """Six verify rows of which the last ``5 - accepted`` are wrong, then the right continuation over the same
    positions."""
    ids = prompt(v41.config, start + 12)
    clean = v41.session(200)
    clean.extend(ids[:start])
    dirty = v41.session(200)
    dirty.extend(ids[:start])
    guess = ids[start : start + 6].clone()
    guess[accepted + 1 :] = (guess[accepted + 1 :] + 1) % v41.config.vocab_size
    dirty.extend(guess)
    dirty.tokens = dirty.tokens[: start + accepted + 1]
    clean.extend(ids[start : start + accepted + 1], chunk=1)
    rest = ids[start + accepted + 1 :]
    assert torch.equal(dirty.extend(rest, chunk=3), clean.extend(rest, chunk=1))
    assert torch.equal(dirty.pages.pages[1:], clean.pages.pages[1:])


def test_fork_within_the_window_is_exact(tiny):
    """A hit of at most one window replays everything it hits, so nothing is approximated."""
    model = V41.load(tiny, page_size=64)
    ids, tail = prompt(model.config, 200), prompt(model.config, 30, seed=5)
    parent = model.session(400)
    parent.extend(ids)
    for prefix in (64, 128):
        full = torch.cat([ids[:prefix], tail])
        assert torch.equal(parent.fork(prefix).extend(tail), model.session(400).extend(full)[prefix:])


def test_long_fork_reads_but_never_writes_the_prefix(tiny):
    model = V41.load(tiny, page_size=64)
    ids, tail = prompt(model.config, 520), prompt(model.config, 40, seed=6)
    parent = model.session(600)
    parent.extend(ids)
    child, chunked = parent.fork(512), parent.fork(512)
    before = child.pages.pages[1:9].clone()
    hidden = child.extend(tail)
    assert torch.equal(child.pages.pages[1:9], before)
    assert torch.equal(hidden, chunked.extend(tail, chunk=7)), "the replay rule must not depend on the chunking"
    exact = model.session(600).extend(torch.cat([ids[:512], tail]))[512:]
    assert not torch.equal(hidden, exact), (
        "replay of a long hit is an approximation; if it is exact, nothing was replayed"
    )
    # Engram looks back over the start of the replay: its rows are those of the whole sequence.
    seen = parent.fork(512)
    rows = seen.rows(tail)
    layer = model.network.layers[model.config.engram.layers[0]].engram
    replayed = layer.rows(model.network.classes(rows), seen.step(rows))
    assert torch.equal(replayed, model.engram_rows(torch.cat([ids[:512], tail]))[512 - 128 :, 0])


@pytest.mark.parametrize("rows", [0, 1, 7])
def test_scores_in_parts_do_not_change_a_bit(v41, monkeypatch, rows):
    """The index of many rows over a long context runs in parts: here of one row, whatever fits, or seven rows."""
    ids = prompt(v41.config, 300)
    whole = v41.session(300).extend(ids)
    layout = v41.page_layout
    widest = max(source.groups for source in layout.sources) * -(-300 // layout.page_size) * 2
    monkeypatch.setattr(indexer, "SCORE_BYTES", rows * widest)
    assert torch.equal(whole, v41.session(300).extend(ids))


def test_drafts_do_not_depend_on_chunking(v41):
    ids = prompt(v41.config, 150)
    whole = v41.draft(ids)
    session = v41.session(200)
    session.extend(ids, chunk=11)
    parts = session.draft(session.next_token())
    block = v41.config.dspark.block_size
    assert whole.tokens.shape == (1, block) and whole.base_logits.shape == (1, block, v41.config.vocab_size)
    assert torch.equal(whole.tokens, parts.tokens) and torch.equal(whole.base_logits, parts.base_logits)
    assert torch.equal(whole.confidence, parts.confidence) and whole.confidence.isfinite().all()


def test_drafting_leaves_the_sequence_alone(v41):
    ids = prompt(v41.config, 140)
    drafted, plain = v41.session(200), v41.session(200)
    drafted.extend(ids)
    plain.extend(ids)
    drafted.draft(5)
    more = prompt(v41.config, 9, seed=3)
    assert torch.equal(drafted.extend(more), plain.extend(more))


def test_first_layer_input_is_the_embedding(v41):
    """All streams start as the embedding and the first site reads stream 0 alone: a backend that ignores its mix
    weights fails."""
    from deepinfer_plugin.model.block import expand_embedding

    x = v41.network.embed_tokens(prompt(v41.config, 9))
    streams, pre = expand_embedding(x, v41.config.hc_mult)
    assert torch.allclose(v41.ops.hc_collapse(streams, pre).float(), x.float(), rtol=1e-3, atol=0)


def test_image_tokens_are_dead_for_engram(v41):
    ids = prompt(v41.config, 12)
    mask = torch.zeros(12, dtype=torch.bool)
    mask[4:7] = True
    rows = v41.engram_rows(ids, image_mask=mask)
    text = v41.engram_rows(ids)
    assert torch.equal(rows[:4], text[:4]) and torch.equal(rows[10:], text[10:])
    start = v41.engram_rows(ids[7:])
    assert torch.equal(rows[7:], start), "look-back stops at an image as it does at the start of the sequence"
    pads = rows[4:7]
    assert torch.equal(pads, pads[:1].expand_as(pads))
    assert not torch.equal(v41.logits(ids, image_mask=mask), v41.logits(ids))


@pytest.mark.parametrize("bad", [[], [-1], [10**9], [[1, 2]]])
def test_bad_ids_are_refused(v41, bad):
    with pytest.raises(ValueError, match="token ids must be"):
        v41.generate(bad, 1)


def test_bad_arguments_are_named(v41, tiny):
    with pytest.raises(ValueError, match="profile='fp8'"):
        V41.load(tiny, profile="fp8")
    with pytest.raises(ValueError, match="context of"):
        v41.generate([5], v41.config.max_position)
    with pytest.raises(ValueError, match="multiple of 128"):
        session = v41.session(300)
        session.extend(prompt(v41.config, 200))
        session.fork(100)
    with pytest.raises(ValueError, match="layer 99"):
        v41.streams([5], [99])


def test_default_dtype_and_device_do_not_matter(tiny):
    """SGLang builds models under a bfloat16 default; what a process first computes there must not poison what it
    computes later."""
    script = (
        "import sys, hashlib, torch\n"
        "from deepinfer_plugin.model import V41\n"
        "torch.set_num_threads(1)\n"
        "torch.set_default_dtype(getattr(torch, sys.argv[2]))\n"
        "logits = V41.load(sys.argv[1]).logits(torch.arange(20, 150))\n"
        "print(hashlib.sha256(logits.numpy().tobytes()).hexdigest())\n"
    )
    runs = [
        subprocess.run(
            [sys.executable, "-c", script, str(tiny), dtype], capture_output=True, text=True, check=True
        ).stdout
        for dtype in ("float32", "bfloat16")
    ]
    assert runs[0] == runs[1]
