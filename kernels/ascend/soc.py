"""The chips this provider is written for, and what a machine says it has.

Nothing here imports torch_npu or needs a device: files and variables are read below a root that tests replace.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

ARCH = 3510  # of every Ascend 950
MIN_CANN = (9, 2)
MIN_TORCH_NPU = (2, 13)
VECTOR_BYTES = 256  # of a vector register
ALIGNMENT = 32  # bytes; a transfer into the unified buffer starts on such a boundary


@dataclass(frozen=True)
class Soc:
    """Limits of one chip. Sizes are bytes of one core; a core is one cube and two vector units.

    Source: the target table of the A5 compiler (``ascendnpu-ir`` 1.2.0) and, for memory, Huawei's announcements.
    """

    name: str
    cores: int
    memory_gb_s: int  # bandwidth of the chip's memory
    ub: int = 248 << 10  # unified buffer of a vector unit
    ub_simt: int = 216 << 10  # what is left of it when a kernel has SIMT functions
    l1: int = 512 << 10
    l0a: int = 64 << 10
    l0b: int = 64 << 10
    l0c: int = 256 << 10
    hertz: float = 1.65e9

    @property
    def vectors(self) -> int:
        return 2 * self.cores

    @property
    def bf16_flops(self) -> float:
        """Dense peak: 4096 multiply-adds a cycle and core."""
        return 2 * 4096 * self.cores * self.hertz

    def rows(self, bytes_per_row: int, fixed: int = 0, buffers: int = 1, most: int = 128) -> int:
        """Rows of a tile, a power of two up to ``most``, so that ``buffers`` tiles and ``fixed`` bytes fit the unified
        buffer beside SIMT functions.

        Raises:
            ValueError: not even one row fits: the kernel must split its columns.
        """
        room = (self.ub_simt - fixed) // (buffers * -(-bytes_per_row // ALIGNMENT) * ALIGNMENT)
        if room < 1:
            raise ValueError(
                f"{self.name}: a row of {bytes_per_row} bytes, {buffers} of them and {fixed} bytes beside do not fit "
                f"{self.ub_simt} bytes of unified buffer"
            )
        return min(most, 1 << (room.bit_length() - 1))


_BINS = {"57": 28, "58": 32, "59": 36, "5A": 36}
_BANDWIDTH = {"PR": 1600, "DT": 4000}


def soc_of(name: str) -> Soc | None:
    """The chip a device name stands for, or None if it is no Ascend 950.

    >>> soc_of("Ascend950PR_9589").cores
    32
    >>> soc_of("Ascend910B3")
    """
    match = re.fullmatch(r"Ascend950(PR|DT)?(?:_9(5[0-9A])([0-9a-z]))?", name.strip())
    if not match:
        return None
    kind, bin_, unit = match.groups()
    cores = {"z": 4, "x": 8}.get(unit or "", _BINS.get(bin_ or "", 28))
    return Soc(name.strip(), cores, _BANDWIDTH[kind or "PR"])


DEFAULT = Soc("Ascend950PR_9589", 32, 1600)  # what kernels are lowered for where there is no device


@dataclass(frozen=True)
class Machine:
    """What was found; None: not found. ``devices`` counts device files."""

    soc: str | None = None
    devices: int = 0
    driver: str | None = None
    cann: str | None = None
    torch_npu: str | None = None

    def problem(self) -> str | None:
        """Why this machine is not supported, or None."""
        if self.soc is None:
            return "it needs an Ascend 950; no Ascend device was found"
        if soc_of(self.soc) is None:
            return f"it needs an Ascend 950 (arch {ARCH}); not supported: found {self.soc}"
        for what, found, least in (("CANN", self.cann, MIN_CANN), ("torch_npu", self.torch_npu, MIN_TORCH_NPU)):
            wanted = ".".join(map(str, least))
            if found is None:
                return f"it needs {what} {wanted} or newer; none was found"
            if version(found) < least:
                return f"it needs {what} {wanted} or newer; not supported: found {found}"
        return None

    def support(self) -> dict[str, tuple[str, str, bool]]:
        """What ``deepinfer doctor`` prints: item -> found, wanted, whether that will do."""
        known = self.soc is not None and soc_of(self.soc) is not None
        return {
            "SoC": (self.soc or "none", f"Ascend 950 (arch {ARCH})", known),
            "driver": (self.driver or "not found", "any", self.driver is not None),
            "CANN": (self.cann or "not found", _at_least(MIN_CANN), _enough(self.cann, MIN_CANN)),
            "torch_npu": (
                self.torch_npu or "not installed",
                _at_least(MIN_TORCH_NPU),
                _enough(self.torch_npu, MIN_TORCH_NPU),
            ),
        }


def version(text: str) -> tuple[int, ...]:
    """The leading numbers: "9.2.0-beta.2" -> (9, 2, 0). No number: ()."""
    match = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(int(part) for part in match.group().split(".")) if match else ()


def _at_least(least: tuple[int, ...]) -> str:
    return ".".join(map(str, least)) + " or newer"


def _enough(found: str | None, least: tuple[int, ...]) -> bool:
    return found is not None and version(found) >= least


def read(path: Path) -> str | None:
    """The text of a small file, or None. The only access to files in this module."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def files(root: Path = Path("/"), env: Mapping[str, str] | None = None) -> Machine:
    """What files and variables tell, without loading anything: device files, driver and CANN."""
    env = os.environ if env is None else env
    homes = [env[name] for name in ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME") if env.get(name)]
    homes += ["/usr/local/Ascend/cann", "/usr/local/Ascend/ascend-toolkit/latest"]
    places = ("*-linux/ascend_toolkit_install.info", "version.info", "runtime/version.info", "version.cfg")
    cann = None
    for home in homes:
        base = root / home.lstrip("/")
        for place in places:
            for file in sorted(base.glob(place)):
                cann = cann or _version_line(read(file))
    driver = _version_line(read(root / "usr/local/Ascend/driver/version.info"))
    devices = [path for path in (root / "dev").glob("davinci*") if path.name[7:].isdigit()]
    return Machine(devices=len(devices), driver=driver, cann=cann)


def _version_line(text: str | None) -> str | None:
    """The value of a version line in the forms CANN has used: version=9.2.0, Version=[9.2.T1:9.2.0]."""
    match = re.search(
        r"^\s*\w*version\w*\s*=\s*\[?(?:[^\]\n]*:)?\s*(\d[\w.\-]*)", text or "", re.IGNORECASE | re.MULTILINE
    )
    return match.group(1) if match else None


def machine(root: Path = Path("/"), env: Mapping[str, str] | None = None) -> Machine:
    """Everything that is found. Loads torch_npu if its device files are there or torch has loaded it already."""
    import torch

    found = files(root, env)
    runtime = getattr(torch, "npu", None)
    if runtime is None and found.devices:
        try:
            import torch_npu  # noqa: F401  registers torch.npu
        except (ImportError, RuntimeError, OSError):
            return found
        runtime = getattr(torch, "npu", None)
    if runtime is None:
        return found
    name = str(runtime.get_device_name(0)) if runtime.is_available() else None
    return replace(found, soc=name, torch_npu=_torch_npu_version())


def _torch_npu_version() -> str | None:
    from importlib import metadata

    for name in ("torch_npu", "torch-npu"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None
