"""The architecture of a DeepSeek-V4.1-Flash checkpoint as one typed, validated object.

``V41Config.load(path)`` reads ``config.json`` of the released layout (``text_config`` nested under the top level) and
refuses a file that is not V4.1 by naming the field and the legal values. Nothing else in the package reads the JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

MODEL_TYPE = "deepseek_v41"
QUANT_BLOCK = 32  # channels that share one UE8M0 scale: FP8 activations, 32x32 FP8 weight tiles, MXFP4
LATENT_BLOCK = 16  # channels of a compressed latent that share one E4M3 scale


# Fields that may be absent, by what they must be otherwise. Those that must be there are checked where they are read.
INTEGERS = (
    "num_nextn_predict_layers",
    "candidate_source_layer_id",
    "candidate_topk_blocks",
    "candidate_block_size",
    "engram_max_ngram_size",
    "engram_n_heads",
    "engram_head_dim",
    "engram_vocab_size",
    "engram_pad_token_id",
    "engram_pad_id",
    "engram_compressed_vocab_size",
    "dspark_block_size",
    "dspark_noise_token_id",
    "dspark_markov_rank",
    "dspark_n_routed_experts",
    "dspark_num_experts_per_tok",
    "dspark_n_activated_experts",
    "bos_token_id",
    "eos_token_id",
    "image_token_id",
)
NUMBERS = ("routed_scaling_factor", "swiglu_limit")
INTEGER_LISTS = ("engram_layer_ids", "engram_num_embeddings", "dspark_target_layer_ids")


class ConfigError(ValueError):
    """``config.json`` describes something this implementation cannot run; the message names the field and what is
    legal."""


def _require(condition: bool, field: str, value: Any, legal: str) -> None:
    if not condition:
        raise ConfigError(f"config.json: {field}={value!r} is not supported; legal: {legal}")


def _integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < sys.float_info.max


def _check_kinds(text: Mapping[str, Any]) -> None:
    def integers(value: Any) -> bool:
        return isinstance(value, list) and all(map(_integer, value))

    for keys, right, legal in (
        (INTEGERS, _integer, "an integer"),
        (NUMBERS, _number, "a number"),
        (INTEGER_LISTS, integers, "a list of integers"),
        (("rope_scaling",), lambda value: isinstance(value, Mapping), "an object"),
    ):
        for key in keys:
            value = text.get(key)
            _require(value is None or right(value), key, value, legal)


@dataclass(frozen=True)
class RopeScaling:
    """YaRN frequencies of the layers that read compressed latents; there is no amplitude scale."""

    factor: float
    original_max_position: int
    beta_fast: float
    beta_slow: float


@dataclass(frozen=True)
class EngramConfig:
    """n-gram hash tables: ``heads`` hashes of each n-gram size 2..max_ngram at every layer of ``layers``."""

    layers: tuple[int, ...]
    rows: tuple[int, ...]  # table rows per layer
    max_ngram: int
    heads: int
    head_dim: int
    vocab_size: int  # every bucket range starts looking for its prime here
    pad_token_id: int
    token_classes: int  # size of the normalised vocabulary; all multipliers derive from it

    @property
    def columns(self) -> int:
        """Table rows fetched per token and layer."""
        return (self.max_ngram - 1) * self.heads

    @property
    def lookback(self) -> int:
        """Earlier tokens that take part in a token's n-grams."""
        return self.max_ngram - 1


@dataclass(frozen=True)
class DSparkConfig:
    """The self-speculation head: ``stages`` blocks that draft ``block_size`` tokens from the streams of
    ``target_layers``."""

    stages: int
    block_size: int
    noise_token_id: int
    target_layers: tuple[int, ...]
    markov_rank: int
    experts: int
    experts_per_token: int


@dataclass(frozen=True)
class V41Config:
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    head_dim: int
    rope_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    window: int
    compress_ratios: tuple[int, ...]  # one per layer; 0 = window only
    kv_sources: tuple[int, ...]  # layers that write compressed latents and index keys to the pages
    index_sources: tuple[int, ...]  # layers that pick compressed groups for themselves and the layers after them
    index_heads: int
    index_head_dim: int
    index_topk: int
    candidate_layer: int  # -1: no candidate blocks
    candidate_blocks: int
    candidate_block_size: int
    rope_theta: float
    compress_rope_theta: float
    rope_scaling: RopeScaling | None
    max_position: int
    norm_eps: float
    experts: int
    experts_per_token: int
    expert_dim: int
    routed_scale: float
    swiglu_limit: float
    hc_mult: int
    hc_iters: int
    hc_eps: float
    engram: EngramConfig | None
    dspark: DSparkConfig | None
    bos_token_id: int
    eos_token_id: int
    image_token_id: int | None

    # ---- derived layout -----------------------------------------------------------------------------------------

    @cached_property
    def kv_source_of(self) -> tuple[int, ...]:
        """For each layer the index into ``kv_sources`` of the latents it reads, -1 for window-only layers."""
        return tuple(self._latest(self.kv_sources, layer) for layer in range(self.num_layers))

    @cached_property
    def index_source_of(self) -> tuple[int, ...]:
        """For each layer the layer whose selection of groups it uses, -1 for window-only layers."""
        return tuple(
            self.index_sources[i] if (i := self._latest(self.index_sources, layer)) >= 0 else -1
            for layer in range(self.num_layers)
        )

    def _latest(self, sources: tuple[int, ...], layer: int) -> int:
        if self.compress_ratios[layer] == 0:
            return -1
        return max(i for i, source in enumerate(sources) if source <= layer)

    @property
    def source_ratios(self) -> tuple[int, ...]:
        """Tokens per compressed group of each KV source."""
        return tuple(self.compress_ratios[layer] for layer in self.kv_sources)

    @property
    def draft_stages(self) -> int:
        return self.dspark.stages if self.dspark else 0

    @property
    def draft_block(self) -> int:
        return self.dspark.block_size if self.dspark else 0

    @property
    def index_scale(self) -> float:
        """Factor on the per-head index weights: head_dim^-1/2 * heads^-1/2, a power of two at released sizes."""
        return (self.index_head_dim * self.index_heads) ** -0.5

    # ---- reading ------------------------------------------------------------------------------------------------

    @classmethod
    def load(cls, path: str | Path) -> V41Config:
        """Read ``path/config.json``.

        Raises:
            ConfigError: the file is missing, is not JSON, or names an unsupported architecture or value.
        """
        file = Path(path) / "config.json"
        try:
            raw = json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ConfigError(f"{file} does not exist; a checkpoint directory needs config.json") from None
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{file} is not valid JSON: {error}") from None
        return cls.from_dict(raw)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> V41Config:
        _require(isinstance(raw, Mapping), "its content", raw, "one JSON object")
        model_type = raw.get("model_type")
        _require(
            model_type == MODEL_TYPE, "model_type", model_type, f"{MODEL_TYPE!r} (V4 and earlier are other models)"
        )
        top: dict[str, Any] = dict(raw)
        text: dict[str, Any] = {**top, **top["text_config"]} if isinstance(top.get("text_config"), Mapping) else top
        _check_quantization(top.get("quantization_config"))
        _check_kinds(text)

        def need(key: str, kind: type = int) -> Any:
            value = text.get(key)
            if value is None:
                raise ConfigError(f"config.json: required field {key!r} is missing")
            if kind is int and not _integer(value):
                raise ConfigError(f"config.json: {key}={value!r} is not supported; legal: an integer")
            if kind is float and not _number(value):
                raise ConfigError(f"config.json: {key}={value!r} is not supported; legal: a number")
            return value

        def ints(key: str, default: Any = None) -> tuple[int, ...]:
            value = text.get(key, default)
            if not isinstance(value, list | tuple) or not all(isinstance(v, int) for v in value):
                raise ConfigError(f"config.json: {key}={value!r} is not supported; legal: a list of integers")
            return tuple(value)

        for key, legal in (
            ("num_key_value_heads", 1),
            ("n_shared_experts", 1),
            ("hidden_act", "silu"),
            ("scoring_func", "sqrtsoftplus"),
            ("topk_method", "noaux_tc"),
            ("norm_topk_prob", True),
            ("hc_shifted", True),
            ("use_fp4_sparse_kv", True),
            ("dspark_target_attn_input", True),
            ("tie_word_embeddings", False),
            ("attention_bias", False),
        ):
            value = text.get(key)
            _require(value is None or value == legal, key, value, repr(legal))
        for key in ("num_hash_layers", "n_group", "topk_group", "first_k_dense_replace"):
            value = text.get(key)
            _require(value in (None, 0, 1) if "group" in key else not value, key, value, "absent")
        dtype = top.get("dtype", top.get("torch_dtype", "bfloat16"))
        _require(dtype == "bfloat16", "dtype", dtype, "'bfloat16'")

        layers = need("num_hidden_layers")
        stages = text.get("num_nextn_predict_layers") or 0
        ratios = ints("compress_ratios")
        _require(
            len(ratios) in (layers, layers + stages) and all(r in (0, 1, 2) for r in ratios),
            "compress_ratios",
            list(ratios),
            f"{layers} or {layers + stages} entries of 0, 1 or 2",
        )
        _require(not any(ratios[layers:]), "compress_ratios", list(ratios), "0 for every DSpark stage")
        kv_sources = ints("kv_source_layer_ids")
        candidate = text.get("candidate_source_layer_id")
        config = cls(
            vocab_size=need("vocab_size"),
            hidden_size=need("hidden_size"),
            num_layers=layers,
            num_heads=need("num_attention_heads"),
            head_dim=need("head_dim"),
            rope_dim=need("qk_rope_head_dim"),
            q_lora_rank=need("q_lora_rank"),
            o_groups=need("o_groups"),
            o_lora_rank=need("o_lora_rank"),
            window=need("sliding_window"),
            compress_ratios=ratios[:layers],
            kv_sources=kv_sources,
            index_sources=ints("index_source_layer_ids"),
            index_heads=need("index_n_heads"),
            index_head_dim=need("index_head_dim"),
            index_topk=need("index_topk"),
            candidate_layer=-1 if candidate is None else candidate,
            candidate_blocks=text.get("candidate_topk_blocks") or 0,
            candidate_block_size=text.get("candidate_block_size") or 0,
            rope_theta=float(need("rope_theta", float)),
            compress_rope_theta=float(need("compress_rope_theta", float)),
            rope_scaling=_rope_scaling(text.get("rope_scaling")),
            max_position=need("max_position_embeddings"),
            norm_eps=float(need("rms_norm_eps", float)),
            experts=need("n_routed_experts"),
            experts_per_token=need("num_experts_per_tok"),
            expert_dim=need("moe_intermediate_size"),
            routed_scale=float(1.0 if text.get("routed_scaling_factor") is None else text["routed_scaling_factor"]),
            swiglu_limit=float(text.get("swiglu_limit", 0.0) or 0.0),
            hc_mult=need("hc_mult"),
            hc_iters=need("hc_sinkhorn_iters"),
            hc_eps=float(need("hc_eps", float)),
            engram=_engram(text),
            dspark=_dspark(text, layers, stages),
            bos_token_id=int(top.get("bos_token_id", text.get("bos_token_id", 0)) or 0),
            eos_token_id=int(top.get("eos_token_id", text.get("eos_token_id", 1)) or 0),
            image_token_id=top.get("image_token_id"),
        )
        other_keys = text.get("index_k_source_layer_ids")
        _require(
            other_keys is None or tuple(other_keys) == kv_sources,
            "index_k_source_layer_ids",
            other_keys,
            f"absent or {list(kv_sources)}",
        )
        config._validate()
        return config

    def _validate(self) -> None:
        def positive(*names: str) -> None:
            for name in names:
                _require(getattr(self, name) > 0, name, getattr(self, name), "a positive integer")

        positive(
            "vocab_size",
            "hidden_size",
            "num_layers",
            "num_heads",
            "q_lora_rank",
            "o_lora_rank",
            "window",
            "index_heads",
        )
        positive("index_topk", "max_position", "experts", "expert_dim", "hc_mult", "hc_iters")
        for name in ("hidden_size", "head_dim", "q_lora_rank", "index_head_dim", "expert_dim"):
            value = getattr(self, name)
            _require(value > 0 and value % QUANT_BLOCK == 0, name, value, f"a positive multiple of {QUANT_BLOCK}")
        _require(
            self.o_groups > 0 and self.num_heads % self.o_groups == 0,
            "o_groups",
            self.o_groups,
            f"a divisor of {self.num_heads} heads",
        )
        _require(
            self.o_groups * self.o_lora_rank % QUANT_BLOCK == 0,
            "o_lora_rank",
            self.o_lora_rank,
            f"o_groups * o_lora_rank a multiple of {QUANT_BLOCK}",
        )
        rope_limit = min(self.head_dim, self.index_head_dim)
        _require(
            0 < self.rope_dim <= rope_limit and self.rope_dim % 2 == 0,
            "qk_rope_head_dim",
            self.rope_dim,
            f"even, at most {rope_limit}",
        )
        _require(
            0 < self.experts_per_token <= self.experts,
            "num_experts_per_tok",
            self.experts_per_token,
            f"1..{self.experts}",
        )
        for key, sources in (("kv_source_layer_ids", self.kv_sources), ("index_source_layer_ids", self.index_sources)):
            ordered = tuple(sorted(set(sources)))
            _require(
                sources == ordered and all(0 <= s < self.num_layers and self.compress_ratios[s] for s in sources),
                key,
                list(sources),
                "ascending layers whose compress_ratio is 1 or 2",
            )
        _require(
            set(self.kv_sources) <= set(self.index_sources),
            "index_source_layer_ids",
            list(self.index_sources),
            "every KV source",
        )
        for layer, ratio in enumerate(self.compress_ratios):
            if ratio == 0:
                continue
            source = max((s for s in self.kv_sources if s <= layer), default=-1)
            _require(
                source >= 0 and self.compress_ratios[source] == ratio,
                "kv_source_layer_ids",
                list(self.kv_sources),
                f"a source of ratio {ratio} at or before layer {layer}",
            )
        if self.candidate_layer >= 0:
            _require(
                self.candidate_layer in self.index_sources,
                "candidate_source_layer_id",
                self.candidate_layer,
                "one of index_source_layer_ids",
            )
            _require(self.candidate_blocks > 0, "candidate_topk_blocks", self.candidate_blocks, "a positive integer")
            _require(
                self.candidate_block_size > 0, "candidate_block_size", self.candidate_block_size, "a positive integer"
            )


def _rope_scaling(raw: Any) -> RopeScaling | None:
    if not raw:
        return None
    kind = raw.get("type", raw.get("rope_type"))
    _require(kind in ("yarn", "deepseek_yarn"), "rope_scaling.type", kind, "'yarn'")
    for key in ("mscale", "mscale_all_dim"):
        _require(raw.get(key) in (None, 0, 1, 1.0), f"rope_scaling.{key}", raw.get(key), "absent (no amplitude scale)")
    try:
        return RopeScaling(
            factor=float(raw["factor"]),
            original_max_position=int(raw["original_max_position_embeddings"]),
            beta_fast=float(raw.get("beta_fast", 32)),
            beta_slow=float(raw.get("beta_slow", 1)),
        )
    except KeyError as missing:
        raise ConfigError(f"config.json: required field rope_scaling.{missing.args[0]} is missing") from None


def _engram(text: Mapping[str, Any]) -> EngramConfig | None:
    layers = tuple(text.get("engram_layer_ids") or ())
    if not layers:
        return None
    keys = ("engram_num_embeddings", "engram_max_ngram_size", "engram_n_heads", "engram_head_dim", "engram_vocab_size")
    for key in (*keys, "engram_compressed_vocab_size"):
        if text.get(key) is None:
            raise ConfigError(f"config.json: required field {key!r} is missing (engram_layer_ids is set)")
    pad = text.get("engram_pad_token_id", text.get("engram_pad_id"))
    if pad is None:
        raise ConfigError("config.json: required field 'engram_pad_token_id' is missing (engram_layer_ids is set)")
    rows = tuple(text["engram_num_embeddings"])
    total = int(text["num_hidden_layers"])
    _require(all(0 <= layer < total for layer in layers), "engram_layer_ids", list(layers), f"layers 0..{total - 1}")
    _require(
        len(rows) == len(layers), "engram_num_embeddings", list(rows), f"one entry per Engram layer ({len(layers)})"
    )
    _require(text["engram_max_ngram_size"] >= 2, "engram_max_ngram_size", text["engram_max_ngram_size"], "at least 2")
    _require(
        text["engram_head_dim"] % QUANT_BLOCK == 0,
        "engram_head_dim",
        text["engram_head_dim"],
        f"a multiple of {QUANT_BLOCK}",
    )
    return EngramConfig(
        layers=layers,
        rows=rows,
        max_ngram=text["engram_max_ngram_size"],
        heads=text["engram_n_heads"],
        head_dim=text["engram_head_dim"],
        vocab_size=text["engram_vocab_size"],
        pad_token_id=pad,
        token_classes=text["engram_compressed_vocab_size"],
    )


def _dspark(text: Mapping[str, Any], layers: int, stages: int) -> DSparkConfig | None:
    block = text.get("dspark_block_size") or 0
    if not stages or not block:
        return None
    for key in ("dspark_noise_token_id", "dspark_target_layer_ids", "dspark_markov_rank"):
        if text.get(key) is None:
            raise ConfigError(f"config.json: required field {key!r} is missing (dspark_block_size is set)")
    targets = tuple(text["dspark_target_layer_ids"])
    _require(
        bool(targets) and all(0 <= t < layers for t in targets),
        "dspark_target_layer_ids",
        list(targets),
        f"layers 0..{layers - 1}",
    )
    experts = text.get("dspark_n_routed_experts") or text["n_routed_experts"]
    per_token = (
        text.get("dspark_num_experts_per_tok") or text.get("dspark_n_activated_experts") or text["num_experts_per_tok"]
    )
    _require(0 < per_token <= experts, "dspark_num_experts_per_tok", per_token, f"1..{experts}")
    return DSparkConfig(
        stages=stages,
        block_size=block,
        noise_token_id=text["dspark_noise_token_id"],
        target_layers=targets,
        markov_rank=text["dspark_markov_rank"],
        experts=experts,
        experts_per_token=per_token,
    )


def _check_quantization(raw: Any) -> None:
    if not isinstance(raw, Mapping):
        raise ConfigError(
            "config.json: required field 'quantization_config' is missing; the released format is fp8 with fp4 experts"
        )
    for key, legal in (
        ("quant_method", "fp8"),
        ("activation_scheme", "dynamic"),
        ("weight_block_size", [QUANT_BLOCK, QUANT_BLOCK]),
        ("scale_fmt", "ue8m0"),
        ("expert_dtype", "fp4"),
    ):
        value = raw.get(key)
        value = list(value) if isinstance(value, tuple) else value
        _require(value == legal, f"quantization_config.{key}", value, repr(legal))


def ring_length(config: V41Config) -> int:
    """Rows of a window ring: the window, the drafts verified beside the anchor, and the anchor itself."""
    return config.window + config.draft_block + 1
