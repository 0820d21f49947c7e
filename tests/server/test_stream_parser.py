"""The parser that turns the model's tokens into content, reasoning and calls gives the same for every way in which
tokens arrive. No server: this is the class the server uses, fed by hand."""

from __future__ import annotations

import re

import pytest

from .scripted import DSML, calls, invoke, tokenizer

MARKUP = re.compile(f"({DSML}|</?think>)")
CALL = invoke("get_weather", ("city", True, "Paris </parameter> 2>&1 <b>"), ("days", False, "3"))
ARGUMENTS = '{"city": "Paris </parameter> 2>&1 <b>", "days": 3}'
CASES = {
    "call": (f"On it.\n\n{calls(CALL)}", "", "On it.", [("get_weather", ARGUMENTS)]),
    "reasoning and call": (
        f"Hm, 2 < 3.</think>On it.\n\n{calls(CALL)}",
        "Hm, 2 < 3.",
        "On it.",
        [("get_weather", ARGUMENTS)],
    ),
    "spelling of V4": (
        calls(CALL).replace(" calls", "tool_calls").replace(f"{DSML} ", DSML),
        "",
        "",
        [("get_weather", ARGUMENTS)],
    ),
    "no outer closer": (calls(CALL, close=False), "", "", [("get_weather", ARGUMENTS)]),
    "ends like a tag": ("so it is 2 <", "", "so it is 2 <", []),
    "half an opening tag": (f"so <{DSML} cal", "", "so ", []),
    "no call at all": ("</parameter> 天气 😀 <b>", "", "</parameter> 天气 😀 <b>", []),
}


@pytest.fixture(scope="module")
def recipe(tiny):
    renderer = pytest.importorskip("sglang.srt.parser.deepseek_recipe_renderer")
    return renderer.DeepSeekRecipe("dsv41", tokenizer(tiny))


def chunks(text, size, vocabulary):
    """Token ids of ``text`` cut every ``size`` characters; what the model says as one token stays one."""
    for part in MARKUP.split(text):
        pieces = [part] if MARKUP.fullmatch(part) else [part[i : i + size] for i in range(0, len(part), size)]
        yield from (vocabulary.encode(piece, add_special_tokens=False).ids for piece in pieces)


def parse(recipe, pieces, thinking):
    """Reasoning, content and calls, put together from every delta."""
    from sglang.srt.parser.deepseek_recipe_output import DeepSeekRecipeOutputParser, whole_tool_calls

    parser = DeepSeekRecipeOutputParser(
        recipe, thinking_stage=recipe.parse_start(thinking=thinking), parse_tool_calls=True
    )
    deltas = [parser.feed(ids) for ids in pieces]
    deltas.append(parser.finish([], {"type": "stop"}))
    whole = deltas[0]
    for delta in deltas[1:]:
        whole = whole.merge(delta)
    found = [(call.name, call.arguments) for call in whole_tool_calls(whole)]
    return whole.reasoning, whole.content, found


@pytest.mark.parametrize("case", CASES)
def test_every_chunking(recipe, case):
    text, reasoning, content, found = CASES[case]
    thinking = "</think>" in text
    for size in range(1, 64):
        pieces = list(chunks(text, size, recipe.hf_tokenizer))
        assert parse(recipe, pieces, thinking) == (reasoning, content, found), f"cut every {size} characters"
    tokens = [token for ids in pieces for token in ids]
    for size in range(1, len(tokens) + 1):
        pieces = [tokens[i : i + size] for i in range(0, len(tokens), size)]
        assert parse(recipe, pieces, thinking) == (reasoning, content, found), f"{size} tokens at a time"


@pytest.mark.parametrize("case", CASES)
def test_nothing_of_the_format_leaks(recipe, case):
    """However early the answer stops."""
    text, _, _, _ = CASES[case]
    tokens = [token for ids in chunks(text, 5, recipe.hf_tokenizer) for token in ids]
    for end in range(len(tokens)):
        reasoning, content, found = parse(recipe, [tokens[:end]], "</think>" in text)
        assert DSML not in reasoning + content + "".join(arguments for _, arguments in found)
