"""What all contracts share: the error, the argument checks, and how a call finds its provider."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

ACTIVATION = (torch.bfloat16, torch.float32)
BF16 = (torch.bfloat16,)
F32 = (torch.float32,)
I64 = (torch.int64,)
I32 = (torch.int32,)
U8 = (torch.uint8,)
BOOL = (torch.bool,)
E4M3 = (torch.float8_e4m3fn,)
E8M0 = (torch.float8_e8m0fnu,)

BLOCK = 32  # channels per UE8M0 scale
LATENT_BLOCK = 16  # channels per E4M3 scale of a compressed latent

Shape = tuple[int | None, ...]


class OpError(ValueError):
    """An argument breaks the contract of an op; the message names op and argument, what was given and what is legal."""


def fail(op: str, arg: str, got: object, expected: object) -> NoReturn:
    raise OpError(f"{op}: {arg} must be {expected}, got {got}")


def check(op: str, arg: str, tensor: Tensor | None, shape: Shape, dtypes: tuple[torch.dtype, ...]) -> None:
    """Raise OpError unless ``tensor`` has one of ``dtypes`` and ``shape`` (None: any size). About a microsecond."""
    if not isinstance(tensor, Tensor):
        fail(op, arg, type(tensor).__name__, "a tensor")
    if tensor.dtype not in dtypes:
        fail(op, arg, _name(tensor.dtype), " or ".join(_name(dtype) for dtype in dtypes))
    actual = tensor.shape
    if len(actual) != len(shape) or any(
        want is not None and want != have for want, have in zip(shape, actual, strict=True)
    ):
        wanted = ", ".join("*" if size is None else str(size) for size in shape)
        fail(op, arg, f"shape {list(actual)}", f"of shape [{wanted}]")


def check_multiple(op: str, arg: str, size: int, block: int) -> None:
    if size % block or size == 0:
        fail(op, arg, f"last dimension {size}", f"a positive multiple of {block} channels wide")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Prepared:
    """A weight in the layout of the providers that read it, opaque to callers.

    It holds all that its ops read: the original tensors, which are its own from then on, or copies of them. So whoever
    drops those keeps a weight in memory once. After writing to them, prepare again (a single expert:
    ``replace_expert``).
    """

    kind: str  # the prepare op that made it
    shape: tuple[int, ...]
    data: Mapping[str, Any]  # provider name -> its layout


class OpTable:
    """Base of the contract classes. ``ops.Ops`` fills the three tables when it is made."""

    choices: dict[str, str]  # op -> provider name
    _run: dict[str, Callable[..., Any]]  # op -> implementation
    _prepare: dict[str, dict[str, Callable[..., Any]]]  # prepare op -> provider name -> implementation

    def _prepared(self, kind: str, shape: tuple[int, ...], *weights: Any) -> Prepared:
        return Prepared(kind, shape, {name: make(*weights) for name, make in self._prepare[kind].items()})

    def _layout(self, op: str, arg: str, prepared: Prepared, kind: str) -> Any:
        if not isinstance(prepared, Prepared) or prepared.kind != kind:
            got = f"the result of {prepared.kind}" if isinstance(prepared, Prepared) else type(prepared).__name__
            fail(op, arg, got, f"the result of {kind}")
        return prepared.data[self.choices[op]]
