"""ForwardBatch -> Rows in every mode, and what happens to a slot when a request takes it."""

import dataclasses
from array import array
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("sglang")

from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

from deepinfer_plugin.runtime import backend as backend_module
from deepinfer_plugin.runtime import pools, requests
from deepinfer_plugin.runtime.backend import DeepInferBackend
from deepinfer_plugin.runtime.checks import SelfCheckError, check_stream_mix, check_window

PAGE = 64
COLUMNS = 1024


class Scene:
    """A backend on real pools, with request rows as SGLang would have filled them."""

    def __init__(self, config, monkeypatch, replay=True):
        features = SimpleNamespace(enable_encoder_swa_bounded_replay=replay)
        monkeypatch.setattr(backend_module, "get_exec", lambda: SimpleNamespace(features=features))
        self.pool = pools.PagePoolForSGLang(config, tokens=64 * PAGE, page_size=PAGE, slots=9, device="cpu")
        self.req_to_token = torch.zeros(9, COLUMNS, dtype=torch.int32)
        self.network = SimpleNamespace(config=config, token_class=torch.arange(config.vocab_size) + 1000)
        runner = SimpleNamespace(
            token_to_kv_pool=self.pool,
            req_to_token_pool=SimpleNamespace(req_to_token=self.req_to_token),
            model=SimpleNamespace(network=self.network),
            device="cpu",
        )
        self.backend = DeepInferBackend(runner)

    def give(self, slot, pages):
        for index, page in enumerate(pages):
            self.req_to_token[slot, index * PAGE : (index + 1) * PAGE] = torch.arange(page * PAGE, (page + 1) * PAGE)

    def batch(self, mode, slots, positions, ids=None, **fields):
        ids = torch.tensor(ids if ids is not None else list(range(len(positions))))
        return ForwardBatch(
            forward_mode=mode,
            batch_size=len(slots),
            input_ids=ids,
            req_pool_indices=torch.tensor(slots),
            seq_lens=fields.pop("seq_lens", None),
            out_cache_loc=None,
            seq_lens_sum=None,
            positions=torch.tensor(positions),
            **fields,
        )

    def extend(self, slots, starts, lengths, padding=0, **fields):
        positions = [p for s, n in zip(starts, lengths, strict=True) for p in range(s, s + n)] + [0] * padding
        return self.batch(
            ForwardMode.EXTEND,
            slots,
            positions,
            seq_lens=torch.tensor(starts) + torch.tensor(lengths),
            extend_seq_lens=torch.tensor(lengths, dtype=torch.int32),
            extend_seq_lens_cpu=lengths,
            extend_prefix_lens_cpu=starts,
            **fields,
        )


@pytest.fixture
def scene(small, monkeypatch):
    return Scene(small, monkeypatch)


def test_extend(scene):
    scene.give(1, [5, 6, 7])
    scene.give(2, [9])
    scene.give(1, [5, 6, 7, 8])  # the fourth page is a leftover
    rows = scene.backend.rows(scene.extend([1, 2], [100, 0], [60, 3]))
    assert rows.positions.tolist() == [*range(100, 160), 0, 1, 2]
    assert rows.cu_rows.tolist() == [0, 60, 63]
    assert rows.requests.tolist() == [0] * 60 + [1] * 3
    assert rows.slots.tolist() == [1, 2]
    assert rows.page_table.tolist() == [[5, 6, 7], [9, 0, 0]] and rows.page_table.dtype == torch.int64
    assert rows.window_floor.tolist() == [0] * 63 and rows.writes_pages.all()
    assert rows.row_slots.tolist() == [1] * 60 + [2] * 3


def test_extend_to_the_end_of_a_page(scene):
    scene.give(1, [5, 6, 7])
    assert scene.backend.rows(scene.extend([1], [0], [PAGE])).page_table.tolist() == [[5]]
    assert scene.backend.rows(scene.extend([1], [0], [PAGE + 1])).page_table.tolist() == [[5, 6]]


def test_decode_is_one_row_of_many(scene):
    scene.give(3, [5, 6, 7])
    scene.give(1, [9])
    lengths = torch.tensor([130, 2])
    batch = scene.batch(ForwardMode.DECODE, [3, 1], [129, 1], seq_lens=lengths, seq_lens_cpu=lengths)
    rows = scene.backend.rows(batch)
    assert rows.cu_rows.tolist() == [0, 1, 2] and rows.requests.tolist() == [0, 1]
    assert rows.page_table.tolist() == [[5, 6, 7], [9, 0, 0]]
    assert rows.fresh.tolist() == [0, 0]
    batch.seq_lens_cpu = None  # speculative decoding leaves no host mirror
    assert torch.equal(scene.backend.rows(batch).page_table, rows.page_table)


def test_decode_padding_is_junk(scene):
    scene.give(3, [5])
    lengths = torch.tensor([3, 1, 1])
    batch = scene.batch(ForwardMode.DECODE, [3, 0, 0], [2, 0, 0], seq_lens=lengths, seq_lens_cpu=lengths)
    rows = scene.backend.rows(batch)
    assert rows.slots.tolist() == [3, 0, 0] and rows.page_table.tolist() == [[5], [0], [0]]


def test_verify_with_a_fixed_block(scene):
    scene.give(1, [5, 6])
    scene.give(2, [9])
    positions = [*range(62, 68), *range(10, 16)]
    spec = SimpleNamespace(draft_token_num=6)
    rows = scene.backend.rows(scene.batch(ForwardMode.TARGET_VERIFY, [1, 2], positions, spec_info=spec))
    assert rows.cu_rows.tolist() == [0, 6, 12] and rows.fresh.tolist() == [*range(6), *range(6)]
    assert rows.page_table.tolist() == [[5, 6], [9, 0]]


def test_verify_with_ragged_lengths_and_padding(scene):
    scene.give(1, [5, 6])
    scene.give(2, [9])
    layout = SimpleNamespace(verify_lens=torch.tensor([1, 4], dtype=torch.int32), total_verify_tokens=5)
    spec = SimpleNamespace(ragged_verify_layout=layout)
    batch = scene.batch(ForwardMode.TARGET_VERIFY, [1, 2], [70, *range(10, 14), 0, 0], spec_info=spec)
    rows = scene.backend.rows(batch)
    assert rows.cu_rows.tolist() == [0, 1, 5, 6, 7] and rows.slots.tolist() == [1, 2, 0, 0]
    assert rows.page_table.tolist() == [[5, 6], [9, 0], [0, 0], [0, 0]]
    assert rows.writes_pages.tolist() == [True] * 5 + [False] * 2


def test_extend_padding_rows_are_requests_of_their_own_on_junk(scene):
    scene.give(1, [5])
    batch = scene.extend([1], [0], [3], padding=4)
    rows = scene.backend.rows(batch)
    assert rows.slots.tolist() == [1, 0, 0, 0, 0] and rows.cu_rows.tolist() == [0, 3, 4, 5, 6, 7]
    assert rows.positions.tolist() == [0, 1, 2, 0, 0, 0, 0]
    assert not rows.writes_pages[3:].any() and not rows.page_table[1:].any()


def test_padding_of_the_request_axis_has_no_rows(scene):
    scene.give(1, [5])
    rows = scene.backend.rows(scene.extend([1, 0], [0, 0], [3, 0]))
    assert rows.cu_rows.tolist() == [0, 3, 3] and rows.page_table.tolist() == [[5], [0]]


def test_a_fabricated_extend_is_harmless(scene):
    """An idle data-parallel rank gets one made-up request on slot 0 whose padded positions are all 0."""
    rows = scene.backend.rows(
        scene.batch(
            ForwardMode.EXTEND,
            [0],
            [0] * 130,
            seq_lens=torch.tensor([130]),
            extend_seq_lens=torch.tensor([130]),
            extend_seq_lens_cpu=[130],
            extend_prefix_lens_cpu=[0],
        )
    )
    assert rows.count == 130 and not rows.page_table.any() and rows.slots.tolist() == [0]


def test_idle_has_no_rows(scene):
    batch = scene.batch(ForwardMode.IDLE, [], [], ids=[])
    scene.backend.forward_metadata = "stale"
    scene.backend.init_forward_metadata(batch)
    assert scene.backend.forward_metadata is None


def folded(scene, prefixes, new, slots, begins=None):
    """An extend batch after SGLang's fold: each hit starts at its replay start."""
    begins = [True] * len(slots) if begins is None else begins
    replay = [min(p, 128) if b else 0 for p, b in zip(prefixes, begins, strict=True)]
    starts = [p - r for p, r in zip(prefixes, replay, strict=True)]
    lengths = [r + n for r, n in zip(replay, new, strict=True)]
    floors = [s if r else 0 for s, r in zip(starts, replay, strict=True)]
    keep, offset = [], 0
    for r, n in zip(replay, lengths, strict=True):
        keep += range(offset + r, offset + n)
        offset += n
    batch = scene.extend(
        slots,
        starts,
        lengths,
        encoder_swa_row_floor=torch.tensor(floors).repeat_interleave(torch.tensor(lengths)),
        encoder_swa_compress_rows=torch.tensor(keep),
    )
    reqs = [
        SimpleNamespace(
            prefix_len=p,
            full_untruncated_fill_ids=array("q", [(7 * slot + i) % 250 for i in range(p + n)]),
            customized_info=None,
        )
        for slot, p, n in zip(slots, prefixes, new, strict=True)
    ]
    schedule = SimpleNamespace(prefix_lens=starts, encoder_swa_reset=begins, reqs=reqs)
    requests.attach(batch, schedule)
    return batch, reqs


def test_replayed_rows_see_no_older_window_and_write_no_page(scene):
    scene.give(1, [5, 6, 7, 8])
    scene.give(2, [9, 10])
    batch, _ = folded(scene, prefixes=[192, 0], new=[10, 20], slots=[1, 2])
    rows = scene.backend.rows(batch)
    assert rows.positions.tolist() == [*range(64, 202), *range(20)]
    assert rows.window_floor.tolist() == [64] * 138 + [0] * 20
    assert rows.writes_pages.tolist() == [False] * 128 + [True] * 30
    assert rows.page_table.tolist() == [[5, 6, 7, 8], [9, 0, 0, 0]]


def test_facts_survive_the_eager_runner_and_reach_the_response(scene):
    batch, reqs = folded(scene, prefixes=[192, 64, 0], new=[10, 3, 20], slots=[1, 2, 3])
    facts = requests.of(dataclasses.replace(batch, batch_size=3))
    assert facts.replayed == [128, 64, 0] and facts.starts == [64, 0, 0] and facts.prompt_ends == [202, 67, 20]
    assert facts.lookback(0, 3) == reqs[0].full_untruncated_fill_ids[61:64].tolist()
    assert facts.lookback(1, 3) == [0, 0, 0]
    assert [req.customized_info for req in reqs] == [{"replayed_tokens": [n]} for n in (128, 64, 0)]


def test_later_chunks_keep_the_count_of_the_first(scene):
    _, reqs = folded(scene, prefixes=[192], new=[64], slots=[1])
    later = scene.extend([1], [256], [64])
    reqs[0].prefix_len = 256
    requests.attach(later, SimpleNamespace(prefix_lens=[256], encoder_swa_reset=[False], reqs=reqs))
    assert reqs[0].customized_info == {"replayed_tokens": [128]}
    assert requests.of(later).begins == [False]


def test_decode_has_a_bound_of_its_lengths_and_no_other_facts(scene):
    batch = scene.batch(ForwardMode.DECODE, [1, 2], [4, 200])
    reqs = [SimpleNamespace(origin_input_ids=[0] * n, output_ids=[0] * 3) for n in (2, 197)]
    requests.attach(batch, SimpleNamespace(reqs=reqs))
    assert requests.of(batch) is None
    assert requests.longest_of(batch) >= 201


def test_a_hit_seeds_the_engram_lookback(scene):
    state, lookback = scene.pool.state, scene.network.config.engram.lookback
    scene.give(1, [5, 6, 7, 8])
    scene.give(2, [9, 10])
    batch, reqs = folded(scene, prefixes=[192, 64], new=[10, 3], slots=[1, 2])
    scene.pool.request_window.reset(torch.tensor([1, 2]))  # the fold does
    scene.backend.init_forward_metadata(batch)
    ids = reqs[0].full_untruncated_fill_ids
    length = state.ngrams.shape[1]
    expected = {p % length: 1000 + ids[p] for p in range(64 - lookback, 64)}
    assert {i: v for i, v in enumerate(state.ngrams[1].tolist()) if v != -1} == expected
    assert (state.ngrams[2] == -1).all()  # replayed from position 0: nothing before it


def test_a_later_chunk_keeps_its_state(scene):
    scene.pool.state.ngrams[1] = 3
    scene.pool.state.tags[:, 1] = 3
    batch, _ = folded(scene, prefixes=[128], new=[10], slots=[1], begins=[False])
    scene.backend.init_forward_metadata(batch)
    assert (scene.pool.state.ngrams[1] == 3).all() and (scene.pool.state.tags[:, 1] == 3).all()


def test_without_replay_a_request_from_position_0_resets_its_slot(small, monkeypatch):
    scene = Scene(small, monkeypatch, replay=False)
    scene.pool.state.tags.fill_(3)
    batch = scene.extend([1, 2], [0, 64], [5, 5])
    reqs = [
        SimpleNamespace(prefix_len=p, full_untruncated_fill_ids=array("q", range(p + 5)), customized_info=None)
        for p in (0, 64)
    ]
    requests.attach(batch, SimpleNamespace(prefix_lens=[0, 64], encoder_swa_reset=None, reqs=reqs))
    scene.backend.init_forward_metadata(batch)
    assert (scene.pool.state.tags[:, 1] == -1).all() and (scene.pool.state.tags[:, 2] == 3).all()
    assert reqs[0].customized_info == {"replayed_tokens": [0]} and reqs[1].customized_info is None


def test_pages_on_their_way_back_are_awaited_once_per_extend(scene):
    waits = []
    scene.pool.register_layer_transfer_counter(SimpleNamespace(wait_until=waits.append))
    scene.backend.init_forward_metadata(scene.extend([1, 2], [0, 0], [5, 5]))
    assert waits == [0]
    lengths = torch.tensor([6])
    scene.backend.init_forward_metadata(
        scene.batch(ForwardMode.DECODE, [1], [5], seq_lens=lengths, seq_lens_cpu=lengths)
    )
    assert waits == [0]


def test_window_check_names_slot_and_position(scene):
    state, window = scene.pool.state, scene.network.config.window
    scene.give(1, [5, 6, 7, 8])
    rows = scene.backend.rows(scene.extend([1], [200], [10]))
    with pytest.raises(SelfCheckError, match="ring 0 of state slot 1 holds position -1 where position 73 is read"):
        check_window(rows, state, window)
    positions = torch.arange(200)[-state.layout.ring_length :]
    state.tags[:, 1, positions % state.layout.ring_length] = positions.int()
    check_window(rows, state, window)
    check_window(scene.backend.rows(scene.extend([0], [0], [10])), state, window)  # junk is never checked


@pytest.mark.parametrize("factor", (1.0, 0.356))
def test_stream_mix_check_measures_the_factor(small, factor):
    def collapse(streams, pre):
        return (factor * (streams.float() * pre.unsqueeze(-1)).sum(1)).to(streams.dtype)

    network = SimpleNamespace(
        config=small,
        norm=SimpleNamespace(weight=torch.zeros(1)),
        embed_tokens=lambda ids: torch.randn(len(ids), 64, generator=torch.Generator().manual_seed(0)).bfloat16(),
        ops=SimpleNamespace(hc_collapse=collapse, choices={"hc_collapse": "test"}),
    )
    if factor == 1.0:
        check_stream_mix(network)
    else:
        with pytest.raises(SelfCheckError, match=r"provider 'test' gives 0\.356 x the embedding"):
            check_stream_mix(network)
