"""Configs for the adapters: the released sizes, and a small model with every kind of layer."""

import pytest

from deepinfer_plugin.model.config import V41Config
from deepinfer_plugin.model.released import RELEASED

SMALL = {
    "vocab_size": 256,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "head_dim": 64,
    "qk_rope_head_dim": 32,
    "q_lora_rank": 32,
    "o_groups": 2,
    "o_lora_rank": 32,
    "compress_ratios": [0, 2, 2, 1, 0, 0, 0],
    "kv_source_layer_ids": [1, 3],
    "index_source_layer_ids": [1, 3],
    "index_n_heads": 4,
    "index_head_dim": 64,
    "index_topk": 64,
    "candidate_source_layer_id": 3,
    "max_position_embeddings": 4096,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "engram_layer_ids": [1],
    "engram_num_embeddings": [1000],
    "engram_n_heads": 2,
    "engram_head_dim": 32,
    "engram_vocab_size": 100,
    "engram_compressed_vocab_size": 90,
    "dspark_noise_token_id": 200,
    "dspark_target_layer_ids": [1, 2, 3],
    "dspark_markov_rank": 16,
    "dspark_n_routed_experts": 4,
    "dspark_num_experts_per_tok": 2,
}


@pytest.fixture(scope="session")
def released() -> V41Config:
    return V41Config.from_dict(RELEASED)


@pytest.fixture(scope="session")
def small() -> V41Config:
    return V41Config.from_dict({**RELEASED, "text_config": {**RELEASED["text_config"], **SMALL}})
