import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_plugin.model.config import V41Config
from deepinfer_plugin.model.memory import PageLayout, PagePool, StateLayout, StatePool
from deepinfer_plugin.model.released import RELEASED

CONFIG = V41Config.from_dict(RELEASED)


@pytest.mark.parametrize(("page_size", "page_bytes"), [(64, 56_960), (128, 113_920), (256, 227_840)])
def test_a_token_costs_890_bytes(page_size, page_bytes):
    layout = PageLayout.of(CONFIG, page_size)
    assert layout.page_bytes == page_bytes and layout.token_bytes == 890
    pool = PagePool.allocate(layout, 3)
    stored = sum(t.shape[1:].numel() for s in pool.sources for t in (s.latent, s.latent_scale, s.key, s.key_scale))
    assert stored == page_bytes == pool.pages.shape[1]


def test_state_costs_three_megabytes_a_request():
    layout = StateLayout.of(CONFIG)
    rings = 43 * 134 * 528
    tails = 3 * 7 * 2 * 512 * 4
    tags_and_ngrams = 43 * 134 * 4 + 9 * 8
    assert layout.slot_bytes == rings + tails + tags_and_ngrams
    assert rings + tails == 3_128_352  # 3.1 MB
    pool = StatePool(layout, 2)
    held = sum(t.element_size() * t.numel() for t in (pool.rings, pool.tags, pool.tails, pool.ngrams))
    assert held == 2 * layout.slot_bytes


@given(st.integers(1, 64).map(lambda n: 2 * n))
def test_sections_cover_a_page_without_overlap(page_size):
    pool = PagePool.allocate(PageLayout.of(CONFIG, page_size), 2)
    marked = torch.zeros_like(pool.pages[1])
    for source in pool.sources:
        for section in (source.latent, source.latent_scale, source.key, source.key_scale):
            assert section.shape[1] == page_size // source.ratio == source.groups
            section[1] += 1
    marked += 1
    assert torch.equal(pool.pages[1], marked) and not pool.pages[0].any()


@pytest.mark.parametrize("page_size", [0, -128, 127])
def test_odd_pages_are_refused(page_size):
    with pytest.raises(ValueError, match="page_size"):
        PageLayout.of(CONFIG, page_size)


def test_pool_refuses_a_foreign_buffer():
    layout = PageLayout.of(CONFIG, 64)
    with pytest.raises(ValueError, match="56960"):
        PagePool(layout, torch.zeros(2, 100, dtype=torch.uint8))


@given(st.integers(0, 40), st.lists(st.integers(0, 5000), min_size=3, max_size=3))
def test_seeded_ngrams_land_at_their_positions(position, classes):
    state = StatePool(StateLayout.of(CONFIG), 2)
    state.seed_ngrams(torch.tensor([1]), torch.tensor([position]), torch.tensor([classes]))
    length = state.ngrams.shape[1]
    for back in range(1, 4):
        if position - back >= 0:
            assert state.ngrams[1, (position - back) % length] == classes[-back]
    assert (state.ngrams[0] == -1).all()
    state.reset(torch.tensor([1]))
    assert (state.ngrams == -1).all() and (state.tags == -1).all()
