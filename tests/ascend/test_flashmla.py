"""The FlashMLA adapter against the reference, with FlashMLA's call as documented; where it serves, what it refuses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deepinfer_plugin.kernels import OP_NAMES, Ops, ascend, registry
from deepinfer_plugin.kernels.ascend import flashmla, soc

from ..kernels.cases import Random
from ..kernels.test_contract import assert_close
from . import flash_mla

HEADS, D, WINDOW, RING = flashmla.HEADS, flashmla.SIZE, 128, 134
MACHINE = soc.Machine("Ascend950PR_9589", 8, "25.5.0", "9.2.0", "2.13.0rc1")


@pytest.fixture(scope="module")
def ops() -> Iterator[Ops]:
    choices = dict.fromkeys(OP_NAMES, "ascend") | {"sparse_attention": "ascend-flashmla"}
    tables = {"ascend": ascend.OPS, "ascend-flashmla": flashmla.ops(torch.device("cpu"))}
    with flash_mla.installed():
        yield Ops(torch.device("cpu"), choices, tables)


def arguments(rows: int, compressed: bool = True, draft: bool = False) -> dict[str, Any]:
    """A decode step, or with ``draft`` one block of ``rows``; unused rows of the ring are NaN."""
    r = Random(rows, torch.bfloat16)
    positions = r.ints(0, 200, rows) if not draft else 150 + torch.arange(rows)
    slots = torch.arange(rows) + 1 if not draft else torch.full((rows,), 3)
    ring = r.window(rows + 4, RING, D)
    ring[0] = 255
    given: dict[str, Any] = {
        "q": r.normal(rows, HEADS, D) * 2,
        "window": r.window(rows, D),
        "positions": positions,
        "fresh": torch.arange(rows) if draft else torch.zeros(rows, dtype=torch.int64),
        "row_slots": slots,
        "window_floor": torch.full((rows,), 23) if draft else torch.zeros(rows, dtype=torch.int64),
        "ring": ring,
        "window_len": WINDOW,
        **dict.fromkeys(("latent", "latent_scale", "page_table", "requests", "selected")),
        "sink": r.normal(HEADS, dtype=torch.float32),
        "scale": D**-0.5,
        "block_future": rows - 1 - torch.arange(rows) if draft else None,
    }
    if compressed:
        latent, latent_scale = r.latents(12, 8, D)
        given |= {
            "latent": latent,
            "latent_scale": latent_scale,
            "page_table": r.ints(0, 12, 3, 5),
            "requests": r.ints(0, 3, rows),
            "selected": r.ints(-1, 40, rows, 70),
        }
    return given


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize(
    ("compressed", "draft"), [(False, False), (True, False), (False, True)], ids=["window", "selected", "draft"]
)
def test_agrees_with_reference(ops, reference, compressed, draft, rows):
    given = arguments(rows, compressed, draft)
    assert_close(ops.sparse_attention(**given), reference.sparse_attention(**given), 4)


def test_rows_in_parts(ops, monkeypatch):
    """What is gathered at a time is bounded; the parts are the whole."""
    given = arguments(5)
    whole = ops.sparse_attention(**given)
    monkeypatch.setattr(flashmla, "CHUNK_BYTES", 1 << 21)
    assert torch.equal(ops.sparse_attention(**given), whole)


def test_rows_without_keys_and_without_rows(ops):
    given = arguments(3)
    given["window_floor"] = given["positions"] + 1
    given["selected"] = torch.full_like(given["selected"], -1)
    assert (ops.sparse_attention(**given) == 0).all()
    rows = ("q", "window", "positions", "fresh", "row_slots", "window_floor", "requests", "selected")
    none = given | {name: given[name][:0] for name in rows}
    assert ops.sparse_attention(**none).shape == (0, HEADS, D)


def test_the_caches_are_the_formats_of_its_documentation():
    """A change of either side's row shows here, not as wrong numbers."""
    given = arguments(2)
    assert given["window"].shape[-1] == flash_mla.FP8
    assert given["latent"].shape[-1] + given["latent_scale"].shape[-1] == flash_mla.FP4


@pytest.mark.parametrize("change", ["float32", "heads"])
def test_other_activations_and_heads_are_refused_by_name(ops, change):
    given = arguments(2)
    given |= {"q": given["q"].float()} if change == "float32" else {"q": given["q"][:, :32], "sink": given["sink"][:32]}
    with pytest.raises(NotImplementedError, match=r"bfloat16 \[rows, 64, 512\], got .* force sparse_attention=ascend"):
        ops.sparse_attention(**given)


@pytest.mark.parametrize(
    ("machine", "build", "reason"),
    [
        (MACHINE, True, None),
        (MACHINE, False, "built for Ascend"),
        (replace(MACHINE, soc="Ascend950PR_9579"), True, "32 cores; not supported: found Ascend950PR_9579"),
        (replace(MACHINE, cann=None), True, "it needs CANN"),
    ],
    ids=["there", "CUDA build", "28 cores", "no CANN"],
)
def test_where_it_serves(monkeypatch, machine, build, reason):
    monkeypatch.setattr(soc, "machine", lambda: machine)
    with flash_mla.installed(ascend=build):
        found = flashmla.unavailable(SimpleNamespace(type="npu"))
    assert found == reason if reason is None else reason in found
    assert flashmla.unavailable(torch.device("cpu")) == "it needs an Ascend 950"


def test_never_chosen_unless_asked_for():
    """It was never executed: the provider that has every op comes before it."""
    names = [provider.name for provider in registry.providers()]
    assert names.index("ascend") < names.index("ascend-flashmla")
