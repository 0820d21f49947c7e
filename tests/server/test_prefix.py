"""Prefix reuse. The rule: a hit is the longest run of cached whole pages at the start of a prompt that ends before its
last token. ``cached_tokens`` is its length, whatever is replayed; the last ``min(hit, 128)`` tokens of it run again to
rebuild the window (``replayed_tokens``). Up to a hit of 128 that is exact, beyond it is an approximation, and the same
one that the library makes."""

from __future__ import annotations

import pytest

from .reference import random_ids, same
from .test_equality import abort

WINDOW = 128
LENGTHS = sorted({k + d for k in (2, 64, 128, 192, 256) for d in (-1, 0, 1)} | {133, 134, 140, 513})
SOME = [128, 129, 257, 513]

default = pytest.mark.parametrize("served", ["default"], indirect=True)
small_pages = pytest.mark.parametrize("served", ["retracting"], indirect=True)  # one request alone is never retracted
exact_modes = pytest.mark.parametrize("served", ["exact", "whole"], indirect=True)


def agree(answer, turn, what):
    assert (answer.cached, answer.replayed) == (turn.cached, turn.replayed), what
    same(answer.ids, turn.ids, what)


# ---- one prompt and its prefixes -----------------------------------------------------------------------------------


def sweep(served, reference, lengths, count=3):
    """Each prompt cold; again; with 7 tokens more; and another that leaves it half way."""

    def run(n):
        prompt = random_ids(n, seed=20)
        asked = {
            "cold": prompt,
            "again": prompt,
            "longer": prompt + random_ids(7, seed=21),
            "branch": prompt[: n // 2 + 1] + random_ids(3, seed=22),
        }
        return n, {name: (ids, served.generate(ids, count)) for name, ids in asked.items()}

    for n, answers in served.together(run, [(n,) for n in lengths], 1):
        tree = reference.tree(served.variant.page_size)
        for name, (ids, answer) in answers.items():
            agree(answer, tree.serve(ids, count), f"prompt of {n}, {name}")
            assert answer.cached < len(ids) and answer.cached % served.variant.page_size == 0
            assert answer.replayed == min(answer.cached, WINDOW)
            if answer.cached <= WINDOW:
                reference.one_shot(ids, answer.ids, f"prompt of {n}, {name}: no approximation up to a window")


@small_pages
def test_hits_at_every_boundary_with_pages_of_64(served, reference):
    sweep(served, reference, LENGTHS)


@default
def test_hits_at_boundaries_with_pages_of_128(served, reference):
    sweep(served, reference, SOME)


@default
def test_hit_lengths(served):
    """Prompts of whole pages lose their last page: at least one token must run."""
    prompt = random_ids(400, seed=23)
    served.generate(prompt, 1)
    for length, cached in [(1, 0), (128, 0), (129, 128), (256, 128), (257, 256), (384, 256), (385, 384), (400, 384)]:
        answer = served.generate(prompt[:length], 1)
        assert (answer.cached, answer.replayed) == (cached, min(cached, WINDOW)), length


@default
def test_long_answer_after_a_hit(served, reference):
    """Until the replayed window has left the ring."""
    tree, prompt = reference.tree(128), random_ids(400, seed=24)
    for ids, count in ((prompt, 1), (prompt[:300] + random_ids(9, seed=25), 140)):
        agree(served.generate(ids, count), tree.serve(ids, count), f"{count} tokens")


@default
def test_requests_that_hit_together(served, reference):
    """Eight at once on one cached prefix, each with another rest, replay in one batch."""
    tree, prefix = reference.tree(128), random_ids(300, seed=26)
    tree.serve(prefix, 1)
    served.generate(prefix, 1)
    prompts = [prefix + random_ids(5 + 37 * i, seed=27) for i in range(8)]
    for ids, answer in zip(prompts, served.together(served.generate, [(ids, 4) for ids in prompts], 8), strict=True):
        agree(answer, tree.serve(ids, 4), f"{len(ids) - 300} tokens after the shared prefix")


# ---- conversations -------------------------------------------------------------------------------------------------


@default
def test_second_turn_of_a_long_chat(served, reference):
    tree, page = reference.tree(128), 128
    ids = random_ids(1200, seed=28)
    first = served.generate(ids, 20)
    agree(first, tree.serve(ids, 20), "first turn")
    assert first.cached == first.replayed == 0
    for turn, new in enumerate((60, 1, 130), 2):
        before = [*ids, *first.ids]
        ids = before + random_ids(new, seed=28 + turn)
        answer = served.generate(ids, 20)
        agree(answer, tree.serve(ids, 20), f"turn {turn}")
        assert answer.replayed <= WINDOW
        assert len(ids) - answer.cached <= new + page, "computed beside the replay"
        first = answer


@default
def test_every_streamed_chunk_says_what_was_replayed(served):
    ids = random_ids(200, seed=40)
    served.generate(ids, 1)
    answers = list(served.stream(ids, 5))
    lengths = [len(answer.ids) for answer in answers]
    assert lengths == sorted(set(lengths)) and lengths[-1] == 5  # right drafts come in one chunk
    assert {(answer.cached, answer.replayed) for answer in answers} == {(128, 128)}


@default
def test_a_request_that_is_aborted_leaves_right_pages(served, reference):
    """What it had prefilled serves the next one."""
    ids = random_ids(900, seed=41)
    stream = served.post("/generate", stream=True, rid="gone", input_ids=ids, sampling_params={"max_new_tokens": 500})
    next(served.events(stream))
    abort(served, "gone")
    stream.close()
    served.wait_idle()
    tree = reference.tree(128)
    tree.begin(ids, len(ids))
    longer = ids[:800] + random_ids(20, seed=42)
    agree(served.generate(longer, 6), tree.serve(longer, 6), "after an abort")


@small_pages
def test_evicted_prefixes(served, reference):
    """More prompts than the pool holds: older ones lose pages, from their end on, and what is left is still right."""
    tree, prompts = reference.tree(64), [random_ids(500 + 10 * i, seed=43) for i in range(10)]
    for ids in prompts:
        agree(served.generate(ids, 2), tree.serve(ids, 2), "cold")
    evicted = 0
    for ids in [*prompts[:2], *prompts[-2:]]:
        answer = served.generate(ids, 2)
        turn = tree.serve(ids, 2, limit=answer.cached)
        agree(answer, turn, f"{answer.cached} of {len(ids)} tokens left")
        evicted += len(ids) - answer.cached > 64
    assert 0 < evicted < 4


# ---- exact mode ----------------------------------------------------------------------------------------------------


@exact_modes
def test_exact_mode_recomputes(served, reference):
    prompt = random_ids(300, seed=44)
    first = served.generate(prompt, 6)
    second = [*prompt, *first.ids, *random_ids(20, seed=45)]
    for ids in (prompt, prompt, second, prompt[:200]):
        answer = served.generate(ids, 6)
        assert (answer.cached, answer.replayed) == (0, 0)
        reference.one_shot(ids, answer.ids, "exact mode")
