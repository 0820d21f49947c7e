"""CUDA C++ compiled on first use, cached on disk, launched on PyTorch's current stream.

A kernel is a ``.cu`` file of this folder, specialised by macros, for Hopper unless another GPU is asked for. NVRTC
compiles it to a cubin: it comes with PyTorch, so neither a toolkit nor a host compiler is needed, and it works without
a GPU. Cubins are kept under ``$XDG_CACHE_HOME/deepinfer_plugin/kernels``, keyed by everything that goes into them.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import MULTIPROCESSORS

FOLDER = Path(__file__).parent
ARCH = "sm_90a"  # Hopper; wgmma exists under this name only
OPTIONS = ("--std=c++17", "--ptxas-options=-v")
DIGEST = 32  # bytes of a sha256
SHARED_BYTES = 227 << 10  # of a block of Hopper at most, static and dynamic


class CompileError(RuntimeError):
    """A kernel does not compile; the message is the compiler's log."""


@dataclass(frozen=True)
class Source:
    """A specialised kernel file."""

    file: str
    defines: tuple[tuple[str, int], ...]
    wgmma: tuple[int, ...]  # widths of the wgmma instructions it uses
    arch: str = ARCH

    @property
    def options(self) -> tuple[str, ...]:
        return (f"--gpu-architecture={self.arch}", *OPTIONS)

    @property
    def text(self) -> str:
        macros = "".join(f"#define {name} {value}\n" for name, value in self.defines)
        each = f"#define FOR_EACH_WGMMA(DO) {' '.join(f'DO({n})' for n in self.wgmma)}\n"
        return macros + each + "".join(map(wgmma, self.wgmma)) + (FOLDER / "hopper.cuh").read_text() + self.body

    @property
    def body(self) -> str:
        """The file, with the files of this folder that it includes."""
        text = (FOLDER / self.file).read_text()
        return re.sub(r'^#include "(.+)"$', lambda found: (FOLDER / found[1]).read_text(), text, flags=re.MULTILINE)


def wgmma(n: int) -> str:
    """C++ of the instructions d[64, n] (+)= a[64, k] times b[k, n], float32 sums, 32 bytes of a row a step.

    bf16 (k = 16) ``wgmma_n*`` and e4m3 (k = 32) ``wgmma_fp8_n*`` take a from registers, ``wgmma_shared_n*`` (bf16) and
    ``wgmma_fp8_shared_n*`` from shared memory; b is in shared memory, along k, or along n for ``wgmma_across_n*``
    (bf16, a from registers). The operand list grows with n, which no template can write.
    """
    count = n // 2
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    accumulators = ", ".join(f"%{i}" for i in range(count))
    registers = "{" + ", ".join(f"%{count + i}" for i in range(4)) + "}"
    forms = (
        ("wgmma_n", "k16.f32.bf16.bf16", 4, ", 1, 1, 0"),
        ("wgmma_across_n", "k16.f32.bf16.bf16", 4, ", 1, 1, 1"),
        ("wgmma_shared_n", "k16.f32.bf16.bf16", 0, ", 1, 1, 0, 0"),
        ("wgmma_fp8_n", "k32.f32.e4m3.e4m3", 4, ", 1, 1"),
        ("wgmma_fp8_shared_n", "k32.f32.e4m3.e4m3", 0, ", 1, 1"),
    )
    return "".join(
        f"""
__device__ __forceinline__ void {name}{n}(float (&d)[{count}], {
            "unsigned a0, unsigned a1, unsigned a2, unsigned a3" if lanes else "unsigned long long a"
        }, unsigned long long b, int accumulate) {{
    asm volatile("{{.reg .pred p; setp.ne.b32 p, %{count + (lanes or 1) + 1}, 0; "
        "wgmma.mma_async.sync.aligned.m64n{n}{kind} {{{accumulators}}}, {registers if lanes else f"%{count}"}, "
        "%{count + (lanes or 1)}, p{ending};}}"
        : {outputs} : {'"r"(a0), "r"(a1), "r"(a2), "r"(a3)' if lanes else '"l"(a)'}, "l"(b), "r"(accumulate));
}}
"""
        for name, kind, lanes, ending in forms
    )


class Boxes(NamedTuple):
    """A kernel's argument: the tensor map of a bf16 matrix [rows, columns], to be copied in boxes whose rows are 128
    bytes and swizzled. Rows that are not there are zeros."""

    matrix: Tensor
    rows: int  # of a box
    columns: int

    def encoded(self) -> Any:
        from cuda.bindings import driver

        rows, columns = self.matrix.shape
        return _ok(driver.cuTensorMapEncodeTiled(
            driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, self.matrix.data_ptr(),
            [driver.cuuint64_t(columns), driver.cuuint64_t(rows)], [driver.cuuint64_t(2 * columns)],
            [driver.cuuint32_t(self.columns), driver.cuuint32_t(self.rows)], [driver.cuuint32_t(1)] * 2,
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        ))  # fmt: skip


class Kernel:
    """One entry of a compiled source. Loaded on each device at its first launch there."""

    def __init__(self, source: Source, entry: str):
        self.source, self.entry = source, entry
        self._functions: dict[int, Any] = {}

    def launch(
        self,
        grid: tuple[int, ...],
        threads: int,
        shared: int,
        *args: Tensor | Boxes | int | float,
        overlap: bool = False,
    ) -> None:
        """Launch on the current stream. Tensors are passed as pointers, ints as ``long long``, floats as ``float``.

        Args:
            grid: up to three sizes; a zero anywhere launches nothing.
            shared: bytes of dynamic shared memory.
            overlap: begin before the kernel before it has ended; it must wait for that one itself.
        """
        if _instead is not None:
            return _instead(self.source)
        if 0 in grid:
            return None
        from cuda.bindings import driver

        device = torch.cuda.current_device()
        function = self._functions.get(device)
        if function is None:
            module = _ok(driver.cuModuleLoadData(cubin(self.source)))
            function = _ok(driver.cuModuleGetFunction(module, self.entry.encode()))
            if shared > 48 << 10:
                limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                _ok(driver.cuFuncSetAttribute(function, limit, shared))
            self._functions[device] = function  # complete: another thread may use it from here on
        values, types = zip(*map(_passed, args), strict=True)
        stream = torch.cuda.current_stream().cuda_stream
        sizes = (*grid, 1, 1)[:3]
        if not overlap:
            _ok(driver.cuLaunchKernel(function, *sizes, threads, 1, 1, shared, stream, (values, types), 0))
            return
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = sizes
        config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
        config.sharedMemBytes, config.hStream = shared, stream
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        config.attrs, config.numAttrs = [attribute], 1
        _ok(driver.cuLaunchKernelEx(config, function, (values, types), 0))


def _passed(arg: Tensor | Boxes | int | float) -> tuple[Any, type | None]:
    """As the driver's bindings take it, with its type in C."""
    if isinstance(arg, Boxes):
        return arg.encoded(), None  # has the address itself
    if isinstance(arg, Tensor):
        return arg.data_ptr(), ctypes.c_void_p
    return arg, ctypes.c_float if isinstance(arg, float) else ctypes.c_longlong


_instead: Callable[[Source], None] | None = None


@contextlib.contextmanager
def instead_of_launching(work: Callable[[Source], None]) -> Iterator[None]:
    """Inside, a launch is ``work`` with the source of the kernel."""
    global _instead
    before, _instead = _instead, work
    try:
        yield
    finally:
        _instead = before


def aligned(x: Tensor) -> Tensor:
    """x, or a copy of it that begins at a multiple of 16 bytes: for kernels that read it 16 bytes at a time."""
    return x.clone() if x.data_ptr() % 16 else x


def multiprocessors(device: torch.device) -> int:
    """Of a GPU; what has none is compiled for Hopper."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else MULTIPROCESSORS


def kernel(file: str, entry: str, wgmma: tuple[int, ...] = (), arch: str = ARCH, **defines: int) -> Kernel:
    """The kernel ``entry`` of ``file`` with these macros; compiled when it is first launched."""
    return _kernel(Source(file, tuple(sorted(defines.items())), wgmma, arch), entry)


@functools.cache
def arch_of(device: torch.device) -> str:
    """The architecture to compile for to run on a GPU; what has no GPU is compiled for Hopper."""
    if device.type != "cuda":
        return ARCH
    return "sm_{}{}a".format(*torch.cuda.get_device_capability(device))


def kernel_like(other: Kernel, entry: str) -> Kernel:
    """Another entry of the same specialised source."""
    return _kernel(other.source, entry)


@functools.cache
def _kernel(source: Source, entry: str) -> Kernel:
    return Kernel(source, entry)


def cubin(source: Source) -> bytes:
    """Machine code of a source, from the cache or compiled.

    Raises:
        CompileError: the compiler refused it.
    """
    path = _cache_path(source)
    if path is not None and (found := _read(path)) is not None:
        return found
    code, _ = compile_source(source)
    if path is not None:
        _write(path, code)
    return code


def _read(path: Path) -> bytes | None:
    """A cached cubin, None if it is not there or not whole: it ends with its digest."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    code, digest = content[:-DIGEST], content[-DIGEST:]
    return code if hashlib.sha256(code).digest() == digest else None


def _write(path: Path, code: bytes) -> None:
    """A cache that cannot be written costs the next start some seconds."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            try:
                file.write(code + hashlib.sha256(code).digest())
                file.close()
                os.replace(file.name, path)  # other processes see all of it or nothing
            except OSError:
                os.unlink(file.name)


def cached(source: Source) -> bool:
    """Whether ``cubin`` would find it compiled."""
    path = _cache_path(source)
    return path is not None and _read(path) is not None


def _cache_path(source: Source) -> Path | None:
    """None where this user has no home."""
    from cuda.bindings import nvrtc

    made_with = repr((_ok(nvrtc.nvrtcVersion()), source.options)).encode()
    key = hashlib.sha256(made_with + source.text.encode()).hexdigest()[:32]
    try:
        return cache_folder() / f"{Path(source.file).stem}-{key}.cubin"
    except RuntimeError:
        return None


def compile_source(source: Source) -> tuple[bytes, str]:
    """(cubin, the assembler's report of registers, spills and shared memory)."""
    from cuda.bindings import nvrtc

    program = _ok(nvrtc.nvrtcCreateProgram(source.text.encode(), source.file.encode(), 0, [], []))
    options = [option.encode() for option in source.options]
    failed = nvrtc.nvrtcCompileProgram(program, len(options), options)[0] != nvrtc.nvrtcResult.NVRTC_SUCCESS
    log = bytearray(_ok(nvrtc.nvrtcGetProgramLogSize(program)))
    _ok(nvrtc.nvrtcGetProgramLog(program, log))
    report = log.rstrip(b"\0").decode()
    if failed:
        raise CompileError(f"{source.file} with {dict(source.defines)}:\n{report}")
    code = bytearray(_ok(nvrtc.nvrtcGetCUBINSize(program)))
    _ok(nvrtc.nvrtcGetCUBIN(program, code))
    return bytes(code), report


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "deepinfer_plugin" / "kernels"


def _ok(result: tuple[Any, ...]) -> Any:
    """The value of a call into the CUDA bindings.

    Raises:
        RuntimeError: the call failed; the message is its code's name.
    """
    status, *values = result
    if int(status) != 0:
        raise RuntimeError(f"CUDA: {status.name}")
    return values[0] if len(values) == 1 else tuple(values)
