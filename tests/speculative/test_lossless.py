"""However drafts are made and rows are planned, what is emitted are the target's own draws.

A target and a draft head over a few tokens, each conditioned on the token before. Chains of three tokens are generated
through as many rounds as it takes. The head's confidences are adversarial: they depend on its drafts as strongly as
they can, and so does the number of rows, drafts at hand included.
"""

from __future__ import annotations

import pytest
import torch
from chi_square import p_value

from deepinfer_plugin.runtime.seeded_draw import draw
from deepinfer_plugin.runtime.shared_noise import Draws, draft
from deepinfer_plugin.speculative.acceptance import accept

K, V, CHAIN, CHAINS = 5, 6, 3, 20_000
START, TEMPERATURE = 0, 0.8  # the token every chain begins behind


def logits() -> tuple[torch.Tensor, torch.Tensor]:
    """[V, V] of target and head after each token."""
    target, error = torch.randn(2, V, V, generator=torch.Generator().manual_seed(1))
    return 1.5 * target, 1.5 * target + error


def chains(shared: bool, rows_of) -> tuple[torch.Tensor, float]:
    """int64 [CHAINS, CHAIN], a seed each, and how many tokens a round brought while none had ended. rows_of(drafts
    [CHAINS, K]) -> rows of each, 1 .. K+1."""
    target, head = logits()
    draws = Draws(
        torch.arange(CHAINS), torch.full((CHAINS,), V), *torch.tensor([[TEMPERATURE], [1], [0]]).expand(3, CHAINS)
    )
    tokens, length = torch.full((CHAINS, CHAIN + K + 2), START), torch.ones(CHAINS, dtype=torch.int64)
    first_round = 0.0
    while (length <= CHAIN).any():
        position, every = length - 1, torch.arange(CHAINS)
        previous, drafts = tokens[every, position], []
        for j in range(K):
            guess = draft(head[previous], position + j, draws) if shared else head[previous].argmax(-1)
            previous = guess
            drafts.append(guess)
        drafts = torch.stack(drafts, 1)
        rows = rows_of(drafts)
        cu_rows = torch.cat([rows.new_zeros(1), rows.cumsum(0)])
        owners = every.repeat_interleave(rows)
        offsets = torch.arange(len(owners)) - cu_rows[owners]
        fed = torch.cat([tokens[every, position][:, None], drafts], 1)[owners, offsets]
        probs = torch.softmax(target[fed] / TEMPERATURE, -1)
        verdict = accept(draw(probs, owners, position[owners] + offsets), cu_rows, drafts)
        first_round = first_round or float(verdict.emitted.double().mean())
        going = length <= CHAIN
        for j in range(K + 1):
            emitted = going & (verdict.tokens[:, j] >= 0)
            tokens[emitted, length[emitted]] = verdict.tokens[emitted, j]
            length = torch.where(emitted & (length <= CHAIN), length + 1, length)
    return tokens[:, 1 : CHAIN + 1], first_round


POLICIES = {
    "one row": lambda drafts: torch.ones(len(drafts), dtype=torch.int64),
    "every draft": lambda drafts: torch.full((len(drafts),), K + 1),
    "by the drafts at hand": lambda drafts: torch.where(drafts[:, 0] % 2 == 0, K + 1, 1 + drafts[:, 1] % 3),
}


@pytest.fixture(scope="module")
def plain():
    return chains(False, POLICIES["one row"])[0]


def test_the_draws_follow_the_target(plain):
    after = torch.softmax(logits()[0].double() / TEMPERATURE, -1)
    expected = after[START][:, None, None] * after[:, :, None] * after[None]
    cells = (plain[:, 0] * V + plain[:, 1]) * V + plain[:, 2]
    assert p_value(torch.bincount(cells, minlength=V**CHAIN), expected * CHAINS) > 1e-3


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("shared", [False, True], ids=["greedy drafts", "shared noise"])
def test_drafts_and_plans_change_no_token(plain, policy, shared):
    assert torch.equal(chains(shared, POLICIES[policy])[0], plain)


def test_shared_noise_is_accepted_more_often():
    assert chains(True, POLICIES["every draft"])[1] > 1.2 * chains(False, POLICIES["every draft"])[1]
