"""The counts of the latest steps."""

from __future__ import annotations

import numpy as np
import torch

from deepinfer_plugin.eplb.window import Window
from deepinfer_plugin.kernels import select
from deepinfer_plugin.model.expert_map import ExpertMap

OPS = select("cpu", "reference")


def test_a_window_holds_the_latest_steps():
    places = ExpertMap(np.array([[0, 1, 2, 3]] * 2), 4, 2)
    window = Window(places, 3)
    assert not window.record() and window.snapshot()().shape == (0, 2, 4)
    for step in range(5):
        for layer in range(2):
            places.assign(OPS, layer, torch.full((step + 1, 1), layer))
        assert window.record() and not window.record()
    read = window.snapshot()
    places.assign(OPS, 0, torch.tensor([[3]]))
    window.record()
    assert read()[:, 0, 0].tolist() == [3, 4, 5] and read()[:, 1, 1].tolist() == [3, 4, 5]
