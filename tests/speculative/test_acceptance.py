from __future__ import annotations

import pytest
import torch
from chi_square import p_value

from deepinfer_plugin.speculative.acceptance import distribution, draw, verify, verify_chosen
from deepinfer_plugin.speculative.randomness import DRAFT, uniform

K, V = 5, 12


def filtered(logits, temperature, top_k, top_p, min_p):
    """The rule, one row and one token at a time."""
    probs = torch.softmax(logits.float() / temperature, -1).tolist()
    order = sorted(range(len(probs)), key=lambda token: (-probs[token], token))
    kept, before = {}, 0.0
    for rank, token in enumerate(order):
        if rank < top_k and before <= top_p and probs[token] >= probs[order[0]] * min_p:
            kept[token] = probs[token]
        before += probs[token]
    total = sum(kept.values())
    return torch.tensor([kept.get(token, 0.0) / total for token in range(len(probs))])


def test_filters_against_the_rule():
    torch.manual_seed(0)
    rows = 60
    logits = torch.randn(rows, 40) * 2
    temperature = torch.empty(rows).uniform_(0.3, 2)
    top_k = torch.randint(1, 45, (rows,))
    top_p, min_p = torch.empty(rows).uniform_(0.1, 1), torch.empty(rows).uniform_(0, 0.3)
    probs = distribution(logits, temperature, top_k, top_p, min_p)
    for row in range(rows):
        want = filtered(logits[row], temperature[row], int(top_k[row]), float(top_p[row]), float(min_p[row]))
        torch.testing.assert_close(probs[row], want, atol=1e-6, rtol=1e-5)


def test_absent_filters_equal_neutral_ones():
    logits, temperature = torch.randn(4, V), torch.full((4,), 0.8)
    neutral = torch.full((4,), V), torch.ones(4), torch.zeros(4)
    torch.testing.assert_close(distribution(logits, temperature), distribution(logits, temperature, *neutral))


def test_ties_go_to_lower_ids_and_masked_tokens_to_nobody():
    logits = torch.zeros(1, 6)
    assert distribution(logits, torch.ones(1), torch.tensor([2])).tolist() == [[0.5, 0.5, 0, 0, 0, 0]]
    logits[0, 0] = -torch.inf
    assert distribution(logits, torch.ones(1), torch.tensor([2])).tolist() == [[0, 0.5, 0.5, 0, 0, 0]]


def test_draw_is_fair_and_never_takes_weight_zero():
    weights = torch.tensor([0.0, 3.0, 0.0, 1.0, 4.0, 0.0])
    uniforms = uniform(torch.tensor(1), torch.arange(20_000), 0)
    tokens = draw(weights.expand(len(uniforms), -1), uniforms)
    assert p_value(torch.bincount(tokens, minlength=6), weights / 8 * len(uniforms)) > 1e-4
    extremes = torch.tensor([2.0**-49, 1 - 2.0**-49], dtype=torch.float64)
    assert draw(weights.expand(2, -1), extremes).tolist() == [1, 4]


def test_broken_rows_give_legal_ids():
    broken = torch.stack([torch.full((V,), torch.nan), torch.zeros(V)])
    tokens = draw(broken, torch.tensor([0.5, 0.5], dtype=torch.float64))
    assert ((tokens >= 0) & (tokens < V)).all()


def block(rows_each, seed=0, sharp=1.0):
    """Random target and drafts for requests with so many verify rows."""
    generator = torch.Generator().manual_seed(seed)
    count, total = len(rows_each), sum(rows_each)
    probs = torch.softmax(torch.randn(total, V, generator=generator) * sharp, -1)
    draft_probs = torch.softmax(torch.randn(count, K, V, generator=generator) * sharp, -1)
    drafts = torch.multinomial(draft_probs.flatten(0, 1), 1, generator=generator).view(count, K)
    cu_rows = torch.tensor([0, *torch.tensor(rows_each).cumsum(0).tolist()])
    return probs, cu_rows, drafts, draft_probs


def test_ragged_batch_equals_each_request_alone():
    rows_each = [6, 1, 4, 6, 2, 3, 6, 5]
    probs, cu_rows, drafts, draft_probs = block(rows_each)
    seeds, positions = torch.arange(8) * 977, torch.arange(8) * 13
    chosen = torch.randint(0, V, (len(probs),))
    by_choice = torch.arange(8) % 3 == 0
    padded = torch.cat([probs, torch.full((7, V), torch.nan)])
    together = verify(
        padded, cu_rows, drafts, draft_probs, seeds, positions, torch.cat([chosen, chosen[:7]]), by_choice
    )
    assert together.accepted.max() > 0 and (together.accepted < torch.tensor(rows_each)).all()
    for b in range(8):
        one = slice(b, b + 1)
        rows = slice(cu_rows[b], cu_rows[b + 1])
        alone = verify(
            probs[rows],
            torch.tensor([0, rows_each[b]]),
            drafts[one],
            draft_probs[one],
            seeds[one],
            positions[one],
            chosen[rows],
            by_choice[one],
        )
        assert torch.equal(alone.tokens[0], together.tokens[b]) and alone.accepted[0] == together.accepted[b]


def test_tokens_are_accepted_drafts_then_one_token_then_nothing():
    probs, cu_rows, drafts, draft_probs = block([6] * 200, seed=3)
    verdict = verify(probs, cu_rows, drafts, draft_probs, torch.arange(200), torch.zeros(200, dtype=torch.int64))
    assert verdict.accepted.unique().tolist() == [0, 1, 2, 3, 4, 5]
    for tokens, accepted, own in zip(verdict.tokens, verdict.accepted, drafts, strict=True):
        assert torch.equal(tokens[:accepted], own[:accepted])
        assert 0 <= tokens[accepted] < V and (tokens[accepted + 1 :] == -1).all()
    assert torch.equal(verdict.emitted, (verdict.tokens >= 0).sum(1))


def test_equal_distributions_accept_everything():
    probs, cu_rows, drafts, _ = block([6] * 300, seed=5)
    draft_probs = probs.view(300, 6, V)[:, :K]
    drafts = torch.multinomial(draft_probs.flatten(0, 1), 1).view(300, K)
    verdict = verify(probs, cu_rows, drafts, draft_probs, torch.arange(300), torch.zeros(300, dtype=torch.int64))
    assert (verdict.accepted == K).all()


@pytest.mark.parametrize("drawn", [True, False])
def test_a_masked_draft_is_rejected_and_never_emitted(drawn):
    probs, cu_rows, drafts, draft_probs = block([6] * 300, seed=6)
    at = torch.arange(300)
    probs = probs.view(300, 6, V).clone()
    probs[at, 2, drafts[:, 2]] = 0
    probs = (probs / probs.sum(-1, keepdim=True)).flatten(0, 1)
    verdict = verify(probs, cu_rows, drafts, draft_probs if drawn else None, at, torch.zeros_like(at))
    assert (verdict.accepted <= 2).all()
    stopped = verdict.accepted == 2
    assert stopped.any() and (verdict.tokens[stopped, 2] != drafts[stopped, 2]).all()


def test_greedy():
    drafts = torch.tensor([[1, 2, 3, 4, 5], [1, 2, 3, 4, 5], [1, 2, 3, 4, 5]])
    chosen = torch.tensor([1, 2, 9, 4, 5, 6, 1, 2, 3, 4, 5, 6, 7])  # row r's successor
    cu_rows = torch.tensor([0, 6, 12, 13])
    verdict = verify_chosen(chosen, cu_rows, drafts)
    assert verdict.accepted.tolist() == [2, 5, 0]
    assert verdict.tokens.tolist() == [[1, 2, 9, -1, -1, -1], [1, 2, 3, 4, 5, 6], [7, -1, -1, -1, -1, -1]]
    probs = torch.full((13, V), torch.nan)
    same = verify(probs, cu_rows, drafts, None, torch.arange(3), torch.arange(3), chosen, torch.ones(3).bool())
    assert torch.equal(same.tokens, verdict.tokens)


def test_one_block_is_distributed_like_the_target():
    """20,000 blocks of random width at one prefix: the first token, and the second where there is one."""
    count = 20_000
    torch.manual_seed(11)
    target, proposal = torch.softmax(torch.randn(6, V) * 1.5, -1), torch.softmax(torch.randn(K, V) * 1.5, -1)
    seeds, positions = torch.arange(count), torch.full((count,), 100)
    drafts = torch.stack(
        [draw(proposal[j].expand(count, -1), uniform(seeds, positions + j, DRAFT)) for j in range(K)], 1
    )
    rows_each = torch.arange(count) % 6 + 1
    cu_rows = torch.cat([torch.zeros(1, dtype=torch.int64), rows_each.cumsum(0)])
    offset = torch.arange(int(cu_rows[-1])) - cu_rows[:-1].repeat_interleave(rows_each)
    for draft_probs in (proposal.expand(count, -1, -1), None):
        verdict = verify(target[offset], cu_rows, drafts, draft_probs, seeds, positions)
        for j in (0, 1, 2):
            tokens = verdict.tokens[:, j]
            tokens = tokens[tokens >= 0]
            assert p_value(torch.bincount(tokens, minlength=V), target[j] * len(tokens)) > 1e-4
