"""Servers of several ranks answer what one rank answers, and end when a rank does."""

from __future__ import annotations

import re
import threading
import time

import psutil
import pytest
import requests
import torch
from heldout import HeldOut, chat_prompts, code_prompts

from deepinfer_plugin.eplb import layout_file
from deepinfer_plugin.model import V41
from deepinfer_plugin.model.config import V41Config
from deepinfer_plugin.model.layout import Layout
from tests.server.reference import same
from tests.server.serving import TRAINED

pytestmark = pytest.mark.server
NEW = 24  # most tokens of an answer
END_S = 30  # after a rank has died or stopped
SLOW_S, PAUSES = 0.2, 15


@pytest.fixture(scope="module")
def expected():
    """Prompts and the library's answers on one rank: a rank's drafts are often right on these."""
    held_out, model = HeldOut.load(TRAINED), V41.load(TRAINED)
    prompts = code_prompts(held_out.code, 3) + chat_prompts(held_out.chats, 3)
    return [(prompt, model.generate(prompt, NEW)) for prompt in prompts]


def processes(form):
    """The processes of the ranks, by rank."""
    found = re.findall(r"rank (\d) of \d \(process (\d+)\)", form.log())
    return [psutil.Process(int(number)) for _, number in sorted(found)]


def runs(process):
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def check(form, expected, at_once):
    def send(ids):
        return form.generate(ids, NEW, sampling={"ignore_eos": False})

    answers = form.together(send, [(ids,) for ids, _ in expected], at_once)
    for (ids, right), answer in zip(expected, answers, strict=True):
        same(answer.ids, right, f"prompt of {len(ids)}, {at_once} at once")


def check_end(form, others, since):
    """The other ranks end in time, for the reason that is returned; so does the server."""
    while any(runs(other) for other in others):
        assert time.monotonic() - since < END_S, f"other ranks still run\n{form.server.tail()}"
        time.sleep(0.1)
    form.server.process.wait(timeout=60)
    return form.log()


# ---- tokens ----------------------------------------------------------------------------------------------------------


def on(*names):
    return pytest.mark.parametrize("form", names, indirect=True)


@on("TP2")
def test_two_ranks_that_divide_the_heads(form, expected):
    check(form, expected, at_once=4)
    check(form, expected[:1], at_once=1)


@on("TP2", "DP2xEP2")
def test_requests_of_every_kind_beside_each_other(form, expected):
    """Drawn tokens, grammars and penalties are where ranks of a group could part; logits are one rank's to the bit."""
    prompt, right = expected[0]
    kinds = [
        {"temperature": 1.0},
        {"temperature": 0.8, "top_p": 0.9, "min_p": 0.01, "n": 2},
        {"frequency_penalty": 0.5},
        {"regex": "[0-9]{4}", "ignore_eos": False},
    ]
    bodies = [{"input_ids": prompt, "sampling_params": {"max_new_tokens": NEW, **kind}} for kind in kinds]
    greedy = {"temperature": 0, "max_new_tokens": NEW}
    bodies.append({"input_ids": prompt, "sampling_params": greedy, "return_logprob": True, "logprob_start_len": 0})
    *_, digits, last = form.together(lambda body: form.ask("/generate", **body), [(body,) for body in bodies], 5)
    assert re.fullmatch("[0-9]{4}", digits["text"])
    same(last["output_ids"], right, "with log-probabilities")
    found = torch.tensor([value for value, *_ in last["meta_info"]["output_token_logprobs"]])
    model = V41.load(TRAINED)
    logits = model.logits([*prompt, *right])[len(prompt) - 1 : -1]
    assert torch.allclose(found, torch.log_softmax(logits, -1).gather(1, torch.tensor(right)[:, None])[:, 0], atol=1e-5)


@on("TP2")
def test_a_slow_rank_is_waited_for(form, expected):
    """Every 0.4 s rank 1 stands still for 0.2 s: nobody complains, and nothing changes."""
    slow, done = processes(form)[1], threading.Event()

    def stumble():
        for _ in range(PAUSES):
            slow.suspend()
            time.sleep(SLOW_S)
            slow.resume()
            if done.wait(SLOW_S):
                return

    thread = threading.Thread(target=stumble)
    thread.start()
    try:
        check(form, expected[:4], at_once=4)
    finally:
        done.set()
        thread.join()
    assert "error: rank" not in form.log()


@on("TP2")
def test_a_killed_rank_ends_the_server(form):
    first, second = processes(form)
    stream = form.stream(list(range(20, 60)), 200)
    next(stream)
    second.kill()
    log = check_end(form, [first], time.monotonic())
    stream.close()
    assert f"error: rank 1 (process {second.pid}) died; rank 0 ends" in log


@on("DP2xEP2")
def test_two_groups_that_divide_the_experts(form, expected):
    check(form, expected, at_once=4)


@on("DP2xEP2")
def test_a_group_with_nothing_to_do_takes_part(form, expected):
    check(form, expected[1:3], at_once=1)


@on("DP2xEP2")
def test_experts_of_both_sets_have_moved_meanwhile(form, expected):
    """The tests before this one, and this one, had their tokens while experts moved between the ranks."""

    def metric(name, experts):
        exposed = requests.get(f"{form.server.url}/metrics", timeout=10).text
        found = re.search(rf'^deepinfer_eplb_{name}{{[^}}]*experts="{experts}"[^}}]*}} (\S+)$', exposed, re.MULTILINE)
        return float(found[1]) if found else 0.0

    for _ in range(8):  # on its own it may take some more steps
        check(form, expected, at_once=3)
        if min(metric("rebalances_total", experts) for experts in ("target", "draft")) >= 2:
            break
    for experts in ("target", "draft"):
        assert metric("rebalances_total", experts) >= 2
        assert metric("moved_bytes_total", experts) >= 52224 * metric("rebalances_total", experts)
        assert 0 < metric("balance", experts) <= 1 and metric("stall_seconds_sum", experts) > 0
    config = V41Config.load(TRAINED)
    (kept,) = form.server.log.parent.glob("deepinfer_plugin/experts_*.json")
    layout, trivial = layout_file.read(kept, config, 2, 4), Layout.trivial(config, 2, 4)
    assert (layout.target != trivial.target).any() and (layout.draft != trivial.draft).any()


@on("DP2xEP2")
def test_a_stopped_rank_ends_the_server(form):
    """It still exists, and holds its connections open."""
    first, second = processes(form)
    since = time.monotonic()
    second.suspend()
    try:
        log = check_end(form, [first], since)
    finally:
        if second.is_running():
            second.kill()
    assert f"error: rank 1 (process {second.pid}) has given no sign of life" in log
