"""From messages to prompt ids: the V4.1 encoding, chosen by ``model_type`` (the checkpoint lies in a directory that is
named after another model), the same for every protocol."""

from __future__ import annotations

import json
import re

import pytest

from .scripted import DSML, MODEL, WEATHER, tokenizer, user

THINKING = {"chat_template_kwargs": {"thinking": True}}
REASONING = "So the user wants to know about rivers. " * 100

TOOL_CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "id": "call_1",
            "type": "function",
            "function": {"name": "get_weather", "arguments": '{"city": "Paris", "days": 2}'},
        }
    ],
}
TOOL_LOOP = [*user("Weather?"), TOOL_CALL, {"role": "tool", "tool_call_id": "call_1", "content": "sunny"}]


def prompt(served, messages, **body):
    """Ids of the rendered prompt."""
    answer = served.ask(
        "/v1/chat/completions",
        model=MODEL,
        messages=messages,
        max_tokens=1,
        return_input_ids_in_sglext=True,
        **body,
    )
    return answer["sglext"]["input_ids"]


def text_of(ids, path):
    return tokenizer(path).decode(ids, skip_special_tokens=False)


def test_the_encoding_is_that_of_v41(served, tiny):
    assert served.server.command[4].endswith("my-deepseek-v4-copy")
    messages = [{"role": "system", "content": "Be brief."}, *user("Hello")]
    assert text_of(prompt(served, messages), tiny) == (
        "<｜begin▁of▁sentence｜><｜System｜>Be brief.<｜User｜>Hello<｜Assistant｜></think>"
    )
    thinking = text_of(prompt(served, messages, **THINKING), tiny)
    assert thinking.endswith("<｜User｜>Hello<｜Assistant｜><think>")
    with_tools = text_of(prompt(served, messages, tools=[WEATHER]), tiny)
    assert f"<{DSML} calls>" in with_tools, "V4 would spell it tool_calls"


def test_any_model_name_is_served(served):
    for name in ("deepseek-flash", "DeepSeek-V4.1-Flash", "x"):
        served.ask("/v1/chat/completions", model=name, messages=user("Hello"), max_tokens=1)


def test_special_tokens_in_a_text_are_text(served, tiny):
    vocabulary = tokenizer(tiny)
    literal = "say <｜User｜> and </think>"
    ids = prompt(served, user(literal))
    special = {
        token: vocabulary.token_to_id(token) for token in ("<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>")
    }
    special["</think>"] = vocabulary.token_to_id("</think>")
    known = set(vocabulary.get_added_tokens_decoder())
    assert [token for token in ids if token in known] == list(special.values()), "BOS, User, Assistant, </think>"
    assert text_of(ids, tiny).count("<｜User｜>") == 2
    assert len(ids) - 4 > 6, "the literal is spelled, not looked up"


def test_old_reasoning(served, tiny):
    """Dropped in a plain chat, kept in a conversation with tools."""
    answer = {"role": "assistant", "content": "They flow.", "reasoning_content": REASONING}
    messages = [*user("Rivers?"), answer, *user("More")]
    bare = [messages[0], {"role": "assistant", "content": "They flow."}, messages[2]]
    assert prompt(served, messages, **THINKING) == prompt(served, bare, **THINKING)
    assert prompt(served, messages, **THINKING, tools=[]) == prompt(served, bare, **THINKING)
    kept = prompt(served, messages, **THINKING, tools=[WEATHER])
    assert REASONING.strip() in text_of(kept, tiny)


def test_tool_loop_without_reasoning(served, tiny):
    """Clients that lost the reasoning are served: its block is empty."""
    text = text_of(prompt(served, TOOL_LOOP, tools=[WEATHER], **THINKING), tiny)
    loop = text[text.index("Weather?") :]
    assert "<think></think>" in loop and "sunny" in loop and loop.endswith("<think>")


@pytest.mark.parametrize("served", ["whole"], indirect=True)  # which logs the prompts it gets
def test_three_protocols_one_prompt(served, tiny):
    """A tool loop as Chat Completions, as Messages and as Responses."""
    function = WEATHER["function"]
    arguments = json.loads(TOOL_CALL["tool_calls"][0]["function"]["arguments"])
    name = served.server.command[4]
    served.ask("/v1/chat/completions", model=MODEL, messages=TOOL_LOOP, tools=[WEATHER], max_tokens=1)
    served.ask(
        "/v1/messages",
        model=MODEL,
        max_tokens=1,
        messages=[
            *user("Weather?"),
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "call_1", "name": "get_weather", "input": arguments}],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "call_1", "content": "sunny"}]},
        ],
        tools=[
            {
                "name": function["name"],
                "description": function["description"],
                "input_schema": function["parameters"],
            }
        ],
    )
    served.ask(
        "/v1/responses",
        model=name,
        max_output_tokens=16,
        input=[
            *user("Weather?"),
            {
                "type": "function_call",
                "call_id": "call_1",
                "name": "get_weather",
                "arguments": json.dumps(arguments),
            },
            {"type": "function_call_output", "call_id": "call_1", "output": "sunny"},
        ],
        tools=[{"type": "function", **function}],
    )
    received = re.findall(r"Receive: obj=.*?input_ids=\[([\d, ]+)\]", served.log())[-3:]
    tails = [text_of([int(token) for token in ids.split(",")], tiny) for ids in received]
    tails = [text[text.index("Weather?") :] for text in tails]
    assert tails[0] == tails[1] == tails[2]
    assert "sunny" in tails[0] and f'<{DSML} invoke name="get_weather">' in tails[0]
