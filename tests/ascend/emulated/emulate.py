"""Run emitted AscendC on the host: compiled with g++ against ``device.h``, in a child process that may fault."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from deepinfer_plugin.kernels.ascend.soc import DEFAULT

HERE = Path(__file__).resolve().parent
CACHE = HERE.parents[2] / ".cache" / "ascend" / "emulated"


class EmulationFault(AssertionError):
    """The kernel broke a rule of the device; the message says which."""


def build(source: str, ub: int = DEFAULT.ub_simt) -> Path:
    """The shared object of a kernel."""
    body = re.sub(r"#include <tl_templates[^\n]*\n", "", source).replace("(__ubuf__ uint8_t *)0", "UB")
    name, parameters = _signature(source)
    call = ", ".join(f"({kind})arguments[{i}]" for i, (kind, _) in enumerate(parameters))
    if "__mix__" in source:
        header, each = "cube.h", f"run_core(core, ub, [&] {{ {name}({call}); }});"
        body = body.replace("(__cc__ float *)0", "(float *)L0C")
        for space, memory in (("cbuf", "L1"), ("ca", "L0A"), ("cb", "L0B"), ("cc", "L0C")):
            body = body.replace(f"(__{space}__ uint8_t *)0", memory)
    else:
        header, each = "device.h", f"start_core(core); {name}({call}); end_core();"
    text = f"""#define EMULATED_UB {ub}
#include "{header}"
{body}
extern "C" void run(int64_t *arguments, int cores, uint8_t *ub) {{
    UB = ub;
    for (int core = 0; core < cores; ++core) {{ {each} }}
}}
"""
    CACHE.mkdir(parents=True, exist_ok=True)
    headers = "".join(header.read_text() for header in sorted(HERE.glob("*.h")))
    key = hashlib.sha256((text + headers).encode()).hexdigest()[:16]
    library, file = CACHE / f"{key}.so", CACHE / f"{key}.cpp"
    if not library.exists():
        file.write_text(text)
        command = ["g++", "-std=c++20", "-O1", "-w", "-fno-strict-aliasing", "-ffp-contract=off", "-shared", "-fPIC"]
        done = subprocess.run(
            [*command, f"-I{HERE}", "-o", str(library) + ".part", str(file)], capture_output=True, text=True
        )
        if done.returncode:
            raise EmulationFault(f"the emitted code does not compile: {done.stderr[:2000]}")
        Path(str(library) + ".part").rename(library)
    return library


def _signature(source: str) -> tuple[str, list[tuple[str, str]]]:
    """Name of the kernel and its parameters: C type, name."""
    match = re.search(r'extern "C" __global__ (?:\w+|__mix__\(1, 2\)) void (\w+)\(([^)]*)\)', source)
    assert match, "no kernel in the source"
    parameters = []
    for text in match.group(2).replace("__gm__", "").split(","):
        kind, name = re.fullmatch(r"\s*(.*?)\s*(\w+)\s*", text).groups()
        parameters.append((kind, name))
    return match.group(1), parameters


def run(
    source: str, tensors: dict[str, Tensor], scalars: dict[str, int], cores: int, ub: int = DEFAULT.ub_simt
) -> None:
    """Run a kernel on named tensors, which it reads and writes in place. A strided view is given with all its memory; a
    file that is mapped is mapped again, so it may have holes and more bytes than there is memory.

    Raises:
        EmulationFault: an access outside a buffer, an unaligned transfer, flags that do not pair.
    """
    library = build(source, ub)
    _, parameters = _signature(source)
    with tempfile.TemporaryDirectory() as folder:
        plan, memories = [], {}  # views of one memory share a file
        for kind, name in parameters:
            if not kind.endswith("*"):
                plan.append({"scalar": scalars[name]})
                continue
            tensor = tensors[name]
            offset = tensor.storage_offset() * tensor.element_size()
            if (mapped := tensor.untyped_storage().filename) is not None:
                plan.append({"mapped": mapped, "offset": offset})
                continue
            file = f"{tensor.untyped_storage().data_ptr()}.npy"
            if file not in memories:
                memories[file] = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
                np.save(Path(folder) / file, memories[file].numpy())
            plan.append({"file": file, "offset": offset})
        (Path(folder) / "plan.json").write_text(
            json.dumps({"library": str(library), "arguments": plan, "cores": cores, "ub": ub})
        )
        done = subprocess.run(
            [sys.executable, str(HERE / "child.py"), folder], capture_output=True, text=True, timeout=300
        )
        if done.returncode:
            said = done.stderr.strip().splitlines()[-1:]
            raise EmulationFault(said[0] if said else f"memory outside a buffer (exit code {done.returncode})")
        for file, memory in memories.items():
            memory.copy_(torch.from_numpy(np.load(Path(folder) / file)))
