"""The FP8 products of a layer on one NVIDIA GPU, beside cuBLAS.

    python benchmarks/cuda_linear.py [--rows 8,64,256,4096] [--json FILE]

cuBLAS multiplies by bf16 weights of the same shape (twice the memory) and does not cast its input, which ours does. us:
medians of CUDA-graph replays over weights that rotate through more than the L2 cache; fast: of profile deepinfer, where
wo_a's input and result are cast too; floor: the larger of bytes over 4.3 TB/s and operations over 790 TFLOP/s (bf16),
both measured on an H200. error: of ours and of fast, against the reference provider on the same inputs (up to 300
rows).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch
from cuda_timing import floor_us, graph_us, machine, relative
from torch import Tensor

from deepinfer_plugin.kernels import Ops, Prepared, select

# name: groups, outputs of a group, channels. wq_a and wkv read the same input, as do gate and up: each pair is one.
SHAPES = {
    "wq_a + wkv": (1, 1792, 5120),
    "wq_b": (1, 32768, 1280),
    "wo_a": (8, 1024, 4096),
    "wo_b": (1, 5120, 8192),
    "gate + up": (1, 4608, 5120),
    "down": (1, 5120, 2304),
}
ROTATED_BYTES = 150 << 20
CHECKED_ROWS = 300


def weight(rows: int, channels: int) -> tuple[Tensor, Tensor]:
    """Finite e4m3 [rows, channels], UE8M0 scales of its 32x32 tiles."""
    codes = torch.randint(256, (rows, channels), dtype=torch.uint8, device="cuda") & 0xBF
    scale = torch.randint(110, 118, (-(-rows // 32), channels // 32), dtype=torch.uint8, device="cuda")
    return codes.view(torch.float8_e4m3fn), scale.view(torch.float8_e8m0fnu)


def prepare(ops: Ops, raw: tuple[Tensor, Tensor], groups: int) -> Prepared:
    return ops.prepare_linear(*raw) if groups == 1 else ops.prepare_grouped(*raw, groups)


def product(ops: Ops, x: Tensor, prepared: Prepared, fp8: bool = False) -> Tensor:
    """x [T, groups, K] -> [T, groups * N]."""
    return ops.linear(x[:, 0], prepared) if x.shape[1] == 1 else ops.grouped_linear(x, prepared, fp8)


@torch.inference_mode()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="8,64,256,4096")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    ops, fast, reference = select("cuda"), select("cuda", profile="deepinfer"), select("cuda", "reference")
    found = []
    print(machine())
    print(f"{'product':>12} {'rows':>5} {'ours':>8} {'fast':>8} {'cuBLAS':>8} {'floor':>8} {'x floor':>8} errors")
    for name, (groups, outputs, channels) in SHAPES.items():
        size = groups * outputs * channels
        raw = [weight(groups * outputs, channels) for _ in range(max(2, min(24, ROTATED_BYTES // size)))]
        prepared = [(prepare(ops, each, groups),) for each in raw]
        prepared_fast = [(prepare(fast, each, groups),) for each in raw]
        expanded = [(torch.randn(groups, channels, outputs, device="cuda", dtype=torch.bfloat16),) for _ in raw]
        for rows in map(int, args.rows.split(",")):
            x = torch.randn(rows, groups, channels, device="cuda", dtype=torch.bfloat16)
            by_group = x.transpose(0, 1).contiguous()
            ours = graph_us(lambda w: product(ops, x, w), prepared)  # noqa: B023
            cublas = graph_us(lambda w: torch.bmm(by_group, w), expanded)  # noqa: B023
            fp8 = graph_us(lambda w: product(fast, x, w, True), prepared_fast)  # noqa: B023
            floor, errors = floor_us(size, 2 * size * rows), [float("nan")] * 2
            if rows <= CHECKED_ROWS:
                right = prepare(reference, raw[0], groups)
                errors = [
                    relative(product(table, x, weights[0][0], cast), product(reference, x, right, cast))
                    for table, weights, cast in ((ops, prepared, False), (fast, prepared_fast, True))
                ]
            found.append(
                {"product": name, "rows": rows, "ours_us": ours, "fast_us": fp8, "cublas_us": cublas,
                 "floor_us": floor, "errors": errors}
            )  # fmt: skip
            print(
                f"{name:>12} {rows:>5} {ours:>8.1f} {fp8:>8.1f} {cublas:>8.1f} {floor:>8.1f} {ours / floor:>8.2f} "
                + " ".join(f"{error:.0e}" for error in errors),
                flush=True,
            )
    if args.json:
        args.json.write_text(json.dumps({**machine(), "products": found}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
