"""The other compiler for the 950: Triton to linalg, then ``bishengir-compile-a5`` down to HIVM, where ``hivmc-a5``, a
part of CANN, is missing. The provider has no Triton kernel; this tier keeps the way open, and is a second opinion on
what fits the unified buffer."""

from __future__ import annotations

import os
import re
import stat
import subprocess
from pathlib import Path
from typing import Any

import ascendnpuir
import pytest
import triton
import triton.language as tl
from triton._C.libtriton import ir
from triton.backends.ascend import compiler as ascend
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

COMPILER = Path(ascendnpuir.__file__).parent / "bin" / "bishengir-compile-a5"
TARGETS = ["Ascend950PR_9589", "Ascend950DT_9591"]
FLAGS = (
    "--enable-hfusion-compile=true",
    "--enable-triton-kernel-compile=true",
    "--enable-hivm-compile=true",
    "--enable-print-memory-allocated-size",
)


@triton.jit
def normed(x_ptr, w_ptr, y_ptr, size, eps, BLOCK: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    there = at < size
    x = tl.load(x_ptr + row * size + at, mask=there, other=0.0).to(tl.float32)
    w = tl.load(w_ptr + at, mask=there, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * size + at, x * tl.rsqrt(tl.sum(x * x, axis=0) / size + eps) * w, mask=there)


@triton.jit
def accumulators(x_ptr, p_ptr, y_ptr, HEADS: tl.constexpr, D: tl.constexpr):
    """What an attention row keeps, float32 [heads, D], rescaled and added to: two such tiles live at once."""
    at = tl.program_id(0) * HEADS * D + tl.arange(0, HEADS)[:, None] * D + tl.arange(0, D)[None, :]
    x, p = tl.load(x_ptr + at), tl.load(p_ptr + at)
    tl.store(y_ptr + at, x * tl.exp(-tl.max(p, axis=1)[:, None]) + p)


def linalg(kernel: Any, signature: dict[str, str], constants: dict[str, int], chip: str) -> str:
    target = GPUTarget("npu", chip, 0)
    backend = ascend.AscendBackend(target)
    options = backend.parse_options(
        {
            "compile_on_910_95": True,
            "multibuffer": False,
            "enable_auto_bind_sub_block": False,
            "enable_select_analysis": True,
        }
    )
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    source = ASTSource(kernel, signature, constants)
    module = source.make_ir(options, backend.get_codegen_implementation(), backend.get_module_map(), context)
    metadata = {**options.__dict__, "target": target, "hash": "none"}
    module = ascend.make_ttir(module, metadata, options)
    text = ascend.ttir_to_linalg(module, metadata, options, named_ops=True)
    return ascend._parse_linalg_metadata(text, metadata)[0]


def compile_a5(text: str, folder: Path, chip: str) -> subprocess.CompletedProcess[str]:
    """Run the middle end with a recorder in the place of the missing last tool."""
    COMPILER.chmod(COMPILER.stat().st_mode | stat.S_IXUSR)
    tools = folder / "tools"
    tools.mkdir()
    recorder = tools / "hivmc-a5"
    recorder.write_text(f'#!/bin/sh\necho "$@" > {folder}/hivmc\n')
    recorder.chmod(0o755)
    (folder / "k.mlir").write_text(text)
    return subprocess.run(
        [str(COMPILER), str(folder / "k.mlir"), f"--target={chip}", *FLAGS, "-o", str(folder / "k.o")],
        env={**os.environ, "PATH": f"{tools}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        cwd=folder,
        timeout=300,
    )


NORM = {"x_ptr": "*bf16", "w_ptr": "*bf16", "y_ptr": "*bf16", "size": "i32", "eps": "fp32"}
ROWS = {"x_ptr": "*fp32", "p_ptr": "*fp32", "y_ptr": "*fp32"}


@pytest.mark.parametrize("chip", TARGETS)
@pytest.mark.parametrize("block", [1024, 8192])
def test_rms_norm_reaches_the_last_tool(tmp_path, chip, block):
    done = compile_a5(linalg(normed, NORM, {"BLOCK": block}, chip), tmp_path, chip)
    said = done.stdout + done.stderr
    assert done.returncode == 0 and (tmp_path / "hivmc").exists(), said
    assert (size := re.search(r"UB size = (\d+) bits", said)) and 0 < int(size.group(1)) <= 248 * 1024 * 8, said


def test_heads_in_tiles_fit(tmp_path):
    done = compile_a5(linalg(accumulators, ROWS, {"HEADS": 16, "D": 512}, TARGETS[0]), tmp_path, TARGETS[0])
    assert done.returncode == 0 and (tmp_path / "hivmc").exists(), done.stdout + done.stderr


def test_sixty_four_heads_overflow_the_unified_buffer(tmp_path):
    done = compile_a5(linalg(accumulators, ROWS, {"HEADS": 64, "D": 512}, TARGETS[0]), tmp_path, TARGETS[0])
    assert done.returncode != 0 and "ub overflow" in done.stdout + done.stderr
    assert not (tmp_path / "hivmc").exists()


def test_a_row_that_is_too_long_is_refused(tmp_path):
    done = compile_a5(linalg(normed, NORM, {"BLOCK": 131072}, TARGETS[0]), tmp_path, TARGETS[0])
    assert done.returncode != 0 and "ub overflow" in done.stdout + done.stderr


def test_what_is_no_module_is_refused(tmp_path):
    assert compile_a5("not a module", tmp_path, TARGETS[0]).returncode != 0
