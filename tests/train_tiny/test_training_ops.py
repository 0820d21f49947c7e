"""What is trained is what is served: the differentiable ops against the reference, masters against checkpoints."""

import pytest
import torch

from deepinfer_plugin.model import V41


@pytest.fixture(scope="module")
def network_of():
    from masters import initialise, load_masters
    from training_ops import TrainingOps

    def build(path, formats=None, profile="model", weights=None):
        ops = TrainingOps(formats)
        network = load_masters(path, ops, "cpu", weights, profile)
        if weights is None:
            initialise(network, seed=0)
        ops.draft_block = network.config.draft_block
        return network, ops

    return build


def tokens(config, sequences, length):
    return torch.randint(10, config.vocab_size - 10, (sequences, length), generator=torch.Generator().manual_seed(3))


def test_whole_network_equals_the_reference(network_of, tiny):
    """Without activation rounding the two differ by the order of sums: selection, candidates, experts and Engram rows
    are the same.
    """
    from batches import Batch
    from target import forward
    from training_ops import ServedFormats

    class NoActivationCast(ServedFormats):
        def activation(self, x):
            return x

    network, ops = network_of(tiny, NoActivationCast(), "float32", weights=tiny)
    network.dspark = None
    ids = tokens(network.config, 2, 256)
    with torch.no_grad():
        network.prepare()
        found = forward(network, ops, Batch(ids, ids, torch.ones(ids.shape))).view(2, 256, -1)
    served = V41.load(tiny, profile="float32")
    expected = torch.stack([served.logits(row) for row in ids])
    error = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert error.median() < 1e-5
    assert (found.argmax(-1) == expected.argmax(-1)).float().mean() > 0.99


def test_export_loses_nothing(network_of, prepared, tmp_path):
    """The weights a step computes with are the weights of the files, and exporting what was loaded changes no value."""
    from masters import export

    network, _ = network_of(prepared)
    export(network, tmp_path)
    again, _ = network_of(prepared, weights=tmp_path)
    with torch.no_grad():
        network.prepare()
        again.prepare()
    compared = 0
    for (name, module), other in zip(network.named_modules(), again.modules(), strict=True):
        ours, theirs = getattr(module, "prepared", None), getattr(other, "prepared", None)
        if ours is not None:
            pairs = zip(ours, theirs, strict=True) if isinstance(ours, tuple) else ((ours, theirs),)
            assert all(torch.equal(a, b) for a, b in pairs), name
            compared += 1
    assert compared > 90


def test_every_master_learns(network_of, prepared):
    """Engram rows, mixes, sinks, gates, compressors, indexers and all of the draft head get a gradient."""
    from batches import Batch
    from draft import DraftTrainer, losses
    from settings import SMALL
    from target import forward, isolate_indexers

    network, ops = network_of(prepared)
    isolate_indexers(network)
    head, network.dspark = network.dspark, None
    ids = tokens(network.config, 2, 129)
    batch = Batch(ids[:, :-1], ids[:, 1:], torch.ones(2, 128))
    network.prepare()
    logits = forward(network, ops, batch)
    loss = torch.nn.functional.cross_entropy(logits, batch.targets.flatten())
    (loss + torch.stack(ops.losses).mean()).backward()
    network.dspark = head
    trainer = DraftTrainer(network, ops, SMALL)
    trainer.prepare()
    drafted = trainer.run(batch, *trainer.anchors(batch))
    torch.stack(list(losses(drafted).values())).sum().backward()
    silent = [
        name
        for name, parameter in network.named_parameters()
        if not name.endswith(("gate.bias", "gate.bias_vl")) and (parameter.grad is None or not parameter.grad.any())
    ]
    assert not silent


def test_the_trunk_does_not_feel_the_indexers(network_of, prepared):
    from batches import Batch
    from target import forward, isolate_indexers

    network, ops = network_of(prepared)
    isolate_indexers(network)
    network.dspark = None
    ids = tokens(network.config, 1, 128)
    network.prepare()
    forward(network, ops, Batch(ids, ids, torch.ones(ids.shape)))
    torch.stack(ops.losses).sum().backward()
    moved = {
        name for name, parameter in network.named_parameters() if parameter.grad is not None and parameter.grad.any()
    }
    assert moved and all(".indexer." in name for name in moved)


def test_draft_rows_equal_the_reference(network_of, tiny):
    """The first draft of a block needs no earlier one, so both must say the same there; float32, to be exact."""
    from batches import Batch
    from draft import DraftTrainer
    from settings import SMALL
    from training_ops import ServedFormats

    class NoActivationCast(ServedFormats):
        def activation(self, x):
            return x

    network, ops = network_of(tiny, NoActivationCast(), "float32", weights=tiny)
    trainer = DraftTrainer(network, ops, SMALL)
    ids = tokens(network.config, 2, 256)
    sequences, positions = torch.tensor([0, 0, 1]), torch.tensor([7, 130, 240])
    with torch.no_grad():
        trainer.prepare()
        found = trainer.run(Batch(ids, ids, torch.ones(ids.shape)), sequences, positions)
    served = V41.load(tiny, profile="float32")
    for block, (sequence, position) in enumerate(zip(sequences.tolist(), positions.tolist(), strict=True)):
        session = served.session(300)
        session.extend(ids[sequence, :position])
        draft = session.draft(int(ids[sequence, position]))
        bias, _ = served.network.mtp[-1].markov_head(ids[sequence, position : position + 1])
        expected = draft.base_logits[0, 0] + bias[0]
        assert torch.allclose(found.logits[block, 0], expected, rtol=1e-3, atol=1e-3)
        assert torch.allclose(found.confidence[block, 0], draft.confidence[0, 0], rtol=1e-3, atol=1e-3)
