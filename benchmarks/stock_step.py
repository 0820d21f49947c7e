"""A step of stock kernels: what SGLang 0.5.23 launches on Hopper for the layers of a network, on the same weights.

*default*: FlashInfer's experts with bf16 activations; *best*: with FP8 activations. Both: cuBLAS on FP8 weights
expanded to bf16, FlashMLA on V4's cache layout, Triton index scores (prefill: torch), SGLang's top-k, mHC kernels and
gate. SGLang prefers DeepGEMM for FP8 weights; where that is not installed it does what is done here from 64 rows on,
and from 256 rows on DeepGEMM would be no faster.

Left out, in the stock step's favour: normalising, rotating and writing keys and latents, the cast of index queries,
candidate blocks, Engram except its product, and gathering the keys of a prefill. Values that no kernel's speed depends
on are random: the logits mean nothing.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from cuda_timing import Parts
from stock_kernels import flashinfer_experts, flashinfer_layout
from torch import Tensor

from deepinfer_plugin.kernels.reference import formats
from deepinfer_plugin.model.layers import FP8Weight, GroupedLinear
from deepinfer_plugin.model.network import Layer, Network
from deepinfer_plugin.model.rows import Rows

PAGE = 256  # tokens of a page of V4's cache
V4_BYTES = 584  # of a token there: 448 FP8 and 64 bf16 channels, then its 8 scales at the end of the page
INDEX_BYTES = 68  # of an index key
POOL = 1 << 22  # compressed slots: requests beyond that share them
LONGEST = 1 << 18  # positions with rotations
SCORE_BYTES = 1 << 30  # of a prefill's scores at once, as SGLang has it


def expanded(*parts: FP8Weight | GroupedLinear) -> Tensor:
    """bf16 [N, K] of FP8 weights that read the same input, as one. Exact."""
    return torch.cat([formats.fp8_weight_dequant(part.weight, part.scale).to(torch.bfloat16) for part in parts])


class StockLayer:
    """Weights of one of our layers as the stock kernels read them."""

    def __init__(self, layer: Layer):
        from sglang.kernels.ops.layernorm.mhc import split_bf16_hc_weight

        attention, ffn, experts = layer.attn, layer.ffn, layer.ffn.experts
        self.qkv = expanded(attention.wq_a, attention.wkv)
        self.wq_b, self.wo_b = expanded(attention.wq_b), expanded(attention.wo_b)
        self.wo_a = expanded(attention.wo_a).unflatten(0, (attention.wo_a.groups, -1))
        self.q_norm, self.sink = attention.q_norm.weight, attention.attn_sink
        self.gate, self.bias = ffn.gate.weight, ffn.gate.bias
        self.shared13 = expanded(ffn.shared_experts.w1, ffn.shared_experts.w3)
        self.shared2 = expanded(ffn.shared_experts.w2)
        raw = experts.w13, experts.s13, experts.w2, experts.s2
        self.experts = {fp8: flashinfer_layout(fp8, *raw) for fp8 in (False, True)}
        self.mixes = {
            site: (
                split_bf16_hc_weight(getattr(layer, f"hc_{site}_fn").data),
                getattr(layer, f"hc_{site}_scale"),
                getattr(layer, f"hc_{site}_base"),
                getattr(layer, f"{site}_norm").weight,
            )
            for site in ("attn", "ffn")
        }


class StockIndexer:
    """Of an index source, and the products of the compressor it may have."""

    def __init__(self, layer: Layer):
        indexer, compressor = layer.attn.indexer, layer.attn.compressor
        assert indexer is not None
        self.wq_b, self.weights = expanded(indexer.wq_b), indexer.weights_proj.weight
        self.heads, self.scale = indexer.heads, indexer.scale
        self.compressed = [] if compressor is None else [compressor.wkv.weight]
        if compressor is not None and compressor.wgate is not None:
            self.compressed.append(compressor.wgate.weight)


class StockWeights:
    """Of ``layers`` layers, which the step's take in turns, so that none finds its weights in the L2 cache."""

    def __init__(self, network: Network, layers: int, counts: list[int]):
        """``counts``: the numbers of rows for which FlashInfer chooses its kernels."""
        from flashinfer.autotuner import autotune

        self.config, self.head = config, head = network.config, network.head.weight
        self.layers = [StockLayer(layer) for layer in network.layers[:layers]]
        self.indexers = {layer: StockIndexer(network.layers[layer]) for layer in config.index_sources}
        self.engrams = {
            index: expanded(layer.engram.wkv) for index, layer in enumerate(network.layers) if layer.engram is not None
        }
        positions = torch.arange(min(config.max_position, LONGEST), device=head.device)
        angles = torch.outer(positions, network.layers[-1].attn.inv_freq)
        self.rotations = torch.polar(torch.ones_like(angles), angles)
        x = torch.randn(counts[-1], config.hidden_size, dtype=torch.bfloat16, device=head.device)
        ids = torch.rand(counts[-1], config.experts, device=head.device).topk(config.experts_per_token).indices.int()
        with autotune(True, tuning_buckets=tuple(counts)):
            for layout in self.layers[0].experts.values():
                flashinfer_experts(x, torch.ones(ids.shape, device=head.device), ids, layout)


class StockStep:
    """Call it for logits float32 of the last rows: of all rows, or of one request's last where ``prefill``."""

    def __init__(self, weights: StockWeights, rows: Rows, each: int, context: int, parts: Parts, fp8_experts: bool):
        import flash_mla

        self.weights, self.config, self.parts, self.fp8_experts = weights, weights.config, parts, fp8_experts
        self.count, self.context, self.prefill = rows.count, context, rows.page_table.shape[0] == 1
        device, requests, config = rows.positions.device, rows.count // each, weights.config
        self.positions, self.requests = rows.positions, rows.requests
        normal = {"dtype": torch.bfloat16, "device": device}
        self.streams = torch.randn(self.count, config.hc_mult, config.hidden_size, **normal)
        if config.engram is not None:
            self.engram = torch.randn(self.count, config.engram.columns * config.engram.head_dim, **normal)
        self.visible = {ratio: ((rows.positions + 1) // ratio).int() for ratio in {*config.compress_ratios} - {0}}
        row = torch.arange(self.count, device=device)
        window = torch.arange(config.window, device=device)
        if self.prefill:
            self.keys = torch.randn(config.window + self.count + context, 1, config.head_dim, **normal)
            self.window = (row[:, None] + 1 + window).int()
            more = config.window + config.index_topk
            self.key_counts = {keys: torch.full_like(row, keys).int() for keys in (config.window, more)}
            self.index_keys = torch.randn(context, config.index_head_dim, **normal)
            return
        self.window_pool, self.pool = _v4_pool(config.num_layers * requests * PAGE, device), _v4_pool(POOL, device)
        layer = requests * PAGE * torch.arange(config.num_layers, device=device)[:, None]
        self.windows = ((layer + row // each * PAGE + row % each)[:, :, None, None] + window).int()
        self.window_count = torch.full_like(row, config.window).int()
        self.chosen_count = torch.full_like(row, config.index_topk).int()
        self.index_pool = torch.randint(0, 120, (POOL // PAGE, PAGE * INDEX_BYTES), dtype=torch.uint8, device=device)
        self.slots = (torch.arange(requests * context, device=device) % POOL).view(requests, context).int()
        self.plans = {with_groups: flash_mla.get_mla_metadata()[0] for with_groups in (False, True)}

    def __call__(self) -> Tensor:
        parts, config, weights = self.parts, self.config, self.weights
        streams, pre, chosen = self.streams, None, None
        for index in range(config.num_layers):
            layer = weights.layers[index % len(weights.layers)]
            if index in weights.engrams:
                parts.next("dense")
                F.linear(self.engram, weights.engrams[index])
            x, pre, post, comb = self.site(layer, "attn", streams, pre)
            low_rank, query = self.query(layer, x)
            if index in weights.indexers:
                chosen = self.indexer(weights.indexers[index], x, low_rank, config.compress_ratios[index])
            out = self.attention(layer, index, query, chosen if config.compress_ratios[index] else None)
            streams = self.spread(self.output(layer, out), streams, post, comb)
            x, pre, post, comb = self.site(layer, "ffn", streams, pre)
            streams = self.spread(self.ffn(layer, x), streams, post, comb)
        parts.next("rest")
        hidden = streams[-1:, 0] if self.prefill else streams[:, 0]
        return F.linear(hidden, weights.head).float()

    # ---- residual streams ----------------------------------------------------------------------------------------

    def site(self, layer: StockLayer, site: str, streams: Tensor, pre: Tensor | None) -> tuple[Tensor, ...]:
        """The input of a sublayer, collapsed by the ``pre`` of the site before; this site's pre, post and comb."""
        from sglang.kernels.ops.layernorm import mhc
        from sglang.kernels.ops.layernorm.hc_combine_norm import hc_combine_norm

        self.parts.next("mHC")
        config, (fn, scale, base, norm) = self.config, layer.mixes[site]
        flat = streams.flatten(1)
        mixes = mhc.hc_mix_stats_sinkhorn_bf16x3(flat, fn, scale, base, config.hc_iters, config.norm_eps, config.hc_eps)
        if pre is None:
            pre = mixes[0]
        if self.count <= 96 or self.count >= 4096:
            x = hc_combine_norm(flat, pre, norm, config.norm_eps)
        else:
            x = mhc.mhc_combine(flat, pre, config.hc_mult, streams.dtype)
            x = F.rms_norm(x, norm.shape, norm, config.norm_eps)
        return x, *mixes

    def spread(self, out: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        from sglang.kernels.ops.layernorm.mhc_post_split_h import mhc_post_split_h

        self.parts.next("mHC")
        return mhc_post_split_h(out, streams, post, comb)

    # ---- attention -----------------------------------------------------------------------------------------------

    def rotate(self, heads: Tensor, inverse: bool = False) -> None:
        from sglang.kernels.ops.attention.dsv4.norm_rope import fused_rope_inplace

        last = heads[..., -self.config.rope_dim :]
        fused_rope_inplace(last, None, self.weights.rotations, self.positions, inverse)

    def query(self, layer: StockLayer, x: Tensor) -> tuple[Tensor, Tensor]:
        config = self.config
        self.parts.next("dense")
        low_rank = F.linear(x, layer.qkv)[:, : config.q_lora_rank].contiguous()
        self.parts.next("mHC")  # with the other norms
        low_rank = F.rms_norm(low_rank, layer.q_norm.shape, layer.q_norm, config.norm_eps)
        self.parts.next("dense")
        query = F.linear(low_rank, layer.wq_b).unflatten(-1, (config.num_heads, config.head_dim))
        self.parts.next("attention")
        self.rotate(query)
        return low_rank, query

    def attention(self, layer: StockLayer, index: int, query: Tensor, chosen: Tensor | None) -> Tensor:
        """[T, heads, D]; chosen: slots int32 [T, topk] of compressed groups, -1 where there is none, or None."""
        import flash_mla

        self.parts.next("attention")
        scale = self.config.head_dim**-0.5
        if self.prefill:
            keys = self.window if chosen is None else torch.cat((self.window, chosen), 1)
            return flash_mla.flash_mla_sparse_fwd(
                query, self.keys, keys[:, None], scale, self.config.head_dim, layer.sink,
                self.key_counts[keys.shape[1]], use_legacy=True, return_log2_lse=True,
            )[0]  # fmt: skip
        more = {}
        if chosen is not None:
            more = {"extra_k_cache": self.pool, "extra_indices_in_kvcache": chosen[:, None]}
            more["extra_topk_length"] = self.chosen_count
        return flash_mla.flash_mla_with_kvcache(
            q=query[:, None], k_cache=self.window_pool, block_table=None, cache_seqlens=None,
            head_dim_v=self.config.head_dim, tile_scheduler_metadata=self.plans[chosen is not None],
            softmax_scale=scale, is_fp8_kvcache=True, indices=self.windows[index], topk_length=self.window_count,
            attn_sink=layer.sink, use_legacy=True, **more,
        )[0][:, 0]  # fmt: skip

    def output(self, layer: StockLayer, out: Tensor) -> Tensor:
        self.rotate(out, inverse=True)
        self.parts.next("dense")
        groups = out.reshape(out.shape[0], layer.wo_a.shape[0], -1)
        return F.linear(torch.einsum("tgd,grd->tgr", groups, layer.wo_a).flatten(1), layer.wo_b)

    # ---- indexer -------------------------------------------------------------------------------------------------

    def indexer(self, indexer: StockIndexer, x: Tensor, low_rank: Tensor, ratio: int) -> Tensor:
        """What ``attention`` takes as chosen."""
        self.parts.next("dense")
        for weight in indexer.compressed:
            F.linear(x, weight)
        query = F.linear(low_rank, indexer.wq_b).unflatten(-1, (indexer.heads, -1))
        weight = F.linear(x, indexer.weights) * indexer.scale
        self.parts.next("indexer")
        self.rotate(query)
        return (self.prefill_groups if self.prefill else self.decode_groups)(query, weight, ratio)

    def decode_groups(self, query: Tensor, weight: Tensor, ratio: int) -> Tensor:
        from sglang.kernels.ops.attention.dsv4.fp4_indexer import finish_paged_indexer_topk, fp4_index_logits_paged
        from sglang.kernels.ops.attention.dsv4.topk import plan_topk_v2, topk_transform_paged_v2

        visible, groups = self.visible[ratio], self.context // ratio
        plan = plan_topk_v2(visible)
        scores = fp4_index_logits_paged(
            query, weight, self.requests, self.slots, visible, self.index_pool, PAGE, groups, ratio, None
        )
        chosen = torch.empty(self.count, self.config.index_topk, dtype=torch.int32, device=scores.device)
        slots = torch.empty_like(chosen)
        topk_transform_paged_v2(scores, visible, None, chosen, 1, plan)
        finish_paged_indexer_topk(chosen, scores, visible, self.requests, self.slots, slots, None, ratio, False)
        return slots

    def prefill_groups(self, query: Tensor, weight: Tensor, ratio: int) -> Tensor:
        keys, visible = self.index_keys[: self.context // ratio], self.visible[ratio]
        most = max(1, SCORE_BYTES // (query.shape[1] * len(keys) * 2))
        group = torch.arange(len(keys), device=keys.device)
        chosen = []
        for first in range(0, self.count, most):
            part = slice(first, first + most)
            score = torch.einsum("bhd,nd->bhn", query[part], keys)
            score = (score.relu() * weight[part, :, None]).sum(1).float()
            score = score.masked_fill(group >= visible[part, None], -torch.inf)
            best = score.topk(self.config.index_topk, sorted=False).indices.sort().values
            chosen.append(best.int() + self.config.window + self.count)
        return torch.cat(chosen)

    # ---- experts -------------------------------------------------------------------------------------------------

    def ffn(self, layer: StockLayer, x: Tensor) -> Tensor:
        from sglang.kernels.ops.activation.silu_and_mul_clamp import silu_and_mul_clamp
        from sglang.kernels.ops.moe.moe_fused_gate import moe_fused_gate

        config = self.config
        self.parts.next("rest")
        weights, ids = moe_fused_gate(
            F.linear(x, layer.gate), layer.bias, config.experts_per_token, "sqrtsoftplus",
            routed_scaling_factor=config.routed_scale, apply_routed_scaling_factor_on_output=True,
            sqrtsoftplus_log1p=True,
        )  # fmt: skip
        self.parts.next("experts")
        routed = flashinfer_experts(x, weights.float(), ids.int(), layer.experts[self.fp8_experts])
        self.parts.next("dense")
        gate_up = F.linear(x, layer.shared13)
        hidden = x.new_empty(x.shape[0], config.expert_dim)
        silu_and_mul_clamp(gate_up, hidden, config.swiglu_limit)
        return routed + F.linear(hidden, layer.shared2)


def _v4_pool(slots: int, device: torch.device) -> Tensor:
    """uint8 [pages, PAGE, 1, V4_BYTES], a page padded to whole rows of 576 bytes."""
    stride = -(-PAGE * V4_BYTES // 576) * 576
    pool = torch.randint(0, 120, (slots // PAGE, stride), dtype=torch.uint8, device=device)
    rotated = pool[:, : PAGE * (V4_BYTES - 8)].unflatten(1, (PAGE, -1))[..., V4_BYTES - 8 - 128 :]
    rotated.copy_(torch.randn(*rotated.shape[:2], 64, dtype=torch.bfloat16, device=device).view(torch.uint8))
    return pool[:, : PAGE * V4_BYTES].view(-1, PAGE, 1, V4_BYTES)
