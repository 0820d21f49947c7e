"""What ``benchmarks/step.py`` measures on a GPU is a network that runs: here a small one, on a CPU."""

from math import prod

import pytest
import step
import torch
from cuda_timing import Parts

from deepinfer_plugin.kernels import select
from deepinfer_plugin.model.memory import PageLayout, PagePool, StateLayout, StatePool


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_share_of_the_network_runs_and_has_a_floor(small, ranks):
    config = step.share(small, ranks)
    assert config.experts * ranks == small.experts and config.engram.rows[0] == small.engram.rows[0] // ranks
    network = step.build(config, step.in_parts(select("cpu", "reference"), Parts()), "cpu")
    network.prepare()
    pages = PagePool.allocate(PageLayout.of(config, step.PAGE), 1 + 2 * 3, "cpu")
    pages.pages.random_(0, 256).bitwise_and_(0x77)
    state = StatePool(StateLayout.of(config), 3, "cpu")
    rows = step.batch(config, pages, 8, 4, 300)
    with torch.inference_mode():
        hidden = network(rows, pages, state)
    assert hidden.shape == (8, config.hidden_size) and hidden.isfinite().all()
    floor = step.floor_ms(network, rows, 4, 300)
    assert set(floor) == set(step.PARTS) and min(floor.values()) > 0
    weights = sum(prod(each.prepared.shape) for each in network.modules() if isinstance(each, step.Dense | step.Linear))
    assert weights / 4.3e12 * 1e3 < sum(floor.values()) < 1
