"""The trained checkpoint served without any flag. Its drafts are often right, which must not show in what it says."""

from __future__ import annotations

import json

import lossless
import pytest
import torch
from chi_square import p_value
from demo import PERSON, WEATHER
from heldout import HeldOut, chat_prompts, code_prompts

from deepinfer_plugin.model import V41

from .reference import Reference, same
from .scripted import MODEL, user
from .serving import TRAINED
from .test_apis import calls_of, chat, chat_stream
from .test_prefix import WINDOW, agree
from .test_speculation import check_figures

ON_TRAINED = pytest.mark.parametrize("served", ["trained"], indirect=True)
EACH, NEW = 4, 48  # prompts of each kind, most tokens of an answer


@pytest.fixture(scope="module")
def trained():
    return Reference(V41.load(TRAINED))


@pytest.fixture(scope="module")
def held_out():
    return HeldOut.load(TRAINED)


@pytest.fixture(scope="module")
def expected(trained, held_out):
    """Held-out prompts and what the library answers; some answers end by themselves."""
    prompts = code_prompts(held_out.code, EACH) + chat_prompts(held_out.chats, EACH)
    answers = [trained.model.generate(prompt, NEW) for prompt in prompts]
    ends = {answer[-1] == trained.model.config.eos_token_id for answer in answers}
    assert ends == {True, False}
    return list(zip(prompts, answers, strict=True))


# ---- tokens --------------------------------------------------------------------------------------------------------


@ON_TRAINED
@pytest.mark.parametrize("at_once", [1, 4])
def test_greedy_answers_are_the_librarys(served, expected, at_once):
    def send(ids):
        return served.generate(ids, NEW, sampling={"ignore_eos": False})

    answers = served.together(send, [(ids,) for ids, _ in expected], at_once)
    for (ids, right), answer in zip(expected, answers, strict=True):
        assert answer.cached <= WINDOW, "up to a window a hit changes nothing"
        same(answer.ids, right, f"prompt of {len(ids)}")
        assert answer.meta["completion_tokens"] == len(right)
        check_figures(answer.meta)


@ON_TRAINED
def test_prefix_hits_follow_the_rule(served, trained, held_out):
    """A text, again, and with its answer and more."""
    tree, text = trained.tree(128), held_out.code[1].tolist()
    answer = None
    for ids in (text[:300], text[:300], [*text[:300], *trained.model.generate(text[:300], 20), *text[300:340]]):
        answer = served.generate(ids, 30)
        agree(answer, tree.serve(ids, 30), f"prompt of {len(ids)}")
        check_figures(answer.meta)
    assert answer.cached == 256


# ---- chat ----------------------------------------------------------------------------------------------------------


def whole_and_streamed(served, question, **body):
    """Reasoning, content and calls, the same both ways."""
    body = {"messages": user(question), "max_tokens": 96, "temperature": 0, **body}
    choice = chat(served, **body)
    found = (choice["message"].get("reasoning_content") or "", choice["message"]["content"] or "", calls_of(choice))
    assert chat_stream(served, **body)[:4] == (*found, choice["finish_reason"])
    assert choice["finish_reason"] == ("tool_calls" if found[2] else "stop")
    return found


@ON_TRAINED
@pytest.mark.parametrize("thinking", [False, True])
def test_answers(served, thinking):
    question = "What is the capital of France?"
    reasoning, content, calls = whole_and_streamed(served, question, chat_template_kwargs={"thinking": thinking})
    assert "Paris" in content and not calls
    assert bool(reasoning) == thinking and "think>" not in reasoning + content


@ON_TRAINED
@pytest.mark.parametrize("city", ["Paris", "Lisbon"])
def test_calls_a_tool(served, city):
    _, content, calls = whole_and_streamed(served, f"What is the weather in {city}?", tools=[WEATHER])
    assert not content and [(name, json.loads(arguments)) for name, arguments in calls] == [
        ("get_weather", {"city": city})
    ]


@ON_TRAINED
def test_answers_by_schema(served):
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    _, content, _ = whole_and_streamed(served, "Maria is 34 years old and lives in Oslo.", response_format=form)
    assert json.loads(content) == {"name": "Maria", "age": 34, "city": "Oslo"}


@ON_TRAINED
def test_speculation_is_reported(served):
    """In a chat completion that asks for it."""
    body = {"messages": user("What is speculative decoding?"), "max_tokens": 64, "temperature": 0}
    answer = served.ask("/v1/chat/completions", model=MODEL, return_spec_tokens_details=True, **body)
    details = answer["sglext"]["spec_tokens_details"]
    check_figures({**details, "num_retractions": 0, "completion_tokens": answer["usage"]["completion_tokens"]})


# ---- sampling ------------------------------------------------------------------------------------------------------


@ON_TRAINED
@pytest.mark.parametrize("temperature", lossless.TEMPERATURES)
def test_samples_follow_the_librarys_distribution(served, trained, temperature):
    found = lossless.compare(served.server.url, trained.model, lossless.prefix_of(TRAINED), temperature, 256)
    assert all(value > 1e-6 for value in found["p_values"].values()), found
    assert found["accepted"] <= found["verified"]


@pytest.mark.parametrize(
    ("wrong", "detected"),
    [(None, None), (0, "tokens 1-2"), (1, "tokens 1-2"), (2, "token 3"), (3, "token 4")],
)
def test_other_distributions_are_detected(wrong, detected):
    """One of the four tokens is, one time in ten, the likeliest instead of a drawn one."""
    vocabulary, count = 4, 20_000
    generator = torch.Generator().manual_seed(0)
    table = torch.softmax(torch.randn(vocabulary, vocabulary, generator=generator), -1).double()
    drawn = torch.zeros(count, 1, dtype=torch.int64)
    for position in range(lossless.NEW):
        chances = table[drawn[:, -1]]
        tokens = torch.multinomial(chances, 1, generator=generator)
        if position == wrong:
            tokens = torch.where(torch.rand(count, 1, generator=generator) < 0.1, chances.argmax(-1, True), tokens)
        drawn = torch.cat([drawn, tokens], 1)
    found = lossless.p_values([tuple(each) for each in drawn[:, 1:].tolist()], lambda ids: table[(0, *ids)[-1]])
    for name, value in found.items():
        assert value < lossless.IMPROBABLE if name == detected else value > 1e-2, found


def test_impossible_tokens_are_detected():
    probabilities = torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64)
    assert p_value(torch.tensor([500, 500, 0]), 1000 * probabilities) == 1
    assert p_value(torch.tensor([500, 499, 1]), 1000 * probabilities) == 0
