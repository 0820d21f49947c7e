"""Bad requests get a clear 400 and hurt nobody; many requests at once all end."""

from __future__ import annotations

import math
import time

import pytest

from .reference import random_ids
from .scripted import MODEL, user

PIXEL = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5E"
    "rkJggg=="
)
GREEDY = {"temperature": 0, "max_new_tokens": 4}

# Path and body -> words that the refusal must say.
REFUSED = {
    "no ids": ("/generate", {"input_ids": []}, ["empty"]),
    "no text": ("/generate", {"text": ""}, ["empty"]),
    "no prompt": ("/v1/completions", {"model": MODEL, "prompt": ""}, ["empty"]),
    "no messages": ("/v1/chat/completions", {"model": MODEL, "messages": []}, ["empty"]),
    "longer than the context": ("/generate", {"input_ids": [5] * 8300}, ["8300", "8192"]),
    "longer with its answer": (
        "/generate",
        {"input_ids": [5] * 8190, "sampling_params": {"max_new_tokens": 100}},
        ["8290", "8192"],
    ),
    "id past the vocabulary": ("/generate", {"input_ids": [5, 1280, 6]}, ["1280", "legal: 0 to 1279"]),
    "negative id": ("/generate", {"input_ids": [5, -1, 6]}, ["-1", "legal: 0 to 1279"]),
    "embeddings": ("/generate", {"input_embeds": [[0.0] * 128] * 4}, ["input_embeds"]),
    "image": (
        "/v1/chat/completions",
        {
            "model": MODEL,
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "image_url", "image_url": {"url": PIXEL}},
                        {"type": "text", "text": "what is this?"},
                    ],
                }
            ],
        },
        ["text input", "image_url"],
    ),
    "image beside a text": ("/generate", {"text": "what is this?", "image_data": PIXEL}, ["image_data", "text only"]),
    "temperature": ("/generate", {"text": "hi", "sampling_params": {"temperature": -1}}, ["temperature"]),
    "grammar": ("/generate", {"text": "hi", "sampling_params": {"ebnf": 'root ::= "yes'}}, ["ebnf"]),
    "answers": ("/generate", {"text": "hi", "sampling_params": {"n": 300_000}}, ["300000", "legal: 1 to 1024"]),
    "expression": ("/generate", {"text": "x", "sampling_params": {"stop_regex": "(x+x+)+y"}}, ["repeats within"]),
    "schema": ("/generate", {"text": "hi", "sampling_params": {"json_schema": "{"}}, ["json"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name_and_the_next_one_answers(served, reference, name):
    path, body, words = REFUSED[name]
    text = served.refused(path, **body)
    assert all(word in text.lower() for word in words), text
    ids = random_ids(9, seed=60)
    reference.one_shot(ids, served.generate(ids, 4).ids, f"after {name}")


def test_a_body_that_is_no_json(served):
    import requests

    response = requests.post(f"{served.server.url}/generate", data="{", timeout=60)
    assert response.status_code in (400, 422)
    assert len(served.generate([5, 6], 2).ids) == 2


def test_image_tokens_are_text_here(served, reference):
    """Ids of the image token without an image: nothing special, nothing infinite."""
    image = reference.model.config.image_token_id
    for ids in ([image] * 150, [5, image, image, 6]):
        answer = served.generate(ids, 4, return_logprob=True, logprob_start_len=0)
        reference.one_shot(ids, answer.ids, "image tokens")
        values = [value for value, *_ in answer.meta["input_token_logprobs"][1:] + answer.meta["output_token_logprobs"]]
        assert all(math.isfinite(value) for value in values)


def test_every_token_of_the_vocabulary(served):
    """Each id once, special ones included, has a finite logprob. (SGLang reports the last id of a vocabulary as 0.)"""
    vocabulary = range(1280)
    answer = served.generate(list(vocabulary), 2, return_logprob=True, logprob_start_len=0)
    assert [token for _, token, _ in answer.meta["input_token_logprobs"][:-1]] == list(vocabulary)[:-1]
    assert all(math.isfinite(value) for value, *_ in answer.meta["input_token_logprobs"][1:])


@pytest.mark.parametrize("served", ["retracting"], indirect=True)
def test_the_longest_request_that_is_accepted_ends(served, reference):
    """It needs all of the page pool; a shorter one waits for it and ends too."""
    context = 4096 - 2 * 64
    text = served.refused("/generate", input_ids=[5] * (context + 1), sampling_params=GREEDY)
    assert str(context) in text
    longest, short = random_ids(context - 7, seed=61), random_ids(30, seed=61)
    answers = list(served.together(served.generate, [(longest, 4), (short, 4)], 2))
    assert [len(answer.ids) for answer in answers] == [4, 4]
    reference.one_shot(short, answers[1].ids, "beside the longest request")


@pytest.mark.parametrize("served", ["whole"], indirect=True)
def test_two_hundred_requests_on_eight_slots(served, reference):
    prompts = [random_ids(1 + 4 * (i % 20), seed=62) for i in range(200)]
    answers = served.together(served.generate, [(ids, 1 + i % 3) for i, ids in enumerate(prompts)], 200)
    for ids, answer in zip(prompts, answers, strict=True):
        reference.one_shot(ids, answer.ids, "200 at once")


def test_messages_with_odd_text(served):
    """Control characters, half surrogates' worth of bytes, every script: rendered, tokenised, answered."""
    for text in ("\x00\x01\x7f", "é" * 50, "天气很好😀🏳️‍🌈", " ", "\n" * 20, "<|endoftext|>"):
        answer = served.ask("/v1/chat/completions", model=MODEL, messages=user(text), max_tokens=2, temperature=0)
        assert answer["usage"]["completion_tokens"] == 2


def test_profiling(served, reference, tmp_path):
    """A trace of two steps; the server answers during and after it."""
    assert served.post("/start_profile", output_dir=str(tmp_path), num_steps=2).status_code == 200
    ids = random_ids(20, seed=9)
    reference.one_shot(ids, served.generate(ids, 8).ids)
    end = time.monotonic() + 60
    while not list(tmp_path.rglob("*.trace.json*")):
        assert time.monotonic() < end, served.log()[-2000:]
        time.sleep(0.5)
    reference.one_shot(ids, served.generate(ids, 8).ids)
