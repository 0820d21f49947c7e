"""Reading and writing rows of a pool through one flat view of its memory.

Pools are strided views into pages and slots. An NPU op that gets such a view may copy the whole pool to make it dense,
so rows are addressed here instead: an element's number is an int64 product of ids and strides and may exceed 2^31.
Nothing waits for the host: rows that are not kept repeat the write of a row that is.
"""

from __future__ import annotations

from math import gcd

import torch
from torch import Tensor


def flat(memory: Tensor) -> Tensor:
    """All elements of the storage behind a view, in one dimension; a view itself."""
    size = memory.untyped_storage().nbytes() // memory.element_size()
    return memory.as_strided((size,), (1,), 0)


def start(memory: Tensor, *ids: Tensor) -> Tensor:
    """Number in ``flat`` of the first element at ``memory[ids]``; int64, of the shape of the ids."""
    at = torch.full_like(ids[0], memory.storage_offset())
    for index, stride in zip(ids, memory.stride(), strict=False):
        at = at + index * stride
    return at


def inside(memory: Tensor, dims: int) -> Tensor:
    """Numbers of the elements of one row, relative to its first, int64 [elements]; a row is the last ``dims``
    dimensions."""
    at = torch.zeros((), dtype=torch.int64, device=memory.device)
    for size, stride in zip(memory.shape[-dims:], memory.stride()[-dims:], strict=True):
        at = at[..., None] + torch.arange(size, dtype=torch.int64, device=memory.device) * stride
    return at.flatten()


def words(memory: Tensor) -> Tensor:
    """A view of bytes as the widest integers that its rows consist of: an address is gathered for each."""
    if memory.dtype != torch.uint8 or memory.stride(-1) != 1:
        return memory
    unit = gcd(memory.shape[-1], memory.storage_offset(), *memory.stride()[:-1])
    for dtype in (torch.int64, torch.int32, torch.int16):
        if unit % dtype.itemsize == 0:
            return memory.view(dtype)
    return memory


def read(memory: Tensor, *ids: Tensor) -> Tensor:
    """``memory[ids]`` without a copy of the pool: [*ids.shape, *rest]. Ids must be in range."""
    dims, wide = memory.dim() - len(ids), words(memory)
    at = start(wide, *ids)[..., None] + inside(wide, dims)
    return flat(wide).index_select(0, at.flatten()).view(*ids[0].shape, *wide.shape[-dims:]).view(memory.dtype)


def write(memory: Tensor, rows: Tensor, keep: Tensor, *ids: Tensor) -> None:
    """``memory[ids] = rows`` where ``keep``; ids int64 [R], rows [R, *rest], keep bool [R]. Ids of other rows may be
    anything."""
    count = keep.shape[0]
    if count == 0:
        return
    dims = memory.dim() - len(ids)
    some = keep.any()
    source = torch.arange(count, device=keep.device)
    source = torch.where(keep, source, keep.to(torch.int32).argmax())
    place = start(memory, *ids).index_select(0, source)
    place = torch.where(some, place, memory.storage_offset())  # no row is kept: an element gets its own value back
    at = (place[:, None] + inside(memory, dims)).flatten()
    target = flat(memory)
    values = torch.where(some, rows.reshape(count, -1).index_select(0, source).flatten(), target.index_select(0, at))
    target.index_put_((at,), values)
