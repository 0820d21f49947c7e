"""The pools SGLang is given: bytes, whole pages, and the sizer's refusals."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("sglang")

from deepinfer_plugin.model.memory import StateLayout
from deepinfer_plugin.runtime import pools
from deepinfer_plugin.runtime.memory_plan import CapacityError, least_tokens

PAGE = 64


@pytest.fixture
def pool(small):
    return pools.PagePoolForSGLang(small, tokens=8 * PAGE, page_size=PAGE, slots=4, device="cpu")


@pytest.fixture
def sizer(small, monkeypatch):
    def make(running=8, dp=1, context=512, max_tokens=None, device="cpu", **disagg):
        schedule = SimpleNamespace(max_running_requests=running, max_total_tokens=max_tokens)
        monkeypatch.setattr(pools, "get_schedule", lambda: schedule)
        values = {"disaggregation_mode": "null", "disaggregation_decode_extra_slots": None, **disagg}
        monkeypatch.setattr(pools, "get_disagg", lambda: SimpleNamespace(**values))
        model = SimpleNamespace(network=SimpleNamespace(config=small))
        model_config = SimpleNamespace(context_len=context)
        return pools.PoolSizer(SimpleNamespace(model=model, model_config=model_config, attn_dp_size=dp, device=device))

    return make


def test_890_bytes_a_token_at_released_size(released):
    pool = pools.PagePoolForSGLang(released, tokens=1024, page_size=128, slots=2, device="cpu")
    pages = pool.pages.pages
    assert pool.get_kv_size_bytes() == pages.nbytes == 890 * (pool.size + pool.page_size)  # one junk page
    assert sum(
        section.nbytes for s in pool.pages.sources for section in (s.latent, s.latent_scale, s.key, s.key_scale)
    ) == (pages.nbytes)
    state = (pool.state.rings, pool.state.tags, pool.state.tails, pool.state.ngrams)
    assert sum(part.nbytes for part in state) == 2 * StateLayout.of(released).slot_bytes


def test_sglang_sees_the_same_bytes(pool):
    pages = pool.pages.pages
    assert pages.shape == (9, pool.layout.page_bytes)
    assert pool.get_key_buffer(0).data_ptr() == pages.data_ptr()
    pointers, lengths, items = pool.get_contiguous_buf_infos()
    assert (pointers, lengths, items) == ([pages.data_ptr()], [pages.nbytes], [pool.layout.page_bytes])
    (info,) = pool.get_device_pool_infos()
    info.buffer_info.validate(layer_ids=info.layer_ids)


def test_whole_pages_and_state_survive_a_copy(pool):
    pages, state = pool.pages.pages, pool.state
    pages.random_(0, 256)
    for tensor in (state.rings, state.tags, state.ngrams):
        tensor.random_(0, 100)
    state.tails.normal_()
    before, slot = pages.clone(), [state.rings[:, 2].clone(), state.tags[:, 2].clone(), state.tails[:, 2].clone()]
    indices = torch.cat(
        [torch.arange(3 * PAGE, 4 * PAGE), torch.arange(PAGE, PAGE + 17)]
    )  # pages 3 and 1, the last one partly
    copy = pool.get_cpu_copy(indices, req_pool_index=2)

    target = torch.cat([torch.arange(7 * PAGE, 8 * PAGE), torch.arange(5 * PAGE, 5 * PAGE + 17)])
    pool.load_cpu_copy(copy, target, req_pool_index=3)
    assert torch.equal(pages[[7, 5]], before[[3, 1]])
    untouched = [0, 1, 2, 3, 4, 6, 8]
    assert torch.equal(pages[untouched], before[untouched])
    assert all(
        torch.equal(a, b) for a, b in zip((state.rings[:, 3], state.tags[:, 3], state.tails[:, 3]), slot, strict=True)
    )


@pytest.mark.parametrize("indices", ([PAGE + 1, PAGE + 2], [PAGE, PAGE + 2], [*range(PAGE, 2 * PAGE), 3 * PAGE + 1]))
def test_torn_pages_are_refused(pool, indices):
    with pytest.raises(ValueError, match="whole pages"):
        pool.get_cpu_copy(torch.tensor(indices))


def test_a_copy_of_another_length_is_refused(pool):
    copy = pool.get_cpu_copy(torch.arange(PAGE, 2 * PAGE))
    with pytest.raises(ValueError, match="1 pages cannot be loaded into 2"):
        pool.load_cpu_copy(copy, torch.arange(PAGE, 3 * PAGE))


def test_token_rows_are_refused(pool):
    with pytest.raises(NotImplementedError):
        pool.move_kv_cache(torch.tensor([64]), torch.tensor([128]))
    with pytest.raises(NotImplementedError):
        pool.set_kv_buffer(None, torch.tensor([64]), None, None)


def test_page_ids_do_not_overflow(pool):
    """Token locations beyond 2^31 stay exact."""
    first = (1 << 33) // PAGE * PAGE
    pages = pool.page_ids(torch.arange(first, first + 2 * PAGE))
    assert pages.dtype == torch.int64 and pages.tolist() == [first // PAGE, first // PAGE + 1]


def test_pages_beyond_2_31_bytes_are_addressed(released):
    """A page id times the page stride passes 2^31 from page 18,852 on. The pool is lazily zero: one page is touched."""
    count = 20_000
    pool = pools.PagePoolForSGLang(released, tokens=count * 128, page_size=128, slots=1, device="cpu")
    assert pool.pages.pages.nbytes > 1 << 31
    latent = pool.pages.sources[3].latent
    page = torch.tensor([count])
    latent[page, 127] = 7
    assert pool.pages.pages[count].sum() == 7 * latent.shape[-1]
    assert torch.equal(
        pool.get_cpu_copy(torch.arange(count * 128, count * 128 + 128))["pages"][0], pool.pages.pages[count]
    )


def test_window_reset_forgets_one_slot(pool):
    pool.state.tags.fill_(5)
    pool.state.ngrams.fill_(5)
    pool.request_window.reset(torch.tensor([2], dtype=torch.int32))
    pool.request_window.initialize_dummy_history()
    assert (pool.state.tags[:, 2] == -1).all() and (pool.state.ngrams[2] == -1).all()
    assert (pool.state.tags[:, [0, 1, 3]] == 5).all() and (pool.state.ngrams[[0, 1, 3]] == 5).all()


def test_loads_are_awaited_once(pool):
    waits = []
    pool.wait_loaded()
    pool.register_layer_transfer_counter(SimpleNamespace(wait_until=waits.append))
    pool.wait_loaded()
    assert waits == [0]


def test_sizer_pays_for_state_first(small, sizer):
    sizes = StateLayout.of(small)
    budget = 64 << 20
    few, many = (sizer(running).calculate_pool_sizes(budget, PAGE).max_total_num_tokens for running in (1, 101))
    page_bytes = pools.PageLayout.of(small, PAGE).page_bytes
    assert abs((few - many) // PAGE * page_bytes - 100 * sizes.slot_bytes) <= 2 * page_bytes
    assert few % PAGE == 0 and (few // PAGE + 1) * page_bytes + 2 * sizes.slot_bytes <= budget


def test_sizer_counts_rows_per_rank_and_decode_slots(sizer):
    assert sizer(8, dp=2).running_requests == 4
    assert sizer(8, disaggregation_mode="decode", disaggregation_decode_extra_slots=6).running_requests == 14


def test_sizer_refuses_by_name(small, sizer):
    least = least_tokens(small, PAGE)
    assert sizer().calculate_pool_sizes_from_max_tokens(least + 5, PAGE).max_total_num_tokens == least
    with pytest.raises(CapacityError, match=f"least legal value is {least}"):
        sizer().calculate_pool_sizes_from_max_tokens(least - 1, PAGE)
    with pytest.raises(CapacityError, match="the largest legal value is"):
        sizer(running=100_000).calculate_pool_sizes(64 << 20, PAGE)
    with pytest.raises(CapacityError, match="must be declared"):
        sizer(running=None)


def test_sizer_refuses_a_context_that_would_wait_for_ever(small, sizer):
    """A prompt that is accepted and can never be charged hangs; what the memory holds is the limit, to the page."""
    budget = 5 * StateLayout.of(small).slot_bytes + 20 * pools.PageLayout.of(small, PAGE).page_bytes
    tokens = sizer(running=4).calculate_pool_sizes(budget, PAGE).max_total_num_tokens
    longest = tokens // PAGE * PAGE - 2 * PAGE
    assert sizer(running=4, context=longest).calculate_pool_sizes(budget, PAGE).max_total_num_tokens == tokens
    with pytest.raises(CapacityError, match=f"--context-length {longest + 1}: .* largest legal value is {longest},"):
        sizer(running=4, context=longest + 1).calculate_pool_sizes(budget, PAGE)
    # The context was cut to fit a cap when arguments were resolved; memory must still hold the one or the other.
    sizer(running=4, context=longest + 1, max_tokens=512).calculate_pool_sizes(budget, PAGE)
    with pytest.raises(CapacityError, match="largest legal value"):
        sizer(running=4, context=longest + 1, max_tokens=1 << 20).calculate_pool_sizes(budget, PAGE)


def test_build_pool_has_a_slot_for_every_request_row(small, sizer, monkeypatch):
    sizer(running=8)
    monkeypatch.setattr(pools, "get_exec", lambda: SimpleNamespace(features=SimpleNamespace(enable_memory_saver=False)))
    model = SimpleNamespace(network=SimpleNamespace(config=small))
    configurator = SimpleNamespace(model=model, attn_dp_size=1, page_size=PAGE, device="cpu")
    sizes = SimpleNamespace(max_total_num_tokens=8 * PAGE)
    pool = pools.build_pool(configurator, sizes, SimpleNamespace(req_to_token=torch.zeros(9, 10)))
    assert pool.state.slots == 9 and pool.size == 8 * PAGE
    with pytest.raises(CapacityError, match="10 request rows"):
        pools.build_pool(configurator, sizes, SimpleNamespace(req_to_token=torch.zeros(10, 10)))
