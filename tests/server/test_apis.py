"""Chat Completions, Messages, Responses and /generate, whole and streamed: one answer, cut into the parts each protocol
knows. The random model is made to say things (``scripted``); what is proved is the way from tokens to the client."""

from __future__ import annotations

import json
import re

import jsonschema
import pytest

from .reference import same
from .scripted import DSML, MODEL, SWITCH, WEATHER, calls, invoke, saying, tokenizer, towards, user

SCHEMA = {
    "type": "object",
    "properties": {
        "answer": {"enum": ["Paris", "Rome"]},
        "count": {"type": "integer", "minimum": 10, "maximum": 99},
        "sure": {"type": "boolean"},
    },
    "required": ["answer", "count", "sure"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def name(servers):
    """What /v1/responses insists on."""
    import requests

    return requests.get(f"{servers.get('default').server.url}/v1/models", timeout=60).json()["data"][0]["id"]


def chat(served, **body):
    return served.ask("/v1/chat/completions", model=MODEL, **body)["choices"][0]


def chat_stream(served, **body):
    """What a client puts together: reasoning, content, calls as (name, arguments), finish_reason; and every piece."""
    reasoning, content, found, reason, pieces = "", "", [], None, []
    with served.post("/v1/chat/completions", stream=True, model=MODEL, **body) as response:
        for event in served.events(response):
            (choice,) = event["choices"] or [{"delta": {}, "finish_reason": None}]
            delta = choice["delta"]
            pieces.append(delta)
            reasoning += delta.get("reasoning_content") or ""
            content += delta.get("content") or ""
            for call in delta.get("tool_calls") or []:
                if call["function"].get("name"):
                    assert call["index"] == len(found)
                    found.append([call["function"]["name"], ""])
                found[call["index"]][1] += call["function"].get("arguments") or ""
            reason = choice["finish_reason"] or reason
    return reasoning, content, [tuple(call) for call in found], reason, pieces


def calls_of(choice):
    found = choice["message"].get("tool_calls") or []
    return [(call["function"]["name"], call["function"]["arguments"]) for call in found]


# ---- the same answer everywhere ------------------------------------------------------------------------------------


def test_every_protocol_gives_the_same_text(served, reference, tiny, name):
    """Greedy, without reasoning; whole and streamed."""
    count, special = 20, tokenizer(tiny).get_added_tokens_decoder()
    for text in ("Tell me about rivers.", "And about bridges?", "Birds!", "What do robots read?"):
        answer = served.ask(
            "/v1/chat/completions",
            model=MODEL,
            messages=user(text),
            max_tokens=count,
            temperature=0,
            return_input_ids_in_sglext=True,
            return_output_ids_in_sglext=True,
        )
        ids, (output,) = answer["sglext"]["input_ids"], answer["sglext"]["output_ids"]
        if not special.keys() & set(output):
            break  # a random model may say anything; here it says plain text
    reference.one_shot(ids, output, "chat")
    expected = answer["choices"][0]["message"]["content"]
    assert expected.strip() and expected.strip() in tokenizer(tiny).decode(output)
    assert answer["usage"]["prompt_tokens"] == len(ids) and answer["usage"]["completion_tokens"] == count

    body = {"max_tokens": count, "temperature": 0}
    _, content, _, reason, _ = chat_stream(served, messages=user(text), **body)
    assert (content, reason) == (expected, "length")

    message = served.ask("/v1/messages", model=MODEL, messages=user(text), **body)
    assert message["content"] == [{"type": "text", "text": expected}] and message["stop_reason"] == "max_tokens"
    assert message["usage"]["input_tokens"] == len(ids)
    with served.post("/v1/messages", stream=True, model=MODEL, messages=user(text), **body) as response:
        events = list(served.events(response))
    assert "".join(e["delta"]["text"] for e in events if e["type"] == "content_block_delta") == expected
    assert events[0]["type"] == "message_start" and events[-1]["type"] == "message_stop"

    body = {"model": name, "input": text, "temperature": 0, "max_output_tokens": count + 2}  # SGLang keeps 2 back
    response = served.ask("/v1/responses", **body)
    (item,) = response["output"]
    assert item["content"][0]["text"] == expected and response["usage"]["input_tokens"] == len(ids)
    with served.post("/v1/responses", stream=True, **body) as response:
        events = list(served.events(response))
    assert "".join(e["delta"] for e in events if e["type"] == "response.output_text.delta") == expected
    assert events[-1]["type"] == "response.incomplete"

    same(served.generate(ids, count, sampling={"ignore_eos": False}).ids, output, "/generate")


def test_completions(served, reference, tiny):
    text = "The river runs past the old mill"
    ids = tokenizer(tiny).encode(text).ids
    output = served.generate(ids, 12).ids
    body = {"model": MODEL, "prompt": text, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    whole = served.ask("/v1/completions", **body)["choices"][0]["text"]
    with served.post("/v1/completions", stream=True, **body) as response:
        streamed = "".join(event["choices"][0]["text"] for event in served.events(response) if event["choices"])
    assert whole and whole == streamed == tokenizer(tiny).decode(output)


def test_an_answer_cut_inside_a_character(served, tiny):
    """The text before it arrives, however few tokens of the character there are."""
    text = "weather: 😀"
    count = len(tokenizer(tiny).encode(text).ids)
    body = {**saying(text, tiny), "messages": user("hi")}
    for tokens in range(count - 3, count):
        choice = chat(served, **{**body, "max_tokens": tokens})
        assert choice["finish_reason"] == "length"
        assert choice["message"]["content"].startswith("weather:"), tokens
    assert chat(served, **body)["message"]["content"] == text


def test_stop_strings(served, tiny):
    body = {**saying("one two three four", tiny), "messages": user("count"), "stop": ["thr"]}
    assert chat(served, **body)["message"]["content"] == "one two "
    _, content, _, reason, _ = chat_stream(served, **body)
    assert (content, reason) == ("one two ", "stop")


# ---- reasoning -----------------------------------------------------------------------------------------------------


def test_reasoning_is_split_off(served, tiny):
    """Random reasoning that ends by itself once the bias is large enough, then a constrained answer."""
    for bias in range(2, 26, 2):
        body = {
            "messages": user("Think."),
            "chat_template_kwargs": {"thinking": True},
            "regex": "[a-z]{8}",
            "logit_bias": towards(tiny, think_end=bias),
            "temperature": 0,
            "max_tokens": 60,
        }
        choice = chat(served, **body)
        if choice["finish_reason"] == "stop":
            break
    message = choice["message"]
    assert re.fullmatch("[a-z]{8}", message["content"])
    assert "think>" not in (message["reasoning_content"] or "")
    reasoning, content, _, _, _ = chat_stream(served, **body)
    assert (reasoning, content) == (message["reasoning_content"] or "", message["content"])


def test_reasoning_in_messages_and_responses(served, name):
    message = served.ask(
        "/v1/messages",
        model=MODEL,
        messages=user("Think."),
        max_tokens=12,
        temperature=0,
        thinking={"type": "enabled", "budget_tokens": 1024},
    )
    assert message["content"][0]["type"] == "thinking" and message["content"][0]["thinking"]
    response = served.ask(
        "/v1/responses", model=name, input="Think.", max_output_tokens=14, temperature=0, reasoning={"effort": "high"}
    )
    assert response["output"][0]["type"] == "reasoning"


# ---- tool calls ----------------------------------------------------------------------------------------------------

WHOLE_CALL = invoke("get_weather", ("city", True, "Paris </parameter> 2>&1 <b>"), ("days", False, "3"))
ARGUMENTS = {"city": "Paris </parameter> 2>&1 <b>", "days": 3}
PARSED = {
    "a call": (calls(WHOLE_CALL), "", [("get_weather", ARGUMENTS)]),
    "text before it": (f"I will look.\n\n{calls(WHOLE_CALL)}", "I will look.", [("get_weather", ARGUMENTS)]),
    "two calls": (
        calls(invoke("get_weather", ("city", True, "x")), invoke("get_weather", ("city", True, "y"))),
        "",
        [("get_weather", {"city": "x"}), ("get_weather", {"city": "y"})],
    ),
    "no outer closer": (calls(WHOLE_CALL, close=False), "", [("get_weather", ARGUMENTS)]),
    "spelling of V4": (
        calls(WHOLE_CALL).replace(" calls", "tool_calls").replace(f"{DSML} ", DSML),
        "",
        [("get_weather", ARGUMENTS)],
    ),
    "text that looks like a tag": ("it is 2 <", "it is 2 <", []),
    "half an opening tag": (f"it is <{DSML} cal", "it is ", []),
}


@pytest.fixture(scope="module")
def parsed(servers, tiny):
    """Every case whole and streamed, all at once: a scripted answer is long."""
    served = servers.get("default")

    def both(text):
        body = {**saying(text, tiny), "messages": user("Weather?"), "tools": [WEATHER]}
        return tuple(served.together(lambda ask: ask(served, **body), [(chat,), (chat_stream,)], 2))

    texts = [(text,) for text, _, _ in PARSED.values()]
    return dict(zip(PARSED, served.together(both, texts, len(texts)), strict=True))


@pytest.mark.parametrize("case", PARSED)
def test_calls_are_parsed(served, parsed, case):
    _, content, expected = PARSED[case]
    choice, (reasoning, streamed, found, reason, pieces) = parsed[case]
    assert (choice["message"]["content"] or "") == content
    assert [(name, json.loads(arguments)) for name, arguments in calls_of(choice)] == expected
    assert choice["finish_reason"] == ("tool_calls" if expected else "stop")
    assert (reasoning, streamed, found, reason) == ("", content, calls_of(choice), choice["finish_reason"])
    assert DSML not in json.dumps(pieces, ensure_ascii=False)


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(calls(invoke("get_weather", ("days", False, "two"))), id="a value that is no JSON"),
        pytest.param(
            calls(invoke("get_weather", close=False), close=False)
            + f'\n<{DSML} parameter name="city" string="true">Par',
            id="an end inside a value",
        ),
    ],
)
@pytest.mark.xfail(strict=True, reason="deepseek-recipe 0.2.0 passes arguments on as the model wrote them")
def test_arguments_of_finished_calls_are_json(served, tiny, text):
    choice = chat(served, **saying(text, tiny), messages=user("Weather?"), tools=[WEATHER])
    if choice["finish_reason"] == "tool_calls":
        for _, arguments in calls_of(choice):
            json.loads(arguments)


def test_forced_calls_are_made(served, tiny):
    """``required`` and a named function, with and without reasoning: nothing leads the random model to a call but the
    grammar. (The bias keeps it from wandering in white space, or in reasoning.)"""
    named = {"type": "function", "function": {"name": "switch"}}

    def both(choice, thinking):
        bias = towards(tiny, dsml=60, close=50, open=40, **({"think_end": 100} if thinking else {}))
        body = {
            "messages": user("Light!"),
            "tools": [SWITCH],
            "tool_choice": choice,
            "chat_template_kwargs": {"thinking": thinking},
            "logit_bias": bias,
            "temperature": 0,
            "max_tokens": 150,
        }
        return tuple(served.together(lambda ask: ask(served, **body), [(chat,), (chat_stream,)], 2))

    cases = [(choice, thinking) for choice in ("required", named) for thinking in (False, True)]
    for case, (answer, streamed) in zip(cases, served.together(both, cases, len(cases)), strict=True):
        assert answer["finish_reason"] == "tool_calls", (case, answer)
        assert calls_of(answer)
        for name, arguments in calls_of(answer):
            assert name == "switch"
            jsonschema.validate(json.loads(arguments), SWITCH["function"]["parameters"])
        assert streamed[1:4] == ("", calls_of(answer), "tool_calls"), case


@pytest.mark.parametrize("thinking", [False, True])
def test_a_forced_call_of_an_unknown_function_is_refused(served, thinking):
    text = served.refused(
        "/v1/chat/completions",
        model=MODEL,
        messages=user("Light!"),
        tools=[SWITCH],
        tool_choice={"type": "function", "function": {"name": "swatch"}},
        chat_template_kwargs={"thinking": thinking},
    )
    assert "swatch" in text


# ---- structured output ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("thinking", [False, True])
def test_json_schema_in_chat(served, tiny, thinking):
    body = {
        "messages": user("Where?"),
        "response_format": {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA}},
        "chat_template_kwargs": {"thinking": thinking},
        "logit_bias": towards(tiny, space=-100, **({"think_end": 100} if thinking else {})),
        "temperature": 0,
        "max_tokens": 120,
    }
    choice = chat(served, **body)
    assert choice["finish_reason"] == "stop"
    jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)
    _, content, _, _, _ = chat_stream(served, **body)
    assert content == choice["message"]["content"]


def test_grammars_in_generate(served, tiny):
    """Eight different ones in a batch, with greedy tokens wherever the grammar leaves a choice."""
    bias = towards(tiny, space=-100)

    def constrained(**grammar):
        sampling = {"temperature": 0, "max_new_tokens": 120, "logit_bias": bias, **grammar}
        answer = served.ask("/generate", text="It is", sampling_params=sampling)
        assert answer["meta_info"]["finish_reason"]["type"] == "stop"
        return answer["text"]

    patterns = ["[a-c]{3,5}-[0-9]{4}", r"(19|20)\d\d", "(yes|no), [A-Z]{2}x+"]
    for pattern in patterns[:2]:
        assert re.fullmatch(pattern, constrained(regex=pattern))
    jsonschema.validate(json.loads(constrained(json_schema=json.dumps(SCHEMA))), SCHEMA)
    assert constrained(ebnf='root ::= "yes" | "no" | "maybe " [0-9] [0-9]') in {"yes", "no"} | {
        f"maybe {n:02}" for n in range(100)
    }
    jobs = [{"regex": f"[a-z]{{{n}}}"} for n in range(3, 7)] + [{"ebnf": f'root ::= "{w}"'} for w in ("a", "bc", "def")]
    for job, text in zip(
        jobs, served.together(lambda job: constrained(**job), [(job,) for job in jobs], 7), strict=True
    ):
        assert re.fullmatch(job["regex"], text) if "regex" in job else text == job["ebnf"].split('"')[1]
