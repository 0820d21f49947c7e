"""What of a network's weights is in memory after ``prepare``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

from torch import Tensor, UntypedStorage

from deepinfer_plugin.kernels.reference.numeric import Weight
from deepinfer_plugin.model.network import Network


def storages(network: Network) -> list[UntypedStorage]:
    """Each one once: of parameters and of what layouts read."""
    found = [parameter for parameter in network.parameters()]
    for module in network.modules():
        prepared: Any = getattr(module, "prepared", None)
        if prepared is not None:
            found += [tensor for layout in prepared.data.values() for tensor in _tensors(layout)]
    return list({tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in found}.values())


def held_bytes(network: Network) -> int:
    return sum(storage.nbytes() for storage in storages(network))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Weight):  # its float64 copy is a cache
        yield from _tensors(value.load)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)
    elif is_dataclass(value):
        yield from _tensors([getattr(value, field.name) for field in fields(value)])
    elif isinstance(value, partial):
        yield from _tensors(value.args)
    else:
        yield from _tensors([cell.cell_contents for cell in getattr(value, "__closure__", None) or ()])
