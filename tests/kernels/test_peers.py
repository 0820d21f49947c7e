"""What is written to peers lands at its place: kernels of ``kernels/cuda/peers.py``, on a GPU or, with
TRITON_INTERPRET=1, without one (``test_interpreter.py``). All peers are this one device's."""

from __future__ import annotations

import pytest
import torch

from deepinfer_plugin.kernels import cuda as provider
from deepinfer_plugin.model.parallel import ascending_sum

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.skipif(
    provider.unavailable(torch.device(DEVICE)) is not None, reason="needs Hopper, or TRITON_INTERPRET=1"
)
OFFSET = 256  # bytes before what is sent


@pytest.mark.parametrize(("groups", "size", "rows"), [(1, 2, 5), (2, 1, 3), (2, 2, 1), (1, 4, 3), (2, 4, 9)])
@pytest.mark.parametrize(("dtype", "width"), [(torch.bfloat16, 96), (torch.uint8, 264), (torch.bfloat16, 1056)])
def test_every_result_comes_to_its_place(groups, size, rows, dtype, width):
    from deepinfer_plugin.kernels.cuda import peers

    torch.manual_seed(0)
    ranks, choices, item = groups * size, 3, dtype.itemsize
    bounds = [group * rows + rows * member // size for group in range(groups) for member in range(size)]
    bounds.append(groups * rows)
    most = -(-rows // size)
    memories = [torch.full((OFFSET + most * choices * width * item,), 255, dtype=torch.uint8, device=DEVICE)
                for _ in range(ranks)]  # fmt: skip
    addresses = torch.tensor([memory.data_ptr() for memory in memories], device=DEVICE)
    holders = torch.randint(-1, ranks, (groups * rows, choices), device=DEVICE)  # -1: nobody
    whole = torch.randint(0, 255, (groups * rows, choices, width), device=DEVICE)
    for rank in range(ranks):
        made = whole.to(torch.uint8 if dtype == torch.uint8 else torch.float32)
        made[holders != rank] = 7
        peers.send(made, torch.where(holders == rank, 5, -1), addresses, OFFSET, rows, size, dtype)
    for rank, memory in enumerate(memories):
        assert (memory[:OFFSET] == 255).all()
        own = slice(bounds[rank], bounds[rank + 1])
        count = own.stop - own.start
        end = OFFSET + count * choices * width * item
        found = memory[OFFSET:end].view(dtype).view(count, choices, width)
        there = holders[own] >= 0
        assert torch.equal(found[there], whole[own][there].to(dtype))
        assert (memory[OFFSET:end].view(count, choices, width * item)[~there] == 255).all()
        assert (memory[end:] == 255).all()


@pytest.mark.parametrize("choices", [1, 3, 6, 8])
def test_choices_are_added_in_ascending_order(choices):
    """To the bit; those of no expert not at all, whatever their place holds."""
    from deepinfer_plugin.kernels.cuda import peers

    torch.manual_seed(0)
    arrived = torch.randn(9, choices, 1056).mul(100).to(DEVICE, torch.bfloat16)
    ids = torch.rand(9, 40).argsort(-1)[:, :choices].to(DEVICE)
    ids[7, : choices - 1], ids[8] = -1, -1
    right = ascending_sum(arrived.masked_fill((ids < 0)[..., None], 0), ids)
    found = peers.ascending_sum(arrived.masked_fill((ids < 0)[..., None], torch.nan), ids)
    assert torch.equal(found, right)


def test_nothing_is_sent_without_rows():
    from deepinfer_plugin.kernels.cuda import peers

    made = torch.empty(0, 3, 64, device=DEVICE)
    peers.send(made, torch.empty(0, 3, dtype=torch.int64, device=DEVICE), made, 0, 0, 1, torch.bfloat16)
    assert peers.ascending_sum(made.to(torch.bfloat16), torch.empty(0, 3, dtype=torch.int64)).shape == (0, 64)
