"""A small random checkpoint in the released format, with every kind of layer and every feature of the large one.

For tests and demos: it is written in a second, loads like the real thing, and says nothing sensible. Weights are random
but scaled so that activations stay of order one, every part of the network moves the logits, and greedy text wanders
instead of looping.
Everything follows from the arguments; the same arguments give the same bytes.
"""

from __future__ import annotations

import json
from math import sqrt
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from deepinfer_plugin.kernels.reference.formats import fp8_cast, fp8_weight_cast, mxfp4_cast

from .checkpoint import INDEX, TensorSpec, expected_tensors
from .config import QUANT_BLOCK, V41Config
from .engram_table import table_rows, token_classes
from .tiny_tokenizer import BOS, EOS, IMAGE, NOISE, PAD, build_tokenizer, special_ids, write_tokenizer

SHARD_NAMES = [f"model-{i:05d}-of-00003.safetensors" for i in (1, 2, 3)]
STAGES = 3
SMALLEST_LAYERS = 6  # two window-only, two ratio-2 sources, a ratio-1 source, an index source among its candidates

# Standard deviation of a matrix's outputs when its inputs have one; 1 where nothing is said.
GAINS = {
    "wq_b": 2.0,  # attention that prefers some keys
    "wo_b": 0.35,  # twenty sublayers together say about as much as the embedding
    "w2": 0.25,
    "head": 3.0,  # spread of the logits
    "confidence_head": 0.2,
}
FAVOUR = 16.0  # logit of a token's favourite successor where the context is silent
LOUD = 1.3  # end tokens win more often than a fair share, so that answers and reasoning end by themselves


def write_tiny(
    path: str | Path,
    *,
    layers: int = 10,
    hidden: int = 128,
    heads: int = 4,
    head_dim: int = 64,
    experts: int = 16,
    expert_dim: int = 64,
    vocab: int = 1280,
    max_position: int = 8192,
    seed: int = 0,
) -> V41Config:
    """Write config.json, generation_config.json, the tokenizer and three shards with their index into ``path``.

    Raises:
        ValueError: a size that the format or the network does not allow, or another checkpoint already in ``path``;
            nothing is written.
    """
    path = Path(path)
    if others := sorted({file.name for file in path.glob("*.safetensors")} - set(SHARD_NAMES)):
        raise ValueError(f"{path} holds another checkpoint ({others[0]}); choose an empty directory")
    if seed < 0:
        raise ValueError(f"seed={seed} is not supported; legal: 0 or more")
    tokenizer = build_tokenizer(vocab)
    raw = _raw_config(
        tokenizer,
        layers=layers,
        hidden=hidden,
        heads=heads,
        head_dim=head_dim,
        experts=experts,
        expert_dim=expert_dim,
        max_position=max_position,
    )
    return write_random(path, raw, tokenizer, seed)


def write_random(
    path: Path, raw: dict[str, Any], tokenizer: Tokenizer, seed: int = 0, device: str = "cpu"
) -> V41Config:
    """The checkpoint of a config.json of any size. Values are drawn on ``device``, and depend on what that is.

    Raises:
        ConfigError: ``raw`` is not a legal config; nothing is written.
    """
    config = V41Config.from_dict(raw)
    path.mkdir(parents=True, exist_ok=True)
    write_tokenizer(tokenizer, path, raw["text_config"]["max_position_embeddings"])
    _write_shards(path, expected_tensors(config), _Values(config, tokenizer, seed, torch.device(device)))
    generation = {"bos_token_id": config.bos_token_id, "eos_token_id": config.eos_token_id, "do_sample": True}
    _write_json(path / "generation_config.json", {**generation, "temperature": 1.0, "top_p": 1.0})
    _write_json(path / "config.json", raw)  # last: a directory without it is unfinished, and says so
    return config


def _raw_config(
    tokenizer: Tokenizer,
    *,
    layers: int,
    hidden: int,
    heads: int,
    head_dim: int,
    experts: int,
    expert_dim: int,
    max_position: int,
) -> dict[str, Any]:
    """config.json with the released keys: the layer pattern of the large model, shortened."""
    if layers < SMALLEST_LAYERS:
        raise ValueError(f"layers={layers} is too few for every kind of layer; legal: {SMALLEST_LAYERS} or more")
    if experts < 4:
        raise ValueError(f"experts={experts} is too few; legal: 4 or more")
    if heads < 2 or heads % 2:
        raise ValueError(f"heads={heads} is not supported; legal: a positive even number")
    ids = {name: tokenizer.token_to_id(name) for name in (BOS, EOS, PAD, IMAGE, NOISE)}
    pairs = (layers - 2) // 2  # ratio-2 layers after the two window-only ones, then as many or one more of ratio 1
    second, decoder = 2 + (pairs + 1) // 2, 2 + pairs
    late = decoder + (layers - decoder + 1) // 2
    engram = {"layers": 2, "max_ngram": 4, "heads": 2, "vocab_size": 1000}
    text = {
        "model_type": "deepseek_v41_text",
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_nextn_predict_layers": STAGES,
        "num_attention_heads": heads,
        "num_key_value_heads": 1,
        "head_dim": head_dim,
        "qk_rope_head_dim": 16,
        "q_lora_rank": 64,
        "o_groups": 2,
        "o_lora_rank": 32,
        "sliding_window": 128,
        "compress_ratios": [0] * 2 + [2] * pairs + [1] * (layers - decoder) + [0] * STAGES,
        "kv_source_layer_ids": [2, second, decoder],
        "index_source_layer_ids": [2, second, decoder, late],
        "index_n_heads": 8,
        "index_head_dim": 32,
        "index_topk": 32,
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
        "max_position_embeddings": max_position,
        "rms_norm_eps": 1e-20,
        "hidden_act": "silu",
        "swiglu_limit": 10.0,
        "n_routed_experts": experts,
        "num_experts_per_tok": 3,
        "n_shared_experts": 1,
        "moe_intermediate_size": expert_dim,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "engram_layer_ids": [1, second],
        "engram_num_embeddings": table_rows(**engram),
        "engram_max_ngram_size": engram["max_ngram"],
        "engram_n_heads": engram["heads"],
        "engram_head_dim": 32,
        "engram_vocab_size": engram["vocab_size"],
        "engram_pad_token_id": ids[PAD],
        "engram_compressed_vocab_size": max(token_classes(tokenizer)) + 1,
        "dspark_block_size": 5,
        "dspark_noise_token_id": ids[NOISE],
        "dspark_target_layer_ids": [layers - 3, layers - 2, layers - 1],
        "dspark_markov_rank": hidden * 3 // 4,
        "dspark_n_routed_experts": max(4, experts // 2),
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
        "vision_config": {
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


class _Values:
    """Values of every tensor, each from its own stream of random numbers, so that one does not depend on the others."""

    def __init__(self, config: V41Config, tokenizer: Tokenizer, seed: int, device: torch.device):
        self.config, self.seed, self.device = config, seed, device
        self.silent = torch.tensor(special_ids(tokenizer))
        self.loud = torch.tensor([config.eos_token_id, tokenizer.token_to_id("</think>")])

    def stored(self, name: str, spec: TensorSpec) -> dict[str, Tensor]:
        """A tensor as a checkpoint holds it: one entry, or a quantised weight and its scale."""
        if spec.dtype.itemsize > 1:
            return {name: self._plain(name, spec.shape).to(spec.dtype).contiguous()}
        if spec.dtype == torch.int8:
            weight, scale = mxfp4_cast(self._matrix(name, spec.shape[0], 2 * spec.shape[1]))
            weight = weight.view(torch.int8)
        elif name.endswith("engram.embed.weight"):
            weight, scale = fp8_cast(self._normal(name, *spec.shape))
        else:
            weight, scale = fp8_weight_cast(self._tiled(name, *spec.shape))
        return {name: weight, f"{name.removesuffix('.weight')}.scale": scale}

    def _plain(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if name == "embed.weight":
            return self._embedding(shape)
        if name == "head.weight":
            return self._head(shape)
        if ".markov_head." in name:
            return self._markov(name, shape)
        if name == f"mtp.{STAGES - 1}.norm.weight":
            return 0.3 + 0.03 * self._normal(name, *shape)  # the bigram decides most drafts
        if name.endswith(("norm.weight", "q_weight", "k_weight")):
            return 1 + 0.1 * self._normal(name, *shape)
        if name.endswith("_scale"):
            return 0.5 + 0.1 * self._normal(name, *shape)
        if name.endswith("_base"):
            return self._mixes(name, *shape)
        if name.endswith(("gate.bias", "gate.bias_vl")):
            return 0.1 * self._normal(name, *shape)
        if name.endswith("attn_sink"):
            return self._normal(name, *shape)
        return self._matrix(name, *shape)

    def _embedding(self, shape: tuple[int, ...]) -> Tensor:
        values = self._normal("embed.weight", *shape)
        if self.config.dspark:
            values[self.config.dspark.noise_token_id] *= 0.1  # a draft row should say what the context says
        return values

    def _head(self, shape: tuple[int, ...]) -> Tensor:
        values = self._matrix("head.weight", *shape)
        loud = values[self.loud] * LOUD
        values[self.silent] = 0  # a trained model hardly ever says a control token
        values[self.loud] = loud
        # Each plain token has a favourite successor, all of them in one circle: where the context does not decide
        # otherwise, greedy text is something a draft can guess, and yet never a short loop.
        plain = np.setdiff1d(np.arange(shape[0]), self.silent.numpy())
        circle = torch.from_numpy(self._generator("favourites").permutation(plain))
        values[circle] += self._embedding(shape)[circle.roll(1)] * (FAVOUR / shape[1])
        return values

    def _markov(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The bigram of embedding and head, on as many channels as the rank has, so that some drafts come true."""
        vocab, rank = shape
        both = (vocab, self.config.hidden_size)
        return (self._embedding(both) if name.endswith("embed.weight") else self._head(both))[:, :rank]

    def _mixes(self, name: str, count: int) -> Tensor:
        """Bases of pre, post and comb: streams that mostly keep to themselves."""
        streams = self.config.hc_mult
        values = 0.7 * self._normal(name, count)
        values[2 * streams :] += 2 * torch.eye(streams, device=self.device).flatten()
        return values

    def _tiled(self, name: str, rows: int, columns: int) -> Tensor:
        """A matrix of uneven 32x32 tiles: with equal ones all scales would be equal, and a misplaced one right."""
        tiles = self._generator(f"{name} tiles").integers(-1, 2, (-(-rows // QUANT_BLOCK), -(-columns // QUANT_BLOCK)))
        factors = torch.exp2(torch.from_numpy(tiles).float()).to(self.device)
        factors = factors.repeat_interleave(QUANT_BLOCK, 0).repeat_interleave(QUANT_BLOCK, 1)[:rows, :columns]
        return self._matrix(name, rows, columns) * factors * sqrt(4 / 7)  # 4/7: mean square of 1/2, 1, 2 is 7/4

    def _matrix(self, name: str, rows: int, columns: int) -> Tensor:
        gain = next((gain for part, gain in GAINS.items() if f".{part}." in f".{name}"), 1.0)
        return self._normal(name, rows, columns) * (gain / sqrt(columns))

    def _normal(self, name: str, *shape: int) -> Tensor:
        if self.device.type != "cpu":
            generator = torch.Generator(self.device).manual_seed((self.seed << 32) + crc32(name.encode()))
            return torch.randn(shape, generator=generator, device=self.device)
        return torch.from_numpy(self._generator(name).standard_normal(shape, dtype=np.float32))

    def _generator(self, name: str) -> np.random.Generator:
        return np.random.default_rng([self.seed, crc32(name.encode())])


def _write_shards(path: Path, table: dict[str, TensorSpec], values: _Values) -> None:
    """Shards of about equal size in the order of the network, and their index."""
    total = sum(spec.nbytes for spec in table.values())
    weight_map: dict[str, str] = {}
    shard: dict[str, Tensor] = {}
    filled = number = 0
    for name, spec in table.items():
        if name.endswith(".scale"):  # comes with its weight
            continue
        stored = values.stored(name, spec)
        shard |= stored
        filled += sum(tensor.nbytes for tensor in stored.values())
        weight_map |= dict.fromkeys(stored, SHARD_NAMES[number])
        if filled * len(SHARD_NAMES) >= total * (number + 1):
            save_file(shard, path / SHARD_NAMES[number], metadata={"format": "pt"})
            shard, number = {}, number + 1
    _write_json(path / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
