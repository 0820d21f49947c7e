"""``deepinfer build``: the kernels of a model, compiled ahead."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from triton import knobs

from deepinfer_plugin.kernels.cuda import ahead, experts, index, jit, norm_rope
from deepinfer_plugin.model import V41Config
from deepinfer_plugin.model.released import RELEASED

CUDA = Path(jit.__file__).parent
BETWEEN_RANKS = {"_send", "_sum"}
SMALL = ("--max-running-requests", "2", "--context-length", "8192")


@pytest.fixture
def compiled(monkeypatch, tmp_path):
    """No compiler: sources, and names of Triton kernels, that would have been compiled."""
    found = SimpleNamespace(sources=[], triton=set())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(jit, "cubin", lambda source: found.sources.append(source) or b"")
    monkeypatch.setattr(knobs.runtime, "jit_cache_hook", lambda *, fn, **rest: found.triton.add(fn.name) or True)
    return found


def defines(compiled, file):
    return [dict(source.defines) for source in compiled.sources if source.file == file]


def launched():
    """Names of the Triton kernels that the provider's sources launch."""
    return {name for file in CUDA.glob("*.py") for name in re.findall(r"\b(_\w+)\[(?:grid\]|\()", file.read_text())}


def test_the_released_model(deepinfer, compiled):
    code, out, _ = deepinfer("build", *SMALL)
    assert code == 0 and f"{len(compiled.sources)} kernels for sm_90a" in out
    assert len(set(compiled.sources)) == len(compiled.sources)
    assert {(d["D"], d["HEADS"], d["GROUPS"]) for d in defines(compiled, "index_scores.cu")} == {
        (128, 32, groups) for groups in (64, 128)
    }
    assert {(d["EXPERTS"], d["TOPK"]) for d in defines(compiled, "experts.cu")} == {(384, 6), (128, 3)}
    names = {name.rpartition(".")[2] for name in compiled.triton}
    # For the other profile and Blackwell; for other heads and Blackwell; for other streams and the check at start.
    others = {"_cast", "_sparse_attention", "_mix_parts", "_mix_finish"}
    assert names == launched() - others - BETWEEN_RANKS
    assert defines(compiled, "attention.cu") and defines(compiled, "site.cu")


def test_what_a_call_asks_for_is_what_was_built(deepinfer, compiled):
    """The same macros: what was compiled ahead is not compiled again. Ranks that share experts ask for pairs."""
    assert deepinfer("build", "--ranks", "8", *SMALL)[0] == 0
    assert {name.rpartition(".")[2] for name in compiled.triton} >= BETWEEN_RANKS
    product = experts.Product(torch.empty(48, 0, device="meta"), torch.empty(48), nan_scales=False)
    pair = experts.Experts(product, product, 5120, 2304)
    assert experts.kernel(pair, experts.FEW, 1)[0].source in compiled.sources
    assert index.ScoresKernels(128, 32, 64, torch.bfloat16, True, True).scores.source in compiled.sources
    assert index._select(torch.empty(3, 8192, dtype=torch.bfloat16), 0).source in compiled.sources


def test_a_profile_with_fast_ops_needs_those(deepinfer, compiled):
    assert deepinfer("build", "--profile", "deepinfer", *SMALL)[0] == 0
    assert {(d["EXPERTS"], d["TOPK"]) for d in defines(compiled, "experts_fp8.cu")} == {(384, 6), (128, 3)}
    assert not defines(compiled, "experts.cu")


def test_longer_contexts_need_more(deepinfer, compiled, tiny):
    assert deepinfer("build", tiny, *SMALL)[0] == 0
    few = set(compiled.sources)
    assert deepinfer("build", tiny, "--max-running-requests", "2", "--context-length", "500000")[0] == 0
    assert few < set(compiled.sources)


def test_replicas_are_experts_of_a_rank(deepinfer, compiled):
    assert deepinfer("build", "--ranks", "8", "--redundant", "10", *SMALL)[0] == 0
    assert {(d["EXPERTS"], d["TOPK"]) for d in defines(compiled, "experts.cu")} == {(50, 1), (18, 1)}
    assert {(d["EXPERTS"], d["SHARED"], d["RANKS"]) for d in defines(compiled, "split.cu")} == {
        (384, 16, 8),
        (128, 16, 8),
    }


def test_a_checkpoint(deepinfer, tiny, compiled):
    assert deepinfer("build", tiny, *SMALL)[0] == 0
    config = V41Config.load(tiny)
    scores, moe = defines(compiled, "index_scores.cu"), defines(compiled, "experts.cu")
    assert {(d["D"], d["SOURCE_HEADS"]) for d in scores} == {(config.index_head_dim, config.index_heads)}
    sets = {(config.experts, config.experts_per_token), (config.dspark.experts, config.dspark.experts_per_token)}
    assert {(d["EXPERTS"], d["TOPK"]) for d in moe} == sets


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (("--ranks", "8", "--redundant", "897"), "897 redundant experts on 8 ranks; legal: 0 to 896"),
        (("--redundant", "1"), "1 redundant experts on 1 ranks; legal: 0 to 0"),
        (("--ranks", "7"), "384 experts do not divide among 7 ranks; legal: 1, 2, 3, 4, 6, 8"),
        (("--ranks", "0"), "--ranks 0 is not supported; legal: a divisor of 384 experts"),
        (("--max-running-requests", "0"), "0 is not supported; legal: a positive number"),
        (("--page-size", "3"), "page_size=3 is not supported"),
        (("--profile", "fp8"), "profile='fp8' is not known"),
        (("--profile", "float32"), "legal: model, deepinfer"),
        (("nowhere",), "nowhere/config.json does not exist"),
    ],
)
def test_refusals(deepinfer, compiled, args, text):
    code, _, complaint = deepinfer("build", *args)
    assert code == 2 and text in complaint and not compiled.sources


def test_a_kernel_that_does_not_compile(deepinfer, compiled, monkeypatch):
    def refuse(source):
        raise jit.CompileError("select.cu: no")

    monkeypatch.setattr(jit, "cubin", refuse)
    code, _, complaint = deepinfer("build", *SMALL)
    assert code == 2 and "select.cu: no" in complaint


@pytest.mark.parametrize(("capability", "target"), [((9, 0), "sm_90a"), ((10, 0), "sm_100a")])
def test_triton_compiles_without_a_gpu(tmp_path, capability, target):
    """And finds it compiled the next time."""
    x = torch.empty(4, 256, dtype=torch.bfloat16, device="meta")
    for compiled in (1, 0):
        with knobs.cache.scope(), ahead.compiling(capability) as kernels:
            knobs.cache.dir = str(tmp_path)
            norm_rope._rms_norm.device_caches.clear()
            out = ahead.ops().rms_norm(x, x[0], 1e-6)
        assert out.shape == x.shape and out.is_meta
        assert (kernels.count, kernels.compiled) == (1, compiled)
    (assembly,) = tmp_path.rglob("*.ptx")
    assert f".target {target}" in assembly.read_text()


def test_nothing_of_it_stays(monkeypatch):
    """A real launch after it is a real launch."""
    from triton.runtime import driver

    before = driver._active
    with ahead.compiling():
        assert driver._active is not before and jit._instead is not None
    assert driver._active is before and jit._instead is None


def test_interpreted_kernels_are_not_compiled(monkeypatch):
    monkeypatch.setattr(knobs.runtime, "interpret", True)
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET"), ahead.compiling():
        pass


def test_the_released_config_is_whole():
    assert V41Config.from_dict(RELEASED).experts == 384
