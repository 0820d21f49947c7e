"""The training text: conversations render and parse back, splits do not mix, the 3-gram model is a distribution."""

import json

import numpy as np
import pytest
from tokenizers import Tokenizer


@pytest.fixture(scope="module")
def renderer(prepared):
    from data import Renderer

    return Renderer(Tokenizer.from_file(str(prepared / "tokenizer.json")))


def test_tool_calls_parse_back(renderer):
    """What the model learns to say is what the server's parser understands: names and arguments return unchanged."""
    from data import conversations
    from sglang.srt.parser.deepseek_recipe_output import DeepSeekRecipeOutputParser, whole_tool_calls

    seen = 0
    for one in conversations(120, seed=11):
        turns = [turn for turn, message in enumerate(one.messages) if message["role"] == "assistant"]
        for turn in turns:
            message = one.messages[turn]
            if not message.get("tool_calls"):
                continue
            prompt, following = renderer.prompt(one, turn), renderer.prompt(one, turn + 1 + len(message["tool_calls"]))
            spoken = following[len(prompt) : following.index(renderer.eos, len(prompt))]
            stage = renderer.recipe.parse_start(thinking=one.thinking)
            parser = DeepSeekRecipeOutputParser(renderer.recipe, thinking_stage=stage, parse_tool_calls=True)
            delta = parser.finish(spoken, {"type": "stop"})
            found = [(call.name, json.loads(call.arguments)) for call in whole_tool_calls(delta)]
            wanted = [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in message["tool_calls"]]
            assert found == wanted
            assert delta.reasoning == (message["reasoning_content"] if one.thinking else "")
            seen += 1
    assert seen > 20


def test_answers_are_marked(renderer):
    from chat import Conversation, say, user

    talk = Conversation([user("Hello"), say("Hi!", "A greeting."), user("Bye"), say("Goodbye!", "They leave.")])
    (sample,) = renderer.samples(talk)
    spoken = [token for token, flag in zip(sample.ids, sample.answer, strict=True) if flag]
    text = renderer.recipe.hf_tokenizer.decode(spoken, skip_special_tokens=False)
    assert text == "Hi!<｜end▁of▁sentence｜>Goodbye!<｜end▁of▁sentence｜>"
    thinking = Conversation(talk.messages, thinking=True)
    samples = list(renderer.samples(thinking))
    assert len(samples) == 2, "the history drops the reasoning, so each answer has its own prompt"
    assert samples[1].ids[: len(renderer.prompt(thinking, 3))] == renderer.prompt(thinking, 3)


def test_the_same_seed_gives_the_same_conversations():
    from data import conversations

    assert list(conversations(50, seed=4)) == list(conversations(50, seed=4))


def test_held_out_is_not_trained_on(prepared):
    from corpus import CORPUS, Corpus

    corpus = Corpus.load(prepared / CORPUS)
    train = corpus.chats["train"]
    seen = {train[index][0].tobytes() for index in range(len(train))}
    for split in ("calibration", "report"):
        chats = corpus.chats[split]
        assert len(chats) and not any(chats[index][0].tobytes() in seen for index in range(len(chats)))
        assert len(corpus.code[split]) > 500


def test_counted_probabilities_add_up():
    from ngram import Trigrams

    text = np.random.default_rng(0).integers(0, 20, 500)
    model = Trigrams(text, vocab=25)
    for context in ((3, 4), (24, 4), (24, 24)):
        counts = model.counts(np.array([context] * 25), np.arange(25))
        assert np.exp(counts.log_probability()).sum() == pytest.approx(1)


def test_a_text_it_knows_is_likelier():
    from ngram import Trigrams

    text = np.tile([1, 2, 3, 4, 5], 50)
    model = Trigrams(text, vocab=10)
    known = model.counts(np.array([[1, 2]]), np.array([3])).log_probability()
    unknown = model.counts(np.array([[1, 2]]), np.array([5])).log_probability()
    assert known > np.log(0.9) > unknown
