"""What memory and matrix units of a 950 need at least for V4.1-Flash, from published figures. Arithmetic, not a claim.

    python -m tests.ascend.roofline      # the table of docs/ascend.md

Attention is data parallel, experts are divided among the chips, every chip has the same rows. Counted: weights once a
step, expert weights as far as some row chose them (uniform routing), index keys and selected latents of the
context, and the products. Not counted: activations, communication, launches, everything that is not perfect.
"""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer_plugin.kernels.ascend.soc import Soc

LAYERS, H, HEADS, D, Q_RANK, O_RANK, O_GROUPS = 40, 5120, 64, 512, 1280, 1024, 8
EXPERTS, TOPK, INNER, VOCAB = 384, 6, 2304, 129280
SELECTED, WINDOW, INDEX_HEADS, INDEX_D, SELECTING = 512, 128, 32, 128, 8  # layers that score groups
FP8, MXFP4 = 1 + 1 / 1024, 0.5 + 1 / 32  # bytes a weight, scales included
LATENT_BYTES, INDEX_BYTES, WINDOW_BYTES = 288, 68, 528
CHIPS = {"950PR": Soc("950PR", 32, 1600), "950DT": Soc("950DT", 32, 4000)}

ATTENTION = (
    H * Q_RANK + Q_RANK * HEADS * D + H * D + O_GROUPS * O_RANK * (HEADS // O_GROUPS) * D + O_GROUPS * O_RANK * H
)
EXPERT = 3 * H * INNER


@dataclass(frozen=True)
class Load:
    """One forward on one chip: rows, of how many requests, at what context, experts divided by how many chips."""

    name: str
    rows: int
    requests: int
    context: int
    chips: int

    @property
    def bytes(self) -> float:
        local = EXPERTS / self.chips
        touched = local * (1 - (1 - TOPK / EXPERTS) ** (self.rows * self.chips))
        weights = LAYERS * ((ATTENTION + EXPERT) * FP8 + touched * EXPERT * MXFP4) + 2 * VOCAB * H
        groups = self.context / 2  # of a ratio-2 source; most layers read one of those
        cache = self.requests * SELECTING * groups * INDEX_BYTES
        # Rows of a request select different groups; at most all of them are read.
        latents = self.requests * LAYERS * min(groups, SELECTED * self.rows / self.requests) * LATENT_BYTES
        window = self.requests * LAYERS * (WINDOW + self.rows / self.requests) * WINDOW_BYTES
        return weights + cache + latents + window

    @property
    def narrow(self) -> float:
        """Operations of products that run in FP8."""
        return 2 * self.rows * (LAYERS * (ATTENTION + EXPERT + TOPK * EXPERT))

    @property
    def wide(self) -> float:
        """Operations of products that run in bf16: scores, attention, the head."""
        groups = self.context / 2
        keys = WINDOW + min(groups, SELECTED)
        scores = SELECTING * INDEX_HEADS * INDEX_D * groups
        return 2 * self.rows * (scores + LAYERS * HEADS * keys * 2 * D) + 2 * self.requests * VOCAB * H

    def milliseconds(self, chip: Soc) -> tuple[float, float]:
        """Least time for memory and for products; FP8 at twice the bf16 peak."""
        products = self.narrow / (2 * chip.bf16_flops) + self.wide / chip.bf16_flops
        return self.bytes / (chip.memory_gb_s * 1e6), products * 1e3


LOADS = (
    Load("decode, 1 request, 1 row", 1, 1, 8192, 8),
    Load("decode, 16 requests, 1 row each", 16, 16, 8192, 8),
    Load("decode, 64 requests, 1 row each", 64, 64, 8192, 8),
    Load("verify, 64 requests, 6 rows each", 384, 64, 8192, 8),
    Load("decode, 64 requests, 64k context", 64, 64, 65536, 8),
    Load("prefill chunk of 4096 rows", 4096, 1, 4096, 8),
    Load("prefill chunk of 4096 rows at 64k", 4096, 1, 65536, 8),
)


def table() -> str:
    lines = [
        "| one forward on one of 8 chips | GB | TFLOP | 950PR memory / products, ms | 950DT memory / products, ms |",
        "|---|---|---|---|---|",
    ]
    for load in LOADS:
        times = " | ".join("{:.2f} / {:.2f}".format(*load.milliseconds(chip)) for chip in CHIPS.values())
        lines.append(f"| {load.name} | {load.bytes / 1e9:.1f} | {(load.narrow + load.wide) / 1e12:.2f} | {times} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
