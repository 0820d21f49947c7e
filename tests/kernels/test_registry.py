"""Choosing providers: automatic, by name, forced per op; refusals name what is wrong and what is legal."""

from __future__ import annotations

import pytest
import torch

from deepinfer_plugin.kernels import OP_NAMES, Provider, cuda, providers, register, select, table, unregister
from deepinfer_plugin.kernels.ops import PREPARED_FOR
from deepinfer_plugin.kernels.reference import OPS

UNAVAILABLE = {
    "cuda-fast": "it needs an NVIDIA GPU",
    "cuda": "it needs an NVIDIA GPU",
    "blackwell": "it needs an NVIDIA GPU",
    "ascend": "it needs an Ascend 950",
    "ascend-tilelang": "it needs an Ascend 950",
    "ascend-flashmla": "it needs an Ascend 950",
}


@pytest.fixture
def fast():
    """A provider with three ops of its own, on any device but a missing one."""
    calls: list[str] = []

    def spy(name):
        def run(*args):
            calls.append(name)
            return OPS[name](*args)

        return run

    ops = {name: spy(name) for name in ("rms_norm", "prepare_dense", "dense")}
    register(Provider("fast", lambda device: "no meta kernels" if device.type == "meta" else None, lambda device: ops))
    yield calls
    unregister("fast")


def test_the_reference_serves_everything_on_cpu():
    assert set(select().choices.values()) == {"reference"} and tuple(select().choices) == OP_NAMES
    assert [provider.name for provider in providers()] == [
        "cuda-fast",
        "cuda",
        "blackwell",
        "ascend",
        "ascend-tilelang",
        "ascend-flashmla",
        "reference",
    ]


def test_auto_prefers_the_newest_and_fills_gaps_on_cpu(fast):
    ops = select("cpu")
    assert {op for op, name in ops.choices.items() if name == "fast"} == {"rms_norm", "dense"}
    x = torch.ones(2, 32)
    ops.rms_norm(x, torch.ones(32, dtype=torch.bfloat16), 1e-6)
    weight = ops.prepare_dense(torch.ones(4, 32, dtype=torch.bfloat16))
    ops.dense(x, weight)
    assert fast == ["rms_norm", "prepare_dense", "dense"]


def test_a_weight_is_laid_out_for_every_provider_that_reads_it(fast):
    """dense is served by one provider, moe_gate and markov by another; one prepared weight serves both."""
    ops = select("cpu")
    weight = ops.prepare_dense(torch.eye(4, dtype=torch.bfloat16))
    assert set(weight.data) == {"fast", "reference"}
    ops.dense(torch.ones(1, 4), weight)
    ops.moe_gate(torch.ones(1, 4), weight, torch.zeros(4), None, None, 2, 1.0)
    assert set(select("cpu", "reference").prepare_dense(torch.eye(4, dtype=torch.bfloat16)).data) == {"reference"}


def test_forced_choice_wins(fast):
    assert select("cpu", "reference", {"dense": "fast"}).choices["dense"] == "fast"
    assert select("cpu", "auto", {"dense": "reference"}).choices["dense"] == "reference"
    assert select("cpu", "fast").choices["dense"] == "fast"


def test_no_silent_fallback_off_cpu(fast):
    with pytest.raises(ValueError, match=r"among fast serves linear, .* on cuda; choose 'reference' for them"):
        select("cuda")
    rest = {op: "reference" for op in OP_NAMES if op not in ("dense", "rms_norm")}
    assert select("cuda", force=rest).choices["dense"] == "fast"


def test_off_cpu_the_reference_must_be_asked_for():
    with pytest.raises(ValueError, match=r"no kernel provider serves linear, .* on cuda; choose 'reference' for them"):
        select("cuda")
    assert set(select("cuda", "reference").choices.values()) == {"reference"}


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (
            ("cpu", "cude"),
            "'cude' is unknown; legal: auto, fast, cuda-fast, cuda, .*, ascend-flashmla, reference",
        ),
        (("cpu", "auto", {"densee": "fast"}), "op 'densee' cannot be forced; legal: linear, dense"),
        (
            ("cpu", "auto", {"dense": "slow"}),
            "'slow' forced for dense is unknown; legal: fast, cuda-fast, cuda, .*, reference",
        ),
        (("cpu", "auto", {"linear": "fast"}), "'fast' has no linear on cpu; legal: reference"),
        (
            ("cpu", "auto", {"prepare_dense": "fast"}),
            "'prepare_dense' cannot be forced; .* follows dense, moe_gate",
        ),
        (("meta", "fast"), "'fast' cannot serve meta: no meta kernels; legal: reference"),
        (("meta", "auto", {"dense": "fast"}), "'fast' cannot serve meta: no meta kernels; legal: reference"),
    ],
)
def test_refusals(fast, args, text):
    with pytest.raises(ValueError, match=text):
        select(*args)


def test_a_name_is_registered_once(fast):
    with pytest.raises(ValueError, match="'fast' is registered already"):
        register(Provider("fast", lambda device: None, lambda device: {}))


def test_a_provider_that_rounds_otherwise_is_refused():
    profiles = {"dense": ("deepinfer", "float32")}
    register(Provider("other", lambda device: None, lambda device: OPS, profiles=profiles))
    try:
        for profile in (None, "deepinfer"):
            assert select("cpu", profile=profile).choices["dense"] == "other"
        with pytest.raises(
            ValueError, match=r"dense of kernel provider 'other' .* profile 'model' .*: deepinfer, float32"
        ):
            select("cpu", profile="model")
        assert select("cpu", "reference", profile="model").choices["dense"] == "reference"
    finally:
        unregister("other")


def test_a_fast_provider_is_for_its_profiles_only():
    profiles = {"dense": ("deepinfer",)}
    register(Provider("quick", lambda device: None, lambda device: OPS, profiles=profiles, special=True))
    try:
        chosen = select("cpu", profile="deepinfer").choices
        assert {op for op, name in chosen.items() if name == "quick"} == {"dense"}
        for profile in (None, "model"):
            assert set(select("cpu", profile=profile).choices.values()) == {"reference"}
        assert all(row.chosen == "reference" for row in table("cpu")[0])
        assert select("cpu", force={"dense": "quick"}).choices["dense"] == "quick"
        with pytest.raises(ValueError, match=r"dense of kernel provider 'quick' does not round as profile 'model'"):
            select("cpu", force={"dense": "quick"}, profile="model")
    finally:
        unregister("quick")


def test_fast_ops_of_hopper():
    """Chosen for the profiles that they name, and each has what prepares its weights."""
    ops = cuda.every_fast_op()
    assert set(cuda.FAST_PROFILES) == set(ops) & set(OP_NAMES)
    assert set(ops) - set(OP_NAMES) == {name for name, of in PREPARED_FOR.items() if set(of) & set(ops)}


def test_table_for_the_doctor(fast):
    rows, reasons = table("cpu")
    assert [row.op for row in rows] == list(OP_NAMES) and reasons == UNAVAILABLE
    others = {**dict.fromkeys(UNAVAILABLE, False), "reference": True}
    row = next(row for row in rows if row.op == "dense")
    assert row.chosen == "fast" and row.available == {"fast": True, **others}
    row = next(row for row in rows if row.op == "linear")
    assert row.chosen == "reference" and row.available == {"fast": False, **others}
    rows, reasons = table("meta")
    assert reasons == {"fast": "no meta kernels", **UNAVAILABLE} and not any(row.available["fast"] for row in rows)
    rows, _ = table("cuda")
    assert {row.op: row.chosen for row in rows}["dense"] == "fast"
    assert {row.op: row.chosen for row in rows}["linear"] is None
