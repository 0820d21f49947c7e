"""With ``--enable-deterministic-inference`` prompt and seed decide what is drawn: the server's tokens are those that
the library's logits give, alone, in a batch, beside requests that come and go, retracted, however drafts are
verified."""

from __future__ import annotations

import pytest
import torch

from deepinfer_plugin.runtime.seeded_draw import draw, filtered

from .reference import random_ids, same
from .scripted import MODEL, tokenizer

SEEDED = pytest.mark.parametrize("served", ["whole", "speculating exact", "scheduled"], indirect=True)
NEW = 24
KINDS = [  # neighbours with limits must not change what one without draws
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.2, "top_k": 20},
    {"temperature": 1.0, "min_p": 0.05},
]


def check(reference, ids, output, sampling, what):
    """Every token of ``output`` is what its seed draws at its position after the tokens before it."""
    logits = reference.model.logits([*ids, *output[:-1]])[len(ids) - 1 :]
    probs = torch.softmax(logits / sampling["temperature"], -1)
    limits = (("top_k", 1 << 30), ("top_p", 1.0), ("min_p", 0.0))
    ranked, order = filtered(probs, *(torch.full((len(probs),), sampling.get(name, free)) for name, free in limits))
    weights = torch.zeros_like(ranked).scatter(1, order, ranked)
    positions = len(ids) - 1 + torch.arange(len(output))
    seeds = torch.full_like(positions, sampling["sampling_seed"])
    same(output, draw(weights, seeds, positions).tolist(), what)


@SEEDED
def test_a_seed_decides_what_is_drawn(served, reference):
    jobs = []
    for number in range(12):
        ids = random_ids(10 + 17 * (number % 6), seed=80)  # prompts come twice, with other seeds
        jobs.append((ids, {**KINDS[number % 4], "sampling_seed": 1000 * number - 3}))

    def send(number):
        ids, sampling = jobs[number]
        return served.generate(ids, NEW - number, sampling=sampling)

    retracted = 0
    for _ in range(5):  # a request is taken back every few forwards, where several run, which need not be in one batch
        answers = list(served.together(send, [(number,) for number in range(len(jobs))], 8))
        for (ids, sampling), answer in zip(jobs, answers, strict=True):
            check(reference, ids, answer.ids, sampling, f"{served.name}, {sampling}, in a batch")
        retracted += sum(answer.meta["num_retractions"] for answer in answers)
        if retracted or not served.variant.retracts:
            break
    assert bool(retracted) == served.variant.retracts
    assert answers[0].ids[:12] != answers[6].ids[:12], "another seed"
    for number in (0, 5):
        same(send(number).ids, answers[number].ids, "alone")
    if served.name == "speculating exact":
        assert sum(answer.meta["spec_num_correct_drafts"] for answer in answers) > 0


@pytest.mark.parametrize("served", ["whole"], indirect=True)
def test_seeds_of_openai_clients(served, reference, tiny):
    text = "The river runs past"
    ids, body = tokenizer(tiny).encode(text).ids, {"model": MODEL, "prompt": text, "max_tokens": 10, "ignore_eos": True}
    sampling = {"temperature": 1.0, "sampling_seed": 17}
    answer = served.generate(ids, 10, sampling=sampling)
    check(reference, ids, answer.ids, sampling, "/generate")
    found = served.ask("/v1/completions", **body, temperature=1.0, seed=17)["choices"][0]["text"]
    assert found == tokenizer(tiny).decode(answer.ids)
    messages = {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 10, "temperature": 1.0}

    def chat(seed):
        return served.ask("/v1/chat/completions", **messages, seed=seed)["choices"][0]["message"]["content"]

    assert chat(5) == chat(5)
    assert len({chat(seed) for seed in range(5)}) > 1
