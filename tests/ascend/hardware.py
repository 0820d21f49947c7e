"""What someone with an Ascend 950 runs (``scripts/run_on_ascend.sh``): everything the other tiers cannot show.

Pre-flight by the support table; every case of the contract suite on the device against the reference on the CPU, once
more with the providers that serve only where asked for; the tiny network; timings of ops at the released model's sizes
with their share of the roofline. Nothing here has run yet.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from deepinfer_plugin.kernels import OP_NAMES, registry
from deepinfer_plugin.kernels.ascend import soc

from ..kernels.cases import BUILDERS, make
from ..kernels.conftest import OnDevice

# float32 sums of another order and the vendor's own roundings, in units of a case's bound.
BF16_FACTOR, FLOAT32_FACTOR = 2.0, 64.0
REPEATS = 30


def versions(machine: soc.Machine) -> dict[str, Any]:
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    found = asdict(machine) | {"torch": torch.__version__, "python": platform.python_version(), "commit": commit}
    return found


BOTH = ((torch.bfloat16, BF16_FACTOR), (torch.float32, FLOAT32_FACTOR))


def contract(
    ops: Any, reference: Any, names: Iterable[str] = BUILDERS, dtypes: Any = BOTH, scale: int = 1
) -> dict[str, Any]:
    """Case -> "passed" or how it failed; ``scale`` multiplies its channels."""
    from ..kernels.test_contract import assert_close

    outcomes: dict[str, Any] = {}
    for dtype, factor in dtypes:
        for name in names:
            for rows in (1, 7, 33):
                case = make(name, dtype, rows, seed=rows, scale=scale)
                label = f"{name} {str(dtype).removeprefix('torch.')} x{rows}"
                try:
                    for got, want in zip(case.run(ops), case.run(reference), strict=True):
                        assert_close(got, want, case.ulps * factor)
                    outcomes[label] = "passed"
                except Exception as error:  # every case is wanted, whatever the first one does
                    outcomes[label] = f"{type(error).__name__}: {str(error)[:300]}"
    return outcomes


def asked_for(reference: Any, device: torch.device) -> dict[str, Any]:
    """Provider that serves only where asked for -> op -> its cases, other ops as by default; or why it serves none."""
    found: dict[str, Any] = {}
    for provider in registry.providers():
        if provider.name not in ("ascend-tilelang", "ascend-flashmla"):
            continue
        if (reason := provider.unavailable(device)) is not None:
            found[provider.name] = reason
            continue
        found[provider.name] = {}
        for op in sorted(set(provider.ops(device)) & set(OP_NAMES)):
            names = [name for name in BUILDERS if make(name, torch.bfloat16).op == op]
            table = OnDevice(registry.select(device, force={op: provider.name}, check=False))
            # The attention tiles take channels in multiples of 128.
            scale = 2 if (provider.name, op) == ("ascend-tilelang", "sparse_attention") else 1
            found[provider.name][op] = contract(table, reference, names, BOTH[:1], scale)
    return found


def tiny_model(device: str) -> dict[str, Any]:
    from deepinfer_plugin.model import V41
    from deepinfer_plugin.model.tiny import write_tiny

    with tempfile.TemporaryDirectory() as folder:
        write_tiny(Path(folder))
        ids = torch.randint(10, 200, (150,), generator=torch.Generator().manual_seed(7))
        outputs = {
            name: V41.load(folder, provider, device=where).logits(ids).cpu()
            for name, provider, where in (("device", "auto", device), ("reference", "reference", "cpu"))
        }
    error = (outputs["device"] - outputs["reference"]).norm(dim=-1) / outputs["reference"].norm(dim=-1)
    same = (outputs["device"].argmax(-1) == outputs["reference"].argmax(-1)).float().mean()
    return {"median_error": float(error.median()), "same_argmax": float(same)}


def timings(ops: Any, chip: soc.Soc) -> list[dict[str, Any]]:
    """Medians by device events, beside the time that memory and the cube need at their peaks."""
    x = lambda *shape, dtype=torch.bfloat16: torch.randn(*shape, device="npu").to(dtype)  # noqa: E731
    rows_, found = (1, 64, 256), []
    weight = torch.randint(0, 126, (1280, 5120), dtype=torch.uint8, device="npu").view(torch.float8_e4m3fn)
    scale = torch.full((40, 160), 120, dtype=torch.uint8, device="npu").view(torch.float8_e8m0fnu)
    prepared = ops.prepare_linear(weight, scale)
    for rows in rows_:
        streams, hidden = x(rows, 4, 5120), x(rows, 5120)
        pre = torch.rand(rows, 4, device="npu")
        cases: dict[str, tuple[Callable[[], Any], float, float]] = {
            "rms_norm": (lambda h=hidden: ops.rms_norm(h, h[0], 1e-20), 2 * hidden.nbytes, 0),
            "hc_collapse": (lambda s=streams, p=pre: ops.hc_collapse(s, p), streams.nbytes + hidden.nbytes, 0),
            "linear": (lambda h=hidden: ops.linear(h, prepared), weight.nbytes + hidden.nbytes, 2 * rows * 1280 * 5120),
        }
        for name, (call, moved, operations) in cases.items():
            floor = max(moved / (chip.memory_gb_s * 1e9), operations / (2 * chip.bf16_flops))
            found.append({"op": name, "rows": rows, "us": (us := measure(call)), "floor_us": floor * 1e6})
            found[-1]["share"] = floor * 1e6 / us
    return found


def measure(call: Callable[[], Any]) -> float:
    npu = torch.npu  # type: ignore[attr-defined]
    times = []
    for _ in range(REPEATS + 5):
        first, last = npu.Event(enable_timing=True), npu.Event(enable_timing=True)
        first.record()
        call()
        last.record()
        last.synchronize()
        times.append(first.elapsed_time(last) * 1e3)
    return statistics.median(times[5:])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("."))
    out = parser.parse_args().out
    machine = soc.machine()
    problem = machine.problem()
    if problem:
        print(f"ascend hardware: SKIPPED ({problem})")
        return 0
    from deepinfer_plugin.kernels import select

    chip = soc.soc_of(str(machine.soc))
    assert chip is not None
    ops = select("npu")
    device, reference = OnDevice(ops), select("cpu", "reference")
    report: dict[str, Any] = {"versions": versions(machine), "contract": contract(device, reference)}
    steps: dict[str, Callable[[], Any]] = {
        "asked_for": lambda: asked_for(reference, torch.device("npu")),
        "tiny_model": lambda: tiny_model("npu"),
        "timings": lambda: timings(ops, chip),
    }
    for name, step in steps.items():
        try:
            report[name] = step()
        except Exception as error:  # a report with a hole is worth more than none
            report[name] = f"{type(error).__name__}: {error}"
    out.mkdir(parents=True, exist_ok=True)
    (out / "ascend_report.json").write_text(json.dumps(report, indent=2) + "\n")
    failed = {name: outcome for name, outcome in report["contract"].items() if outcome != "passed"}
    lines = [f"{key}: {value}" for key, value in report["versions"].items()]
    lines += [f"contract: {len(report['contract']) - len(failed)} passed, {len(failed)} failed"]
    lines += [f"  {name}: {outcome}" for name, outcome in failed.items()]
    lines += [f"served where asked for: {json.dumps(report['asked_for'])}"]
    lines += [f"tiny model: {report['tiny_model']}", "timings:"]
    lines += [f"  {row}" for row in report["timings"]] if isinstance(report["timings"], list) else [report["timings"]]
    (out / "ascend_report.txt").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
