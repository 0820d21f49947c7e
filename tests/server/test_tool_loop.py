"""A conversation in which a tool is called three times gives the same tokens without speculation, with every draft
verified, and scheduled: on servers that recompute prefixes all three answer as one forward of the library."""

from __future__ import annotations

from threading import Event

import pytest

from .reference import random_ids
from .scripted import tokenizer
from .serving import ANSWER_S

TURNS = [
    {"user": "list files"},
    {"tool_result": "a.py b.py"},
    {"user": "open a.py"},
    {"tool_result": "def f(x): return x"},
    {"user": "add a test"},
    {"tool_result": "ok"},
]
NEW = 32  # tokens of an answer


@pytest.fixture(scope="module")
def recipe(tiny):
    """The server's own encoder."""
    renderer = pytest.importorskip("sglang.srt.parser.deepseek_recipe_renderer")
    return renderer.DeepSeekRecipe("dsv41", tokenizer(tiny))


class Conversation:
    """One client: a system message that is another for every ``number``, and what was said since. It begins while the
    client ``before``, if there is one, is being answered."""

    def __init__(self, number, recipe, vocabulary, before=None):
        self.recipe, self.vocabulary, self.before = recipe, vocabulary, before
        self.messages = [{"role": "system", "content": vocabulary.decode(random_ids(10 + 7 * number, seed=32))}]
        self.begun = Event()  # an answer is on its way

    def prompt(self, turn):
        ((kind, text),) = turn.items()
        if kind == "user":
            self.messages.append({"role": "user", "content": text})
        else:
            name = f"call_{len(self.messages)}"
            call = {"id": name, "type": "function", "function": {"name": "shell", "arguments": '{"command": "..."}'}}
            self.messages[-1]["tool_calls"] = [call]
            self.messages.append({"role": "tool", "tool_call_id": name, "content": text})
        return self.recipe.encode({"messages": self.messages, "thinking": False})

    def run(self, served, turns):
        """Prompts and answers."""
        assert self.before is None or self.before.begun.wait(ANSWER_S)
        answers = []
        for turn in turns:
            ids = self.prompt(turn)
            for answer in served.stream(ids, NEW):
                if len(answer.ids) > 2:
                    self.begun.set()
            self.messages.append({"role": "assistant", "content": self.vocabulary.decode(answer.ids)})
            answers.append((ids, answer.ids))
        return answers


@pytest.mark.parametrize("served", ["whole", "speculating exact", "scheduled"], indirect=True)
@pytest.mark.parametrize(("at_once", "turns"), [(2, 6), (8, 2)])
def test_tool_loop(served, reference, recipe, tiny, at_once, turns):
    clients = []
    for number in range(at_once):
        clients.append(Conversation(number, recipe, tokenizer(tiny), clients[-1] if clients else None))
    runs = served.together(Conversation.run, [(client, served, TURNS[:turns]) for client in clients], at_once)
    for number, answers in enumerate(runs):
        for turn, (ids, output) in enumerate(answers):
            assert len(output) == NEW
            reference.one_shot(ids, output, f"{served.name}, client {number} of {at_once}, turn {turn}")
