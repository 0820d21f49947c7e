"""A check of a provider's hyper-connections when an op table is made.

A device library was seen whose collapse ignored the mixing weights: the network then speaks fluent nonsense, because
the residual is a plausible 0.356 times the embedding. Errors of that kind show on a handful of numbers, so those are
asked for at start, on the device, and compared with the reference on the CPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import reference
from .ops import OP_NAMES, SEQUENCES, Ops

ROWS, STREAMS, SIZE = 3, 4, 192
TOLERANCE = 0.02  # of the largest value; bf16 keeps two decimal digits


class IdentityError(ValueError):
    """A provider's op does not do what its contract says on the simplest input; the message names both."""


def check(ops: Ops) -> None:
    """Ask the hyper-connections of an op table for results that are known.

    Raises:
        IdentityError: weights are ignored or applied at the wrong place.
    """
    right = Ops(torch.device("cpu"), dict.fromkeys(OP_NAMES, "reference"), {"reference": reference.OPS})
    generator = torch.Generator("cpu").manual_seed(0)
    # Whoever makes a model may have another default type and device.
    here: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float32, device="cpu")

    mixes = (2 + STREAMS) * STREAMS
    streams, out = draw(ROWS, STREAMS, SIZE).to(torch.bfloat16), draw(ROWS, SIZE).to(torch.bfloat16)
    fn, base = draw(mixes, STREAMS * SIZE) * (STREAMS * SIZE) ** -0.5, draw(mixes)
    scale = torch.tensor([0.7, 1.3, 0.9], **here)
    weight = draw(SIZE).to(torch.bfloat16)
    # Every stream alone, then all of them with unequal weights.
    one_hot = torch.eye(STREAMS, **here)[:ROWS]
    uneven = torch.tensor([0.1, 0.2, 0.3, 0.4], **here).expand(ROWS, -1).contiguous()
    shift = torch.eye(STREAMS, **here).roll(1, 0).expand(ROWS, -1, -1).contiguous()  # stream j goes to the next one
    for op, arguments in (
        ("hc_mix", (streams, fn, base, scale, 1e-20, 1e-6, 20)),
        ("hc_mix", (streams, fn * 0, base, scale, 1e-20, 1e-6, 20)),
        ("hc_collapse", (streams, one_hot)),
        ("hc_collapse", (streams, uneven)),
        ("hc_expand", (out, streams, one_hot, shift)),
        ("hc_site", (streams, uneven, fn, base, scale, weight, 1e-20, 1e-6, 20, out, one_hot, shift)),
    ):
        got = getattr(ops, op)(*(_move(argument, ops.device) for argument in arguments))
        want = getattr(right, op)(*arguments)
        pairs = zip(got, want, strict=True) if isinstance(want, tuple) else [(got, want)]
        for actual, expected in pairs:
            error = (actual.to("cpu", torch.float32) - expected.to(torch.float32)).abs().max()
            if not error <= TOLERANCE * expected.abs().max():  # a NaN too
                forced = SEQUENCES.get(op, (op,))[0]
                raise IdentityError(
                    f"{op} of kernel provider {ops.choices[forced]!r} on {ops.device} is off by {float(error):.3g} on "
                    "a known input: mixing weights are ignored or misplaced, and the model would answer nonsense; "
                    f"force another provider for it ({forced}=reference)"
                )


def _move(argument: object, device: torch.device) -> object:
    return argument.to(device) if isinstance(argument, Tensor) else argument
