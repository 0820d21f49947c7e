"""CUDA graphs of whole steps: one launch instead of thousands.

The network knows rows, not modes, and so do its graphs: one is captured for a number of rows and a width of the page
tables, and runs decode, verification or a short prefill alike. A step is padded to the next captured number of rows
with requests of one token in slot 0 and page 0, which are junk. More rows than were captured run eagerly.

Several ranks replay together: they agree on the host which graph it is, that of the group that needs the largest, and
groups without rows replay padding. If the rows of one fit none, all run eagerly.
"""

from __future__ import annotations

import dataclasses
import logging
import sys
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from tqdm import tqdm

from deepinfer_plugin.conflicts import graph_field
from deepinfer_plugin.model.dspark import Draft, DSpark
from deepinfer_plugin.model.layout import TARGET
from deepinfer_plugin.model.memory import PagePool, StatePool
from deepinfer_plugin.model.network import Network
from deepinfer_plugin.model.parallel import OP_BY_OP, Exchange
from deepinfer_plugin.model.rows import Rows
from deepinfer_plugin.runtime import shared_noise
from deepinfer_plugin.runtime.memory_plan import CapacityError, gib
from deepinfer_plugin.runtime.shared_noise import Draws

T = TypeVar("T")
logger = logging.getLogger(__name__)

NARROWEST = 4096  # tokens of the narrowest page tables that are captured
WIDER = 16  # times as wide as the next narrower ones


class EagerStep:
    """Runs rows through the network: final hidden states [R, H], the caller's to keep."""

    rows: Sequence[int] = ()  # the numbers of rows that are captured, ascending
    widths: Sequence[int] = ()  # of page tables, likewise

    def __init__(self, network: Network, pages: PagePool, state: StatePool):
        self.network, self.pages, self.state = network, pages, state

    def __call__(self, rows: Rows) -> Tensor:
        return self.network(rows, self.pages, self.state)

    def width(self, count: int, pages: int) -> int:
        """How wide to make page tables that need ``pages`` columns, for a step of ``count`` rows."""
        return pages


def row_counts(most: int) -> tuple[int, ...]:
    """Numbers of rows worth a graph each for steps of up to ``most``: two an octave, so that a step is padded by less
    than half."""
    usual = (1, 2, *(factor << shift for shift in range(1, most.bit_length()) for factor in (2, 3)))
    return (*sorted({rows for rows in usual if rows < most}), most)


def table_widths(longest: int, page_size: int) -> tuple[int, ...]:
    """Widths of page tables, in pages, for requests of up to ``longest`` tokens. What an index source scores, and the
    memory it takes, grows with the width, however short the requests are."""
    full, widths, tokens = -(-longest // page_size), [], NARROWEST
    while -(-tokens // page_size) < full:
        widths.append(-(-tokens // page_size))
        tokens *= WIDER
    return (*widths, full)


class Graphs:
    """Captured calls that share one memory pool. They may: only one runs at a time, and whatever a graph returns is
    copied before the next one starts."""

    def __init__(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream()

    def capture(self, work: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
        """The graph of ``work``, and where its results will be. It runs once before, so that kernels compile."""
        current = torch.cuda.current_stream()
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            work()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"):
            results = work()
        current.wait_stream(self.stream)
        return graph, results


class StepGraphs(EagerStep):
    """``rows`` ascending numbers of rows, ``widths`` ascending widths of page tables in pages."""

    def __init__(
        self,
        graphs: Graphs,
        network: Network,
        pages: PagePool,
        state: StatePool,
        rows: Sequence[int],
        widths: Sequence[int],
    ):
        super().__init__(network, pages, state)
        self.rows, self.widths = rows, widths
        most, device = rows[-1], network.norm.weight.device
        self.per_row = torch.zeros(3, most, dtype=torch.int64, device=device)  # token ids, positions, window floors
        self.writes_pages = torch.zeros(most, dtype=torch.bool, device=device)
        self.requests = torch.zeros(most, dtype=torch.int64, device=device)
        self.slots = torch.zeros(most, dtype=torch.int64, device=device)
        self.live = torch.zeros(1, dtype=torch.int64, device=device)  # rows that are no padding
        self.cu_rows = torch.zeros(most + 1, dtype=torch.int64, device=device)
        self.table = torch.zeros(most * widths[-1], dtype=torch.int64, device=device)
        self.counting = torch.arange(most + 1, device=device)
        self.captured: dict[tuple[int, int], tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        # The largest first: what it leaves in the pool is enough for the others.
        for count, width in progress(
            "graphs of steps", [(count, width) for width in reversed(widths) for count in reversed(rows)]
        ):
            inputs = self._inputs(count, width)
            self._pad(inputs, 0, 0)
            self.captured[count, width] = graphs.capture(partial(self._run, inputs))

    def _run(self, inputs: Rows) -> Tensor:
        # What a Rows derives from its fields must be computed by the graph, not found: a new one every time.
        exchange = self.network.parallel.captured(inputs.count, self.live)
        return self.network(dataclasses.replace(inputs), self.pages, self.state, exchange=exchange)

    def width(self, count: int, pages: int) -> int:
        """As wide as a graph's, so that the table is copied as it is."""
        return self.widths[bisect_left(self.widths, pages)] if count <= self.rows[-1] else pages

    def __call__(self, rows: Rows) -> Tensor:
        parallel = self.network.parallel
        forward = parallel.meet(rows.count, rows.parts, self._size(rows))
        if forward.size in (0, OP_BY_OP):
            return self.network(rows, self.pages, self.state, exchange=parallel.exchange(forward))
        count, width = forward.size, self.width(rows.count, rows.page_table.shape[1])
        self._fill(self._inputs(count, width), rows)
        graph, hidden = self.captured[count, width]
        graph.replay()
        self.network.expert_maps[TARGET].forwards += 1  # which it counted when it was captured
        return hidden[: rows.count].clone()

    def _size(self, rows: Rows) -> int:
        """Of the smallest graph for these rows, see ``Parallel.meet``."""
        requests = rows.page_table.shape[0]
        if rows.count > self.rows[-1] or requests > rows.count or rows.image_mask is not None:
            return OP_BY_OP
        return self.rows[bisect_left(self.rows, rows.count)] if rows.count else 0

    def _inputs(self, count: int, width: int) -> Rows:
        """The rows a graph reads, views of the buffers that all graphs share."""
        token_ids, positions, window_floor = self.per_row[:, :count]
        return Rows(
            token_ids=token_ids,
            positions=positions,
            requests=self.requests[:count],
            cu_rows=self.cu_rows[: count + 1],
            slots=self.slots[:count],
            page_table=self.table[: count * width].view(count, width),
            window_floor=window_floor,
            writes_pages=self.writes_pages[:count],
        )

    def _fill(self, inputs: Rows, rows: Rows) -> None:
        requests, pages = rows.page_table.shape
        for name in ("token_ids", "positions", "window_floor", "writes_pages", "requests"):
            getattr(inputs, name)[: rows.count].copy_(getattr(rows, name))
        inputs.slots[:requests].copy_(rows.slots)
        inputs.cu_rows[: requests + 1].copy_(rows.cu_rows)
        inputs.page_table[:requests, :pages].copy_(rows.page_table)
        inputs.page_table[:requests, pages:].zero_()
        self.live.fill_(rows.count)
        self._pad(inputs, rows.count, requests)

    def _pad(self, inputs: Rows, count: int, requests: int) -> None:
        """After ``count`` rows of ``requests``: each row a request of its own, requests beyond those without rows."""
        padding = inputs.count - count
        if padding:
            self.per_row[:, count : inputs.count].zero_()
            inputs.writes_pages[count:].zero_()
            inputs.requests[count:].copy_(self.counting[requests : requests + padding])
            inputs.cu_rows[requests : requests + padding + 1].copy_(self.counting[count : inputs.count + 1])
        inputs.slots[requests:].zero_()
        inputs.cu_rows[requests + padding + 1 :].fill_(inputs.count)
        inputs.page_table[requests:].zero_()


class EagerDraft:
    """Drafts after the newest tokens of requests: ``DSpark.draft``. draws: how they sample; None: all are greedy."""

    def __init__(self, dspark: DSpark, pages: PagePool, state: StatePool):
        self.dspark, self.pages, self.state = dspark, pages, state

    def __call__(self, anchors: Tensor, positions: Tensor, slots: Tensor, draws: Draws | None = None) -> Draft:
        return self.draft(anchors, positions, slots, draws)

    def draft(
        self, anchors: Tensor, positions: Tensor, slots: Tensor, draws: Draws | None, exchange: Exchange | None = None
    ) -> Draft:
        choose = None if draws is None else partial(shared_noise.draft, draws=draws)
        return self.dspark.draft(anchors, positions, slots, self.state, self.pages, choose, exchange)


class DraftGraphs(EagerDraft):
    """For the captured ``counts`` of requests, ascending; eagerly for more. draws: whether requests may sample, for
    which there are graphs of their own."""

    def __init__(
        self,
        graphs: Graphs,
        dspark: DSpark,
        pages: PagePool,
        state: StatePool,
        counts: Sequence[int],
        draws: bool = False,
    ):
        super().__init__(dspark, pages, state)
        self.counts = counts
        most, device = counts[-1], state.rings.device
        self.inputs = torch.zeros(3, most, dtype=torch.int64, device=device)  # anchors, positions, slots
        self.live = torch.zeros(1, dtype=torch.int64, device=device)  # rows that are no padding
        self.draws = Draws(*torch.zeros(2, most, dtype=torch.int64, device=device), *torch.ones(3, most, device=device))
        self.captured: dict[tuple[int, bool], tuple[torch.cuda.CUDAGraph, Draft]] = {}
        self._pad(0, most)
        kinds = (False, True) if draws else (False,)
        for count, drawn in progress(
            "graphs of drafting", [(count, drawn) for count in reversed(counts) for drawn in kinds]
        ):
            given = self.draws.at(slice(count)) if drawn else None
            self.captured[count, drawn] = graphs.capture(partial(self._run, self.inputs[:, :count], given))

    def __call__(self, anchors: Tensor, positions: Tensor, slots: Tensor, draws: Draws | None = None) -> Draft:
        count, size = anchors.shape[0], OP_BY_OP
        if count <= self.counts[-1]:
            size = self.counts[bisect_left(self.counts, count)] if count else 0
        forward = self.dspark.meet(anchors, positions, slots, size)
        padded = forward.size
        if padded in (0, OP_BY_OP):
            return self.draft(anchors, positions, slots, draws, self.dspark.parallel.exchange(forward))
        for buffer, value in zip(self.inputs, (anchors, positions, slots), strict=True):
            buffer[:count].copy_(value)
        if draws is not None:
            for field in dataclasses.fields(Draws):  # whatever padding rows have drawn before is as good as anything
                getattr(self.draws, field.name)[:count].copy_(getattr(draws, field.name))
        self._pad(count, padded)
        self.live.fill_(count * self.dspark.dspark.block_size)
        graph, draft = self.captured[padded, draws is not None]
        graph.replay()
        self.dspark.places.forwards += 1  # which it counted when it was captured
        confidence = None if draft.confidence is None else draft.confidence[:count].clone()
        return Draft(draft.tokens[:count].clone(), None, confidence)

    def _run(self, inputs: Tensor, draws: Draws | None) -> Draft:
        # Logits of a vocabulary for every draft, which nobody reads, would stay in the pool for ever.
        anchors, positions, slots = inputs
        exchange = self.dspark.parallel.captured(anchors.shape[0] * self.dspark.dspark.block_size, self.live)
        return dataclasses.replace(self.draft(anchors, positions, slots, draws, exchange), base_logits=None)

    def _pad(self, count: int, padded: int) -> None:
        self.inputs[:, count:padded].zero_()
        self.inputs[1, count:padded] = 1  # the first position with a token before it


def wanted(runner: Any) -> bool:
    """Whether SGLang's model runner is to capture: on a GPU, unless a flag says no or the ops cannot be captured."""
    if torch.device(runner.device).type != "cuda":
        return False
    network = runner.model.network
    if not network.parallel.captures:  # said when the ranks were made
        return False
    uncapturable = [op for op, name in network.ops.choices.items() if name == "reference"]
    if network.profile.dtype == torch.float32:  # some ops of every provider are then the reference's
        uncapturable.append("the float32 profile")
    if uncapturable:
        logger.warning("no CUDA graphs: the reference implementation of %s waits for the device", uncapturable[-1])
        return False
    given = runner.server_args  # as given: to SGLang's own runners we always declare "disabled"
    off = given.disable_cuda_graph or given.disable_decode_cuda_graph or given.cuda_graph_backend_decode
    return not (off or graph_field(given.cuda_graph_config, "decode", "backend"))


def progress(what: str, work: Sequence[T]) -> Iterable[T]:
    """A bar on stderr: kernels compile at their first capture, which takes minutes on a new machine."""
    return tqdm(work, desc=what, unit="graph", file=sys.stderr)


def logged(what: str, counts: Sequence[int], work: Callable[[], T]) -> T:
    """Do ``work``, which captures; say what it took.

    Raises:
        CapacityError: the memory that weights and pools leave is too little.
    """
    start, free = time.perf_counter(), torch.cuda.mem_get_info()[0]
    try:
        result = work()
    except torch.OutOfMemoryError as error:
        raise CapacityError(
            f"capturing {what} of up to {counts[-1]} rows does not fit the {gib(free)} that weights and pools leave: "
            "lower --mem-fraction-static or --max-running-requests, or add --disable-cuda-graph"
        ) from error
    used = gib(free - torch.cuda.mem_get_info()[0])
    logger.info("captured %s at %s: %.1f s, %s", what, list(counts), time.perf_counter() - start, used)
    return result
