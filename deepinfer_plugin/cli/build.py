"""``deepinfer build [DIR]``: compile the CUDA kernels of a model ahead of their first use.

Needs neither a GPU nor a CUDA toolkit. Without DIR the released model's shapes are compiled; ``--ranks`` divides the
experts as expert parallelism does. Kernels that are compiled already are only counted.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

RELEASED = {"hidden": 5120, "index_heads": 32, "index_head_dim": 128, "block_size": 8}
RELEASED_EXPERTS = ((384, 2304, 6), (128, 2304, 3))  # network, draft stages


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser("build", help="compile the CUDA kernels ahead of their use", description=__doc__)
    parser.add_argument(
        "dir", metavar="DIR", type=Path, nargs="?", help="checkpoint directory; only its config is read"
    )
    parser.add_argument("--ranks", type=int, default=1, metavar="N", help="expert parallel ranks (default 1)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from tqdm import tqdm

    from ..kernels.cuda import ahead, jit

    try:
        shapes = _shapes(args.dir, args.ranks)
    except ValueError as error:
        print(f"deepinfer build: {error}", file=sys.stderr)
        return 2
    sources = list(ahead.sources(**shapes))
    started, compiled = time.perf_counter(), 0
    print(f"compiling {len(sources)} kernels for {jit.ARCH}, some of them for minutes", flush=True)
    for source in tqdm(sources, unit="kernel", mininterval=0.1 if sys.stderr.isatty() else 10):
        try:
            compiled += not jit.cached(source)
            jit.cubin(source)
        except (jit.CompileError, ImportError, RuntimeError) as error:
            print(f"deepinfer build: {error}", file=sys.stderr)
            return 2
    seconds = time.perf_counter() - started
    print(f"{len(sources)} kernels for {jit.ARCH} in {jit.cache_folder()}: {compiled} compiled, {seconds:.1f} s")
    return 0


def _shapes(path: Path | None, ranks: int) -> dict:
    from ..conflicts import PAGE_SIZES
    from ..model.config import V41Config

    if path is None:
        shapes: dict = {**RELEASED, "expert_sets": RELEASED_EXPERTS}
    else:
        config = V41Config.load(path)
        sets = [(config.experts, config.expert_dim, config.experts_per_token)]
        if config.dspark is not None:
            sets.append((config.dspark.experts, config.expert_dim, config.dspark.experts_per_token))
        shapes = {
            "hidden": config.hidden_size,
            "index_heads": config.index_heads,
            "index_head_dim": config.index_head_dim,
            "block_size": config.candidate_block_size,
            "expert_sets": tuple(sets),
        }
    for count, _, _ in shapes["expert_sets"]:
        if ranks < 1 or count % ranks:
            raise ValueError(f"--ranks {ranks} does not divide {count} experts; legal: a divisor of it")
    return shapes | {
        "expert_sets": tuple((count // ranks, inner, topk) for count, inner, topk in shapes["expert_sets"]),
        "groups_per_page": tuple(sorted({size // ratio for size in PAGE_SIZES for ratio in (1, 2)})),
    }
