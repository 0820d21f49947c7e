"""Copies between host and device that wait for neither: through pinned memory, in the order of the current stream."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor


def to_device(values: Any, device: torch.device | str) -> Tensor:
    """A list or an array of numbers, on ``device`` for whatever runs there next."""
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    return tensor if torch.device(device).type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def to_host(tensor: Tensor) -> Tensor:
    """On the host once the device has come to here; before that, anything may be in it."""
    if tensor.device.type == "cpu":
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
