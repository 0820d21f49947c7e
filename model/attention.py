"""Attention over two kinds of keys in one softmax: the sliding window, and the compressed groups an index source
selected."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from deepinfer_plugin.kernels import Ops

from .compressor import Compressor
from .config import V41Config
from .indexer import Indexer
from .layers import FP8Weight, GroupedLinear, JoinedLinear, Linear, RMSNorm, parameter
from .parallel import Parallel
from .profiles import Profile
from .rope import inverse_frequencies
from .step import Step


class WindowAttention(nn.Module):
    """The projections every attention layer has, window keys of its own, no compressed groups.

    Keys are values: one latent of ``head_dim`` channels a token, shared by all heads, its last ``rope_dim``
    channels rotated. The output is rotated back, so that the sum over keys at different positions is
    position-free.

    On many ranks each has some of the heads, the output groups they feed and as many columns of the output; the
    low-rank query, keys and both memories are the same on all of them.
    """

    inv_freq: Tensor

    def __init__(
        self, ops: Ops, config: V41Config, profile: Profile, ring: int, parallel: Parallel, compressed: bool = False
    ):
        super().__init__()
        self.ops, self.ring, self.columns = ops, ring, parallel.columns
        self.window = config.window
        share = parallel.place.heads
        self.heads, self.head_dim = len(share.part(config.num_heads)), config.head_dim
        self.scale = config.head_dim**-0.5
        self.wq_a = FP8Weight(config.hidden_size, config.q_lora_rank)
        self.q_norm = RMSNorm(ops, config.q_lora_rank, config.norm_eps)
        self.wq_b = Linear(ops, config.q_lora_rank, self.heads * config.head_dim)
        self.wkv = FP8Weight(config.hidden_size, config.head_dim)
        self.down = JoinedLinear(ops, self.wq_a, self.wkv)
        self.kv_norm = RMSNorm(ops, config.head_dim, config.norm_eps)
        self.attn_sink = parameter(self.heads, dtype=torch.float32)
        groups = len(share.part(config.o_groups))
        self.wo_a = GroupedLinear(
            ops, groups, self.heads * config.head_dim // groups, config.o_lora_rank, profile.fp8_output
        )
        self.wo_b = Linear(ops, config.o_groups * config.o_lora_rank, len(share.part(config.hidden_size)))
        self.register_buffer("inv_freq", inverse_frequencies(config, compressed), persistent=False)

    def project(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The normalised low-rank query [T, q_lora_rank], which the indexer reads too, the rotated heads
        [T, heads, D], and the window rows."""
        query, key = self.down(x)
        low_rank = self.q_norm(query)
        heads = self.wq_b(low_rank).unflatten(-1, (self.heads, self.head_dim))
        return low_rank, self.ops.rope(heads, positions, self.inv_freq), self.window_rows(key, positions)

    def window_rows(self, key: Tensor, positions: Tensor) -> Tensor:
        """Packed window keys uint8 [T, row_bytes], as the ring stores them; fresh rows are attended in the
        same format."""
        return self.ops.window_pack(self.ops.rope(self.kv_norm(key), positions, self.inv_freq))

    def output(self, o: Tensor, positions: Tensor) -> Tensor:
        o = self.ops.rope(o, positions, self.inv_freq, inverse=True)
        grouped = o.flatten(1).unflatten(1, (self.wo_a.groups, -1))
        return self.columns(self.wo_b(self.columns(self.wo_a(grouped))))

    def write_window(self, window: Tensor, step: Step) -> None:
        rows, state = step.rows, step.state
        self.ops.window_write(
            window, rows.row_slots, rows.positions, step.keep_ring, state.rings[self.ring], state.tags[self.ring]
        )


class Attention(WindowAttention):
    """A layer of the network. Depending on its place it also compresses (KV source), selects (index source), or
    reuses both."""

    def __init__(self, ops: Ops, config: V41Config, profile: Profile, layer: int, parallel: Parallel):
        ratio = config.compress_ratios[layer]
        super().__init__(ops, config, profile, layer, parallel, compressed=ratio > 0)
        self.source = config.kv_source_of[layer]
        self.compressor = Compressor(ops, config, layer) if layer in config.kv_sources else None
        self.indexer = Indexer(ops, config, profile, layer) if layer in config.index_sources else None

    def forward(self, x: Tensor, step: Step) -> Tensor:
        rows, state = step.rows, step.state
        low_rank, query, window = self.project(x, rows.positions)
        latent = None if self.compressor is None else self.compressor(x, step, self.inv_freq)
        if self.indexer is not None:
            step.selected = self.indexer(x, low_rank, latent, step, self.inv_freq)
        pages = step.source(self.source) if self.source >= 0 else None
        o = self.ops.sparse_attention(
            query,
            window,
            rows.positions,
            rows.fresh,
            rows.row_slots,
            rows.window_floor,
            state.rings[self.ring],
            self.window,
            None if pages is None else pages.latent,
            None if pages is None else pages.latent_scale,
            None if pages is None else rows.page_table,
            None if pages is None else rows.requests,
            None if pages is None else step.selected,
            self.attn_sink,
            self.scale,
            None,
        )
        # After attention: a long chunk overwrites ring rows that its own first rows still had to read.
        self.write_window(window, step)
        return self.output(o, rows.positions)
