"""``deepinfer build``: the kernels of a model, compiled ahead."""

from __future__ import annotations

import pytest
import torch

from deepinfer_plugin.kernels.cuda import experts, index, jit
from deepinfer_plugin.model import V41Config


@pytest.fixture(autouse=True)
def compiled(monkeypatch, tmp_path):
    """No compiler: what would have been compiled."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    sources: list[jit.Source] = []
    monkeypatch.setattr(jit, "cubin", lambda source: sources.append(source) or b"")
    return sources


def test_the_released_model(deepinfer, compiled):
    code, out, _ = deepinfer("build")
    assert code == 0 and "24 kernels for sm_90a" in out and len(set(compiled)) == 24
    by_file = {file: [dict(s.defines) for s in compiled if s.file == file] for file in {s.file for s in compiled}}
    assert {(d["D"], d["HEADS"], d["GROUPS"]) for d in by_file["index_scores.cu"]} == {
        (128, 32, groups) for groups in (32, 64, 128)
    }
    assert {(d["EXPERTS"], d["TOPK"]) for d in by_file["experts.cu"]} == {(384, 6), (128, 3)}


def test_what_a_call_asks_for_is_what_was_built(deepinfer, compiled):
    """The same macros: a kernel that was compiled ahead is not compiled again."""
    assert deepinfer("build", "--ranks", "8")[0] == 0
    shapes = ((48, 72, 40, 0), (48, 80, 18, 0))
    for shape, gated, out in zip(shapes, (True, False), (2304, 5120), strict=True):
        product = experts.Product(torch.empty(shape, device="meta"), torch.empty(48), nan_scales=False)
        assert product.kernel(experts.FEW, 6, gated, out)[0].source in compiled
    assert index.ScoresKernels(128, 32, 64, torch.bfloat16, True, True).scores.source in compiled
    assert index._select(torch.empty(3, 32768, dtype=torch.bfloat16), 0).source in compiled


def test_a_checkpoint(deepinfer, tiny, compiled):
    assert deepinfer("build", tiny)[0] == 0
    config = V41Config.load(tiny)
    scores = [dict(source.defines) for source in compiled if source.file == "index_scores.cu"]
    moe = [dict(source.defines) for source in compiled if source.file == "experts.cu"]
    assert {(d["D"], d["SOURCE_HEADS"]) for d in scores} == {(config.index_head_dim, config.index_heads)}
    sets = {(config.experts, config.experts_per_token), (config.dspark.experts, config.dspark.experts_per_token)}
    assert {(d["EXPERTS"], d["TOPK"]) for d in moe} == sets


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (("--ranks", "7"), "--ranks 7 does not divide 384 experts; legal: a divisor of it"),
        (("--ranks", "0"), "--ranks 0 does not divide 384 experts"),
        (("nowhere",), "nowhere/config.json does not exist"),
    ],
)
def test_refusals(deepinfer, compiled, args, text):
    code, _, complaint = deepinfer("build", *args)
    assert code == 2 and text in complaint and not compiled


def test_a_kernel_that_does_not_compile(deepinfer, monkeypatch):
    def refuse(source):
        raise jit.CompileError("select.cu: no")

    monkeypatch.setattr(jit, "cubin", refuse)
    code, _, complaint = deepinfer("build")
    assert code == 2 and "select.cu: no" in complaint
