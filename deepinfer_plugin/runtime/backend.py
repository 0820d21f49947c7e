"""SGLang's ForwardBatch -> the network's Rows. No attention runs here: the network reads both memories itself.

Everything below happens while a forward is prepared, on its stream: resetting the slots of requests that begin,
seeding their Engram look-back, and gathering the page table, after which the forward no longer reads what the
scheduler may change.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.runtime_context import get_exec
from torch import Tensor

from deepinfer_plugin.model.rows import Rows
from deepinfer_plugin.runtime import graphs, requests
from deepinfer_plugin.runtime.pools import PagePoolForSGLang
from deepinfer_plugin.runtime.transfer import to_device


class DeepInferBackend(AttentionBackend):
    """``forward_metadata`` is the Rows of the current forward, None when there are none (idle)."""

    needs_cpu_seq_lens = False
    tail_forward_metadata = None  # no late-layer row subset yet: every row runs every layer
    forward_metadata: Rows | None

    def __init__(self, runner: Any):
        super().__init__()
        self.token_to_kv_pool: PagePoolForSGLang = runner.token_to_kv_pool
        self.req_to_token_pool = runner.req_to_token_pool
        self.network = runner.model.network
        self.folds_encoder_swa_replay = get_exec().features.enable_encoder_swa_bounded_replay
        pool = self.token_to_kv_pool
        self.graphs = graphs.Graphs() if graphs.wanted(runner) else None
        self.step = graphs.EagerStep(self.network, pool.pages, pool.state)
        if self.graphs is not None:
            self.step = self._capture(self.graphs, runner.spec_algorithm.is_speculative())

    # ---- SGLang's contract -----------------------------------------------------------------------------------------

    def init_forward_metadata(self, forward_batch: Any) -> None:
        mode = forward_batch.forward_mode
        if mode.is_idle() or forward_batch.input_ids.shape[0] == 0:
            self.forward_metadata = None
            return
        self.forward_metadata = rows = self.rows(forward_batch)
        if mode.is_extend_without_speculative():
            self._begin_requests(rows, requests.of(forward_batch))
            self.token_to_kv_pool.wait_loaded()

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    get_cpu_graph_seq_len_fill_value = get_cuda_graph_seq_len_fill_value

    def _capture(self, captures: graphs.Graphs, speculative: bool) -> graphs.StepGraphs:
        """Graphs for every decode step, or every verification, of as many requests as may run at a time."""
        slots, longest = self.req_to_token_pool.req_to_token.shape
        each = 1 + self.network.config.draft_block if speculative else 1
        pool, rows = self.token_to_kv_pool, graphs.row_counts((slots - 1) * each)
        widths = graphs.table_widths(longest, pool.page_size)
        return graphs.logged(
            f"steps with page tables of {widths}",
            rows,
            lambda: graphs.StepGraphs(captures, self.network, pool.pages, pool.state, rows, widths),
        )

    # ---- rows ------------------------------------------------------------------------------------------------------

    def rows(self, batch: Any) -> Rows:
        """Rows of an extend, decode or verify batch, in the order of ``batch.input_ids``.

        Rows beyond the requests' own (data-parallel padding) each become a request of one token at position 0 of
        slot 0, page 0.
        """
        device, count = batch.input_ids.device, batch.input_ids.shape[0]
        lengths, own = self._row_counts(batch)
        slots, positions = batch.req_pool_indices.to(torch.int64), batch.positions.to(torch.int64)
        padding = count - own
        if padding:
            lengths = torch.cat([lengths, torch.ones(padding, dtype=torch.int64, device=device)])
            slots = torch.cat([slots, torch.zeros(padding, dtype=torch.int64, device=device)])
            positions = torch.cat([positions[:own], torch.zeros(padding, dtype=torch.int64, device=device)])
        index = torch.arange(len(slots), device=device)
        cu_rows = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        owners = torch.repeat_interleave(index, lengths, output_size=count)
        # A request without rows (padding of the request axis) has no end; it gets the table of an empty sequence.
        ends = torch.where(lengths > 0, positions[(cu_rows[1:] - 1).clamp(min=0)] + 1, 0)
        floor = torch.zeros(count, dtype=torch.int64, device=device)
        if batch.encoder_swa_row_floor is not None:
            floor[: len(batch.encoder_swa_row_floor)] = batch.encoder_swa_row_floor
        writes = torch.ones(count, dtype=torch.bool, device=device)
        if batch.encoder_swa_compress_rows is not None:
            writes = torch.zeros_like(writes).index_fill_(0, batch.encoder_swa_compress_rows, True)
        writes[own:] = False
        return Rows(
            token_ids=batch.input_ids.to(torch.int64),
            positions=positions,
            requests=owners,
            cu_rows=cu_rows,
            slots=slots,
            page_table=self._page_table(slots, ends, self._longest(batch, ends), count),
            window_floor=floor,
            writes_pages=writes,
        )

    def _row_counts(self, batch: Any) -> tuple[Tensor, int]:
        """Rows of each request, int64 [B] on the device, and their sum on the host."""
        mode, count, size = batch.forward_mode, batch.input_ids.shape[0], batch.req_pool_indices.shape[0]
        device = batch.input_ids.device
        if mode.is_decode():
            return torch.ones(size, dtype=torch.int64, device=device), size
        if mode.is_target_verify():
            layout = getattr(batch.spec_info, "ragged_verify_layout", None)
            if layout is not None:
                total = layout.total_verify_tokens
                return layout.verify_lens.to(torch.int64), count if total is None else total
            each = batch.spec_info.draft_token_num
            return torch.full((size,), each, dtype=torch.int64, device=device), size * each
        host = batch.extend_seq_lens_cpu
        return batch.extend_seq_lens.to(torch.int64), count if host is None else sum(host)

    def _longest(self, batch: Any, ends: Tensor) -> int:
        """A bound of every request's length on the host, without waiting for the device: its own tables are as wide
        as that."""
        if ends.device.type == "cpu":
            return int(ends.max())
        known = requests.longest_of(batch)
        if known is not None:
            return min(known, self.req_to_token_pool.req_to_token.shape[1])
        if batch.extend_prefix_lens_cpu is not None and not batch.forward_mode.is_target_verify():
            return max(map(sum, zip(batch.extend_prefix_lens_cpu, batch.extend_seq_lens_cpu, strict=True)))
        return self.req_to_token_pool.req_to_token.shape[1]

    def _page_table(self, slots: Tensor, ends: Tensor, longest: int, count: int) -> Tensor:
        """int64 [B, at least the pages of the longest] for a step of ``count`` rows; entries past a request's end,
        where SGLang keeps what older requests left, are page 0."""
        size, last = self.token_to_kv_pool.page_size, self.req_to_token_pool.req_to_token.shape[1] - 1
        width = self.step.width(count, -(-max(longest, 1) // size))
        firsts = torch.arange(0, width * size, size, device=slots.device)
        table = self.req_to_token_pool.req_to_token[slots.unsqueeze(1), firsts.clamp(max=last)].to(torch.int64) // size
        return torch.where(firsts < ends.unsqueeze(1), table, 0)

    # ---- requests that begin ---------------------------------------------------------------------------------------

    def _begin_requests(self, rows: Rows, facts: requests.RequestFacts | None) -> None:
        """Make the slots of new requests theirs. Under replay the fold has already reset them."""
        if facts is None or not any(facts.begins):
            return
        state, device = self.token_to_kv_pool.state, rows.slots.device
        new = [request for request, begins in enumerate(facts.begins) if begins]
        if not self.folds_encoder_swa_replay:
            state.reset(rows.slots[to_device(new, device)])
        engram = self.network.config.engram
        middle = [request for request in new if facts.starts[request] > 0]
        if engram is None or not middle:
            return
        ids = to_device([facts.lookback(request, engram.lookback) for request in middle], device)
        starts = to_device([facts.starts[request] for request in middle], device)
        state.seed_ngrams(rows.slots[to_device(middle, device)], starts, self.network.token_class[ids])
