"""Greedy tokens from the server are those of one full forward in the library, whatever runs beside them."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from .reference import random_ids, same

# Around multiples of a page of 64, of a window and a page of 128, of the chunks of 128, 256 and 512 and of the
# compression ratio 2.
LENGTHS = sorted(
    {1, 2, 3, 4, 5, *(multiple + step for multiple in (64, 128, 192, 256, 384, 512) for step in (-1, 0, 1)), 700}
)
SOME = [1, 2, 63, 128, 129, 255, 257, 384, 511, 513, 700]
ON_EVERY_SERVER = pytest.mark.parametrize("served", ["default", "retracting", "exact", "whole"], indirect=True)
WITHOUT_RETRACTION = pytest.mark.parametrize("served", ["default", "whole"], indirect=True)


def count_for(length: int) -> int:
    """New tokens, uneven so that requests leave a batch at different times."""
    return 3 + length % 7


def check(served, reference, lengths, at_once, seed=0):
    def one(length):
        ids = random_ids(length, seed)
        answer = served.generate(ids, count_for(length))
        return ids, answer

    for ids, answer in served.together(one, [(length,) for length in lengths], at_once):
        assert answer.cached == 0, "prompts differ from their first token on"
        if served.variant.replay and answer.meta["num_retractions"]:
            continue  # rebuilt from its own cached pages: see test_retraction
        reference.one_shot(ids, answer.ids, f"{served.name}, {at_once} at once")


@ON_EVERY_SERVER
def test_every_boundary_eight_at_once(served, reference):
    check(served, reference, LENGTHS, at_once=8)


@ON_EVERY_SERVER
def test_three_at_once(served, reference):
    check(served, reference, SOME, at_once=3)


@ON_EVERY_SERVER
def test_alone(served, reference):
    check(served, reference, SOME[::2], at_once=1)


def test_library_generates_the_same(served, reference):
    for length in (1, 127, 128, 300):
        ids = random_ids(length)
        expected = reference.model.generate(ids, 10, ignore_eos=True)
        same(served.generate(ids, 10).ids, expected, f"prompt of {length}")
        reference.one_shot(ids, expected)


@WITHOUT_RETRACTION
def test_long_answers_cross_pages_and_windows(served, reference):
    """Decode over a page boundary (at 64 or 128) and until a window has left the prompt behind."""
    lengths = [2, 60, 120, 250]
    prompts = [random_ids(length, seed=3) for length in lengths]
    for ids, answer in zip(prompts, served.together(served.generate, [(ids, 140) for ids in prompts], 4), strict=True):
        reference.one_shot(ids, answer.ids, "140 tokens")


# ---- retraction ----------------------------------------------------------------------------------------------------


def retractions(served, ids, count):
    """The answer, and the numbers of output tokens after which the request was retracted."""
    after, last = [], None
    for answer in served.stream(ids, count):
        new = answer.meta["num_retractions"] - (last.meta["num_retractions"] if last else 0)
        after += [len(last.ids) if last else 0] * new
        last = answer
    return last.ids, after


@pytest.mark.parametrize("served", ["exact"], indirect=True)
def test_retraction_changes_nothing_when_prefixes_are_recomputed(served, reference):
    prompts = [random_ids(length, seed=5) for length in (5, 127, 129, 200, 300, 64)]
    answers = list(served.together(served.generate, [(ids, 16) for ids in prompts], 6))
    assert sum(answer.meta["num_retractions"] for answer in answers) > 1
    for ids, answer in zip(prompts, answers, strict=True):
        reference.one_shot(ids, answer.ids, f"{answer.meta['num_retractions']} retractions")


@pytest.mark.parametrize("served", ["retracting"], indirect=True)
def test_retraction_is_a_prefix_hit_when_prefixes_are_reused(served, reference):
    """The request continues from the pages of its own prompt, with the window rebuilt by replay: the answer is that
    of the same rule in the library, and the uninterrupted one if no more than a window was cached."""
    prompts = [random_ids(length, seed=6) for length in (5, 100, 127, 129, 200, 300)]
    answers = list(served.together(retractions, [(served, ids, 16) for ids in prompts], 6))
    assert sum(len(after) for _, after in answers) > 1
    for ids, (found, after) in zip(prompts, answers, strict=True):
        expected = reference.tree(served.variant.page_size).interrupted(ids, after, 16)
        same(found, expected, f"prompt of {len(ids)}, retracted after {after}")
        if len(ids) < 128:
            reference.one_shot(ids, found, "no approximation in a single window")


# ---- aborts and disconnects ----------------------------------------------------------------------------------------


def abort(served, request_id):
    assert served.post("/abort_request", rid=request_id).status_code == 200


@ON_EVERY_SERVER
def test_abort_in_mid_answer(served, reference):
    """The same prompt again afterwards, beside an undisturbed neighbour."""
    ids, neighbour = random_ids(257, seed=7), random_ids(190, seed=7)
    beside = ThreadPoolExecutor(1).submit(served.generate, neighbour, 24)
    body = {"input_ids": ids, "sampling_params": {"temperature": 0, "max_new_tokens": 400, "ignore_eos": True}}
    with served.post("/generate", stream=True, rid="stop-me", **body) as response:
        events = served.events(response)
        for _ in range(5):
            next(events)
        abort(served, "stop-me")
        *_, last = events
    assert last["meta_info"]["finish_reason"]["type"] == "abort", last["meta_info"]
    assert len(last["output_ids"]) < 400
    answer = beside.result()
    served.wait_idle()
    again = served.generate(ids, 8)
    if served.variant.replay:
        # The aborted request left its pages in the tree: a hit, which is the same rule in the library.
        assert again.cached == 256
        tree = reference.tree(served.variant.page_size)
        tree.begin(ids, len(ids))
        same(again.ids, tree.serve(ids, 8).ids, "after abort")
    else:
        reference.one_shot(ids, again.ids, "after abort")
    if not (served.variant.replay and answer.meta["num_retractions"]):
        reference.one_shot(neighbour, answer.ids, "neighbour of an aborted request")


@ON_EVERY_SERVER
def test_client_that_disconnects(served, reference):
    for gone in range(3):
        stream = served.stream(random_ids(150 + gone, seed=8), 2000)
        next(stream)
        next(stream)
        stream.close()
    served.wait_idle()  # the requests end although 2000 tokens were asked for
    ids = random_ids(150, seed=9)
    reference.one_shot(ids, served.generate(ids, 6).ids, "after disconnects")


@pytest.mark.parametrize("served", ["default", "retracting"], indirect=True)
def test_aborts_in_every_stage(served, reference):
    """Aborted while waiting, in the middle of a chunked prefill, in decode; then all at once. Which requests an abort
    still finds depends on the machine. The server checks after every step that pages add up and that none has two
    owners."""

    def send(name, length):
        sampling = {"temperature": 0, "max_new_tokens": 200, "ignore_eos": True}
        return served.post("/generate", rid=name, input_ids=random_ids(length, seed=10), sampling_params=sampling)

    lengths = [200, 257, 700, 1500, 64, 3000, 128, 129, 500, 1000, 31, 2000]
    with ThreadPoolExecutor(len(lengths)) as pool:
        sent = [pool.submit(send, f"r{i}", length) for i, length in enumerate(lengths)]
        for i in range(0, len(lengths), 2):
            time.sleep(0.15)
            abort(served, f"r{i}")
        time.sleep(0.5)
        served.post("/abort_request", abort_all=True)
    for answer in (response.result().json() for response in sent):
        end = answer["meta_info"]["finish_reason"]["type"]
        assert end == "abort" or (end == "length" and len(answer["output_ids"]) == 200), answer["meta_info"]
    served.wait_idle()
    ids = random_ids(200, seed=11)
    reference.one_shot(ids, served.generate(ids, 8).ids, "after aborts")
