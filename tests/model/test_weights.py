"""The load: every byte where it belongs, every parameter written once, no memory beside the weights; or a refusal."""

import json
import logging
import os
import random
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from deepinfer_plugin.model.checkpoint import (
    DTYPE_NAMES,
    SINGLE,
    Checkpoint,
    CheckpointError,
    TensorSpec,
    expected_tensors,
)
from deepinfer_plugin.model.config import V41Config
from deepinfer_plugin.model.tiny import SHARD_NAMES
from deepinfer_plugin.model.weights import load_into, load_tensors

CONFIDENCE = "mtp.2.confidence_head.proj.weight"
VICTIM = "layers.3.ffn.experts.5.w2.weight"


class Parameters:
    """A model that is nothing but its parameters; the w2 of the experts of one layer share a tensor."""

    def __init__(self, config, stacked="layers.3.ffn.experts."):
        self.config = config
        self.slices = {}
        for name, (shape, dtype) in expected_tensors(config).items():
            dtype = torch.uint8 if dtype == torch.int8 else dtype
            self.slices[name] = filled(shape, dtype)
        self.stack = filled((config.experts, config.hidden_size, config.expert_dim // 2), torch.uint8)
        for expert in range(config.experts):
            self.slices[f"{stacked}{expert}.w2.weight"] = self.stack[expert]

    def parameter_slices(self):
        return self.slices


def filled(shape, dtype):
    tensor = torch.empty(shape, dtype=dtype)
    tensor.view(torch.uint8).fill_(0xA5)
    return tensor


def same_bytes(a, b):
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def untouched(model):
    return all((tensor.contiguous().view(torch.uint8) == 0xA5).all() for tensor in model.slices.values())


@pytest.fixture(scope="module")
def config(tiny):
    return V41Config.load(tiny)


@pytest.fixture(scope="module")
def checkpoint(tiny, config):
    return Checkpoint.open(tiny, config)


@pytest.fixture(scope="module")
def tensors(tiny):
    return {name: tensor for shard in SHARD_NAMES for name, tensor in load_file(tiny / shard).items()}


# ---- what arrives ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1 << 26, 1000])
def test_every_byte_arrives(checkpoint, config, tensors, monkeypatch, chunk):
    monkeypatch.setattr("deepinfer_plugin.model.weights.CHUNK", chunk)
    model = Parameters(config)
    load_into(model, checkpoint, progress=False)
    assert model.slices.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert same_bytes(model.slices[name], tensor), name


def test_progress_counts_bytes_on_stderr(checkpoint, config, capfd):
    load_into(Parameters(config), checkpoint)
    out, err = capfd.readouterr()
    assert "weights: 100%" in err and "B/s" in err
    assert out == ""
    load_into(Parameters(config), checkpoint, progress=False)
    assert capfd.readouterr() == ("", "")


def test_iterator_in_any_order_and_spelling(config, tensors):
    pairs = [(random.choice(["", "model."]) + name, tensor) for name, tensor in tensors.items()]
    random.Random(0).shuffle(pairs)
    extra = [("vision.norm.weight", torch.zeros(3)), ("model.mtp.0.embed.weight", torch.zeros(3))]
    model = Parameters(config)
    assert load_tensors(model, iter(extra + pairs))
    for name, tensor in tensors.items():
        assert same_bytes(model.slices[name], tensor), name


def test_without_confidence_head(tiny, tmp_path, config, tensors, caplog):
    path = shutil.copytree(tiny, tmp_path / "checkpoint")
    index = json.loads((path / "model.safetensors.index.json").read_text())
    del index["weight_map"][CONFIDENCE]
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    model = Parameters(config)
    load_into(model, Checkpoint.open(path, config), progress=False)
    assert (model.slices[CONFIDENCE].view(torch.uint8) == 0xA5).all()
    assert same_bytes(model.slices[VICTIM], tensors[VICTIM])

    caplog.clear()
    rest = [(name, tensor) for name, tensor in tensors.items() if name != CONFIDENCE]
    assert not load_tensors(Parameters(config), rest)
    assert len([record for record in caplog.records if record.levelno == logging.WARNING]) == 1


# ---- what is refused ------------------------------------------------------------------------------------------------


def damage_missing(model):
    del model.slices[VICTIM]
    return f"{VICTIM}: the model has no parameter for it"


def damage_hole(model):
    """A slice that points at the parameter of another expert: one is written twice, one never."""
    model.slices[VICTIM] = model.stack[6]
    return "are never written"


def damage_overlap(model):
    model.slices[VICTIM] = model.stack[6]
    return "write the same bytes"


def damage_shape(model):
    model.slices["norm.weight"] = filled((64,), torch.bfloat16)
    return "norm.weight: is BF16 [128], its parameter is BF16 [64]"


def damage_dtype(model):
    model.slices["norm.weight"] = filled((128,), torch.float16)
    return "norm.weight: is BF16 [128], its parameter is torch.float16 [128]"


def damage_layout(model):
    model.slices["head.weight"] = filled((128, 1280), torch.bfloat16).T
    return "head.weight: its parameter is not contiguous"


def damage_stranger(model):
    model.slices["layers.9.ffn.extra"] = filled((3,), torch.float32)
    return "layers.9.ffn.extra: a parameter of the model, not a tensor of the checkpoint"


DAMAGES = [
    damage_missing,
    damage_hole,
    damage_overlap,
    damage_shape,
    damage_dtype,
    damage_layout,
    damage_stranger,
]


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("source", ["checkpoint", "iterator"])
def test_model_that_would_load_in_part(checkpoint, config, tensors, damage, source):
    model = Parameters(config)
    text = damage(model)
    with pytest.raises(CheckpointError) as error:
        if source == "checkpoint":
            load_into(model, checkpoint, progress=False)
        else:
            load_tensors(model, tensors.items())
    assert any(text in problem for problem in error.value.problems)
    assert untouched(model)


def test_parameter_without_a_tensor(checkpoint, config):
    class Module(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.config, self.inner = config, Parameters(config)
            self.forgotten = torch.nn.Parameter(torch.zeros(3))

        def parameter_slices(self):
            return self.inner.slices

    with pytest.raises(CheckpointError, match="forgotten: a parameter that no tensor of the checkpoint fills"):
        load_into(Module(), checkpoint, progress=False)


@pytest.mark.parametrize(
    "edit, text",
    [
        (lambda t: t.pop(VICTIM), f"{VICTIM}: missing; expected I8 [128, 32]"),
        (
            lambda t: t.update({"layers.10.attn_norm.weight": torch.zeros(1)}),
            "layers.10.attn_norm.weight: not a tensor",
        ),
        (lambda t: t.update({"model.norm.weight": t["norm.weight"]}), "model.norm.weight: given twice"),
        (lambda t: t.update({"norm.weight": t["norm.weight"].float()}), "is F32 [128], config.json implies BF16 [128]"),
        (lambda t: t.update({"head.weight": t["head.weight"].T}), "head.weight: is BF16 [128, 1280], config.json"),
        (lambda t: t.update({VICTIM: t[VICTIM].view(torch.uint8)}), f"{VICTIM}: is torch.uint8"),
    ],
)
def test_wrong_iterator(config, tensors, edit, text):
    wrong = dict(tensors)
    edit(wrong)
    with pytest.raises(CheckpointError) as error:
        load_tensors(Parameters(config), wrong.items())
    assert text in str(error.value)


def test_file_that_shrinks_after_the_check(tiny, tmp_path, config):
    path = shutil.copytree(tiny, tmp_path / "checkpoint")
    checkpoint = Checkpoint.open(path, config)
    last = path / SHARD_NAMES[-1]
    os.truncate(last, last.stat().st_size - 1)
    with pytest.raises(CheckpointError, match=rf"{SHARD_NAMES[-1]} changed since it was checked"):
        load_into(Parameters(config), checkpoint, progress=False)


# ---- memory ---------------------------------------------------------------------------------------------------------

MEASURE = """
import resource, sys
from pathlib import Path
import torch
from deepinfer_plugin.model.config import V41Config
from deepinfer_plugin.model.weights import Checkpoint, load_into

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

class Parameters:
    def __init__(self, config, specs):
        self.config = config
        self.slices = {name: torch.empty(spec.shape, dtype=spec.dtype) for name, spec in specs.items()}
    def parameter_slices(self):
        return self.slices

from deepinfer_plugin.model.checkpoint import expected_tensors
path = Path(sys.argv[1])
config = V41Config.load(path)
checkpoint = Checkpoint.open(path, config)
model = Parameters(config, expected_tensors(config))
before = peak()
load_into(model, checkpoint)
print(peak() - before, checkpoint.nbytes)
"""


def test_peak_memory_is_the_weights(tiny, tmp_path):
    """The real peak of a process that loads 350 MB: a second copy of anything large would show."""
    raw = json.loads((tiny / "config.json").read_text())
    raw["text_config"] |= {"vocab_size": 131072, "hidden_size": 512, "dspark_markov_rank": 256}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    write_random(tmp_path / SINGLE, expected_tensors(V41Config.from_dict(raw)))
    run = subprocess.run([sys.executable, "-c", MEASURE, tmp_path], capture_output=True, text=True, check=True)
    grown, weights = map(int, run.stdout.split())
    assert weights > 350e6
    assert grown < weights + 50e6


def write_random(file, table: dict[str, TensorSpec]):
    header, end = {}, 0
    for name, spec in table.items():
        header[name] = {
            "dtype": DTYPE_NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [end, end + spec.nbytes],
        }
        end += spec.nbytes
    text = json.dumps(header).encode()
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for begin in range(0, end, 1 << 24):
            out.write(os.urandom(min(1 << 24, end - begin)))
