"""The process that runs an emulated kernel, which may take it down: guard pages and canaries surround its buffers."""

from __future__ import annotations

import ctypes
import json
import mmap
import sys
from pathlib import Path

import numpy as np

GUARD = 512  # bytes on both sides of a tensor that a kernel must not touch


def main(folder: Path) -> int:
    """Run what ``plan.json`` says; the exit code is that of the emulation."""
    plan = json.loads((folder / "plan.json").read_text())
    page = mmap.PAGESIZE
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    size = -(-plan["ub"] // page) * page
    area = mmap.mmap(-1, size + 2 * page)
    base = ctypes.addressof(ctypes.c_char.from_buffer(area))
    for guard in (base, base + page + size):
        assert libc.mprotect(guard, page, 0) == 0
    # The end of the buffer lies at the end of its pages, so that the first byte beyond it is a guard.
    ub = base + page + size - plan["ub"]
    assert ub % 32 == 0
    values, held, maps = [], {}, []
    for argument in plan["arguments"]:
        if "scalar" in argument:
            values.append(argument["scalar"])
            continue
        if "mapped" in argument:
            maps.append(_mapped(argument["mapped"]))
            values.append(ctypes.addressof(maps[-1]) + argument["offset"])
            continue
        if argument["file"] not in held:
            data = np.load(folder / argument["file"])
            padded = held[argument["file"]] = np.full(data.size + 2 * GUARD, 0xCD, np.uint8)
            padded[GUARD : GUARD + data.size] = data
        values.append(held[argument["file"]].ctypes.data + GUARD + argument["offset"])
    arguments = (ctypes.c_int64 * len(values))(*values)
    ctypes.CDLL(plan["library"]).run(arguments, plan["cores"], ctypes.c_void_p(ub))
    for file, padded in held.items():
        if (padded[:GUARD] != 0xCD).any() or (padded[-GUARD:] != 0xCD).any():
            print("emulation: written outside a tensor", file=sys.stderr)
            return 87
        np.save(folder / file, padded[GUARD:-GUARD])
    return 0


def _mapped(file: str) -> ctypes.c_char:
    """The first of a file's bytes, shared with whoever maps it too, for as long as this is held."""
    with open(file, "r+b") as opened:
        return ctypes.c_char.from_buffer(mmap.mmap(opened.fileno(), 0))


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1])))
