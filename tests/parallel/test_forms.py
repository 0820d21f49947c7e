"""However the network is divided among ranks, the bits are those of one rank."""

import pytest
import torch

from deepinfer_plugin.model import V41
from deepinfer_plugin.model.checkpoint import Checkpoint
from deepinfer_plugin.model.config import V41Config
from deepinfer_plugin.model.layout import Layout, LayoutError
from deepinfer_plugin.model.place import Place, PlaceError, Share, check_place

from . import forms, spawned
from .forms import FORMS, PLANS


@pytest.fixture(scope="module")
def outcomes(tiny, tmp_path_factory):
    return spawned.run(forms.follow_all, 4, tmp_path_factory.mktemp("ranks") / "forms", tiny)


@pytest.fixture(scope="module")
def alone(tiny):
    """What one rank makes of each group's plan."""
    known = {}

    def of(profile, group):
        if (profile, group) not in known:
            model = known.setdefault(profile, V41.load(tiny, profile=profile))
            known[profile, group] = forms.follow(model, group)
        return known[profile, group]

    return of


@pytest.mark.parametrize("name", FORMS)
def test_the_bits_are_those_of_one_rank(name, outcomes, alone):
    form = FORMS[name]
    for rank in range(form.ranks):
        group = rank // form.size
        found, right = outcomes[rank][name], alone(form.profile, group)
        for forward, plan in enumerate(PLANS[group]):
            assert found.hidden[forward].shape[0] == sum(count for _, count in plan)
            assert torch.equal(found.hidden[forward], right.hidden[forward]), f"rank {rank}, forward {forward}"
            assert torch.equal(found.logits[forward], right.logits[forward]), f"rank {rank}, forward {forward}"
        for part in ("drafts", "base_logits", "confidence"):
            assert torch.equal(getattr(found, part), getattr(right, part)), f"rank {rank}, {part}"


def test_each_rank_holds_its_part(tiny, outcomes):
    """Heads, experts and table rows are divided, the rest is on every rank; nothing is lost or held twice."""
    config = V41Config.load(tiny)
    checkpoint = Checkpoint.open(tiny, config)
    for name, form in FORMS.items():
        held = [outcomes[rank][name].weight_bytes for rank in range(form.ranks)]
        heads, experts = form.heads * (form.size - 1) + 1, form.experts * (form.ranks - 1) + 1
        layout = form.layout(config)
        places = [
            Place(Share(rank % heads, heads), Share(rank % experts, experts), layout) for rank in range(form.ranks)
        ]
        assert held == [checkpoint.part(place, config).nbytes for place in places], name
    whole = checkpoint.part(Place(), config)
    assert whole == checkpoint
    parts = [checkpoint.part(Place(Share(rank, 2), Share(rank, 2)), config).tensors for rank in range(2)]
    for name, tensor in checkpoint.tensors.items():
        runs = sorted((part[name].offset, part[name].nbytes) for part in parts if name in part)
        if len(runs) == 2 and runs[0] != runs[1]:
            assert runs[0][0] == tensor.offset and sum(runs[0]) == runs[1][0], name
            assert sum(size for _, size in runs) == tensor.nbytes, name
        else:
            assert set(runs) == {(tensor.offset, tensor.nbytes)}, name


def test_sizes_that_do_not_divide_are_refused(tiny):
    config = V41Config.load(tiny)
    with pytest.raises(PlaceError) as refusal:
        check_place(config, heads=3, experts=12)
    assert "4 attention heads do not divide among 3 ranks of attention; legal: 1, 2" in refusal.value.problems
    assert "2 output groups do not divide among 3 ranks of attention; legal: 1, 2" in refusal.value.problems
    assert "16 experts do not divide among 12 ranks; legal: 1, 2, 4, 8, 16" in refusal.value.problems
    for ranks in (1, 2):
        check_place(config, heads=ranks, experts=4 * ranks)


def test_replicas_make_experts_divide(tiny):
    config = V41Config.load(tiny)
    check_place(config, heads=1, experts=3, redundant=1)
    layout = Layout.trivial(config, 3, 1)
    layout.check(config, 3)
    assert layout.target.shape == (config.num_layers, 18) and layout.draft.shape[1] == 9
    for redundant in (17, -1):
        with pytest.raises(PlaceError, match=f"{redundant} redundant experts on 3 ranks; legal: 0 to 16"):
            check_place(config, heads=1, experts=3, redundant=redundant)


def test_layouts_that_do_not_fit_are_refused_by_name(tiny):
    config = V41Config.load(tiny)
    right = Layout.trivial(config, 2, 2)
    right.check(config, 2)

    def changed(change):
        table = right.target.copy()
        return change(table)

    def put(table, slot, expert):
        table[1, slot] = expert
        return table

    for target, problem in (
        (
            changed(lambda table: table[1:]),
            f"target experts: {config.num_layers - 1} layers; legal: {config.num_layers}",
        ),
        (changed(lambda table: table[:, :15]), "15 slots a layer; legal: multiples of 2 from 16 to 32"),
        (changed(lambda table: put(table, 3, 2)), "layer 1: expert 3 is in no slot; legal: every one in at least one"),
        (changed(lambda table: put(table, 17, 9)), "layer 1: rank 1 holds expert 9 twice; legal: once"),
        (changed(lambda table: put(table, 0, 16)), "layer 1: expert 16; legal: 0 to 15"),
        (changed(lambda table: put(table, 0, -1)), "layer 1: expert -1; legal: 0 to 15"),
        (changed(lambda table: table.astype(float)), "not a table of expert numbers"),
        (changed(lambda table: table[0]), "not a table of expert numbers"),
    ):
        with pytest.raises(LayoutError) as refusal:
            Layout(target, right.draft).check(config, 2)
        assert len(refusal.value.problems) == 1 and problem in refusal.value.problems[0]


def test_ranks_that_diverge_are_named(tmp_path):
    for told in spawned.run(forms.diverge, 2, tmp_path / "ranks"):
        tokens, counts, steps = told
        assert tokens.startswith("rank 1 begins forward 2 with 2 rows (0x") and "while rank 0, of the same" in tokens
        assert counts.startswith("rank 1 begins forward 2 with 2 rows (0x") and "has 1 (0x" in counts
        assert steps == "rank 1 begins forward 3 while rank 0 begins forward 2"
