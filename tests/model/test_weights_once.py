"""A weight is in memory once: where its layout reads it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from deepinfer_plugin.cli import build
from deepinfer_plugin.kernels import OP_NAMES, Ops, cuda, reference, select
from deepinfer_plugin.kernels.reference import formats
from deepinfer_plugin.model import V41
from deepinfer_plugin.model.checkpoint import DTYPE_NAMES, Checkpoint, StoredTensor, expected_tensors
from deepinfer_plugin.model.config import V41Config
from deepinfer_plugin.model.engram_table import EngramTable
from deepinfer_plugin.model.moe import Experts
from deepinfer_plugin.model.network import Network
from deepinfer_plugin.model.profiles import profile_named
from deepinfer_plugin.model.released import RELEASED
from deepinfer_plugin.model.weights import load_into
from deepinfer_plugin.runtime.memory_plan import weight_bytes_of

from ..held import held_bytes


def loaded(path, ops) -> Network:
    config = V41Config.load(path)
    network = Network(config, ops, profile_named("model"), EngramTable.load(path, config))
    load_into(network, Checkpoint.open(path, config), progress=False)
    return network


def all_experts(network):
    return [module for module in network.modules() if isinstance(module, Experts)]


@pytest.fixture
def ops() -> Ops:
    """The reference, but for experts the cuda provider, whose layout is whole in itself."""
    choices = dict.fromkeys(OP_NAMES, "reference") | {"moe_experts": "cuda"}
    return Ops(torch.device("cpu"), choices, {"reference": reference.OPS, "cuda": cuda.every_op()})


def test_experts_are_in_memory_as_their_kernels_read_them_only(tiny, ops, monkeypatch):
    network = loaded(tiny, ops)
    experts = all_experts(network)
    given = [tuple(part.clone() for part in (e.w13, e.s13, e.w2, e.s2)) for e in experts]
    loads = [StorageWeakRef(getattr(e, name).untyped_storage()) for e in experts for name in e.raw]
    alive = []
    original = Experts.prepare

    def prepare(self):
        alive.append(sum(not each.expired() for each in loads))
        original(self)

    monkeypatch.setattr(Experts, "prepare", prepare)
    network.prepare()
    assert alive == [len(loads) - 4 * done for done in range(len(experts))], "a layer at a time"
    assert all(each.expired() for each in loads)

    for module, parts in zip(experts, given, strict=True):  # and nothing is lost
        packed = torch.empty(module.expert_bytes, dtype=torch.uint8)
        for slot in range(module.slots):
            read = module.ops.read_expert(module.prepared, slot)
            for at in (0, 2):
                got = formats.mxfp4_dequant(*read[at : at + 2])
                assert torch.equal(got, formats.mxfp4_dequant(parts[at][slot], parts[at + 1][slot]))
            module.read(slot, packed)  # as it is laid out
            views = module.ops.expert_views(module.prepared, slot)
            assert torch.equal(packed, torch.cat([part.flatten().view(torch.uint8) for part in views]))


def test_what_the_reference_reads_is_what_was_loaded(tiny):
    model = V41.load(tiny)
    assert held_bytes(model.network) == Checkpoint.open(tiny, model.config).nbytes


def test_float32_activations_are_served_from_the_layout(tiny, ops):
    """The same values: the reference multiplies with what it finds there."""
    network, plain = loaded(tiny, ops), loaded(tiny, select("cpu", "reference"))
    for each in (network, plain):
        each.prepare()
    x = torch.randn(5, network.config.hidden_size)
    for mine, other in zip(all_experts(network), all_experts(plain), strict=True):
        ids = torch.stack([torch.randperm(mine.slots)[:2] for _ in range(5)])
        ids[0] = -1
        weights = torch.rand(5, 2)
        assert torch.equal(mine(x, weights, ids), other(x, weights, ids))


def test_an_expert_that_moved_is_the_expert(tiny, ops):
    """As it is laid out, or as in a checkpoint; the same as ``replace_expert`` makes of what ``read_expert`` read."""
    for each in (ops, select("cpu", "reference")):
        here, there, replaced = (loaded(tiny, each) for _ in range(3))
        for network in (here, there, replaced):
            network.prepare()
        here, there, replaced = (all_experts(network)[1] for network in (here, there, replaced))
        packed, again = torch.empty(2, here.expert_bytes, dtype=torch.uint8)
        here.read(3, packed)
        there.write(0, packed)
        each.replace_expert(replaced.prepared, 0, *each.read_expert(here.prepared, 3))
        for other in (there, replaced):
            other.read(0, again)
            assert torch.equal(again, packed)
            for mine, theirs in zip(
                each.read_expert(here.prepared, 3), each.read_expert(other.prepared, 0), strict=True
            ):
                assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))
        there.read(1, again)
        assert not torch.equal(again, packed)


def test_nothing_is_loaded_after_it_is_laid_out(tiny):
    network = V41.load(tiny).network
    with pytest.raises(RuntimeError, match="what was loaded is gone: load into a new network"):
        network.parameter_slices()
    assert not any(name.endswith(("w13", "wq_a.weight", "wq_a.scale")) for name in network.state_dict())


def test_weights_that_are_read_as_they_are_stay(tiny):
    network = V41.load(tiny).network
    assert network.embed.weight is not None and network.norm.weight is not None
    assert network.mtp[-1].confidence_head.proj.weight is not None
    assert all(gate.bias is not None for gate in network.modules() if hasattr(gate, "bias_vl"))


@pytest.mark.parametrize("ranks", [1, 8])
def test_what_a_gpu_holds_is_what_the_plan_counts(ranks):
    """Shapes only, at released size: layouts of the cuda provider and what is read as stored, within 1 % of the bytes
    of the checkpoint."""
    config = V41Config.from_dict(RELEASED)
    tensors = {
        name: StoredTensor(Path(), DTYPE_NAMES[spec.dtype], spec.shape, 0, spec.nbytes)
        for name, spec in expected_tensors(config).items()
    }
    network = build._network(config, ranks, 0, "model")
    part = Checkpoint(Path(), tensors, True).part(network.parallel.place, config)
    assert held_bytes(network) == pytest.approx(weight_bytes_of(part, config, "cuda", balanced=False), rel=0.01)
