"""Every TileLang kernel, at the released model's shapes and at small ones, through TileLang's whole pipeline for the
Ascend 950; a warning is a failure. Controls: what must be refused is."""

from __future__ import annotations

import re

import pytest
import tilelang
import tilelang.ascend.language as T
import torch

from deepinfer_plugin.kernels.ascend.soc import DEFAULT

from ..emitted import LoweringError, source
from ..tile_cases import CASES

# Ops with kernels of a whole core, one cube and two vector units.
CUBE = ("index_scores", "sparse_attention", "moe_experts")


@pytest.mark.parametrize("size", ["released", "small"])
@pytest.mark.parametrize("name", CASES)
def test_lowers(name, size):
    case = CASES[name]
    emitted = source(case.kernel, *case.tensors(6, **getattr(case, size)))
    kind = "__mix__(1, 2)" if case.op in CUBE else "__vector__"
    assert f"__global__ {kind} void" in emitted
    assert ub_bytes(emitted) <= DEFAULT.ub_simt


def ub_bytes(emitted: str) -> int:
    """End of the last transfer into or out of the unified buffer whose place is a constant."""
    sizes = {"bfloat16_t": 2, "float": 4, "int32_t": 4, "int64_t": 8, "uint8_t": 1}
    found = re.findall(r"__ubuf__ (\w+)\*\)buf_dyn_shmem\)\[(\d+)\]\)\)\).{0,900}?1, (\d+),", emitted)
    return max((int(at) * sizes[kind] + int(count) for kind, at, count in found), default=0)


def test_one_source_serves_any_number_of_rows():
    case = CASES["collapse"]
    assert source(case.kernel, *case.tensors(1, **case.small)) == source(case.kernel, *case.tensors(700, **case.small))


# ---- controls ------------------------------------------------------------------------------------------------------


@tilelang.jit(target="ascend")
def all_heads(X, Y, heads: int = 64):
    """The attention accumulator of one row as one tile, as it overflowed upstream: float32 [heads, D]."""
    R = T.dynamic("R")
    D = T.const("D")
    X: T.Tensor((R, heads, D), T.float32)
    Y: T.Tensor((R, heads, D), T.float32)
    with T.Kernel(64) as core:
        a = T.alloc_shared((heads, D), T.float32)
        b = T.alloc_shared((heads, D), T.float32)
        for r in T.Persistent([R], 64, core):
            T.copy(X[r, :, :], a)
            with T.SimtVF(threads=256):
                for h, d in T.Parallel(heads, D):
                    b[h, d] = a[h, d] * T.float32(2.0)
            T.copy(b, Y[r, :, :])


def test_sixty_four_heads_overflow_the_unified_buffer():
    with pytest.raises(LoweringError):
        source(all_heads, torch.empty(2, 64, 512), torch.empty(2, 64, 512))


def test_the_tile_that_the_chip_allows_does_not():
    heads = DEFAULT.rows(512 * 4, buffers=2, most=64)
    assert heads == 32
    source(all_heads, torch.empty(2, heads, 512), torch.empty(2, heads, 512), heads=heads)


@tilelang.jit(target="ascend")
def flat_address(X, Y, slot):
    """A pool taken as one dimension: the compiler guards its end with a 32-bit difference."""
    R = T.dynamic("R")
    N = T.dynamic("N", "int64")
    W = T.const("W")
    X: T.Tensor((R, W), T.uint8)
    Y: T.Tensor((N,), T.uint8)
    slot: T.Tensor((R,), T.int64)
    with T.Kernel(64) as core:
        row = T.alloc_shared((W,), T.uint8)
        for r in T.Persistent([R], 64, core):
            T.copy(X[r, :], row)
            at = slot[r] * 70752
            T.copy(row, Y[at : at + W])


def test_a_page_address_of_32_bits_is_refused():
    tensors = torch.empty(4, 528, dtype=torch.uint8), torch.empty(1 << 20, dtype=torch.uint8)
    with pytest.raises(LoweringError, match="cut to 32 bits"):
        source(flat_address, *tensors, torch.empty(4, dtype=torch.int64))


@tilelang.jit(target="ascend")
def outside_a_vector_function(X, Y):
    """Lane loops belong in a vector function; this one is what a CUDA kernel would look like."""
    R = T.dynamic("R")
    D = T.const("D")
    X: T.Tensor((R, D), T.float32)
    Y: T.Tensor((R, D), T.float32)
    with T.Kernel(64) as core:
        x = T.alloc_shared((D,), T.float32)
        for r in T.Persistent([R], 64, core):
            T.copy(X[r, :], x)
            for d in T.Parallel(D):
                x[d] = x[d] * T.float32(2.0)
            T.copy(x, Y[r, :])


def test_a_kernel_of_another_target_is_refused():
    with pytest.raises(LoweringError):
        source(outside_a_vector_function, torch.empty(4, 256), torch.empty(4, 256))
