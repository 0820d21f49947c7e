"""The streaming load: from the shards, or from any iterator of tensors, into the parameters of a model.

``load_into`` reads each tensor from its file straight into the memory of its parameter, so a load needs no memory
beside the weights themselves and leaves no mapped file behind.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Mapping
from io import FileIO
from itertools import groupby
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from tqdm import tqdm

from .checkpoint import (
    DTYPES,
    Checkpoint,
    CheckpointError,
    TensorSpec,
    canonical,
    checkpoint_bytes,
    confidence_name,
    expected_tensors,
    is_tied,
    is_vision,
)
from .config import V41Config

__all__ = ["Checkpoint", "CheckpointError", "checkpoint_bytes", "expected_tensors", "load_into", "load_tensors"]

logger = logging.getLogger(__name__)

CHUNK = 64 << 20  # bytes read at a time


class Loadable(Protocol):
    config: V41Config

    def parameter_slices(self) -> Mapping[str, Tensor]:
        """The contiguous destination of every checkpoint tensor, by its name in ``expected_tensors``."""


def load_into(model: Loadable, checkpoint: Checkpoint, progress: bool = True) -> None:
    """Fill the parameters of ``model``, shard by shard in file order; ``progress``: a bar in bytes on stderr.

    A parameter on a device is filled through one staging buffer of 64 MiB. Without a confidence head in the checkpoint
    (``checkpoint.has_confidence``) its parameter is left as it is.

    Raises:
        CheckpointError: a tensor has no destination or one of another shape or dtype, or a parameter element would be
            written never or twice (all before the first byte); a file has changed since it was checked.
    """
    specs = {name: TensorSpec(stored.shape, DTYPES[stored.dtype]) for name, stored in checkpoint.tensors.items()}
    targets = _targets(model, specs, checkpoint.path)
    order = sorted(checkpoint.tensors.items(), key=lambda item: (item[1].shard, item[1].offset))
    units = {"unit": "B", "unit_scale": True, "unit_divisor": 1024}
    with tqdm(total=checkpoint.nbytes, desc="weights", file=sys.stderr, disable=not progress, **units) as bar:
        reader = _Reader(bar)
        for shard, tensors in groupby(order, key=lambda item: item[1].shard):
            with FileIO(shard) as file:
                for name, stored in tensors:
                    file.seek(stored.offset)
                    if not reader.fill(targets[name], file):
                        raise CheckpointError(checkpoint.path, [f"{name}: {shard.name} changed since it was checked"])


def load_tensors(model: Loadable, tensors: Iterable[tuple[str, Tensor]]) -> bool:
    """Fill the parameters of ``model`` from (name, tensor) pairs in any order, by the rules of a checkpoint directory.

    Returns:
        whether the confidence head was among them.

    Raises:
        CheckpointError: as ``load_into``; and by name an unknown, repeated or wrong tensor when it comes, missing ones
            at the end.
    """
    where, stages = "weights", model.config.draft_stages
    missing = expected_tensors(model.config)
    targets = _targets(model, missing, where)
    for name, tensor in tensors:
        key = canonical(name)
        if is_vision(name) or is_tied(name, stages):
            continue
        spec = missing.pop(key, None)
        if spec is None:
            kind = "given twice" if key in targets else "not a tensor of this model"
            raise CheckpointError(where, [f"{name}: {kind}"])
        found = TensorSpec(tuple(tensor.shape), tensor.dtype)
        if found != spec:
            raise CheckpointError(where, [f"{name}: is {found}, config.json implies {spec}"])
        targets[key].copy_(tensor.view(targets[key].dtype))
    has_confidence = missing.pop(confidence_name(model.config), None) is None
    if missing:
        raise CheckpointError(where, [f"{name}: missing; expected {spec}" for name, spec in missing.items()])
    if model.config.dspark and not has_confidence:
        logger.warning("no confidence head: drafts are verified whole, never scheduled")
    return has_confidence


class _Reader:
    """Bytes from files into tensors on any device."""

    def __init__(self, bar: tqdm):
        self.bar = bar
        self.staging: Tensor | None = None

    def fill(self, target: Tensor, file: FileIO) -> bool:
        """Read ``target.nbytes`` from where ``file`` stands; False if it ends before."""
        data = target.flatten().view(torch.uint8)
        for piece in data.split(CHUNK):
            buffer = piece if piece.device.type == "cpu" else self._stage(piece)
            view = memoryview(buffer.numpy())  # type: ignore[arg-type]
            while view:
                count = file.readinto(view)
                if not count:
                    return False
                view = view[count:]
            if buffer is not piece:
                piece.copy_(buffer)
            self.bar.update(piece.nbytes)
        return True

    def _stage(self, piece: Tensor) -> Tensor:
        if self.staging is None:
            self.staging = torch.empty(CHUNK, dtype=torch.uint8, pin_memory=piece.device.type == "cuda", device="cpu")
        return self.staging[: piece.nbytes]


# ---- destinations ---------------------------------------------------------------------------------------------------


def _targets(model: Loadable, tensors: Mapping[str, TensorSpec], where: str | Path) -> dict[str, Tensor]:
    """The destination of every tensor, after checking that together they fill every parameter element exactly once."""
    slices = {name: target.detach() for name, target in model.parameter_slices().items()}
    problems = []
    for name, spec in tensors.items():
        target = slices.get(name)
        if target is None:
            problems.append(f"{name}: the model has no parameter for it")
            continue
        own = TensorSpec(tuple(target.shape), torch.int8 if target.dtype == torch.uint8 else target.dtype)
        if own != spec:
            problems.append(f"{name}: is {spec}, its parameter is {own}")
        elif not target.is_contiguous():
            problems.append(f"{name}: its parameter is not contiguous")
    unfilled = slices.keys() - tensors.keys() - {confidence_name(model.config)}
    problems += [f"{name}: a parameter of the model, not a tensor of the checkpoint" for name in sorted(unfilled)]
    problems += _uncovered(model, slices)
    if problems:
        raise CheckpointError(where, problems)
    return slices


def _uncovered(model: Loadable, slices: Mapping[str, Tensor]) -> list[str]:
    """Parameter memory that no tensor, or more than one, would write: the slices must tile the storages they lie in."""
    storages: dict[int, list[tuple[int, int, str]]] = {}
    sizes: dict[int, int] = {}
    for name, target in slices.items():
        storage = target.untyped_storage()
        begin = int(target.storage_offset()) * target.element_size()
        storages.setdefault(storage.data_ptr(), []).append((begin, begin + target.nbytes, name))
        sizes[storage.data_ptr()] = storage.nbytes()
    problems = []
    for key, spans in storages.items():
        position, before = 0, "the start of its parameter"
        for begin, end, name in [*sorted(spans), (sizes[key], sizes[key], "the end of its parameter")]:
            if begin > position:
                problems.append(f"{begin - position} bytes between {before} and {name} are never written")
            elif begin < position:
                problems.append(f"{before} and {name} write the same bytes")
            position, before = max(position, end), name
    if isinstance(model, torch.nn.Module):
        for name, parameter in model.named_parameters():
            if parameter.untyped_storage().data_ptr() not in storages:
                problems.append(f"{name}: a parameter that no tensor of the checkpoint fills")
    return problems
