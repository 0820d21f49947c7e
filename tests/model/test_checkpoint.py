"""What a checkpoint must hold, and every way of not holding it: refused by name in seconds, before a weight is read."""

import json
import logging
import os
import shutil
import time
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from deepinfer_plugin.model.checkpoint import (
    DTYPE_NAMES,
    INDEX,
    SINGLE,
    Checkpoint,
    CheckpointError,
    checkpoint_bytes,
    expected_tensors,
)
from deepinfer_plugin.model.config import ConfigError, V41Config
from deepinfer_plugin.model.released import RELEASED
from deepinfer_plugin.model.tiny import SHARD_NAMES

FIRST, MIDDLE, LAST = SHARD_NAMES
CONFIDENCE = "mtp.2.confidence_head.proj.weight"
SCALE = "layers.3.ffn.experts.5.w2.scale"


@pytest.fixture
def copy(tiny, tmp_path):
    return shutil.copytree(tiny, tmp_path / "checkpoint")


def edit_index(path, edit):
    index = json.loads((path / INDEX).read_text())
    edit(index["weight_map"])
    (path / INDEX).write_text(json.dumps(index))


def rename(old, new):
    def edit(weight_map):
        for name in [name for name in weight_map if name.startswith(old)]:
            weight_map[new + name.removeprefix(old)] = weight_map.pop(name)

    return edit


def edit_shard(path, shard, edit):
    """Rewrite one shard, the index left alone."""
    tensors = load_file(path / shard)
    edit(tensors)
    save_file(tensors, path / shard)


def shard_of(path, name):
    return json.loads((path / INDEX).read_text())["weight_map"][name]


def refused(path, config=None):
    """The problems with which ``path`` is refused, within 5 s of this process's time (others may hold the machine)."""
    start = time.process_time()
    with pytest.raises(CheckpointError) as error:
        Checkpoint.open(path, config or V41Config.load(path))
    assert time.process_time() - start < 5
    assert all(problem in str(error.value) for problem in error.value.problems[:10])
    return error.value.problems


# ---- the table ------------------------------------------------------------------------------------------------------


def test_released_shapes():
    table = expected_tensors(V41Config.from_dict(RELEASED))
    for name, shape, dtype in [
        ("embed.weight", (129280, 5120), "BF16"),
        ("norm.weight", (5120,), "BF16"),
        ("layers.0.attn.wq_a.weight", (1280, 5120), "F8_E4M3"),
        ("layers.0.attn.wq_a.scale", (40, 160), "F8_E8M0"),
        ("layers.39.attn.wq_b.weight", (32768, 1280), "F8_E4M3"),
        ("layers.0.attn.wkv.weight", (512, 5120), "F8_E4M3"),
        ("layers.0.attn.wo_a.weight", (8192, 4096), "F8_E4M3"),
        ("layers.0.attn.wo_b.weight", (5120, 8192), "F8_E4M3"),
        ("layers.0.attn.attn_sink", (64,), "F32"),
        ("layers.8.attn.compressor.wgate.weight", (512, 5120), "BF16"),
        ("layers.36.attn.indexer.wq_b.weight", (4096, 1280), "F8_E4M3"),
        ("layers.36.attn.indexer.weights_proj.weight", (32, 5120), "BF16"),
        ("layers.20.attn.indexer.wk.weight", (128, 512), "BF16"),
        ("layers.0.hc_ffn_fn", (24, 20480), "F32"),
        ("layers.0.ffn.gate.bias_vl", (384,), "F32"),
        ("layers.0.ffn.experts.383.w1.weight", (2304, 2560), "I8"),
        ("layers.0.ffn.experts.383.w2.scale", (5120, 72), "F8_E8M0"),
        ("layers.0.ffn.shared_experts.w2.weight", (5120, 2304), "F8_E4M3"),
        ("layers.14.engram.embed.weight", (384016682, 256), "F8_E4M3"),
        ("layers.14.engram.embed.scale", (384016682, 8), "F8_E8M0"),
        ("layers.1.engram.wkv.weight", (25600, 6144), "F8_E4M3"),
        ("layers.1.engram.q_weight", (4, 5120), "BF16"),
        ("mtp.0.main_proj.weight", (5120, 15360), "F8_E4M3"),
        ("mtp.2.ffn.gate.weight", (128, 5120), "BF16"),
        ("mtp.2.markov_head.head.weight", (129280, 256), "BF16"),
        (CONFIDENCE, (1, 5376), "BF16"),
    ]:
        assert table[name].shape == shape, name
        assert DTYPE_NAMES[table[name].dtype] == dtype, name
    for name in (
        "layers.20.attn.compressor.wgate.weight",  # ratio 1 has no gate
        "layers.3.attn.compressor.wkv.weight",  # not a source
        "layers.24.attn.indexer.wk.weight",  # selects, writes no keys
        "mtp.0.attn.indexer.wq_b.weight",
        "mtp.1.main_proj.weight",
        "mtp.3.attn_norm.weight",
    ):
        assert name not in table


def test_released_bytes():
    """Sums worked out by hand from the architecture: a layer, the Engram tables, the draft stages."""
    table = expected_tensors(V41Config.from_dict(RELEASED))

    def size(*prefixes):
        return sum(spec.nbytes for name, spec in table.items() if name.startswith(prefixes))

    assert size("layers.5.ffn.experts.") == 384 * 3 * 2304 * 5120 * (16 + 1) // 32
    assert size("layers.5.") == pytest.approx(7.389e9, rel=1e-3)
    assert size("layers.1.engram.embed", "layers.14.engram.embed") == (384006168 + 384016682) * 264
    assert size("mtp.") == pytest.approx(7.9e9, rel=0.02)
    assert size("embed.", "head.") == 2 * 129280 * 5120 * 2
    assert size("") == pytest.approx(509e9, rel=0.01)


# ---- what is accepted -----------------------------------------------------------------------------------------------


def test_whole(tiny):
    config = V41Config.load(tiny)
    checkpoint = Checkpoint.open(tiny, config)
    assert list(checkpoint.tensors) == list(expected_tensors(config))
    assert checkpoint.has_confidence
    assert checkpoint.nbytes == checkpoint_bytes(tiny) == sum(spec.nbytes for spec in expected_tensors(config).values())
    for name, tensor in load_file(tiny / LAST).items():
        stored = checkpoint.tensors[name]
        with stored.shard.open("rb") as file:
            file.seek(stored.offset)
            assert file.read(stored.nbytes) == tensor.flatten().view(torch.uint8).numpy().tobytes()


def test_prefix_and_single_file(tiny, tmp_path):
    tensors = {f"model.{name}": tensor for shard in SHARD_NAMES for name, tensor in load_file(tiny / shard).items()}
    save_file(tensors, tmp_path / SINGLE)
    config = V41Config.load(tiny)
    assert Checkpoint.open(tmp_path, config).tensors.keys() == expected_tensors(config).keys()
    assert checkpoint_bytes(tmp_path) == checkpoint_bytes(tiny)


def test_vision_and_tied_tensors_are_passed_over(copy, caplog):
    extra = {
        "vision.patch_embed.proj.weight": torch.zeros(8, 588),
        "aligner.w1.bias": torch.zeros(8),
        "image_newline": torch.zeros(8),
        "mtp.1.embed.weight": torch.zeros(8, 8),
        "mtp.2.head.weight": torch.zeros(8, 8),
    }
    size = checkpoint_bytes(copy)
    edit_shard(copy, FIRST, lambda tensors: tensors.update(extra))
    edit_index(copy, lambda weight_map: weight_map.update(dict.fromkeys(extra, FIRST)))
    with caplog.at_level(logging.INFO, "deepinfer_plugin"):
        checkpoint = Checkpoint.open(copy, V41Config.load(copy))
    assert not checkpoint.tensors.keys() & extra.keys()
    assert [record.getMessage() for record in caplog.records if "3 vision tensors" in record.getMessage()] == [
        record.getMessage() for record in caplog.records
    ]
    assert checkpoint_bytes(copy) == size


@pytest.mark.parametrize("file_too", [False, True])
def test_confidence_head_may_be_missing(copy, caplog, file_too):
    if file_too:
        edit_shard(copy, shard_of(copy, CONFIDENCE), lambda tensors: tensors.pop(CONFIDENCE))
    edit_index(copy, lambda weight_map: weight_map.pop(CONFIDENCE))
    checkpoint = Checkpoint.open(copy, V41Config.load(copy))
    assert not checkpoint.has_confidence
    assert CONFIDENCE not in checkpoint.tensors
    assert len([record for record in caplog.records if record.levelno == logging.WARNING]) == 1


# ---- what is refused ------------------------------------------------------------------------------------------------


def test_dropped_shared_expert(copy):
    names = ["mtp.1.ffn.shared_experts.w1.weight", "mtp.1.ffn.shared_experts.w1.scale"]
    shards = [shard_of(copy, name) for name in names]
    edit_index(copy, lambda weight_map: [weight_map.pop(name) for name in names])
    problems = refused(copy)
    assert len(problems) == 2
    for name, shard in zip(names, shards, strict=True):
        assert any(problem.startswith(f"{name}: missing") and shard in problem for problem in problems)


def test_renamed_stage(copy):
    edit_index(copy, rename("mtp.0.", "mtp.3."))
    problems = refused(copy)
    assert any(problem.startswith("mtp.3.attn.wkv.weight: in model-0000") for problem in problems)
    assert any(problem.startswith("mtp.0.attn.wkv.weight: missing") for problem in problems)


def test_expert_scale_listed_twice_in_the_index(copy):
    text = (copy / INDEX).read_text()
    line = f'"{SCALE}": "{shard_of(copy, SCALE)}",'
    (copy / INDEX).write_text(text.replace(line, line + line.replace(FIRST, LAST)))
    assert refused(copy) == [f"{INDEX}: {SCALE} is listed twice"]


def test_expert_scale_under_both_names(copy):
    edit_shard(copy, LAST, lambda tensors: tensors.update({f"model.{SCALE}": torch.zeros(1)}))
    edit_index(copy, lambda weight_map: weight_map.update({f"model.{SCALE}": LAST}))
    (problem,) = refused(copy)
    assert SCALE in problem and LAST in problem and shard_of(copy, SCALE) in problem and "twice" in problem


def test_expert_scale_in_two_shards(copy):
    edit_shard(copy, LAST, lambda tensors: tensors.update({SCALE: torch.zeros(1)}))
    (problem,) = refused(copy)
    assert problem == f"{SCALE}: in {LAST}, but {INDEX} says {shard_of(copy, SCALE)}"


def test_scale_of_a_coarser_block(copy):
    config, shard = V41Config.load(copy), shard_of(copy, SCALE)
    coarse = torch.ones(config.hidden_size, config.expert_dim // 64).to(torch.float8_e8m0fnu)
    edit_shard(copy, shard, lambda tensors: tensors.update({SCALE: coarse}))
    assert refused(copy) == [f"{SCALE}: in {shard} is F8_E8M0 [128, 1], config.json implies F8_E8M0 [128, 2]"]


def test_wrong_dtype(copy):
    shard = shard_of(copy, "layers.4.attn.attn_sink")
    edit_shard(copy, shard, lambda tensors: tensors.update({"layers.4.attn.attn_sink": torch.zeros(4).bfloat16()}))
    assert refused(copy) == [f"layers.4.attn.attn_sink: in {shard} is BF16 [4], config.json implies F32 [4]"]


@pytest.mark.parametrize("keep", [-1, -1000, 100, 8, 3, 0])
def test_truncated_last_shard(copy, keep):
    size = (copy / LAST).stat().st_size
    os.truncate(copy / LAST, keep if keep >= 0 else size + keep)
    (problem,) = refused(copy)
    assert problem.startswith(f"{LAST}: ")
    if keep < 0:
        assert f"truncated: {size + keep} bytes, its header promises {size}" in problem


def test_overlong_shard(copy):
    with (copy / LAST).open("ab") as file:
        file.write(b"\0")
    (problem,) = refused(copy)
    assert problem.startswith(f"{LAST}: file is too long")
    with pytest.raises(CheckpointError, match="too long"):
        checkpoint_bytes(copy)


def test_missing_shard(copy):
    (copy / MIDDLE).unlink()
    assert refused(copy) == [f"{MIDDLE}: file is missing"]
    with pytest.raises(CheckpointError, match=f"{MIDDLE}: file is missing"):
        checkpoint_bytes(copy)


def test_index_names_another_shard(copy):
    edit_index(copy, lambda weight_map: weight_map.update({SCALE: LAST}))
    problems = refused(copy)
    assert any(problem.startswith(f"{SCALE}: {INDEX} says {LAST}, which does not have it") for problem in problems)


def test_unlisted_tensor(copy):
    edit_shard(copy, LAST, lambda tensors: tensors.update({"layers.0.attn.wq_c.weight": torch.zeros(1)}))
    assert refused(copy) == [f"layers.0.attn.wq_c.weight: in {LAST}, not listed in {INDEX}"]


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": 1}}', '{"weight_map": {"a": "../b"}}']
)
def test_unreadable_index(copy, text):
    (copy / INDEX).write_text(text)
    assert all(problem.startswith(INDEX) for problem in refused(copy, V41Config.load(copy)))


def test_empty_directory(tiny, tmp_path):
    (problem,) = refused(tmp_path, V41Config.load(tiny))
    assert INDEX in problem and SINGLE in problem


@pytest.mark.parametrize("header", [b"[]", b"{}", b'{"a": 1}', b'{"a": {"dtype": "F32"}}', b"\xff\xfe", b"{" * 8])
def test_malformed_header(copy, header):
    (copy / LAST).write_bytes(len(header).to_bytes(8, "little") + header)
    assert any(problem.startswith(f"{LAST}: ") or f"says {LAST}" in problem for problem in refused(copy))


def test_v4_checkpoint(copy):
    """Another model under our config: its tensors are unknown, ours missing. With its own config it never gets here."""
    edit_index(copy, rename("layers.2.attn.indexer.", "layers.2.attn.indexer.compressor."))
    edit_index(copy, rename("layers.0.hc_attn_", "hc_head_"))
    problems = refused(copy)
    assert any(problem.startswith("hc_head_fn: in ") for problem in problems)
    assert any(problem.startswith("layers.0.hc_attn_fn: missing") for problem in problems)
    raw = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(raw | {"model_type": "deepseek_v4"}))
    with pytest.raises(ConfigError, match="model_type='deepseek_v4'"):
        V41Config.load(copy)


@pytest.mark.parametrize(
    "field, value, tensor",
    [
        ("vocab_size", 1312, "embed.weight"),
        ("hidden_size", 160, "norm.weight"),
        ("num_attention_heads", 8, "layers.0.attn.attn_sink"),
        ("head_dim", 96, "layers.0.attn.kv_norm.weight"),
        ("q_lora_rank", 96, "layers.0.attn.q_norm.weight"),
        ("o_lora_rank", 64, "layers.0.attn.wo_a.weight"),
        ("n_routed_experts", 12, "layers.0.ffn.gate.bias"),
        ("moe_intermediate_size", 96, "layers.0.ffn.experts.0.w1.weight"),
        ("index_head_dim", 64, "layers.2.attn.indexer.k_norm.weight"),
        ("index_n_heads", 4, "layers.2.attn.indexer.weights_proj.weight"),
        ("hc_mult", 2, "layers.0.hc_attn_base"),
        ("engram_num_embeddings", [7, 7], "layers.1.engram.embed.weight"),
        ("dspark_markov_rank", 32, "mtp.2.markov_head.embed.weight"),
        ("dspark_n_routed_experts", 4, "mtp.0.ffn.gate.weight"),
        ("num_nextn_predict_layers", 0, "mtp.0.main_proj.weight"),
        ("kv_source_layer_ids", [2, 6], "layers.4.attn.compressor.wkv.weight"),
        ("engram_layer_ids", [1, 5], "layers.5.engram.wkv.weight"),
    ],
)
def test_config_that_does_not_fit(tiny, field, value, tensor):
    raw = json.loads((tiny / "config.json").read_text())
    text = raw["text_config"] | {field: value}
    if field == "num_nextn_predict_layers":
        text["compress_ratios"] = text["compress_ratios"][:-3]
    problems = refused(tiny, V41Config.from_dict(raw | {"text_config": text}))
    assert any(problem.startswith(f"{tensor}: ") for problem in problems)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_edit_of_any_entry_is_refused_by_name(copy, data):
    """One header entry of one shard, damaged at random; the file stays a valid safetensors file of the same length."""
    shard = data.draw(st.sampled_from(SHARD_NAMES))
    original = (copy / shard).read_bytes()
    length = int.from_bytes(original[:8], "little")
    header = json.loads(original[8 : 8 + length])
    name = data.draw(st.sampled_from(sorted(header.keys() - {"__metadata__"})))
    edit = data.draw(st.sampled_from(["rename", "dtype", "transpose", "split"]))
    entry = header[name]
    if edit == "rename":
        header[name + ".old"] = header.pop(name)
    elif edit == "dtype":
        entry["dtype"] = data.draw(st.sampled_from(sorted({"F16", "F32", "BF16", "I8", "U8"} - {entry["dtype"]})))
    elif edit == "transpose":
        entry["shape"] = [1, *entry["shape"]]
    else:
        entry["shape"] = [*entry["shape"][:-1], entry["shape"][-1] + 1]
    text = json.dumps(header).encode()
    try:
        (copy / shard).write_bytes(len(text).to_bytes(8, "little") + text + original[8 + length :])
        problems = refused(copy)
    finally:
        (copy / shard).write_bytes(original)
    assert any(problem.startswith(f"{name}: ") and shard in problem for problem in problems)


def test_released_size_is_checked_in_seconds(tmp_path):
    """Half a terabyte in 48 shards and 95,000 tensors, the weights being holes in sparse files."""
    config = V41Config.from_dict(RELEASED)
    table = list(expected_tensors(config).items())
    weight_map = {}
    for number in range(48):
        shard = f"model-{number:05d}.safetensors"
        header, end = {}, 0
        for name, spec in table[number::48]:
            header[name] = {
                "dtype": DTYPE_NAMES[spec.dtype],
                "shape": list(spec.shape),
                "data_offsets": [end, end + spec.nbytes],
            }
            end += spec.nbytes
            weight_map[name] = shard
        write_sparse(tmp_path / shard, header, end)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    start = time.process_time()
    checkpoint = Checkpoint.open(tmp_path, config)
    assert time.process_time() - start < 5
    assert checkpoint.nbytes == checkpoint_bytes(tmp_path) > 500e9
    last = tmp_path / "model-00047.safetensors"
    os.truncate(last, last.stat().st_size - 1)
    (problem,) = refused(tmp_path, config)
    assert problem.startswith(f"{last.name}: file is truncated")


def write_sparse(file: Path, header, length):
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text)
    try:
        os.truncate(file, 8 + len(text) + length)
    except OSError as error:
        pytest.skip(f"no sparse files here: {error}")
