"""The released checkpoint: what it must contain, and the check of it before a byte of weights is read.

``expected_tensors(config)`` is the one table of names, shapes and dtypes; ``Checkpoint.open`` compares it with the
headers of every shard, in a second or two at full size. A tensor that is missing, unknown, listed twice or of the wrong
kind is refused by name: half a draft head would load without a word and cost only speed, the failure nobody sees.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .config import QUANT_BLOCK, V41Config
from .place import Place

logger = logging.getLogger(__name__)

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DTYPES = {
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I8": torch.int8,  # two e2m1 values a byte
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
MAX_HEADER = 100_000_000  # the limit of the safetensors format
PROBLEMS_SHOWN = 10


class CheckpointError(ValueError):
    """A checkpoint that would load only in part. ``problems`` has every finding; the text shows the first ten."""

    def __init__(self, where: str | Path, problems: list[str]):
        self.problems = problems
        lines = [f"{where}: {len(problems)} problem{'s' if len(problems) > 1 else ''}; nothing is served from it"]
        lines += [f"  {problem}" for problem in problems[:PROBLEMS_SHOWN]]
        if len(problems) > PROBLEMS_SHOWN:
            lines.append(f"  ... and {len(problems) - PROBLEMS_SHOWN} more")
        super().__init__("\n".join(lines))


# ---- the table ------------------------------------------------------------------------------------------------------


class TensorSpec(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{DTYPE_NAMES.get(self.dtype, str(self.dtype))} {list(self.shape)}"


def expected_tensors(config: V41Config) -> dict[str, TensorSpec]:
    """Every tensor of the text model and the draft stages in the order of the network, without the "model." prefix.

    FP8 matrices ``X.weight`` [N, K] come with ``X.scale`` UE8M0 [ceil(N/32), ceil(K/32)], MXFP4 expert matrices int8
    [N, K/2] with [N, K/32]. Vision tensors are not in the table: the text model is served alone.
    """
    table: dict[str, TensorSpec] = {}
    hidden, streams = config.hidden_size, config.hc_mult

    def plain(name: str, *shape: int, dtype: torch.dtype = torch.bfloat16) -> None:
        table[name] = TensorSpec(shape, dtype)

    def fp8(name: str, rows: int, columns: int) -> None:
        plain(f"{name}.weight", rows, columns, dtype=torch.float8_e4m3fn)
        plain(f"{name}.scale", -(-rows // QUANT_BLOCK), -(-columns // QUANT_BLOCK), dtype=torch.float8_e8m0fnu)

    def fp4(name: str, rows: int, columns: int) -> None:
        plain(f"{name}.weight", rows, columns // 2, dtype=torch.int8)
        plain(f"{name}.scale", rows, columns // QUANT_BLOCK, dtype=torch.float8_e8m0fnu)

    def attention(name: str) -> None:
        heads = config.num_heads * config.head_dim
        fp8(f"{name}.wq_a", config.q_lora_rank, hidden)
        plain(f"{name}.q_norm.weight", config.q_lora_rank)
        fp8(f"{name}.wq_b", heads, config.q_lora_rank)
        fp8(f"{name}.wkv", config.head_dim, hidden)
        plain(f"{name}.kv_norm.weight", config.head_dim)
        plain(f"{name}.attn_sink", config.num_heads, dtype=torch.float32)
        fp8(f"{name}.wo_a", config.o_groups * config.o_lora_rank, heads // config.o_groups)
        fp8(f"{name}.wo_b", hidden, config.o_groups * config.o_lora_rank)

    def latents(layer: int) -> None:
        name = f"layers.{layer}.attn"
        if layer in config.kv_sources:
            plain(f"{name}.compressor.wkv.weight", config.head_dim, hidden)
            if config.compress_ratios[layer] == 2:
                plain(f"{name}.compressor.wgate.weight", config.head_dim, hidden)
            plain(f"{name}.compressor.norm.weight", config.head_dim)
            plain(f"{name}.indexer.wk.weight", config.index_head_dim, config.head_dim)
            plain(f"{name}.indexer.k_norm.weight", config.index_head_dim)
        if layer in config.index_sources:
            fp8(f"{name}.indexer.wq_b", config.index_heads * config.index_head_dim, config.q_lora_rank)
            plain(f"{name}.indexer.weights_proj.weight", config.index_heads, hidden)

    def moe(name: str, experts: int) -> None:
        plain(f"{name}.gate.weight", experts, hidden)
        plain(f"{name}.gate.bias", experts, dtype=torch.float32)
        plain(f"{name}.gate.bias_vl", experts, dtype=torch.float32)
        for matrix in (fp4, fp8):
            prefixes = [f"{name}.shared_experts"] if matrix is fp8 else [f"{name}.experts.{e}" for e in range(experts)]
            for prefix in prefixes:
                matrix(f"{prefix}.w1", config.expert_dim, hidden)
                matrix(f"{prefix}.w3", config.expert_dim, hidden)
                matrix(f"{prefix}.w2", hidden, config.expert_dim)

    def block(name: str, experts: int) -> None:
        for site in ("attn", "ffn"):
            plain(f"{name}.{site}_norm.weight", hidden)
            mixes = (2 + streams) * streams
            plain(f"{name}.hc_{site}_fn", mixes, streams * hidden, dtype=torch.float32)
            plain(f"{name}.hc_{site}_base", mixes, dtype=torch.float32)
            plain(f"{name}.hc_{site}_scale", 3, dtype=torch.float32)
        attention(f"{name}.attn")
        moe(f"{name}.ffn", experts)

    plain("embed.weight", config.vocab_size, hidden)
    for layer in range(config.num_layers):
        if config.engram and layer in config.engram.layers:
            engram, name = config.engram, f"layers.{layer}.engram"
            rows = engram.rows[engram.layers.index(layer)]
            plain(f"{name}.embed.weight", rows, engram.head_dim, dtype=torch.float8_e4m3fn)
            plain(f"{name}.embed.scale", rows, engram.head_dim // QUANT_BLOCK, dtype=torch.float8_e8m0fnu)
            fp8(f"{name}.wkv", (streams + 1) * hidden, engram.columns * engram.head_dim)
            plain(f"{name}.q_weight", streams, hidden)
            plain(f"{name}.k_weight", streams, hidden)
        block(f"layers.{layer}", config.experts)
        latents(layer)
    plain("norm.weight", hidden)
    plain("head.weight", config.vocab_size, hidden)

    if config.dspark:
        draft = config.dspark
        fp8("mtp.0.main_proj", hidden, len(draft.target_layers) * hidden)
        plain("mtp.0.main_norm.weight", hidden)
        for stage in range(draft.stages):
            block(f"mtp.{stage}", draft.experts)
        last = f"mtp.{draft.stages - 1}"
        plain(f"{last}.norm.weight", hidden)
        plain(f"{last}.markov_head.embed.weight", config.vocab_size, draft.markov_rank)
        plain(f"{last}.markov_head.head.weight", config.vocab_size, draft.markov_rank)
        plain(confidence_name(config), 1, hidden + draft.markov_rank)
    return table


def confidence_name(config: V41Config) -> str:
    """The one tensor a checkpoint may lack: without it drafts are verified whole, never scheduled."""
    return f"mtp.{config.draft_stages - 1}.confidence_head.proj.weight"


def canonical(name: str) -> str:
    """The name in the table of a tensor in a file."""
    return name.removeprefix("model.")


_VISION = re.compile(r"(vision|aligner)\..+|image_(start|end|newline)(\.weight)?")
_TIED = re.compile(r"mtp\.(\d+)\.(embed|head)\..+")


def is_vision(name: str) -> bool:
    """Part of the vision tower: known by its prefix, not loaded."""
    return _VISION.fullmatch(canonical(name)) is not None


def is_tied(name: str, stages: int | None = None) -> bool:
    """A draft stage's copy of the embedding or the head, which the stages share with the network."""
    match = _TIED.fullmatch(canonical(name))
    return match is not None and (stages is None or int(match[1]) < stages)


# ---- headers --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies: ``nbytes`` bytes from ``offset`` of the file."""

    shard: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class _Broken(Exception):
    """A file that cannot be understood; the text says why."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """JSON object hook: Python keeps the last of two equal keys, a checkpoint must not have two."""
    out = dict(pairs)
    if len(out) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise _Broken(f"{twice} is listed twice")
    return out


def _read_header(shard: Path) -> dict[str, StoredTensor]:
    """Entries of one safetensors file, checked against its length."""
    try:
        size = shard.stat().st_size
        with shard.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or not 0 < length <= min(size - 8, MAX_HEADER):
                raise _Broken(f"no safetensors header in its {size} bytes")
            raw = json.loads(file.read(length), object_pairs_hook=_unique)
    except FileNotFoundError:
        raise _Broken("file is missing") from None
    except OSError as error:
        raise _Broken(f"cannot be read: {error.strerror}") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise _Broken(f"header is not JSON: {error}") from None

    start, entries, end = 8 + length, {}, 0
    try:
        raw.pop("__metadata__", None)
        for name, entry in sorted(raw.items(), key=lambda item: item[1]["data_offsets"]):
            begin, stop = entry["data_offsets"]
            if begin != end or stop < begin:
                raise _Broken(f"header: bytes of {name} start at {begin}, expected {end}")
            entries[name] = StoredTensor(shard, str(entry["dtype"]), tuple(entry["shape"]), start + begin, stop - begin)
            end = stop
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise _Broken(f"header is malformed: {error!r}") from None
    if size != start + end:
        kind = "truncated" if size < start + end else "too long"
        raise _Broken(f"file is {kind}: {size} bytes, its header promises {start + end}")
    return entries


def _read_index(path: Path) -> dict[str, str] | None:
    """``weight_map`` of the index, None for a single-file checkpoint."""
    index = path / INDEX
    if not index.exists():
        if (path / SINGLE).exists():
            return None
        raise CheckpointError(path, [f"neither {INDEX} nor {SINGLE} is there"])
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"), object_pairs_hook=_unique)["weight_map"]
        shards = set(weight_map.values())
        if not shards or not all(isinstance(shard, str) and Path(shard).name == shard for shard in shards):
            raise _Broken("weight_map does not map tensor names to file names")
    except (_Broken, OSError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(path, [f"{INDEX}: {error}"]) from None
    except (KeyError, TypeError, AttributeError):
        raise CheckpointError(path, [f"{INDEX}: has no weight_map"]) from None
    return weight_map


def checkpoint_bytes(path: str | Path) -> int:
    """Bytes of the weights that ``load_into`` will read, from the shard headers alone: what memory planning asks.

    Raises:
        CheckpointError: the index or a header cannot be read.
    """
    path = Path(path)
    weight_map = _read_index(path)
    total = 0
    for shard in sorted(set(weight_map.values())) if weight_map else [SINGLE]:
        try:
            entries = _read_header(path / shard)
        except _Broken as error:
            raise CheckpointError(path, [f"{shard}: {error}"]) from None
        total += sum(entry.nbytes for name, entry in entries.items() if not is_vision(name) and not is_tied(name))
    return total


# ---- the check ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose every tensor was found, once, with the right shape and dtype."""

    path: Path
    tensors: Mapping[str, StoredTensor]  # by canonical name, in the order of ``expected_tensors``
    has_confidence: bool  # False: no confidence head, so draft lengths cannot be scheduled

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def part(self, place: Place, config: V41Config) -> Checkpoint:
        """What a rank at ``place`` reads of it: of each tensor a run of rows, so of its bytes."""
        tensors = {}
        for name, stored in self.tensors.items():
            rows = place.part(name, stored.shape[0], config)
            if rows is None:
                continue
            width = stored.nbytes // stored.shape[0]
            tensors[name] = replace(
                stored,
                shape=(len(rows), *stored.shape[1:]),
                offset=stored.offset + rows.start * width,
                nbytes=len(rows) * width,
            )
        return replace(self, tensors=tensors)

    @classmethod
    def open(cls, path: str | Path, config: V41Config) -> Checkpoint:
        """Read the index and the headers of every shard, no weights.

        Raises:
            CheckpointError: anything is missing, unknown, duplicated, truncated or of another shape or dtype than
                ``config`` implies; names tensor and shard.
        """
        path = Path(path)
        expected, optional = expected_tensors(config), confidence_name(config)
        weight_map = _read_index(path)
        headers: dict[str, dict[str, StoredTensor]] = {}
        problems: list[str] = []
        for shard in sorted(set(weight_map.values())) if weight_map else [SINGLE]:
            try:
                headers[shard] = _read_header(path / shard)
            except _Broken as error:
                problems.append(f"{shard}: {error}")
        source = INDEX if weight_map else SINGLE
        if weight_map is None:
            if problems:
                raise CheckpointError(path, problems)
            weight_map = dict.fromkeys(headers[SINGLE], SINGLE)

        found: dict[str, StoredTensor] = {}
        named: dict[str, str] = {}
        vision = 0
        for name, shard in weight_map.items():
            key = canonical(name)
            if is_vision(name):
                vision += 1
            elif is_tied(name, config.draft_stages):
                continue
            elif key not in expected:
                problems.append(f"{name}: in {shard}, not a tensor of this model")
            elif key in named:
                other = f"{named[key]} in {weight_map[named[key]]}"
                problems.append(f"{name}: in {shard}, listed twice: {other} is the same tensor")
            else:
                named[key] = name
                stored = headers.get(shard, {}).get(name)
                if stored is not None:
                    found[key] = stored
                    problems += _mismatch(name, stored, expected[key])
                elif shard in headers:
                    problems.append(f"{name}: {source} says {shard}, which does not have it")

        holder: dict[str, str] = {}  # tensors that lie in a shard without being listed, and that shard
        for shard, entries in headers.items():
            for name in entries:
                if name not in weight_map:
                    holder[canonical(name)] = shard
                elif weight_map[name] != shard:
                    problems.append(f"{name}: in {shard}, but {source} says {weight_map[name]}")
        for key, spec in expected.items():
            if key in named:
                continue
            where = f", {unlisted} has it" if (unlisted := holder.pop(key, None)) else ""
            if key != optional:
                problems.append(f"{key}: missing from {source}{where}; expected {spec}")
        problems += [f"{key}: in {shard}, not listed in {source}" for key, shard in holder.items()]
        if problems:
            raise CheckpointError(path, problems)

        if vision:
            logger.info("%s: %d vision tensors skipped; the text model is served", path, vision)
        if config.dspark and optional not in found:
            logger.warning("%s: no confidence head (%s); drafts are verified whole, never scheduled", path, optional)
        return cls(path, {name: found[name] for name in expected if name in found}, optional in found)


def _mismatch(name: str, stored: StoredTensor, spec: TensorSpec) -> list[str]:
    if stored.shape != spec.shape or DTYPES.get(stored.dtype) != spec.dtype:
        found = f"{stored.dtype} {list(stored.shape)}"
        return [f"{name}: in {stored.shard.name} is {found}, config.json implies {spec}"]
    if stored.nbytes != spec.nbytes:
        return [f"{name}: in {stored.shard.name} has {stored.nbytes} bytes, {spec} needs {spec.nbytes}"]
    return []
