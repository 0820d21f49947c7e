"""The parts of the served class that need no server; tests/server drives the whole of it."""

import pytest
import torch

pytest.importorskip("sglang")

from deepinfer_plugin.model import V41
from deepinfer_plugin.runtime.served_model import Head
from deepinfer_plugin.runtime.threads import compute_threads


def test_a_small_model_computes_on_one_thread():
    assert compute_threads(128, cores=8) == 1
    assert compute_threads(5120, cores=8) == 8


def test_head_is_the_networks_own_in_float32(tiny):
    network = V41.load(tiny).network
    head = Head(network)
    hidden = torch.randn(3, network.config.hidden_size).bfloat16()
    logits = head.quant_method.apply(head, hidden)
    assert logits.dtype == torch.float32 and torch.equal(logits, network.logits(hidden))
    # --enable-fp32-lm-head hands the head float32 copies of bf16 states: the same logits
    assert torch.equal(head.quant_method.apply(head, hidden.float()), logits)
    assert not hasattr(head, "weight") and not list(head.parameters())  # SGLang would multiply by it, or load it twice
