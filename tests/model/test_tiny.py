"""The tiny checkpoint: every feature, the same bytes for the same arguments, a tokenizer that serves, sane numbers."""

import hashlib
import json
import random
import shutil
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from tokenizers import Tokenizer

from deepinfer_plugin.cli import main
from deepinfer_plugin.kernels.reference.formats import fp8_weight_cast, fp8_weight_dequant, mxfp4_cast, mxfp4_dequant
from deepinfer_plugin.model import V41, ConfigError, V41Config
from deepinfer_plugin.model.checkpoint import INDEX, Checkpoint
from deepinfer_plugin.model.engram_table import EngramTable
from deepinfer_plugin.model.tiny import SHARD_NAMES, write_tiny
from deepinfer_plugin.model.tiny_tokenizer import BOS, CONTROL, EOS, MARKUP, PAD, build_tokenizer, special_ids


def digests(path):
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in path.iterdir()}


@pytest.fixture(scope="module")
def config(tiny):
    return V41Config.load(tiny)


@pytest.fixture(scope="module")
def tokenizer(tiny):
    return Tokenizer.from_file(str(tiny / "tokenizer.json"))


# ---- what is in it --------------------------------------------------------------------------------------------------


def test_every_layer_kind_and_feature(config):
    ratios = [config.compress_ratios[layer] for layer in config.kv_sources]
    assert config.compress_ratios.count(0) == 2
    assert ratios == [2, 2, 1]
    assert any(layer not in config.index_sources and ratio for layer, ratio in enumerate(config.compress_ratios))
    assert config.candidate_layer in config.kv_sources
    assert any(layer > config.candidate_layer and layer not in config.kv_sources for layer in config.index_sources)
    assert config.index_topk < config.candidate_blocks * config.candidate_block_size < 128  # both bite on short prompts
    assert config.engram.lookback == 3 and len(config.engram.layers) == 2
    assert (config.dspark.stages, config.dspark.block_size, config.window) == (3, 5, 128)
    assert config.rope_scaling is not None and config.swiglu_limit > 0
    assert torch.tensor(config.index_scale).log2() % 1 == 0  # a power of two, as at released size


def test_files(tiny, config, tokenizer):
    index = json.loads((tiny / INDEX).read_text())
    assert set(index["weight_map"].values()) == set(SHARD_NAMES)
    checkpoint = Checkpoint.open(tiny, config)
    assert checkpoint.has_confidence
    assert index["metadata"]["total_size"] == checkpoint.nbytes < 10e6
    raw = json.loads((tiny / "config.json").read_text())
    assert raw["architectures"] == ["DeepseekV41ForCausalLM"] and raw["vision_config"]
    for key, token in (("bos", BOS), ("eos", EOS), ("pad", PAD)):
        assert raw[f"{key}_token_id"] == tokenizer.token_to_id(token)
    assert config.engram.pad_token_id == tokenizer.token_to_id(PAD)
    assert tokenizer.id_to_token(config.image_token_id) == "<｜deepseek_image｜>"
    assert config.dspark.noise_token_id in special_ids(tokenizer)
    assert EngramTable.load(tiny, config).token_class.shape == (config.vocab_size,)


def test_quantised_weights(tiny):
    """Casting what the stored bytes mean changes nothing, as with a converter's output; the scales differ."""
    tensors = {name: tensor for shard in SHARD_NAMES for name, tensor in load_file(tiny / shard).items()}
    weight, scale = (tensors[f"layers.3.attn.wq_b.{part}"] for part in ("weight", "scale"))
    meant = fp8_weight_dequant(weight, scale)
    assert torch.equal(fp8_weight_dequant(*fp8_weight_cast(meant)), meant)
    assert scale.view(torch.uint8).unique().numel() > 1
    weight, scale = (tensors[f"mtp.1.ffn.experts.3.w1.{part}"] for part in ("weight", "scale"))
    meant = mxfp4_dequant(weight.view(torch.uint8), scale)
    assert torch.equal(mxfp4_dequant(*mxfp4_cast(meant)), meant)
    assert scale.view(torch.uint8).unique().numel() > 1


def test_same_arguments_same_bytes(tiny, tmp_path):
    script = "import sys; from deepinfer_plugin.cli import main; sys.exit(main(['tiny', sys.argv[1]]))"
    subprocess.run([sys.executable, "-c", script, tmp_path / "again"], check=True, capture_output=True)
    assert digests(tmp_path / "again") == digests(tiny)
    write_tiny(tmp_path / "other", seed=1)
    different = {name for name, digest in digests(tmp_path / "other").items() if digest != digests(tiny)[name]}
    assert different == set(SHARD_NAMES)


@pytest.mark.parametrize(
    "sizes",
    [
        {"layers": 6, "hidden": 64, "heads": 2, "head_dim": 32, "experts": 4, "expert_dim": 32, "vocab": 300},
        {"layers": 7},
        {"layers": 13, "experts": 20},
        {"hidden": 96, "vocab": 3000, "max_position": 1 << 20},
    ],
)
def test_other_sizes(tmp_path, sizes):
    config = write_tiny(tmp_path, **sizes)
    assert config == V41Config.load(tmp_path)
    Checkpoint.open(tmp_path, config)
    logits = V41.load(tmp_path).logits(range(40))
    assert logits.shape == (40, config.vocab_size) and logits.isfinite().all()


# ---- what it says ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def v41(tiny):
    return V41.load(tiny)


def test_activations_are_of_order_one(v41, config):
    ids = random.Random(0).sample(range(3, 1000), 200)
    for layer, streams in v41.streams(ids, range(config.num_layers)).items():
        scale = streams.float().square().mean((0, 2)).sqrt()  # of each stream
        assert ((scale > 0.5) & (scale < 4)).all(), layer
    assert 2 < v41.logits(ids).std() < 5


def test_greedy_text_wanders(v41, tokenizer):
    """Many different tokens, no control tokens but the two that end something, and another text for another prompt."""
    ends = {tokenizer.token_to_id(EOS), tokenizer.token_to_id("</think>")}
    texts = [v41.generate(tokenizer.encode(text).ids, 50, ignore_eos=True) for text in ("The river", "import json")]
    for text in texts:
        assert len(set(text)) > 25
        assert not set(text) & (set(special_ids(tokenizer)) - ends)
    assert texts[0] != texts[1]


def test_some_drafts_come_true(v41):
    chance = random.Random(0)
    accepted = []
    for _ in range(8):
        prompt = [chance.randrange(3, 1000) for _ in range(chance.randrange(2, 30))]
        truth, drafts = v41.generate(prompt, 6, ignore_eos=True)[1:], v41.draft(prompt).tokens[0].tolist()
        accepted.append(next((i for i in range(5) if drafts[i] != truth[i]), 5))
    assert len(set(accepted)) > 1
    assert 0.2 < sum(accepted) / len(accepted) < 4


# ---- the tokenizer --------------------------------------------------------------------------------------------------


TOKENIZER = build_tokenizer(1280)


@settings(deadline=None)
@given(st.text())
def test_any_text_survives(text):
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("vocab", [282, 300, 1280, 5000])
def test_vocabulary_is_full(vocab):
    tokenizer = build_tokenizer(vocab)
    assert tokenizer.get_vocab_size() == vocab
    assert [tokenizer.token_to_id(token) for token in (BOS, EOS, PAD)] == [0, 1, 2]
    assert all(tokenizer.id_to_token(i) is not None for i in range(vocab))
    for token in (BOS, EOS, PAD, *MARKUP, *CONTROL):
        assert tokenizer.encode(f"a{token}b").tokens.count(token) == 1


def test_skipping_special_tokens_keeps_markup(tokenizer):
    ids = tokenizer.encode("<｜User｜>hi<think>a</think><｜DSML｜ calls><｜end▁of▁sentence｜>").ids
    assert tokenizer.decode(ids) == "hi<think>a</think><｜DSML｜ calls>"


def test_transformers_loads_it(tiny):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (0, 1, 2)
    assert len(tokenizer) == V41Config.load(tiny).vocab_size
    assert (
        tokenizer.decode(tokenizer("Hello, 世界! x = [1, 22, 3333]\n").input_ids) == "Hello, 世界! x = [1, 22, 3333]\n"
    )
    assert tokenizer("hi").input_ids[0] != tokenizer.bos_token_id


WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@pytest.fixture(scope="module")
def recipe(tiny):
    """The chat codec as SGLang builds it for this model."""
    renderer = pytest.importorskip("sglang.srt.parser.deepseek_recipe_renderer")
    from transformers import AutoTokenizer

    return renderer.DeepSeekRecipe.from_hf_tokenizer("dsv41", AutoTokenizer.from_pretrained(tiny))


def test_chat_is_rendered(recipe, tokenizer):
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Paris? <｜User｜>"},
        {
            "role": "assistant",
            "reasoning_content": "A tool.",
            "content": "",
            "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "1", "content": "sunny"},
    ]
    ids = recipe.encode({"messages": messages, "thinking": True, "tools": [WEATHER]})
    text = tokenizer.decode(ids, skip_special_tokens=False)
    assert text.startswith("<｜begin▁of▁sentence｜><｜System｜>") and text.endswith("<｜Assistant｜><think>")
    assert "get_weather" in text and "sunny" in text
    # What a user types is text: the role token in the message is not the role token.
    assert ids.count(tokenizer.token_to_id("<｜User｜>")) < text.count("<｜User｜>")
    plain = recipe.encode({"messages": messages[:2], "thinking": False})
    assert plain[-2:] == [tokenizer.token_to_id("<｜Assistant｜>"), tokenizer.token_to_id("</think>")]
    for task in ("action", "query", "authority", "domain", "title", "read_url"):
        ids = recipe.encode({"messages": messages[:2], "thinking": False}, task=task)
        assert ids[-1] == tokenizer.token_to_id(f"<｜{task}｜>")


def test_answer_is_parsed(recipe, tokenizer):
    from sglang.srt.parser.deepseek_recipe_output import DeepSeekRecipeOutputParser, whole_tool_calls

    parser = DeepSeekRecipeOutputParser(recipe, thinking_stage=recipe.parse_start(thinking=True), parse_tool_calls=True)
    answer = (
        "Look outside: 天气.</think>One moment.\n\n<｜DSML｜ calls>\n"
        '<｜DSML｜ invoke name="get_weather">\n'
        '<｜DSML｜ parameter name="city" string="true">Paris</｜DSML｜ parameter>\n'
        "</｜DSML｜ invoke>\n</｜DSML｜ calls>"
    )
    ids = tokenizer.encode(answer, add_special_tokens=False).ids
    delta = parser.feed(ids[:1])
    for token in ids[1:]:
        delta = delta.merge(parser.feed([token]))
    delta = delta.merge(parser.finish([1], {"type": "stop", "matched": 1}))
    assert (delta.reasoning, delta.content) == ("Look outside: 天气.", "One moment.")
    (call,) = whole_tool_calls(delta)
    assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Paris"})


# ---- the command ----------------------------------------------------------------------------------------------------


def test_command(tmp_path, capsys):
    assert main(["tiny", str(tmp_path / "a"), "--layers", "6", "--experts", "4", "--head-dim", "32"]) == 0
    assert "6 layers, 1280 token ids" in capsys.readouterr().out
    assert V41Config.load(tmp_path / "a").head_dim == 32


@pytest.mark.parametrize(
    "size, text",
    [
        ("--layers=5", "layers=5 is too few"),
        ("--hidden=100", "hidden_size=100 is not supported; legal: a positive multiple of 32"),
        ("--hidden=0", "hidden_size=0"),
        ("--heads=3", "heads=3 is not supported; legal: a positive even number"),
        ("--head-dim=48", "head_dim=48"),
        ("--experts=3", "experts=3 is too few"),
        ("--expert-dim=16", "expert_dim=16"),
        ("--vocab=100", "vocab=100 is too small; legal: 282 or more"),
        ("--max-position=0", "max_position=0"),
        ("--seed=-1", "seed=-1"),
    ],
)
def test_refused_sizes(tmp_path, capsys, size, text):
    assert main(["tiny", str(tmp_path / "a"), size]) == 2
    assert text in capsys.readouterr().err
    assert not (tmp_path / "a").exists()


def test_another_checkpoint_is_not_overwritten(tiny, tmp_path, capsys):
    shutil.copy(tiny / SHARD_NAMES[0], tmp_path / "model-00001-of-00048.safetensors")
    assert main(["tiny", str(tmp_path)]) == 2
    assert "holds another checkpoint" in capsys.readouterr().err
    assert len(list(tmp_path.iterdir())) == 1


def test_unfinished_directory_is_no_checkpoint(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise OSError("disk full")

    monkeypatch.setattr("deepinfer_plugin.model.tiny.save_file", fail)
    with pytest.raises(OSError, match="disk full"):
        write_tiny(tmp_path)
    with pytest.raises(ConfigError, match="does not exist"):
        V41Config.load(tmp_path)
