"""A server that decodes speculatively answers as one that does not: greedy tokens, log-probabilities, constraints,
stops; and says what speculation did."""

from __future__ import annotations

import json
import re
from collections import defaultdict

import pytest
import requests
import torch
from prometheus_client.parser import text_string_to_metric_families

from .reference import random_ids, same
from .serving import SHORT
from .test_equality import SOME, abort, check

SPECULATING = pytest.mark.parametrize("served", ["speculating", "speculating exact", "scheduled"], indirect=True)
FIXED = pytest.mark.parametrize("served", ["speculating"], indirect=True)
BLOCK = 5  # drafts


def check_figures(meta):
    """What an answer says about its own speculation adds up, however many drafts were thought worth a row."""
    rounds, right = meta["spec_verify_ct"], meta["spec_num_correct_drafts"]
    emitted = 1 + meta["num_retractions"] + rounds + right  # each prefill gives a token, each verification one more
    assert 1 <= meta["completion_tokens"] <= emitted
    assert meta["num_retractions"] or emitted - meta["completion_tokens"] <= BLOCK, "only the last block is cut"
    assert meta["spec_accept_length"] == pytest.approx(meta["completion_tokens"] / rounds)
    assert meta["spec_accept_length"] >= 1
    assert 1 <= meta["spec_cap_length"] <= BLOCK + 1 and right <= round((meta["spec_cap_length"] - 1) * rounds)
    assert meta["spec_num_proposed_drafts"] == BLOCK * rounds
    assert meta["spec_accept_rate"] == pytest.approx(right / (BLOCK * rounds))
    histogram = meta["spec_correct_drafts_histogram"]
    assert sum(histogram) == rounds and sum(drafts * times for drafts, times in enumerate(histogram)) == right


@SPECULATING
@pytest.mark.parametrize("at_once", [1, 3, 8])
def test_greedy_tokens_are_the_same(served, reference, at_once):
    check(served, reference, SOME, at_once, seed=20)


@SPECULATING
def test_long_answers_cross_pages_and_windows(served, reference):
    prompts = [random_ids(length, seed=21) for length in (2, 60, 120, 250)]
    answers = served.together(served.generate, [(ids, 140) for ids in prompts], 4)
    for ids, answer in zip(prompts, answers, strict=True):
        reference.one_shot(ids, answer.ids, f"{answer.meta['num_retractions']} retractions")
        check_figures(answer.meta)
        if served.name != "scheduled":  # which may find no draft worth a row, depending on the machine
            assert answer.meta["spec_cap_length"] == BLOCK + 1
            assert answer.meta["spec_num_correct_drafts"] > 0


@FIXED
def test_prefix_hits_are_the_same_rule(served, reference):
    """Only committed pages are kept for others, whatever drafts were written beyond."""
    tree, ids = reference.tree(128), random_ids(250, seed=22)
    for prompt in (ids, [*ids, *random_ids(9, seed=23)], [*ids[:200], 5], ids):
        answer, turn = served.generate(prompt, 16), tree.serve(prompt, 16)
        assert (answer.cached, answer.replayed) == (turn.cached, turn.replayed)
        same(answer.ids, turn.ids, f"{turn.cached} cached")
    conversation = ids
    for turn_length in (40, 60, 7):  # the answers' pages are hit as well
        answer, turn = served.generate(conversation, turn_length), tree.serve(conversation, turn_length)
        assert answer.cached == turn.cached
        same(answer.ids, turn.ids, f"{turn.cached} cached")
        conversation = [*conversation, *answer.ids, *random_ids(5, seed=turn_length)]


@FIXED
def test_log_probabilities_of_every_token(served, reference):
    ids = random_ids(33, seed=24)
    answer = served.generate(ids, 12, return_logprob=True, top_logprobs_num=2, token_ids_logprob=[7])
    expected = reference.logprobs([*ids, *answer.ids])[len(ids) - 1 : -1]
    for name, tokens in (
        ("output_token_logprobs", torch.tensor(answer.ids)[:, None]),
        ("output_token_ids_logprobs", torch.full((12, 1), 7)),
        ("output_top_logprobs", expected.topk(2).indices),
    ):
        found = answer.meta[name] if name != "output_token_logprobs" else [[each] for each in answer.meta[name]]
        assert [[token for _, token, _ in row] for row in found] == tokens.tolist()
        values = torch.tensor([[value for value, _, _ in row] for row in found])
        torch.testing.assert_close(values, expected.gather(1, tokens), atol=1e-4, rtol=1e-4)


@FIXED
def test_what_counts_tokens_verifies_one_row(served):
    ids = random_ids(20, seed=25)
    for sampling in ({"frequency_penalty": 0.9}, {"presence_penalty": 0.5}, {"repetition_penalty": 1.3}):
        meta = served.generate(ids, 10, sampling=sampling).meta
        assert meta["spec_cap_length"] == 1.0 and meta["spec_verify_ct"] == 9


@FIXED
def test_bias_and_sampling_reach_every_row(served, reference):
    ids = random_ids(21, seed=26)
    assert served.generate(ids, 9, sampling={"logit_bias": {"77": 1000.0}}).ids == [77] * 9
    reference.one_shot(ids, served.generate(ids, 15, sampling={"temperature": 0.7, "top_k": 1}).ids, "top_k 1")
    reference.one_shot(ids, served.generate(ids, 15, sampling={"temperature": 0.7, "top_p": 1e-6}).ids, "top_p 0")
    reference.one_shot(ids, served.generate(ids, 15, sampling={"temperature": 0.7, "min_p": 1.0}).ids, "min_p 1")


@FIXED
def test_answers_end_inside_a_block(served, reference):
    ids = random_ids(22, seed=27)
    whole = served.generate(ids, 40).ids
    reference.one_shot(ids, whole)
    for end in range(1, 13):
        stop = whole[end]
        sampling = {"stop_token_ids": [stop], "ignore_eos": False, "max_new_tokens": 40}
        same(served.generate(ids, 40, sampling=sampling).ids, whole[: whole.index(stop) + 1], f"stop at {end}")
        same(served.generate(ids, end).ids, whole[:end], f"{end} tokens")


@SPECULATING
def test_grammars_are_walked_over_drafts(served):
    """Alone and beside others that have none or another."""
    schema = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]}
    schema |= {"additionalProperties": False}
    kinds = [
        {"regex": "(ab|cd)[0-9]{2,9}x"},
        {"json_schema": json.dumps(schema)},
        {"regex": "[a-f]{3,6}"},
        {},
    ]

    def one(index, kind):
        body = {"temperature": 0, "max_new_tokens": 60, **kind}
        return served.ask("/generate", input_ids=random_ids(15 + index, seed=28), sampling_params=body)

    for at_once in (1, 4):
        answers = served.together(one, list(enumerate(kinds)), at_once)
        texts = [(answer["text"], answer["meta_info"]["finish_reason"]["type"]) for answer in answers]
        assert re.fullmatch(kinds[0]["regex"], texts[0][0]) and re.fullmatch(kinds[2]["regex"], texts[2][0])
        if texts[1][1] == "stop":
            assert json.loads(texts[1][0])["a"] in ("x", "y")


@FIXED
def test_abort_in_mid_answer(served, reference):
    ids = random_ids(140, seed=29)
    body = {"input_ids": ids, "sampling_params": {"temperature": 0, "max_new_tokens": 400, "ignore_eos": True}}
    with served.post("/generate", stream=True, rid="speculating-stop", **body) as response:
        events = served.events(response)
        next(events)
        abort(served, "speculating-stop")
        *_, last = events
    assert last["meta_info"]["finish_reason"]["type"] == "abort"
    served.wait_idle()
    tree = reference.tree(128)
    tree.begin(ids, len(ids))
    same(served.generate(ids, 8).ids, tree.serve(ids, 8).ids, "after abort")


@FIXED
def test_the_longest_request(served, reference):
    """Drafts beyond the end of the context have somewhere to go."""
    ids = random_ids(SHORT - 41, seed=30)
    answer = served.generate(ids, 39)  # SGLang keeps one position back, with or without speculation
    assert len(answer.ids) == 39
    reference.one_shot(ids, answer.ids, "to the end")


@FIXED
def test_sampling_masks_are_refused(served):
    body = {"temperature": 0.5, "top_k": 5, "max_new_tokens": 4}
    assert "speculative" in served.refused(
        "/generate", input_ids=[5, 6], sampling_params=body, return_sampling_mask=True
    )


# ---- metrics -------------------------------------------------------------------------------------------------------


def metrics(served):
    """Our metrics without their common prefix: values by draft position, upper edge of a bucket, or None."""
    found = defaultdict(dict)
    text = requests.get(f"{served.server.url}/metrics", timeout=60).text
    for sample in (each for family in text_string_to_metric_families(text) for each in family.samples):
        if sample.name.startswith("deepinfer_spec_"):
            key = sample.labels.get("position") or sample.labels.get("le")
            found[sample.name.removeprefix("deepinfer_spec_")][key] = sample.value
    return found


@pytest.mark.parametrize("served", ["scheduled"], indirect=True)
def test_metrics_add_up(served):
    before = metrics(served)
    list(served.together(served.generate, [(random_ids(50 + length, seed=31), 40) for length in range(6)], 3))
    served.wait_idle()
    found = metrics(served)
    drafted, trimmed, verified, accepted = (
        found[f"{name}_total"] for name in ("drafted", "trimmed", "verified", "accepted")
    )
    positions = [str(position + 1) for position in range(BLOCK)]
    assert list(drafted) == positions
    for position in positions:
        assert drafted[position] == trimmed[position] + verified[position]
        assert accepted[position] <= verified[position]
    for counts in (drafted, verified, accepted):
        assert list(counts.values()) == sorted(counts.values(), reverse=True), "no draft without those before it"
    steps, rounds, emitted, unplanned = (
        found[f"{name}_total"][None] for name in ("steps", "rounds", "emitted_tokens", "unplanned_steps")
    )
    assert steps > before["steps_total"].get(None, 0) and rounds >= steps
    assert emitted == rounds + sum(accepted.values())
    assert found["profiled"] == {None: 1} and unplanned == 0 and found["broken_confidences_total"] == {None: 0}
    for name, count, total in (
        ("accept_length", rounds, emitted),
        ("planned_rows", steps, None),
        ("real_rows", steps, rounds + sum(verified.values())),
        ("planned_seconds", steps, None),
        ("real_seconds", steps, None),
    ):
        buckets = sorted(found[f"{name}_bucket"].items(), key=lambda bucket: float(bucket[0]))
        heights = [height for _, height in buckets]
        assert heights == sorted(heights) and heights[-1] == found[f"{name}_count"][None] == count, name
        assert found[f"{name}_sum"][None] == total or (total is None and found[f"{name}_sum"][None] > 0), name
    assert found["accept_length_bucket"][f"{BLOCK + 1}.0"] == rounds
