"""Servers on a GPU answer as the library does there, to the token: with graphs and without, however much is verified,
whatever shares their batches."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import requests
import torch

pytest.importorskip("sglang")

from deepinfer_plugin.kernels import cuda as provider
from deepinfer_plugin.local_server import LocalServer
from deepinfer_plugin.model import V41

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(provider.unavailable(torch.device("cuda")) is not None, reason="no Hopper GPU"),
]

TRAINED = Path(__file__).parents[2] / "examples" / "train_tiny" / "checkpoint"
ROOM = ("--max-total-tokens", "65536", "--max-running-requests", "24")
SERVERS = {
    "default": ROOM,
    "fixed": (*ROOM, "--deepinfer-speculation", "fixed", "--page-size", "64", "--disable-overlap-schedule"),
    "off": (*ROOM, "--deepinfer-speculation", "off", "--chunked-prefill-size", "256"),
    "eager": (*ROOM, "--disable-cuda-graph"),
    "fast": (*ROOM, "--deepinfer-profile", "deepinfer"),
    # With heads divided a GPU's bits are not those of one rank, so there is nothing to compare with.
    "DP2xEP2": (*ROOM, "--tp-size", "2", "--attn-dp-size", "2"),
}


@pytest.fixture(scope="module", params=SERVERS)
def server(request, tmp_path_factory):
    if "--tp-size" in SERVERS[request.param] and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    log = tmp_path_factory.mktemp("gpu_server") / "server.log"
    with LocalServer(TRAINED, *SERVERS[request.param], log=log, timeout_s=240) as server:
        server.name = request.param
        yield server


@pytest.fixture(scope="module")
def library(server):
    return V41.load(TRAINED, "auto", "deepinfer" if server.name == "fast" else "model", device="cuda")


def generate(server, ids, count=48, group=None, **params):
    sampling = {"temperature": 0, "max_new_tokens": count, "ignore_eos": True, **params}
    body = {"input_ids": ids, "sampling_params": sampling, "routed_dp_rank": group}
    answer = requests.post(f"{server.url}/generate", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer.json()


def prompt(length, seed):
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(3, 900, (length,), generator=generator).tolist()


def test_one_request(server, library):
    for length in (1, 2, 63, 64, 127, 128, 129, 300, 700):
        ids = prompt(length, 1)
        assert generate(server, ids)["output_ids"] == library.generate(ids, 48, ignore_eos=True), length


def test_requests_that_join_and_end(server, library):
    """Two dozen of unequal lengths, a dozen at a time."""
    work = [(prompt(1 + 37 * i % 400, 2), 5 + 13 * i % 40) for i in range(24)]
    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda each: generate(server, *each)["output_ids"], work))
    for (ids, count), found in zip(work, answers, strict=True):
        assert found == library.generate(ids, count, ignore_eos=True)


def test_a_prefix_hit_follows_the_rule(server, library):
    ids, size = prompt(500, 3), 64 if server.name == "fixed" else 128
    group = 0 if server.name == "DP2xEP2" else None  # of attention: each has a cache of its own
    generate(server, ids, 1, group)
    longer = ids + prompt(20, 4)
    answer = generate(server, longer, group=group)
    cached = answer["meta_info"]["cached_tokens"]
    assert cached == 500 // size * size
    session = library.session(500)
    if size != library.page_layout.page_size:
        session = V41(library.network, size).session(500)
    session.extend(ids)
    turn = session.fork(cached, 600)
    turn.extend(longer[cached:])
    assert answer["output_ids"] == list(turn.generate(48, ignore_eos=True))


def test_a_grammar_and_a_chat(server):
    schema = '{"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}'
    text = generate(server, prompt(30, 5), 60, json_schema=schema, ignore_eos=False)["text"]
    assert re.match(r'\s*\{\s*"n"\s*:', text), text
    body = {"model": "x", "messages": [{"role": "user", "content": "What is 2 + 2?"}], "max_tokens": 30}
    answer = requests.post(f"{server.url}/v1/chat/completions", json=body, timeout=120)
    assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] > 0


def test_sampling_and_logprobs(server):
    body = {"input_ids": prompt(40, 6), "sampling_params": {"temperature": 0.8, "top_p": 0.9, "max_new_tokens": 40}}
    answer = requests.post(f"{server.url}/generate", json={**body, "return_logprob": True}, timeout=120).json()
    assert len(answer["meta_info"]["output_token_logprobs"]) == answer["meta_info"]["completion_tokens"] > 0


def test_what_the_server_said(server):
    log = server.log.read_text(errors="replace")
    assert ("captured steps" in log) == (server.name != "eager")
    assert ("captured drafting" in log) == (server.name not in ("off", "eager"))
    assert "Traceback" not in log
