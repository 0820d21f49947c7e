"""The checkpoint in the repository: complete, small, alive, and as good as its card says."""

import json

import pytest
import torch
from tokenizers import Tokenizer

from deepinfer_plugin.model import V41
from deepinfer_plugin.model.config import V41Config
from deepinfer_plugin.model.weights import checkpoint_bytes

from .conftest import EXAMPLE

CHECKPOINT = EXAMPLE / "checkpoint"


@pytest.fixture(scope="module")
def model():
    return V41.load(CHECKPOINT)


@pytest.fixture(scope="module")
def recipe():
    from sglang.srt.parser.deepseek_recipe_renderer import DeepSeekRecipe

    return DeepSeekRecipe("dsv41", Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json")))


@pytest.fixture(scope="module")
def figures():
    return json.loads((CHECKPOINT / "figures.json").read_text())


def test_size():
    files = sum(file.stat().st_size for file in CHECKPOINT.iterdir())
    assert checkpoint_bytes(CHECKPOINT) < files < 24e6


def test_has_every_feature():
    config = V41Config.load(CHECKPOINT)
    assert {0, 1, 2} == set(config.compress_ratios) and len(config.index_sources) > len(config.kv_sources) >= 2
    assert 0 <= config.candidate_layer < config.index_sources[-1]
    assert config.candidate_blocks * config.candidate_block_size < 512, "candidates matter at test lengths"
    assert config.experts >= 16 and config.experts_per_token == 2
    assert config.engram is not None and min(config.engram.rows) > 10_000
    assert config.dspark is not None and (config.dspark.stages, config.dspark.block_size) == (3, 5)


def test_recorded_figures(figures):
    assert figures["ppl"] < 0.6 * figures["ppl_3gram"] and figures["ppl_chat"] < 0.6 * figures["ppl_3gram_chat"]
    assert figures["ppl"] == pytest.approx(figures["ppl_bf16"], rel=0.02)
    assert figures["accept_len_code"] >= 2.5 and figures["accept_len_chat"] >= 2.2
    assert figures["ece_after"] <= 0.05
    assert figures["checkpoint_bytes"] == checkpoint_bytes(CHECKPOINT)


def test_perplexity_of_a_window_repeats(model):
    """A few windows through the reference, against the 3-gram model on the same tokens."""
    from heldout import CONTEXT, WINDOW, HeldOut
    from report import code_losses, perplexity

    held_out = HeldOut.load(CHECKPOINT)
    few = HeldOut(**{**vars(held_out), "code": held_out.code[:3]})
    baseline = -held_out.code_counts.log_probability()[: 3 * (WINDOW - CONTEXT)].mean()
    assert perplexity(code_losses(model, few)) < 0.7 * torch.tensor(baseline).exp()


def test_experts_are_skewed_and_alive():
    """Source text and conversations use different experts."""
    from batches import Batch
    from heldout import HeldOut
    from masters import load_masters
    from target import forward
    from training_ops import TrainingOps

    held_out, ops = HeldOut.load(CHECKPOINT), TrainingOps()
    network = load_masters(CHECKPOINT, ops, "cpu", CHECKPOINT)
    network.dspark = None
    shares = []
    with torch.no_grad():
        network.prepare()
        for ids in (held_out.code[0], held_out.chat[:512]):
            ops.loads = []
            rows = torch.from_numpy(ids).long()[None]
            forward(network, ops, Batch(rows, rows, torch.ones(rows.shape)))
            shares.append(torch.stack([counts / counts.sum() for _, counts in ops.loads]))
    code, chat = shares
    experts = code.shape[1]
    assert (torch.stack(shares).amax(-1) * experts).median() > 1.5, "the busiest expert gets well over its share"
    assert ((code - chat).abs().sum(-1) / 2).median() > 0.2, "the load depends on the text"
    assert ((code + chat) > 0).float().mean() > 0.9


def test_speculation_is_lossless_and_pays(model):
    from heldout import HeldOut, code_prompts
    from speculate import accept_length, speculate

    (prompt,) = code_prompts(HeldOut.load(CHECKPOINT).code, 1)
    tokens, steps = speculate(model, prompt, 40)
    assert tokens[:40] == model.generate(prompt, 40, ignore_eos=True)[: len(tokens)][:40]
    assert accept_length(steps) > 1.2


# ---- what a demo shows ---------------------------------------------------------------------------------------------

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "The name of the city"}},
            "required": ["city"],
        },
    },
}


def answer(model, recipe, question, thinking=False, **body):
    """Reasoning, content and tool calls as the server's parser returns them."""
    from sglang.srt.parser.deepseek_recipe_output import DeepSeekRecipeOutputParser, whole_tool_calls

    prompt = recipe.encode({"messages": [{"role": "user", "content": question}], "thinking": thinking, **body})
    ids = model.generate(prompt, 96)
    assert ids[-1] == model.config.eos_token_id, "an answer comes to an end"
    stage = recipe.parse_start(thinking=thinking)
    delta = DeepSeekRecipeOutputParser(recipe, thinking_stage=stage, parse_tool_calls=True).finish(
        ids[:-1], {"type": "stop"}
    )
    return delta.reasoning, delta.content, whole_tool_calls(delta)


def test_chats(model, recipe):
    _, content, calls = answer(model, recipe, "What is speculative decoding?")
    assert "draft" in content and not calls


def test_thinks(model, recipe):
    reasoning, content, _ = answer(model, recipe, "Who are you?", thinking=True)
    assert reasoning and "model" in content


def test_calls_a_tool(model, recipe):
    _, _, (call,) = answer(model, recipe, "What is the weather in Lisbon?", tools=[WEATHER])
    assert call.name == "get_weather" and list(json.loads(call.arguments)) == ["city"]


def test_answers_in_json(model, recipe):
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "city": {"type": "string"}},
        "required": ["name", "age", "city"],
    }
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    _, content, _ = answer(model, recipe, "Maria is 34 years old and lives in Oslo.", response_format=form)
    assert json.loads(content)["age"] == 34
