"""Sizes, steps and rates of the two trainings: the one whose checkpoint is shipped, and one that a CPU does in a
minute.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from deepinfer_plugin.model.engram_table import table_rows, token_classes
from deepinfer_plugin.model.tiny_tokenizer import BOS, EOS, IMAGE, NOISE, PAD

STAGES, BLOCK = 3, 5
MAX_POSITION = 8192


@dataclass(frozen=True)
class Setting:
    name: str
    # data
    vocab: int
    code_bytes: int  # of standard library source, at most
    chats: int  # generated conversations
    lengths: tuple[int, ...]  # of training sequences, ascending; multiples of the window
    # network
    layers: int
    hidden: int
    heads: int
    head_dim: int
    q_lora: int
    o_lora: int
    experts: int
    expert_dim: int
    markov_rank: int
    window: int
    index_topk: int
    engram_buckets: int
    hc_iters: int
    # training
    batch_tokens: int
    target_steps: int
    target_lr: float
    draft_steps: int
    draft_lr: float
    anchors: int  # draft blocks per sequence of 512 tokens


SHIPPED = Setting(
    name="shipped",
    vocab=3072,
    code_bytes=40_000_000,
    chats=40_000,
    lengths=(128, 512, 1024),
    layers=8,
    hidden=256,
    heads=6,
    head_dim=96,
    q_lora=128,
    o_lora=96,
    experts=16,
    expert_dim=128,
    markov_rank=128,
    window=128,
    index_topk=32,
    engram_buckets=4096,
    hc_iters=20,
    batch_tokens=32768,
    target_steps=1080,
    target_lr=2e-3,
    draft_steps=2610,
    draft_lr=1.5e-3,
    anchors=64,
)

# Everything the shipped one has, at the smallest size that still learns.
SMALL = Setting(
    name="small",
    vocab=512,
    code_bytes=1_000_000,
    chats=200,
    lengths=(64, 128, 256),
    layers=6,
    hidden=64,
    heads=2,
    head_dim=32,
    q_lora=32,
    o_lora=32,
    experts=8,
    expert_dim=32,
    markov_rank=32,
    window=32,
    index_topk=8,
    engram_buckets=256,
    hc_iters=4,
    batch_tokens=1024,
    target_steps=50,
    target_lr=4e-3,
    draft_steps=25,
    draft_lr=4e-3,
    anchors=16,
)

SETTINGS = {setting.name: setting for setting in (SHIPPED, SMALL)}


def raw_config(setting: Setting, tokenizer: Tokenizer) -> dict[str, Any]:
    """config.json with the released keys: two window-only layers, two KV sources of ratio 2, one of ratio 1 that also
    makes candidate blocks, and an index source that picks inside them.
    """
    s = setting
    pairs = (s.layers - 2) // 2
    second, decoder = 2 + (pairs + 1) // 2, 2 + pairs
    late = decoder + (s.layers - decoder + 1) // 2
    ids = {name: tokenizer.token_to_id(name) for name in (BOS, EOS, PAD, IMAGE, NOISE)}
    engram = {"layers": 2, "max_ngram": 4, "heads": 2, "vocab_size": s.engram_buckets}
    text = {
        "model_type": "deepseek_v41_text",
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": s.hidden,
        "num_hidden_layers": s.layers,
        "num_nextn_predict_layers": STAGES,
        "num_attention_heads": s.heads,
        "num_key_value_heads": 1,
        "head_dim": s.head_dim,
        "qk_rope_head_dim": 32,
        "q_lora_rank": s.q_lora,
        "o_groups": 2,
        "o_lora_rank": s.o_lora,
        "sliding_window": s.window,
        "compress_ratios": [0] * 2 + [2] * pairs + [1] * (s.layers - decoder) + [0] * STAGES,
        "kv_source_layer_ids": [2, second, decoder],
        "index_source_layer_ids": [2, second, decoder, late],
        "index_n_heads": 4,
        "index_head_dim": 64,
        "index_topk": s.index_topk,
        "candidate_source_layer_id": decoder,
        "candidate_topk_blocks": 8,
        "candidate_block_size": 8,
        "rope_theta": 10000,
        "compress_rope_theta": 160000,
        "rope_scaling": {
            "type": "yarn",
            "factor": 16,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": 65536,
        },
        "max_position_embeddings": MAX_POSITION,
        "rms_norm_eps": 1e-20,
        "hidden_act": "silu",
        "swiglu_limit": 10.0,
        "n_routed_experts": s.experts,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "moe_intermediate_size": s.expert_dim,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "hc_mult": 4,
        "hc_sinkhorn_iters": s.hc_iters,
        "hc_eps": 1e-6,
        "engram_layer_ids": [1, second],
        "engram_num_embeddings": table_rows(**engram),
        "engram_max_ngram_size": engram["max_ngram"],
        "engram_n_heads": engram["heads"],
        "engram_head_dim": 32,
        "engram_vocab_size": engram["vocab_size"],
        "engram_pad_token_id": ids[PAD],
        "engram_compressed_vocab_size": max(token_classes(tokenizer)) + 1,
        "dspark_block_size": BLOCK,
        "dspark_noise_token_id": ids[NOISE],
        "dspark_target_layer_ids": [s.layers - 3, s.layers - 2, s.layers - 1],
        "dspark_markov_rank": s.markov_rank,
        "dspark_n_routed_experts": max(4, s.experts // 2),
        "dspark_num_experts_per_tok": 2,
        "tie_word_embeddings": False,
        "attention_bias": False,
    }
    return {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "dtype": "bfloat16",
        "image_token_id": ids[IMAGE],
        "bos_token_id": ids[BOS],
        "eos_token_id": ids[EOS],
        "pad_token_id": ids[PAD],
        "quantization_config": {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [32, 32],
            "scale_fmt": "ue8m0",
            "expert_dtype": "fp4",
        },
        "text_config": text,
        "vision_config": {  # part of every released config; there are no vision weights here
            "model_type": "deepseek_v41_vision",
            "num_hidden_layers": 2,
            "hidden_size": 64,
            "num_attention_heads": 2,
            "intermediate_size": 96,
            "patch_size": 14,
            "rope_theta": 10000,
            "downsample_ratio": 3,
            "max_image_tokens": 1024,
            "min_pixels": 295936,
            "max_wh_ratio": None,
        },
    }
