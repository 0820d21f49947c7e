"""A draft drawn with the noise of the network's draw is that draw, as far as head and network agree."""

from __future__ import annotations

import pytest
import torch

from deepinfer_plugin.runtime.seeded_draw import draw, filtered, hash32
from deepinfer_plugin.runtime.shared_noise import CANDIDATES, Draws, draft

ROWS, FREE = 4000, 1 << 30


def draws(temperature=1.0, top_k=FREE, top_p=1.0, min_p=0.0, rows=ROWS):
    generator = torch.Generator().manual_seed(5)
    seeds = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=generator)
    values = (temperature, top_p, min_p)
    return Draws(seeds, torch.full((rows,), top_k), *(torch.full((rows,), value) for value in values))


def scenes(vocabulary, rows=ROWS, error=0.0):
    """Logits of network and head, float32 [rows, vocabulary], and positions."""
    generator = torch.Generator().manual_seed(vocabulary)
    logits = 3 * torch.randn(rows, vocabulary, generator=generator)
    return logits, logits + error * torch.randn(rows, vocabulary, generator=generator), 7 * torch.arange(rows)


def drawn_by_network(logits, positions, given):
    ranked, order = filtered(
        torch.softmax(logits / given.temperatures[:, None], -1), given.top_ks, given.top_ps, given.min_ps
    )
    return draw(torch.zeros_like(ranked).scatter(1, order, ranked), given.seeds, positions)


@pytest.mark.parametrize(
    "limits",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 1.3, "top_k": 4},
        {"top_p": 0.8},
        {"temperature": 0.8, "min_p": 0.1},
        {"top_k": 20, "top_p": 0.9, "min_p": 0.02},
        {"top_k": 1},
    ],
)
def test_a_head_that_is_right_drafts_what_is_drawn(limits):
    given, (logits, head, positions) = draws(**limits), scenes(CANDIDATES - 4)
    same = draft(head, positions, given) == drawn_by_network(logits, positions, given)
    assert same.float().mean() > 0.999, "all but what rounding decides at the edge of top_p"


def test_of_a_vocabulary_only_the_likeliest_are_drafted():
    given, (logits, head, positions) = draws(), scenes(20 * CANDIDATES)
    found = draft(head, positions, given)
    assert (head.gather(1, found[:, None]) >= head.topk(CANDIDATES).values[:, -1:]).all()
    assert (found == drawn_by_network(logits, positions, given)).float().mean() > 0.6


def test_a_head_that_is_nearly_right_is_accepted_more_often_than_its_best_guess():
    given, (logits, head, positions) = draws(), scenes(50, error=0.3)
    right = drawn_by_network(logits, positions, given)
    shared, greedy = ((found == right).float().mean() for found in (draft(head, positions, given), head.argmax(-1)))
    assert shared > 0.85 and greedy < 0.75


def test_greedy_requests_get_the_first_of_equals():
    logits = torch.zeros(3, 500)
    logits[1, 400:] = logits[2, 20] = 1
    given = draws(top_k=1, rows=3)
    assert draft(logits, torch.arange(3), given).tolist() == [0, 400, 20]


def test_a_row_drafts_alone_what_it_drafts_among_others():
    given, (_, head, positions) = draws(top_p=0.9, rows=40), scenes(500, rows=40)
    together = draft(head, positions, given)
    alone = [draft(head[[i]], positions[[i]], given.at(slice(i, i + 1))).item() for i in range(40)]
    assert together.tolist() == alone


def test_each_row_may_hash_tokens_of_its_own():
    seeds, positions, tokens = torch.tensor([3, -4]), torch.tensor([1, 2]), torch.tensor([[5, 6], [7, 5]])
    every = hash32(seeds, positions, torch.arange(8))
    assert torch.equal(hash32(seeds, positions, tokens), every.gather(1, tokens))
