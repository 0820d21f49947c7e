from __future__ import annotations

import torch

from deepinfer_plugin.speculative.acceptance import accept

K, V = 5, 2


def block(rows_each):
    """Random tokens of the target, drafts that are often right, and first rows."""
    generator = torch.Generator().manual_seed(0)
    chosen = torch.randint(0, V, (sum(rows_each),), generator=generator)
    drafts = torch.randint(0, V, (len(rows_each), K), generator=generator)
    return chosen, torch.tensor([0, *torch.tensor(rows_each).cumsum(0).tolist()]), drafts


def test_the_first_wrong_draft_ends_a_block():
    drafts = torch.tensor([[1, 2, 3, 4, 5], [1, 2, 3, 4, 5], [1, 2, 3, 4, 5]])
    chosen = torch.tensor([1, 2, 9, 4, 5, 6, 1, 2, 3, 4, 5, 6, 7])  # row r's successor
    verdict = accept(chosen, torch.tensor([0, 6, 12, 13]), drafts)
    assert verdict.accepted.tolist() == [2, 5, 0] and verdict.emitted.tolist() == [3, 6, 1]
    assert verdict.tokens.tolist() == [[1, 2, 9, -1, -1, -1], [1, 2, 3, 4, 5, 6], [7, -1, -1, -1, -1, -1]]


def test_ragged_batch_equals_each_request_alone():
    rows_each = [6, 1, 4, 6, 2, 3, 6, 5] * 20
    chosen, cu_rows, drafts = block(rows_each)
    together = accept(torch.cat([chosen, chosen[:7]]), cu_rows, drafts)  # padding rows
    assert together.accepted.unique().tolist() == [*range(K + 1)]
    assert (together.accepted < torch.tensor(rows_each)).all()
    for b, rows in enumerate(rows_each):
        alone = accept(chosen[cu_rows[b] : cu_rows[b + 1]], torch.tensor([0, rows]), drafts[b : b + 1])
        assert torch.equal(alone.tokens[0], together.tokens[b]) and alone.accepted[0] == together.accepted[b]
