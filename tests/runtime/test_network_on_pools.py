"""The real network on SGLang's batches and our pools gives the library's hidden states to the bit."""

from array import array
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("sglang")

from sglang.srt.model_executor.forward_batch_info import ForwardMode

from deepinfer_plugin.model import V41
from deepinfer_plugin.runtime import requests
from deepinfer_plugin.runtime.checks import check_stream_mix, check_window

from .test_backend import PAGE, Scene, folded


@pytest.fixture(scope="module")
def model(tiny):
    return V41.load(tiny, page_size=PAGE)


@pytest.fixture
def scene(model, monkeypatch):
    scene = Scene(model.config, monkeypatch)
    scene.backend.network = model.network
    return scene


def tokens(seed, count):
    return torch.randint(3, 1000, (count,), generator=torch.Generator().manual_seed(seed))


@torch.inference_mode()
def run(scene, batch):
    scene.backend.init_forward_metadata(batch)
    rows = scene.backend.forward_metadata
    check_window(rows, scene.pool.state, scene.network.config.window)
    return scene.backend.network(rows, scene.pool.pages, scene.pool.state)


def begin(batch, begins, starts, ids):
    """What the hook attaches; SGLang's fold resets the slots of requests that begin."""
    reqs = [
        SimpleNamespace(prefix_len=s, full_untruncated_fill_ids=array("q", i), customized_info=None)
        for s, i in zip(starts, ids, strict=True)
    ]
    requests.attach(batch, SimpleNamespace(prefix_lens=starts, encoder_swa_reset=begins, reqs=reqs))


def test_chunks_and_decode_steps_of_several_requests(model, scene):
    """A is prefilled in two chunks, B joins at the second and decodes next to A; slots hold garbage of old requests."""
    scene.pool.state.rings.random_(0, 256)
    scene.pool.state.tails.normal_()
    a, b = tokens(1, 203), tokens(2, 67)
    wanted = {name: model.session(256).extend(ids) for name, ids in (("a", a), ("b", b))}
    scene.give(3, [5, 2, 9, 11])
    scene.give(1, [7, 4])

    first = scene.extend([3], [0], [128])
    first.input_ids = a[:128]
    begin(first, [True], [0], [a[:128].tolist()])
    scene.pool.request_window.reset(torch.tensor([3]))
    assert torch.equal(run(scene, first), wanted["a"][:128])

    second = scene.extend([3, 1], [128, 0], [72, 64], padding=3)
    second.input_ids = torch.cat([a[128:200], b[:64], torch.zeros(3, dtype=torch.int64)])
    begin(second, [False, True], [128, 0], [a[:200].tolist(), b[:64].tolist()])
    scene.pool.request_window.reset(torch.tensor([1]))
    hidden = run(scene, second)
    assert torch.equal(hidden[:72], wanted["a"][128:200])
    assert torch.equal(hidden[72:136], wanted["b"][:64])

    for step in range(3):
        lengths = torch.tensor([64 + step + 1, 200 + step + 1, 1])
        batch = scene.batch(
            ForwardMode.DECODE,
            [1, 3, 0],
            (lengths - 1).tolist(),
            [int(b[64 + step]), int(a[200 + step]), 0],
            seq_lens=lengths,
            seq_lens_cpu=lengths,
        )
        hidden = run(scene, batch)
        assert torch.equal(hidden[0], wanted["b"][64 + step])
        assert torch.equal(hidden[1], wanted["a"][200 + step])


def test_verify_rows_are_ordinary_rows(model, scene):
    a = tokens(3, 140)
    wanted = model.session(256).extend(a)
    scene.give(2, [6, 3, 8])
    first = scene.extend([2], [0], [130])
    first.input_ids = a[:130]
    run(scene, first)
    spec = SimpleNamespace(ragged_verify_layout=SimpleNamespace(verify_lens=torch.tensor([6]), total_verify_tokens=6))
    batch = scene.batch(ForwardMode.TARGET_VERIFY, [2], list(range(130, 136)), a[130:136].tolist(), spec_info=spec)
    assert torch.equal(run(scene, batch), wanted[130:136])


@pytest.mark.parametrize("prefix", (64, 128, 192))
def test_a_prefix_hit_is_the_librarys_fork(model, scene, prefix):
    """Pages of one request, read by another in another slot after its window was rebuilt; nothing in them changes."""
    base, more = tokens(4, 200), tokens(5, 9)
    session = model.session(256)
    session.extend(base)
    wanted = session.fork(prefix).extend(more)

    scene.give(1, [5, 6, 7, 8])
    first = scene.extend([1], [0], [200])
    first.input_ids = base
    run(scene, first)
    shared = [5, 6, 7, 8][: prefix // PAGE]
    before = scene.pool.pages.pages[shared].clone()

    scene.give(4, [*shared, 20])
    batch, reqs = folded(scene, [prefix], [len(more)], [4])
    replay = min(prefix, 128)
    batch.input_ids = torch.cat([base[prefix - replay : prefix], more])
    requests.of(batch).tokens[0] = array("q", [*base[:prefix].tolist(), *more.tolist()])
    scene.pool.request_window.reset(torch.tensor([4]))
    hidden = run(scene, batch)
    assert torch.equal(hidden[replay:], wanted)
    assert torch.equal(scene.pool.pages.pages[shared], before)
    assert reqs[0].customized_info == {"replayed_tokens": [replay]}


def test_junk_rows_touch_only_junk(scene):
    state, pages = scene.pool.state, scene.pool.pages.pages
    before = [pages[1:].clone(), state.rings[:, 1:].clone(), state.tails[:, 1:].clone(), state.ngrams[1:].clone()]
    fabricated = scene.extend([0], [0], [130])
    fabricated.positions = torch.zeros(130, dtype=torch.int64)
    fabricated.input_ids = torch.zeros(130, dtype=torch.int64)
    hidden = run(scene, fabricated)
    assert hidden.isfinite().all()
    after = [pages[1:], state.rings[:, 1:], state.tails[:, 1:], state.ngrams[1:]]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_the_reference_mixes_streams(model):
    check_stream_mix(model.network)
