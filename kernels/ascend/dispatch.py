"""Rows among ranks by torch_npu's expert-parallel ops. Never executed on hardware (docs/ascend.md).

The ops send a token to its experts and bring back a weighted sum. Here every rank stands as one expert and every token
chooses one, with weight one: what comes back is what a rank made of the row, unchanged. So the ops' buffer does not
grow with the number of experts, layers with other experts make the same calls, and the caller adds in its own order.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

from .vendor import has, op

ROWS = 512  # of a rank in one call, at most
HIDDEN = range(1024, 8193)  # channels of a row
RANKS = range(2, 769)
OPS = _DISPATCH, _COMBINE = "npu_moe_distribute_dispatch_v2", "npu_moe_distribute_combine_v2"


class Dispatch:
    """One communicator, which nothing else may use. ``name``: as HCCL knows it; ``buffer``: its bytes."""

    def __init__(self, name: str, rank: int, size: int, buffer: int):
        self.name, self.rank, self.size, self.buffer = name, rank, size, buffer

    def rows(self, hidden: int, dtype: torch.dtype) -> int:
        """How many rows of ``hidden`` channels each rank gives to one call; 0: these rows cannot be sent."""
        if dtype != torch.bfloat16 or hidden not in HIDDEN or self.size not in RANKS:
            return 0
        sent, back = _up(_up(2 * hidden, 32) + 64, 512), _up(2 * hidden, 512)
        # Twice for what comes back: the ops count a shared expert, which we do not give them.
        return min(ROWS, self.buffer // (2 * (self.size * sent + 2 * back)))

    def send(self, x: Tensor, ranks: Tensor, live: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
        """x bf16 [n, H], ranks int32 [n] to which its rows go, live bool [n]: rows that go anywhere come first. All
        ranks call with the same n, which is not 0 even if none of their rows is live.

        Returns:
            Rows that arrived, bf16 [n * size, H], as many as the next says; the others hold anything. How many: int64
            [1]. What ``back`` needs.
        """
        arrived, _, whence, counts, received, _, _ = op(_DISPATCH)(
            x,
            ranks[:, None],
            self.name,
            self.size,
            self.rank,
            self.size,
            x_active_mask=live,
            global_bs=x.shape[0] * self.size,
            expert_token_nums_type=1,
        )
        return arrived, counts, (whence, received)

    def back(self, results: Tensor, ranks: Tensor, live: Tensor, sent: tuple[Tensor, Tensor]) -> Tensor:
        """results bf16 [n * size, H] of the rows that arrived -> [n, H] of the rows that were sent; anything of rows
        that are not live."""
        whence, received = sent
        return op(_COMBINE)(
            results,
            ranks[:, None],
            whence,
            received,
            torch.ones(ranks.shape[0], 1, dtype=torch.float32, device=results.device),
            self.name,
            self.size,
            self.rank,
            self.size,
            x_active_mask=live,
            global_bs=ranks.shape[0] * self.size,
        )


def there() -> bool:
    """Whether the installed torch_npu has the ops."""
    return all(map(has, OPS))


def buffer_bytes() -> int:
    """Of a communicator: ``HCCL_BUFFSIZE``, MiB, 200 where it is not set."""
    return int(os.environ.get("HCCL_BUFFSIZE") or 200) << 20


def _up(size: int, unit: int) -> int:
    return -(-size // unit) * unit
