from __future__ import annotations

import pytest
import torch
from chi_square import p_value

from deepinfer_plugin.speculative.randomness import ACCEPT, DRAFT, RESIDUAL, TARGET, uniform

N = 200_000


def even(values: torch.Tensor, cells: int) -> float:
    counts = torch.bincount((values * cells).long(), minlength=cells)
    return p_value(counts, torch.full((cells,), len(values) / cells))


def ids(count: int = N) -> torch.Tensor:
    return torch.arange(count)


STREAMS = {
    "positions": lambda: uniform(torch.tensor(7), ids(), ACCEPT),
    "seeds": lambda: uniform(ids(), torch.tensor(31), ACCEPT),
    "large seeds": lambda: uniform(ids() * 2**40 - 2**62, torch.tensor(31), TARGET),
    "rounds": lambda: uniform(torch.tensor(7), torch.tensor(31), DRAFT, ids()),
    "purposes": lambda: torch.stack([uniform(torch.tensor(7), ids(N // 4), kind) for kind in range(4)], 1).flatten(),
    "sequence": lambda: uniform(torch.tensor(7), ids() + 31, DRAFT, ids()),
}


@pytest.mark.parametrize("name", STREAMS)
def test_even_and_independent_of_the_number_before(name):
    values = STREAMS[name]()
    assert values.min() > 0 and values.max() < 1
    assert 1e-4 < even(values, 256) < 1 - 1e-4
    assert 1e-4 < even(values * 4096 % 1, 256) < 1 - 1e-4  # lower bits
    pairs = (values[:-1] * 16).long() * 16 + (values[1:] * 16).long()
    counts = torch.bincount(pairs, minlength=256)
    assert 1e-4 < p_value(counts, torch.full((256,), len(pairs) / 256)) < 1 - 1e-4
    assert len(values.unique()) == len(values)


def test_streams_of_one_request_do_not_share_numbers():
    seed = torch.tensor(7)
    streams = [
        uniform(seed, ids(2000), kind, round) for kind in (ACCEPT, RESIDUAL, TARGET, DRAFT) for round in range(3)
    ]
    assert len(torch.cat(streams).unique()) == 12 * 2000


def test_a_number_does_not_depend_on_its_batch():
    seeds, positions = torch.randint(-(2**62), 2**62, (50,)), torch.randint(0, 2**20, (50, 5))
    batch = uniform(seeds[:, None], positions, DRAFT, 3)
    assert batch.shape == (50, 5)
    for row in range(50):
        assert torch.equal(uniform(seeds[row : row + 1], positions[row], DRAFT, torch.tensor(3)), batch[row])


def test_values_are_pinned():
    """Seeded requests repeat across versions and devices only as long as these hold."""
    expected = [0.9711, 0.4905, 0.9669]
    assert [round(value, 4) for value in uniform(torch.arange(3), torch.arange(3), RESIDUAL).tolist()] == expected
