"""``deepinfer plan``: sizes that are really allocated, and a refusal of what does not fit."""

from __future__ import annotations

import functools
import json
import shutil

import pytest

from deepinfer_plugin import arguments
from deepinfer_plugin.cli import plan as command
from deepinfer_plugin.model.checkpoint import DTYPE_NAMES, INDEX, expected_tensors
from deepinfer_plugin.model.config import V41Config
from deepinfer_plugin.model.memory import PageLayout, PagePool, StateLayout, StatePool
from deepinfer_plugin.model.released import RELEASED

GIB = 1 << 30
SHARDS = 4


@pytest.fixture
def plan(deepinfer):
    return functools.partial(deepinfer, "plan")


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    """A checkpoint of released size without its weights: a config, an index, headers, and holes behind them."""
    path = tmp_path_factory.mktemp("released")
    (path / "config.json").write_text(json.dumps(RELEASED))
    table = list(expected_tensors(V41Config.from_dict(RELEASED)).items())
    weight_map = {}
    for number in range(SHARDS):
        shard, header, end = path / f"model-{number}.safetensors", {}, 0
        for name, spec in table[number::SHARDS]:
            offsets = [end, end := end + spec.nbytes]
            header[name] = {"dtype": DTYPE_NAMES[spec.dtype], "shape": spec.shape, "data_offsets": offsets}
            weight_map[name] = shard.name
        text = json.dumps(header).encode()
        with shard.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + end)
    (path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return path


def test_the_sizes_are_what_is_allocated(plan, tiny):
    config = V41Config.load(tiny)
    code, out, _ = plan(tiny, "--json", "--page-size", 64, "--running", 3, "--tokens", 700)
    found = json.loads(out)
    state = StatePool(StateLayout.of(config), 3 + 1)
    pages = PagePool.allocate(PageLayout.of(config, 64), found["tokens"] // 64 + 1)
    assert code == 0
    assert (found["tokens"], found["page_size"], found["running_requests"]) == (640, 64, 3)
    assert found["state_bytes"] == sum(t.nbytes for t in (state.rings, state.tags, state.tails, state.ngrams))
    assert found["pool_bytes"] == pages.pages.nbytes
    assert found["weight_bytes"] == sum(spec.nbytes for spec in expected_tensors(config).values())
    assert found["total_bytes"] == found["weight_bytes"] + found["state_bytes"] + found["pool_bytes"]


@pytest.mark.parametrize(
    ("accelerator", "running", "tokens"),
    [(False, arguments.RUNNING_REQUESTS_CPU, 32 * (8192 + 2 * 128)), (True, arguments.RUNNING_REQUESTS, None)],
)
def test_the_defaults_are_the_server_s(plan, tiny, monkeypatch, accelerator, running, tokens):
    monkeypatch.setattr(command, "_this_machine", lambda: ("cuda" if accelerator else "cpu", GIB))
    found = json.loads(plan(tiny, "--json")[1])
    assert (found["running_requests"], found["memory_bytes"]) == (running, GIB)
    if tokens is None:
        assert 0 <= GIB - found["total_bytes"] < found["page_bytes"], "all of an accelerator's memory is used"
    else:
        assert found["tokens"] == tokens, "as many as the requests can fill"


def test_released_size(plan, released):
    code, out, _ = plan(released, "--json", "--memory-gib", 500)
    found = json.loads(out)
    assert code == 0 and found["token_bytes"] == 890 and 470 * GIB < found["weight_bytes"] < 480 * GIB
    assert 0 <= 500 * GIB - found["total_bytes"] < found["page_bytes"]
    assert found["longest_request"] == found["max_position"] == 1 << 20

    code, out, err = plan(released, "--memory-gib", 141)
    assert (code, out) == (2, "") and "141.00 GiB of memory cannot serve this model: weights take 47" in err


def test_the_text_has_the_numbers(plan, tiny):
    argv = tiny, "--memory-gib", 0.05, "--running", 20
    found, (code, out, _) = json.loads(plan(*argv, "--json")[1]), plan(*argv)
    assert code == 0
    for words in ("6.42 MiB", f"{found['slot_bytes']} bytes x (20 requests", f"{found['tokens']} tokens at 106 bytes"):
        assert words in out, out
    assert "of 0.05 GiB" in out and "8192 tokens, the longest of this model: fits" in out


def test_a_pool_too_small_for_the_longest_context(plan, tiny):
    """Requests are then shorter; the pool has room for the longest of them and a page to spare, as SGLang wants."""
    whole = 8192 + 2 * 128
    assert ": fits" in plan(tiny, "--tokens", whole)[1]
    code, out, _ = plan(tiny, "--tokens", whole - 1)
    assert code == 0 and f"does not fit; requests of up to {8192 - 128} tokens are served" in out
    assert json.loads(plan(tiny, "--tokens", whole - 1, "--json")[1])["longest_request"] == 8192 - 128


def test_what_does_not_fit_is_refused_with_what_would(plan, tiny):
    code, out, err = plan(tiny, "--memory-gib", 0.006)
    assert (code, out) == (2, "") and "cannot serve this model: weights take 6.42 MiB" in err
    assert plan(tiny, "--memory-gib", 0.006, "--tokens", 384)[0] == 2
    least = int(err.rsplit("(", 1)[1].split()[0])
    assert plan(tiny, "--memory-gib", least / GIB, "--running", 1)[0] == 0
    assert plan(tiny, "--memory-gib", (least - 1) / GIB, "--running", 1)[0] == 2

    code, _, err = plan(tiny, "--memory-gib", 0.02, "--running", 5000)
    assert code == 2 and "--max-running-requests 5000 does not fit" in err
    most = err.split()[-1]
    assert plan(tiny, "--memory-gib", 0.02, "--max-running-requests", most)[0] == 0

    code, _, err = plan(tiny, "--tokens", 100, "--json")
    assert code == 2 and "--max-total-tokens 100" in err and err.endswith(" 384\n")
    assert plan(tiny, "--max-total-tokens", 384)[0] == 0


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--page-size", "100"], ["--page-size", "64", "128"]),
        (["--memory-gib", "much"], ["--memory-gib", "much", "a positive number"]),
        (["--memory-gib", "inf"], ["--memory-gib", "inf", "a positive number"]),
        (["--memory-gib", "0"], ["--memory-gib", "a positive number"]),
        (["--running", "0"], ["--max-running-requests 0", "1"]),
    ],
)
def test_illegal_numbers(plan, tiny, argv, words):
    code, out, err = plan(tiny, *argv)
    assert (code, out) == (2, "") and all(word in err for word in words), err


def test_no_checkpoint(plan, tiny, tmp_path):
    assert plan(tmp_path / "nowhere") == (
        2,
        "",
        f"deepinfer plan: {tmp_path}/nowhere/config.json does not exist; a checkpoint directory needs config.json\n",
    )
    assert plan(tiny / "config.json")[0] == 2
    shutil.copy(tiny / "config.json", tmp_path)
    code, _, err = plan(tmp_path)
    assert code == 2 and INDEX in err
    shutil.copy(tiny / INDEX, tmp_path)
    code, _, err = plan(tmp_path)
    assert code == 2 and "model-00001-of-00003.safetensors: file is missing" in err


def test_a_rank_has_its_part_of_the_weights_and_requests(deepinfer, tiny):
    def planned(*flags):
        code, out, _ = deepinfer("plan", tiny, "--memory-gib", 1, "--json", *flags)
        assert code == 0
        return json.loads(out)

    alone, two, grouped = planned(), planned("--ranks", 2), planned("--tp-size", 2, "--attn-dp-size", 2)
    assert two["running_requests"] == alone["running_requests"] == 2 * grouped["running_requests"]
    assert two["weight_bytes"] < grouped["weight_bytes"] < alone["weight_bytes"], "heads are whole in a group of one"
    assert two["page_bytes"] == alone["page_bytes"]


def test_ranks_that_do_not_divide_the_model(deepinfer, tiny):
    code, _, complaint = deepinfer("plan", tiny, "--memory-gib", 1, "--ranks", 3)
    assert code == 2 and "4 attention heads do not divide among 3 ranks of attention; legal: 1, 2" in complaint
    code, _, complaint = deepinfer("plan", tiny, "--memory-gib", 1, "--ranks", 4, "--groups", 3)
    assert code == 2 and "--groups 3" in complaint


def test_replicas_and_what_moves_experts_take_memory(deepinfer, tiny):
    def weights(*arguments):
        code, out, complaint = deepinfer("plan", tiny, "--memory-gib", 1, "--json", *arguments)
        assert code == 0, complaint
        return json.loads(out)["weight_bytes"]

    config = V41Config.load(tiny)
    values = 3 * config.hidden_size * config.expert_dim
    expert = values // 2 + values // 32
    plain = weights("--ranks", 2)
    slots = 2 * (config.num_layers + config.draft_stages)  # of a rank: two of four replicas in every layer
    assert weights("--ranks", 2, "--redundant", 4) == plain + slots * expert
    counts = 4 * 100 * (config.num_layers * config.experts + config.draft_stages * config.dspark.experts)
    assert weights("--ranks", 2, "--enable-eplb") == plain + 4 * expert + counts
    code, _, complaint = deepinfer("plan", tiny, "--memory-gib", 1, "--ranks", 2, "--ep-num-redundant-experts", 9)
    assert code == 2 and "9 redundant experts on 2 ranks; legal: 0 to 8" in complaint
