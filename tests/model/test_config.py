import copy
import json

import pytest
import torch

from deepinfer_plugin.model.config import INTEGER_LISTS, INTEGERS, NUMBERS, ConfigError, V41Config, ring_length
from deepinfer_plugin.model.released import RELEASED
from deepinfer_plugin.model.rope import inverse_frequencies


def edited(**changes):
    raw = copy.deepcopy(RELEASED)
    for key, value in changes.items():
        holder = raw if key in raw else raw["text_config"]
        if value is None:
            holder.pop(key, None)
        else:
            holder[key] = value
    return raw


def test_released_config_layout():
    config = V41Config.from_dict(RELEASED)
    assert config.source_ratios == (2, 2, 2, 1)
    assert config.kv_source_of[:9] == (-1, -1, 0, 0, 0, 0, 0, 0, 1) and config.kv_source_of[20:] == (3,) * 20
    groups = {
        source: [i for i, s in enumerate(config.index_source_of) if s == source] for source in config.index_sources
    }
    assert groups[2] == list(range(2, 8)) and groups[20] == list(range(20, 24)) and groups[36] == list(range(36, 40))
    assert config.index_scale == 2**-6
    assert ring_length(config) == 134
    assert config.dspark.experts == 128 and config.engram.columns == 24


def test_alternative_spellings_are_accepted():
    raw = edited(engram_pad_token_id=None)
    raw["text_config"]["engram_pad_id"] = 2
    raw["text_config"]["hc_shifted"] = True
    assert V41Config.from_dict(raw).engram.pad_token_id == 2
    flat = {**RELEASED, **RELEASED["text_config"]}
    flat.pop("text_config")
    assert V41Config.from_dict(flat) == V41Config.from_dict(RELEASED)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "deepseek_v4"}, "model_type"),
        ({"quantization_config": None}, "quantization_config"),
        ({"hidden_size": 5000}, "hidden_size"),
        ({"hidden_size": "5120"}, "hidden_size"),
        ({"compress_ratios": [0, 0] + [4] * 41}, "compress_ratios"),
        ({"compress_ratios": [0, 0] + [2] * 18}, "compress_ratios"),
        ({"kv_source_layer_ids": [8, 14, 20]}, "kv_source_layer_ids"),
        ({"kv_source_layer_ids": [0, 2, 8, 14, 20]}, "kv_source_layer_ids"),
        ({"index_source_layer_ids": [2, 8, 20]}, "index_source_layer_ids"),
        ({"candidate_source_layer_id": 21}, "candidate_source_layer_id"),
        ({"scoring_func": "softmax"}, "scoring_func"),
        ({"hc_shifted": False}, "hc_shifted"),
        ({"num_hash_layers": 3}, "num_hash_layers"),
        ({"n_group": 8}, "n_group"),
        ({"num_experts_per_tok": 400}, "num_experts_per_tok"),
        ({"o_groups": 7}, "o_groups"),
        ({"engram_num_embeddings": [1]}, "engram_num_embeddings"),
        ({"dspark_target_layer_ids": [40]}, "dspark_target_layer_ids"),
        ({"vocab_size": None}, "vocab_size"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope_scaling.type"),
    ],
)
def test_wrong_field_is_named(changes, named):
    with pytest.raises(ConfigError, match=named.replace(".", r"\.")):
        V41Config.from_dict(edited(**changes))


@pytest.mark.parametrize("wrong", ["3", [1.5], {}, True, 10**400, float("nan")], ids=lambda wrong: repr(wrong)[:9])
@pytest.mark.parametrize("key", sorted(RELEASED["text_config"]))
def test_a_field_of_any_wrong_type_is_refused_or_legal(key, wrong):
    """Never a TypeError from somewhere inside."""
    try:
        V41Config.from_dict(edited(**{key: wrong}))
    except ConfigError as error:
        assert "legal: " in str(error)


@pytest.mark.parametrize("key", [*INTEGERS, *NUMBERS, *INTEGER_LISTS, "rope_scaling"])
def test_a_wrong_type_is_named(key):
    with pytest.raises(ConfigError, match=f"{key}='3' is not supported; legal: an? "):
        V41Config.from_dict(edited(**{key: "3"}))


def test_something_else_than_an_object_is_named():
    with pytest.raises(ConfigError, match="legal: one JSON object"):
        V41Config.from_dict([1, 2])


def test_unreadable_files_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"config\.json does not exist"):
        V41Config.load(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not valid JSON"):
        V41Config.load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(RELEASED))
    assert V41Config.load(tmp_path).num_layers == 40


def test_yarn_ramp():
    """Worked by hand for the released numbers: dimensions below 15 keep their frequency, from 25 on they are
    divided by 16."""
    config = V41Config.from_dict(RELEASED)
    plain = 1.0 / (160000.0 ** (torch.arange(0, 64, 2).double() / 64))
    ratio = inverse_frequencies(config, compressed=True).double() / plain
    assert torch.allclose(ratio[:16], torch.ones(16, dtype=torch.float64), atol=1e-6)
    assert torch.allclose(ratio[25:], torch.full((7,), 1 / 16, dtype=torch.float64), atol=1e-6)
    middle = 1 - 0.5 * (1 - 1 / 16)
    assert ratio[20].item() == pytest.approx(middle, abs=1e-6)
    base = inverse_frequencies(config, compressed=False)
    assert base[0] == 1 and base[16].item() == pytest.approx(10000**-0.5)
