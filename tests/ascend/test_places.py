"""Rows of a pool read by their places: as the widest words they consist of, the same bytes whatever the strides."""

from __future__ import annotations

import pytest
import torch

from deepinfer_plugin.kernels.ascend import places


def section(page: int, offset: int, groups: int, width: int) -> torch.Tensor:
    """[5, groups, width] in pages of ``page`` bytes."""
    pool = torch.randint(0, 256, (5, page), dtype=torch.uint8)
    return pool[:, offset : offset + groups * width].unflatten(1, (groups, width))


@pytest.mark.parametrize(
    ("page", "offset", "width", "word"),
    [
        (4096, 0, 528, torch.int64),  # a window key
        (4096, 32, 32, torch.int64),  # scales of a latent
        (4096, 64, 4, torch.int32),  # scales of an index key
        (4098, 64, 528, torch.int16),  # pages that are no words apart
        (4096, 3, 256, torch.uint8),  # a section that begins anywhere
        (4095, 0, 256, torch.uint8),
    ],
)
def test_words(page, offset, width, word):
    memory = section(page, offset, 7, width)
    assert places.words(memory).dtype == word
    ids = torch.tensor([[4, 0, 3], [2, 2, 1]]), torch.tensor([[6, 0, 5], [1, 6, 3]])
    got = places.read(memory, *ids)
    assert got.dtype == torch.uint8 and torch.equal(got, memory[ids])


def test_other_types_and_columns_are_read_as_they_are():
    for memory in (torch.randn(4, 3, 8), torch.randint(0, 256, (4, 3, 8), dtype=torch.uint8)[..., ::2]):
        assert places.words(memory) is memory
        ids = torch.tensor([3, 0]), torch.tensor([2, 1])
        assert torch.equal(places.read(memory, *ids), memory[ids])
