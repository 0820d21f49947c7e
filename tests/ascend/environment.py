"""Environments of the Ascend tests, apart from the main one: an installed torch_npu breaks ``import torch`` wherever
its runtime is missing.

    python -m tests.ascend.environment npu      # prints the interpreter; builds what is missing

``npu``: torch, torch_npu over a stub runtime, and TileLang. ``triton``: Triton for Ascend and the compiler of its IR.
Wheels exist for x86-64 Linux and Python 3.11; nothing here needs an Ascend device or CANN.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CACHE = ROOT / ".cache" / "ascend"
REQUIREMENTS = {
    "npu": (
        "torch==2.13.0",
        "torch-npu==2.13.0rc1",
        "tilelang==0.1.15",
        "numpy==2.4.6",
        "pyyaml==6.0.4",
        "safetensors==0.8.0",
        "pytest==9.2.0",
        "pytest-timeout==2.4.0",
        "setuptools==84.2.1",
        "sympy==1.14.0",
        "tokenizers==0.23.2",
        "tqdm==4.70.1",
        "msgspec==0.23.0",
    ),
    "triton": (
        "triton-ascend==3.2.0",
        "ascendnpu-ir==1.2.0",
        "pybind11==3.0.1",
        "numpy==2.4.6",
        "pytest==9.2.0",
        "pytest-timeout==2.4.0",
    ),
}
# What torch_npu links against; the stub stands in for all of them.
LIBRARIES = (
    "libhccl.so",
    "libascendcl.so",
    "libacl_op_compiler.so",
    "libge_runner.so",
    "libgraph.so",
    "libacl_tdt_channel.so",
)
# Calls that report success although nothing defines them: profiling and logging.
HARMLESS = ("Msprof", "aclAppLog")
# Looked up by name while torch_npu starts, so no undefined symbol asks for them.
LOOKED_UP = ("aclrtSetDeviceSatMode", "aclrtSetOpExecuteTimeOut")


def interpreter(name: str) -> Path:
    """The interpreter of an environment, built if it is not there.

    Raises:
        subprocess.CalledProcessError: pip or the C compiler failed.
    """
    home = CACHE / name
    python = home / "bin" / "python"
    recipe = "\n".join((*REQUIREMENTS[name], (HERE / "runtime_stub.c").read_text(), Path(__file__).read_text()))
    stamp = home / f".ready-{hashlib.sha256(recipe.encode()).hexdigest()[:12]}"
    if stamp.exists():
        return python
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
    install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    if name == "npu":
        # A CPU build: another brings gigabytes of CUDA. pip must know an index that has it (PIP_EXTRA_INDEX_URL).
        subprocess.run([*install, f"{REQUIREMENTS[name][0]}+cpu"], check=True)
    subprocess.run([*install, *REQUIREMENTS[name]], check=True)
    if name == "npu":
        subprocess.run([*install, "--no-deps", "--no-build-isolation", "--editable", str(ROOT)], check=True)
        build_stub(python, home / "stub")
    for old in home.glob(".ready-*"):
        old.unlink()
    stamp.touch()
    return python


def environment(name: str) -> dict[str, str]:
    """Variables under which a process of the environment runs: the stub reaches no other process."""
    variables = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    for inherited in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"):
        variables.pop(inherited, None)
    if name == "npu":
        variables["LD_LIBRARY_PATH"] = str(CACHE / name / "stub")
        variables["TILELANG_CACHE_DIR"] = str(CACHE / "tilelang")
    return variables


def build_stub(python: Path, folder: Path) -> None:
    """Compile the stub runtime under the names torch_npu links against."""
    folder.mkdir(parents=True, exist_ok=True)
    site = Path(
        subprocess.run(
            [str(python), "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"],
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()
    )
    source = (HERE / "runtime_stub.c").read_text()
    defined = set(re.findall(r"\b\**(\w+)\(", source))
    missing = sorted((_undefined(site) | set(LOOKED_UP)) - defined)
    generated = folder / "runtime.c"
    generated.write_text(
        "\n".join(
            [source, *(f"long {name}(void) {{ return {0 if _harmless(name) else 107000}; }}" for name in missing)]
        )
    )
    first = folder / LIBRARIES[0]
    subprocess.run(["gcc", "-w", "-shared", "-fPIC", "-o", str(first), str(generated)], check=True)
    for name in LIBRARIES[1:]:
        link = folder / name
        link.unlink(missing_ok=True)
        link.symlink_to(first.name)


def _harmless(name: str) -> bool:
    return name.startswith(HARMLESS) or name in LOOKED_UP


def _undefined(site: Path) -> set[str]:
    """Runtime calls that torch_npu's libraries leave undefined. All of them are C functions."""
    own = [*(site / "torch_npu" / "lib").glob("*.so"), *(site / "torch_npu").glob("_C*.so")]
    needed = set().union(*(_symbols(library, undefined=True) for library in own))
    return {name for name in needed if re.match(r"(acl|aclrt|aclop|aclmdl|rt|ge|Msprof|Hccl)[A-Z]", name)}


def _symbols(library: Path, undefined: bool) -> set[str]:
    table = subprocess.run(
        ["readelf", "--wide", "--dyn-syms", str(library)], check=True, capture_output=True, text=True
    ).stdout
    found = set()
    for line in table.splitlines():
        columns = line.split()
        if len(columns) >= 8 and (columns[6] == "UND") == undefined and columns[4] != "WEAK":
            found.add(columns[7].split("@")[0])
    return found


if __name__ == "__main__":
    print(interpreter(sys.argv[1]))
