"""Sizes and refusals, from the config alone."""

import pytest

from deepinfer_plugin.runtime.memory_plan import CapacityError, least_tokens, plan

GIB = 1 << 30


def test_released_sizes(released):
    sizes = plan(released, page_size=128, running_requests=256, weight_bytes=510 * GIB, budget_bytes=700 * GIB)
    assert sizes.token_bytes == 890
    assert sizes.slot_bytes == 3_042_336 + 43 * 134 * 4 + 86_016 + 9 * 8  # rings, their position tags, tails, n-grams
    assert sizes.state_bytes == 257 * sizes.slot_bytes
    assert sizes.total_bytes <= 700 * GIB < sizes.total_bytes + sizes.page_bytes
    assert sizes.tokens % 128 == 0


@pytest.mark.parametrize("page_size", (64, 128, 256))
def test_token_bytes_do_not_depend_on_the_page(released, page_size):
    assert plan(released, page_size=page_size, running_requests=1, max_tokens=4096).token_bytes == 890


@pytest.mark.parametrize("tokens", (1, 256, 1024, 4096, 8192))
def test_undersized_pools_are_refused_with_the_least_legal_number(small, tokens):
    least = least_tokens(small, 256)
    assert least == 512
    if tokens >= least:
        assert plan(small, page_size=256, running_requests=8, max_tokens=tokens).tokens == tokens
        return
    with pytest.raises(CapacityError, match=rf"--max-total-tokens {tokens} .* the least legal value is {least}$"):
        plan(small, page_size=256, running_requests=8, max_tokens=tokens)


def test_the_least_legal_number_is_legal(small):
    for page_size in (2, 64, 128, 256):
        least = least_tokens(small, page_size)
        assert plan(small, page_size=page_size, running_requests=1, max_tokens=least).tokens == least
        with pytest.raises(CapacityError):
            plan(small, page_size=page_size, running_requests=1, max_tokens=least - 1)


def test_too_many_requests_name_the_largest_number_that_fits(released):
    with pytest.raises(CapacityError) as refused:
        plan(released, page_size=128, running_requests=4096, weight_bytes=GIB, budget_bytes=2 * GIB)
    fitting = int(str(refused.value).rsplit(" ", 1)[1])
    sizes = plan(released, page_size=128, running_requests=fitting, weight_bytes=GIB, budget_bytes=2 * GIB)
    assert sizes.tokens >= least_tokens(released, 128)
    with pytest.raises(CapacityError):
        plan(released, page_size=128, running_requests=fitting + 1, weight_bytes=GIB, budget_bytes=2 * GIB)


def test_no_room_at_all_names_the_least_memory(released):
    with pytest.raises(CapacityError, match="the least that works is") as refused:
        plan(released, page_size=128, running_requests=1, weight_bytes=510 * GIB, budget_bytes=141 * GIB)
    least = int(str(refused.value).rsplit("(", 1)[1].removesuffix(" bytes)"))
    assert plan(released, page_size=128, running_requests=1, weight_bytes=510 * GIB, budget_bytes=least).tokens >= 256


def test_a_cap_wins_over_a_larger_budget(small):
    assert plan(small, page_size=128, running_requests=1, budget_bytes=GIB, max_tokens=1000).tokens == 896
