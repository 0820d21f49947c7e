"""Draw what ``step.py --json`` measured: at each point a stacked bar of parts for ours, the stock kernels, the floor.

python benchmarks/plot_step.py STEP.json docs/step.svg      # needs matplotlib
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from step import PARTS

BARS = {"ours": "ours", "stock_best": "best", "stock_default": "stock", "floor": "floor"}


def draw(axes: Axes, points: list[dict[str, Any]]) -> None:
    """Bars of the points side by side, those of a point next to each other."""
    names = [(point, name) for point in points for name in BARS if f"{name}_parts" in point]
    places = [index + 0.8 * points.index(point) for index, (point, _) in enumerate(names)]
    base = [0.0] * len(names)
    for part in PARTS:
        heights = [point[f"{name}_parts"].get(part, 0.0) for point, name in names]
        axes.bar(places, heights, bottom=base, label=part, width=0.85)
        base = [below + height for below, height in zip(base, heights, strict=True)]
    axes.set_xticks(places, [BARS[name] for _, name in names], rotation=90, fontsize=7)
    for point in points:
        middle = [place for place, (own, _) in zip(places, names, strict=True) if own is point]
        text = f"{point['rows']} rows\n{point['context'] >> 10}k"
        axes.annotate(
            text, (sum(middle) / len(middle), -0.2), xycoords=("data", "axes fraction"), ha="center", va="top"
        )
    axes.set_ylabel("ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("json", type=Path)
    parser.add_argument("svg", type=Path)
    args = parser.parse_args()
    points = json.loads(args.json.read_text())["steps"]
    kinds = [[point for point in points if point["prefill"] is kind] for kind in (False, True)]
    kinds = [kind for kind in kinds if kind]
    figure, axes = plt.subplots(len(kinds), figsize=(12, 5 * len(kinds)), squeeze=False, layout="constrained")
    for one, kind in zip(axes[:, 0], kinds, strict=True):
        draw(one, kind)
    axes[0, 0].legend(ncols=len(PARTS), loc="upper left")
    plt.rcParams["svg.hashsalt"] = "step"  # the same file from the same numbers
    figure.savefig(args.svg, metadata={"Date": None})


if __name__ == "__main__":
    main()
