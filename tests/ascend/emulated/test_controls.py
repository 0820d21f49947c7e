"""Negative controls of the emulation: it sees what it claims to see. The kernels are written by hand, in the form that
the compiler emits."""

from __future__ import annotations

import pytest
import torch

from deepinfer_plugin.kernels.ascend.soc import DEFAULT

from .emulate import EmulationFault, run

LANES = "__simt_vf__ __launch_bounds__(4) inline void lanes(__ubuf__ uint8_t* ub) {{ {lanes} }}\n"
KERNEL = """extern "C" __global__ __vector__ void k(__gm__ float* X, int32_t R) {{
  asc_init();
  __ubuf__ uint8_t *ub = (__ubuf__ uint8_t *)0;
  {body}
}}
"""
CALL = "asc_vf_call<lanes>(cce::dim3(4), ub);"
IN = "asc_copy_gm2ub_align(ub + {at}, (uint8_t*)X, 1, {bytes}, 0, 0, 0, 0, 64, 64);"
OUT = "asc_copy_ub2gm_align((uint8_t*)X, ub, 1, {bytes}, 0, 64, 64);"


def emulate(body: str, lanes: str = "") -> torch.Tensor:
    x = torch.arange(16, dtype=torch.float32)
    run(LANES.format(lanes=lanes) + KERNEL.format(body=body), {"X": x}, {"R": 1}, cores=2)
    return x


def test_a_kernel_that_keeps_the_rules():
    body = IN.format(at=0, bytes=64) + CALL + OUT.format(bytes=64)
    got = emulate(body, "((float*)ub)[threadIdx.x] += 1; asc_syncthreads(); ((float*)ub)[threadIdx.x] *= 2;")
    once = torch.arange(16.0)
    for _ in range(2):  # two cores
        once[:4] = (once[:4] + 1) * 2
    assert torch.equal(got, once)


@pytest.mark.parametrize(
    ("body", "lanes", "said"),
    [
        (IN.format(at=DEFAULT.ub_simt - 32, bytes=64), "", "outside the unified buffer"),
        (IN.format(at=16, bytes=32), "", "not aligned to 32 bytes"),
        ("asc_sync_wait(PIPE_MTE2, PIPE_V, 0);", "", "a flag that nobody set"),
        ("asc_sync_notify(PIPE_MTE2, PIPE_V, 0);", "", "a flag that nobody waits for"),
        (CALL, "if (threadIdx.x < 2) asc_syncthreads();", "others wait at a barrier"),
        (CALL, f"((float*)ub)[{DEFAULT.ub_simt // 4} + threadIdx.x] = 1;", "memory outside a buffer"),
        (OUT.format(bytes=128), "", "written outside a tensor"),
        ("undeclared();", "", "does not compile"),
    ],
    ids=["bounds", "alignment", "unset flag", "leaked flag", "barrier", "lane bounds", "tensor bounds", "compiles"],
)
def test_broken_rules_are_seen(body, lanes, said):
    with pytest.raises(EmulationFault, match=said):
        emulate(body, lanes)


def test_what_was_never_written_is_no_number_that_passes():
    """Memory starts as a pattern, so a kernel that forgets a part of its result does not look right by chance."""
    got = emulate(OUT.format(bytes=64))
    assert (got == torch.full((16,), -1431655766, dtype=torch.int32).view(torch.float32)).sum() == 0
    assert not torch.equal(got, torch.arange(16.0)) and len(set(got.tolist())) == 1


# ---- a whole core: one cube and two vector units ---------------------------------------------------------------------

CORE = """extern "C" __global__ __mix__(1, 2) void k(__gm__ float* X, int32_t R) {{
  asc_init();
  __ubuf__ uint8_t *ub = (__ubuf__ uint8_t *)0;
  __cbuf__ uint8_t *l1 = (__cbuf__ uint8_t *)0;
  __ca__ uint8_t *l0a = (__ca__ uint8_t *)0;
  __cb__ uint8_t *l0b = (__cb__ uint8_t *)0;
  __cc__ uint8_t *l0c = (__cc__ uint8_t *)0;
  if ASC_IS_AIC {{ {cube} }}
  if ASC_IS_AIV {{ {vector} }}
}}
"""
MEET = "asc_sync_intra_wait(PIPE_M, 1); asc_sync_intra_wait(PIPE_M, 17);"
SENDS = "asc_sync_intra_arrive(PIPE_MTE3, 1);"


def test_units_that_meet():
    x = torch.zeros(2)
    write = "X[asc_get_sub_block_id()] = 1 + asc_get_sub_block_id();"
    back = "asc_sync_intra_arrive(PIPE_FIX, 0); asc_sync_intra_arrive(PIPE_FIX, 16);"
    vector = f"{SENDS} asc_sync_intra_wait(PIPE_V, 0); {write}"
    run(CORE.format(cube=MEET + back, vector=vector), {"X": x}, {"R": 1}, cores=2)
    assert x.tolist() == [1, 2]


@pytest.mark.parametrize(
    ("cube", "vector", "said"),
    [
        (MEET, "", "units wait for each other"),
        (MEET, "if (asc_get_sub_block_id() == 0) " + SENDS, "units wait for each other"),
        ("", SENDS, "a flag that nobody waits for"),
        ("", "asc_copy_ub2l1(l1 + (512 << 10) - 32, ub, 1, 2, 0, 0);", "outside L1"),
        ("asc_copy_l12l0a((bfloat16_t*)l0a, (bfloat16_t*)l1, 0, 0, 4, 64, 4, 4);", "", "outside L0"),
        ("asc_copy_l12l0b((bfloat16_t*)l0b, (bfloat16_t*)l1, 0, 255, 4, 8, 4, 4);", "", "outside L1"),
        ("asc_mmad((float*)l0c, (bfloat16_t*)l0a, (bfloat16_t*)l0b, 512, 16, 256, 0, 1, 0, 1);", "", "outside L0C"),
        ("", "asc_sync_wait(PIPE_MTE2, PIPE_V, 0);", "a flag that nobody set"),
        ("", f"((float*)ub)[{DEFAULT.ub_simt // 4}] = 1;", "memory outside a buffer"),
    ],
    ids=[
        "nobody comes",
        "one comes",
        "leaked flag",
        "L1 bounds",
        "operand",
        "operand in L1",
        "sums",
        "unset flag",
        "bounds",
    ],
)
def test_broken_rules_of_a_core_are_seen(cube, vector, said):
    with pytest.raises(EmulationFault, match=said):
        run(CORE.format(cube=cube, vector=vector), {"X": torch.zeros(2)}, {"R": 1}, cores=1)


LOAD = """asc_set_gm2l1_nz_para(1, 1, 32, 0);
asc_copy_gm2l1_nd2nz((bfloat16_t*)l1, (bfloat16_t*)X, 64, 0, 32, 32, 0, 0);
asc_copy_gm2l1_nd2nz((bfloat16_t*)l1 + 1024, (bfloat16_t*)X + 1024, 64, 0, 32, 32, 0, 0);
asc_copy_l12l0a((bfloat16_t*)l0a, (bfloat16_t*)l1, 0, 0, 2, 2, 2, 2);
asc_copy_l12l0b{how}((bfloat16_t*)l0b, (bfloat16_t*)l1 + 1024, 0, 0, 2, 2, 2, 2);
asc_mmad((float*)l0c, (bfloat16_t*)l0a, (bfloat16_t*)l0b, 32, 32, 32, 0, 1, 0, 1);
asc_copy_l0c2ub((float*)ub, (float*)l0c, 32, 32, 32, 32, 0, 1, 0, 0, 0, 0, 1, 0, 0);
asc_sync_intra_arrive(PIPE_FIX, 0); asc_sync_intra_arrive(PIPE_FIX, 16);"""
STORE = """asc_sync_intra_wait(PIPE_V, 0);
asc_copy_ub2gm_align((uint8_t*)(X + 1024 + 512 * asc_get_sub_block_id()), ub, 1, 2048, 0, 2048, 2048);"""


@pytest.mark.parametrize("how", ["", "_transpose"])
def test_a_product_knows_which_side_of_an_operand_is_reduced(how):
    """The same bytes as [N, K] and as [K, N]: what is no transpose of the other's result would hide a wrong load."""
    a, b = torch.randn(2, 32, 32).to(torch.bfloat16)
    x = torch.cat((torch.stack((a, b)).flatten().view(torch.float32), torch.zeros(1024)))
    run(CORE.format(cube=LOAD.format(how=how), vector=STORE), {"X": x}, {"R": 1}, cores=1)
    products = {"": a.float() @ b.float().T, "_transpose": a.float() @ b.float()}
    close = {name: torch.allclose(x[1024:].view(32, 32), want, atol=1e-4) for name, want in products.items()}
    assert close == {name: name == how for name in products}
