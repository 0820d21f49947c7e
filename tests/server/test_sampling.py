"""Logprobs, penalties and random sampling: SGLang's own code on our logits, and no request disturbs another."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from .reference import random_ids, same

ANY = pytest.mark.parametrize("served", ["default", "exact"], indirect=True)
CLOSE = 1e-4  # SGLang takes the log of a float32 softmax


def check_prompt_logprobs(answer, ids, logprobs, first):
    """Positions from ``first`` on: the logprob of each token after those before it, and the best ones there."""
    found, best = answer.meta["input_token_logprobs"], answer.meta["input_top_logprobs"]
    assert [token for _, token, _ in found] == ids[first:]
    assert found[0][0] is None or first > 0
    for position, ((value, token, _), top) in enumerate(zip(found, best, strict=True), first):
        if value is None:
            continue
        before = logprobs[position - 1]
        assert math.isclose(value, before[token], abs_tol=CLOSE), f"position {position}"
        expected = before.topk(len(top))
        assert [other for _, other, _ in top] == expected.indices.tolist(), f"position {position}"
        torch.testing.assert_close(torch.tensor([v for v, *_ in top]), expected.values, atol=CLOSE, rtol=0)


@ANY
def test_prompt_and_output_logprobs(served, reference):
    """Over several chunks, cold and with the prompt in the cache: asking from the start recomputes it."""
    ids = random_ids(600, seed=50)
    for _ in range(2):
        answer = served.generate(ids, 4, return_logprob=True, logprob_start_len=0, top_logprobs_num=3)
        assert answer.cached == 0
        logprobs = reference.logprobs([*ids, *answer.ids])
        check_prompt_logprobs(answer, ids, logprobs, 0)
        for step, (value, token, _) in enumerate(answer.meta["output_token_logprobs"]):
            assert math.isclose(value, logprobs[len(ids) - 1 + step][token], abs_tol=CLOSE), f"new token {step}"
        same(answer.ids, logprobs[len(ids) - 1 : -1].argmax(-1).tolist(), "beside logprobs")


def test_logprobs_after_a_prefix_hit(served, reference):
    """Only the end of the prompt is asked for, so its beginning comes from the cache, and the values are those of the
    replay rule."""
    ids, start = random_ids(400, seed=51), 300
    served.generate(ids, 1)
    answer = served.generate(ids, 3, return_logprob=True, logprob_start_len=start, top_logprobs_num=2)
    assert (answer.cached, answer.replayed) == (256, 128)
    tree = reference.tree(128)
    session = tree.begin(ids, len(ids)).session.fork(256)
    hidden = session.extend(ids[256:])
    logprobs = torch.cat([torch.zeros(256, 1280), torch.log_softmax(reference.model.network.logits(hidden), -1)])
    check_prompt_logprobs(answer, ids, logprobs, start)


@pytest.mark.parametrize("served", ["retracting"], indirect=True)  # overlap off: with it, penalties come a token late
def test_penalties(served, reference):
    ids, count = random_ids(40, seed=52), 40
    penalties = {"frequency_penalty": 1.5, "presence_penalty": 0.7, "repetition_penalty": 1.3}
    found = served.generate(ids, count, sampling=penalties).ids
    session, seen = reference.model.session(len(ids) + count), Counter()
    session.extend(ids)
    expected = []
    repeated = torch.zeros(reference.model.config.vocab_size, dtype=torch.bool)  # SGLang counts the output only
    for _ in range(count):
        logits = session.logits()[0].clone()
        for token, times in seen.items():
            logits[token] -= 1.5 * times + 0.7
        logits = torch.where(repeated, torch.where(logits > 0, logits / 1.3, logits * 1.3), logits)
        token = int(logits.argmax())
        expected.append(token)
        seen[token] += 1
        repeated[token] = True
        session.extend([token])
    same(found, expected, "with penalties")


def test_neighbours_of_other_samplers(served, reference):
    """Greedy requests beside penalties, temperatures, seeds, biases and a grammar."""
    others = [
        {"frequency_penalty": 2.0, "presence_penalty": 1.0, "repetition_penalty": 1.5},
        {"temperature": 1.3, "top_p": 0.9},
        {"temperature": 0.8, "top_k": 20, "sampling_seed": 7},
        {"temperature": 1.0, "min_p": 0.1},
        {"logit_bias": {"7": 100.0}},
        {"regex": "[a-z]{30,40}", "ignore_eos": False},
    ]
    prompts = [random_ids(90 + 40 * i, seed=53) for i in range(len(others))]
    jobs = [(ids, 20, sampling) for ids, sampling in zip(prompts, others, strict=True)]
    jobs += [(random_ids(70 + 30 * i, seed=54), 20, None) for i in range(len(others))]
    jobs = [job for pair in zip(jobs[: len(others)], jobs[len(others) :], strict=True) for job in pair]

    def send(ids, count, sampling):
        return served.generate(ids, count, sampling=sampling)

    for (ids, _, sampling), answer in zip(jobs, served.together(send, jobs, 12), strict=True):
        if sampling is None:
            reference.one_shot(ids, answer.ids, "greedy neighbour")
        elif "logit_bias" in sampling:
            assert answer.ids == [7] * 20
        else:
            assert 0 < len(answer.ids) <= 20


def test_samples_follow_the_distribution(served, reference):
    """Counts of single new tokens against softmax(logits / temperature); an error of 5 sigma is no accident."""
    ids, temperature, runs, each = random_ids(6, seed=55), 1.5, 6, 64
    body = {"input_ids": ids, "sampling_params": {"temperature": temperature, "max_new_tokens": 1, "n": each}}
    drawn = Counter(sample["output_ids"][0] for _ in range(runs) for sample in served.ask("/generate", **body))
    expected = torch.softmax(reference.model.logits(ids)[-1] / temperature, -1)
    total = runs * each
    assert sum(drawn.values()) == total
    for chance, token in zip(*expected.topk(5), strict=True):
        chance = float(chance)
        error = abs(drawn[int(token)] - total * chance) / math.sqrt(total * chance * (1 - chance))
        assert error < 5, f"token {int(token)}: {drawn[int(token)]} of {total}, expected {total * chance:.1f}"
    limited = served.ask("/generate", **{**body, "sampling_params": {**body["sampling_params"], "top_k": 2}})
    assert {sample["output_ids"][0] for sample in limited} <= set(expected.topk(2).indices.tolist())
