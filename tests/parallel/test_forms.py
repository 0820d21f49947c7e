"""However the network is divided among ranks, the bits are those of one rank."""

import pytest
import torch

from deepinfer_plugin.model import V41
from deepinfer_plugin.model.checkpoint import Checkpoint
from deepinfer_plugin.model.config import V41Config
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
        places = [Place(Share(rank % heads, heads), Share(rank % experts, experts)) for rank in range(form.ranks)]
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


def test_ranks_that_diverge_are_named(tmp_path):
    for told in spawned.run(forms.diverge, 2, tmp_path / "ranks"):
        tokens, counts, steps = told
        assert tokens.startswith("rank 1 begins forward 2 with 2 rows (0x") and "while rank 0, of the same" in tokens
        assert counts.startswith("rank 1 begins forward 2 with 2 rows (0x") and "has 1 (0x" in counts
        assert steps == "rank 1 begins forward 3 while rank 0 begins forward 2"
