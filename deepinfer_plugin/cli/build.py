"""``deepinfer build [DIR]``: compile the CUDA kernels of a model ahead of their first use.

Needs neither a GPU nor a CUDA toolkit: every step that a server with these flags captures, prefills and drafting run
without memory and without launches, so that whatever they would launch is compiled. Without DIR the released model is
built; only a checkpoint's config is read. Kernels that are compiled already are only counted.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..arguments import RUNNING_REQUESTS

if TYPE_CHECKING:
    from ..model.config import V41Config
    from ..model.network import Network

PREFILL = 8192  # rows of the largest prefill step, SGLang's default on a large GPU


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser("build", help="compile the CUDA kernels ahead of their use", description=__doc__)
    parser.add_argument(
        "dir", metavar="DIR", type=Path, nargs="?", help="checkpoint directory; only its config is read"
    )
    parser.add_argument("--ranks", type=int, default=1, metavar="N", help="ranks that share the experts (default 1)")
    parser.add_argument(
        "--redundant", type=int, default=0, metavar="N", help="replicas of experts in every layer (default 0)"
    )
    parser.add_argument(
        "--max-running-requests",
        type=_positive,
        default=RUNNING_REQUESTS,
        metavar="N",
        help=f"as the server will be told (default {RUNNING_REQUESTS})",
    )
    parser.add_argument(
        "--context-length", type=_positive, metavar="N", help="as the server will be told (default: the model's)"
    )
    parser.add_argument("--page-size", type=int, default=128, metavar="N", help="likewise (default 128)")
    parser.add_argument("--profile", default="model", metavar="NAME", help="--deepinfer-profile (default model)")
    parser.set_defaults(run=run)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not supported; legal: a positive number")
    return int(text)


def run(args: argparse.Namespace) -> int:
    from ..kernels.cuda import ahead, jit

    started = time.perf_counter()
    try:
        with ahead.compiling() as kernels:
            network = _network(_config(args.dir), args.ranks, args.redundant, args.profile)
            print(f"compiling for {jit.ARCH}; a new kernel takes seconds, some of them a minute", flush=True)
            _steps(network, args)
    except (jit.CompileError, ImportError, RuntimeError, ValueError) as error:
        print(f"deepinfer build: {error}", file=sys.stderr)
        return 2
    from triton import knobs

    seconds = time.perf_counter() - started
    print(
        f"{kernels.count} kernels for {jit.ARCH} in {jit.cache_folder()} and {knobs.cache.dir}: {kernels.compiled} "
        f"compiled, {seconds:.1f} s"
    )
    return 0


def _config(path: Path | None) -> V41Config:
    from ..model.config import V41Config
    from ..model.released import RELEASED

    return V41Config.from_dict(RELEASED) if path is None else V41Config.load(path)


def _network(config: V41Config, ranks: int, redundant: int, profile: str) -> Network:
    """Without memory, laid out as the providers of Hopper do.

    Raises:
        ValueError: ranks among which the experts and their replicas do not divide, or an unknown profile.
    """
    import torch

    from ..kernels.cuda import ahead
    from ..model.engram_table import EngramTable
    from ..model.network import Network
    from ..model.place import check_place
    from ..model.profiles import profile_named

    rounding, table = profile_named(profile), None
    if rounding.dtype == torch.float32:
        raise ValueError("--profile float32 is for debugging and runs the reference in part; legal: model, deepinfer")
    if ranks < 1:
        raise ValueError(f"--ranks {ranks} is not supported; legal: a divisor of {config.experts} experts")
    check_place(config, 1, ranks, redundant)
    with torch.device("meta"):
        if (engram := config.engram) is not None:
            layers, sizes = len(engram.layers), engram.max_ngram - 1

            def numbers(*shape: int) -> torch.Tensor:
                return torch.empty(shape, dtype=torch.int64)

            table = EngramTable(
                token_class=numbers(config.vocab_size),
                pad_class=0,
                multipliers=numbers(layers, engram.max_ngram),
                primes=numbers(layers, sizes, engram.heads),
                offsets=numbers(layers, sizes * engram.heads),
            )
        network = Network(
            config, ahead.ops(profile), rounding, table, _parallel(config, ranks, redundant) if ranks > 1 else None
        )
        network.prepare()
    return network


def _parallel(config: V41Config, ranks: int, redundant: int) -> Any:
    """One of several ranks that divide the experts, as far as kernels can tell: nothing travels, and a rank's experts
    are asked for pairs of a token and one choice."""
    import torch

    from ..kernels.cuda import peers
    from ..model.captured import Captured
    from ..model.layout import Layout
    from ..model.parallel import ExpertSum, Here, Ranks

    class Pairs(Here):
        def routed(self, experts: ExpertSum, x: Any, weights: Any, ids: Any) -> Any:
            return experts(x, weights[:, :1], experts.assign(ids)[:, :1])

    class Nobody:
        rank, size = 0, ranks

        def all_gather(self, x: Any) -> Any:
            return x.new_empty(ranks, *x.shape)

    class Nowhere:
        """In the place of ``PeerMemory``."""

        def begin(self) -> None:
            pass

        def send(self, made: Any, local: Any, rows: int, size: int, dtype: torch.dtype) -> Any:
            memories = torch.empty(ranks, dtype=torch.int64, device="meta")
            peers.send(made, local, memories, 0, rows, size, dtype)
            return made.new_empty(rows // size, *made.shape[1:], dtype=dtype)

        ascending_sum = staticmethod(peers.ascending_sum)

    nobody: Any = Nobody()
    return Ranks(
        nobody,
        nobody,
        split_heads=False,
        layout=Layout.trivial(config, ranks, redundant),
        travelling=lambda ranks, counts: Pairs(sum(counts)),
        fixed=partial(Captured, peers=Nowhere()),
    )


def _steps(network: Network, args: argparse.Namespace) -> None:
    """All that a server runs, on memory that is not there."""
    import torch

    from ..model.memory import PageLayout, PagePool, StateLayout, StatePool
    from ..model.rows import Rows
    from ..runtime import graphs

    class Compiling:
        """In the place of ``graphs.Graphs``."""

        def capture(self, work: Callable[[], Any]) -> tuple[None, Any]:
            return None, work()

    config, longest = network.config, args.context_length or network.config.max_position
    layout = PageLayout.of(config, args.page_size)
    pages = PagePool.allocate(layout, 2, "meta")
    state = StatePool(StateLayout.of(config), args.max_running_requests + 1, "meta")
    each = 1 + config.draft_block
    with torch.inference_mode():
        counts = graphs.row_counts(args.max_running_requests * each)
        widths = graphs.table_widths(longest, args.page_size)
        step = graphs.StepGraphs(Compiling(), network, pages, state, counts, widths)  # type: ignore[arg-type]
        for _, hidden in step.captured.values():
            network.logits(hidden)
        if network.dspark is not None:
            requests = graphs.row_counts(args.max_running_requests)
            graphs.DraftGraphs(Compiling(), network.dspark, pages, state, requests)  # type: ignore[arg-type]
        eager = graphs.EagerStep(network, pages, state)
        for count in graphs.row_counts(PREFILL):
            if count <= counts[-1]:
                continue
            rows = torch.empty(5, count, dtype=torch.int64, device="meta")
            eager(
                Rows(
                    token_ids=rows[0],
                    positions=rows[1],
                    requests=rows[2],
                    cu_rows=rows[3, :2],
                    slots=rows[3, :1],
                    page_table=torch.empty(1, widths[0], dtype=torch.int64, device="meta"),
                    window_floor=rows[4],
                    writes_pages=torch.empty(count, dtype=torch.bool, device="meta"),
                )
            )
