"""Every argument SGLang resolves for us, and every one it may not have."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import socket
from types import SimpleNamespace

import pytest

from deepinfer_plugin import conflicts
from deepinfer_plugin.arguments import cpu_tokens, speculates, tokens_for_context
from deepinfer_plugin.model.config import V41Config
from deepinfer_plugin.model.memory import PageLayout, StateLayout
from deepinfer_plugin.settings import Settings, SettingsError

from .probes import ask


def _compact(value):
    return json.dumps(value, separators=(",", ":"))


# Command line -> words that its refusal must say.
REFUSALS = [
    ("--tokenizer-worker-num 2", ["--tokenizer-worker-num 2", "do not load plugins"]),
    ("--enable-mixed-chunk", ["--enable-mixed-chunk", "replayed rows"]),
    ("--enable-lora", ["--enable-lora", "no LoRA layers"]),
    ("--enable-streaming-session", ["--enable-streaming-session"]),
    ("--enable-session-radix-cache", ["--enable-session-radix-cache"]),
    ("--pp-size 2", ["--pp-size 2"]),
    ("--tp-size 3", ["--tp-size 3: 4 attention heads", "legal: 1, 2", "16 experts", "legal: 1, 2, 4, 8, 16"]),
    ("--tp-size 4", ["--tp-size 4: 2 output groups do not divide among 4 ranks of attention; legal: 1, 2"]),
    ("--tp-size 6 --attn-dp-size 3", ["--tp-size 6 --attn-dp-size 3: 16 experts do not divide among 6 ranks"]),
    ("--tp-size 2 --attn-dp-size 4", ["--attn-dp-size 4: it must divide --tp-size 2; legal: 1, 2"]),
    ("--dp-size 2", ["--dp-size 2: replicas are servers of their own", "--enable-dp-attention"]),
    ("--tp-size 4 --attn-dp-size 2 --ep-size 2", ["--ep-size 2: experts are divided among all", "legal: 1 or 4"]),
    ("--tp-size 2 --attn-dp-size 2 --chunked-prefill-size 256", ["least legal value is 512"]),
    ("--attn-cp-size 2 --tp-size 2", ["--attn-cp-size 2", "not there yet"]),
    ("--enable-eplb", ["--enable-eplb: one rank holds all experts", "legal with --tp-size 2 or more"]),
    ("--ep-num-redundant-experts 4", ["--ep-num-redundant-experts 4: 4 redundant experts on 1 ranks; legal: 0 to 0"]),
    ("--tp-size 2 --ep-num-redundant-experts 9", ["--ep-num-redundant-experts 9: 9 redundant", "legal: 0 to 8"]),
    ("--tp-size 2 --enable-eplb --ep-num-redundant-experts 999999999999", ["999999999999 redundant", "legal: 0 to 8"]),
    ("--tp-size 2 --ep-num-redundant-experts -2", ["--ep-num-redundant-experts -2: -2 redundant", "legal: 0 to 8"]),
    ("--tp-size 2 --enable-eplb --eplb-rebalance-num-iterations 0", ["--eplb-rebalance-num-iterations 0", "1 or more"]),
    ("--tp-size 2 --enable-eplb --eplb-algorithm deepseek", ["--eplb-algorithm deepseek", "legal: auto, deepinfer"]),
    ("--eplb-rebalance-layers-per-chunk 4", ["--eplb-rebalance-layers-per-chunk 4", "--deepinfer-expert-chunk-kib"]),
    ("--ep-dispatch-algorithm lp", ["--ep-dispatch-algorithm lp", "own counts"]),
    ("--expert-distribution-recorder-mode stat", ["--expert-distribution-recorder-mode stat", "deepinfer_eplb_"]),
    ("--deepinfer-expert-chunk-kib 0", ["--deepinfer-expert-chunk-kib='0'", "KiB"]),
    ("--init-expert-location nowhere.json", ["--init-expert-location: one rank holds all experts"]),
    ("--tp-size 2 --init-expert-location nowhere.json", ["--init-expert-location: nowhere.json", "No such file"]),
    *(
        (
            f"--tp-size 2 --ep-num-redundant-experts 2 --init-expert-location {_compact(given)}",
            words,
        )
        for given, words in (
            ({"target": [[0] * 18] * 3}, ["target experts: 3 layers; legal:"]),
            ({"physical_to_logical_map": [[*range(1, 16), 1, 2, 3]] * 10}, ["layer 0: expert 0 is in no slot"]),
            ({"target": [[*range(16)]] * 10}, ["16 slots a layer; legal: 18, with --ep-num-redundant-experts 2"]),
            (
                {"logical_count": [[0] * 16] * 10},
                ["logical_count; legal: physical_to_logical_map, or target and draft"],
            ),
            ({"target": [[1], [1, 2]]}, ["layers of several lengths"]),
        )
    ),
    ("--enable-hisparse", ["--enable-hisparse"]),
    ("--enable-two-batch-overlap", ["--enable-two-batch-overlap"]),
    ("--kv-cache-dtype fp8_e4m3", ["--kv-cache-dtype fp8_e4m3", "part of the model"]),
    ("--quantization fp8", ["--quantization fp8"]),
    ("--dtype float16", ["--dtype float16", "--deepinfer-profile float32"]),
    ("--speculative-algorithm EAGLE", ["--speculative-algorithm EAGLE", "legal: DEEPINFER_DSPARK"]),
    ("--speculative-algorithm NGRAM", ["--speculative-algorithm NGRAM", "legal: DEEPINFER_DSPARK"]),
    ("--speculative-algorithm mtp", ["--speculative-algorithm mtp", "legal: DEEPINFER_DSPARK"]),
    ("--speculative-algorithm DSPARK", ["--speculative-algorithm DSPARK", "legal: DEEPINFER_DSPARK"]),
    *(
        (f"{start} {flag} {value}", [f"{flag} {value}", f"legal: {legal}"])
        for start in ("--speculative-algorithm DEEPINFER_DSPARK", "--deepinfer-speculation fixed")
        for flag, legal, wrong in (
            ("--speculative-dspark-block-size", 5, (0, -1, 3, 7)),
            ("--speculative-num-draft-tokens", 6, (0, -6, 5, 7)),
            ("--speculative-num-steps", 5, (0, 4, 6)),
            ("--speculative-eagle-topk", 1, (0, 2)),
        )
        for value in wrong
    ),
    ("--deepinfer-speculation fixed --speculative-draft-model-path x", ["--speculative-draft-model-path x", "itself"]),
    ("--deepinfer-speculation fixed --speculative-adaptive", ["--speculative-adaptive", "draft length"]),
    ("--deepinfer-speculation fixed --enable-watermark", ["--enable-watermark", "--deepinfer-speculation off"]),
    ("--deepinfer-speculation on", ["--deepinfer-speculation='on'", "legal: auto, off, fixed, scheduled"]),
    (
        "--deepinfer-speculation off --speculative-algorithm DEEPINFER_DSPARK",
        ["speculation off", "contradicts"],
    ),
    ("--speculative-num-steps 4", ["--speculative-num-steps 4", "legal: 5"]),
    ("--deepinfer-calibration nowhere.json", ["--deepinfer-calibration", "nowhere.json", "temperatures"]),
    ("--enable-hierarchical-cache", ["--enable-hierarchical-cache", "not there yet"]),
    ("--disaggregation-mode prefill", ["--disaggregation-mode prefill", "not there yet"]),
    ("--cpu-offload-gb 4", ["--cpu-offload-gb 4"]),
    ("--enable-torch-compile", ["--enable-torch-compile"]),
    ("--attention-backend torch_native", ["--attention-backend torch_native"]),
    ("--cuda-graph-backend-prefill full", ["--cuda-graph-backend-prefill full"]),
    ("""--cuda-graph-config {"prefill":{"backend":"full"}}""", ["--cuda-graph-config prefill.backend=full"]),
    ("""--json-model-override-args {"num_hidden_layers":4}""", ["--json-model-override-args", "change the file"]),
    ("--load-format gguf", ["--load-format gguf"]),
    ("--rl-on-policy-target fsdp", ["--rl-on-policy-target fsdp", "not those of a trainer"]),
    ("--device xpu", ["--device xpu", "legal: cpu, cuda, npu"]),
    ("--device npu", ["--device npu: it needs an Ascend 950"]),
    # Sizes, each with the nearest legal value (pages of 128 unless said otherwise).
    ("--page-size 63", ["--page-size 63", "legal: 64, 128"]),
    ("--page-size 256", ["--page-size 256", "legal: 64, 128"]),
    ("--chunked-prefill-size 128", ["--chunked-prefill-size 128", "least legal value is 256"]),
    ("--chunked-prefill-size 128 --page-size 64", ["least legal value is 192"]),
    ("--chunked-prefill-size -1", ["--chunked-prefill-size off", "--deepinfer-exact-prefix"]),
    ("--chunked-prefill-size 64 --deepinfer-exact-prefix", ["--chunked-prefill-size 64", "least legal value is 128"]),
    ("--max-total-tokens 256", ["--max-total-tokens 256", "least legal value is 384"]),
    ("--max-total-tokens 128 --page-size 64", ["--max-total-tokens 128", "least legal value is 256"]),
    ("--max-total-tokens 4096 --context-length 4096", ["--context-length 4096", "least legal value is 4352"]),
    ("--max-running-requests 0", ["--max-running-requests 0", "least legal value is 1"]),
    ("--max-running-requests 100000000", ["--max-running-requests 100000000", "largest legal value"]),
    ("--context-length 999999", ["--context-length 999999", "legal: 1 to 8192"]),
    ("--context-length 0", ["--context-length 0", "legal: 1 to 8192"]),
    ("--mem-fraction-static 0", ["--mem-fraction-static 0", "legal: a number above 0, at most 1"]),
    ("--mem-fraction-static 80", ["--mem-fraction-static 80", "legal: a number above 0, at most 1"]),
    ("--mem-fraction-static 1e-6", ["--mem-fraction-static 1e-06", "cannot serve this model", "least that works"]),
    # Where a server would listen.
    ("--port 99999", ["--port 99999", "cannot listen there"]),
    ("--host 192.0.2.1", ["--host 192.0.2.1", "cannot listen there", "name another"]),
    # Our own switches.
    ("--deepinfer-profile fast", ["--deepinfer-profile='fast'", "legal: model, deepinfer, float32"]),
    ("--deepinfer-provider nowhere", ["--deepinfer-provider='nowhere'", "reference"]),
    ("--deepinfer-ops linear", ["--deepinfer-ops='linear'", "op=provider"]),
    ("--deepinfer-ops liner=reference", ["'liner'", "linear"]),
    ("--deepinfer-cpu-kv-mib 0", ["--deepinfer-cpu-kv-mib='0'", "MiB"]),
]
ACCEPTED = [
    "--page-size 64",
    "--chunked-prefill-size 256",
    "--chunked-prefill-size 128 --deepinfer-exact-prefix",
    "--chunked-prefill-size -1 --deepinfer-exact-prefix",
    "--enable-deterministic-inference",
    "--enable-deterministic-inference --chunked-prefill-size -1",
    "--max-running-requests 1",
    "--context-length 8192",
    "--mem-fraction-static 0.5",
    "--max-total-tokens 384",
    "--max-total-tokens 4352 --context-length 4096",
    "--disable-overlap-schedule",
    "--disable-radix-cache",
    "--attention-backend deepinfer",
    "--dtype bfloat16",
    "--deepinfer-speculation off",
    "--deepinfer-speculation fixed",
    "--deepinfer-speculation scheduled",
    "--deepinfer-speculation fixed --speculative-dspark-block-size 5 --speculative-num-draft-tokens 6",
    "--speculative-algorithm deepinfer_dspark --speculative-num-steps 5 --speculative-eagle-topk 1",
    "--reasoning-parser deepseek-v41 --tool-call-parser deepseekv41",
    "--deepinfer-profile float32 --deepinfer-debug --deepinfer-ops linear=reference",
    "--tp-size 2",
    "--tp-size 2 --ep-size 2 --deepinfer-check-ranks --deepinfer-rank-patience-s 0",
    "--tp-size 2 --dp-size 2 --enable-dp-attention",
    "--tp-size 4 --attn-dp-size 2 --ep-size 4 --chunked-prefill-size 512",
    "--tp-size 2 --enable-eplb --eplb-algorithm deepinfer --eplb-rebalance-num-iterations 20",
    "--tp-size 3 --attn-dp-size 3 --chunked-prefill-size 768 --ep-num-redundant-experts 1",
    f"--tp-size 2 --init-expert-location {_compact({'target': [[*range(15, -1, -1)]] * 10})}",
]


@pytest.fixture(scope="module")
def broken(tiny, tmp_path_factory):
    """Copies of the tiny checkpoint, each with one thing wrong."""
    root = tmp_path_factory.mktemp("broken")

    def copy(name, change=None):
        path = root / name
        shutil.copytree(tiny, path)
        if change is not None:
            config = json.loads((path / "config.json").read_text())
            change(config)
            (path / "config.json").write_text(json.dumps(config))
        return path

    copy("v4", lambda config: config.update(model_type="deepseek_v4", architectures=["DeepseekV4ForCausalLM"]))
    copy("field", lambda config: config["text_config"].update(scoring_func="softmax"))
    copy("window", lambda config: config["text_config"].update(sliding_window=64))
    next(copy("shard").glob("*-00002-of-*.safetensors")).unlink()
    (copy("config") / "config.json").unlink()
    (copy("no tokenizer") / "tokenizer.json").unlink()
    (copy("no tokenizer config") / "tokenizer_config.json").unlink()
    for name, file, text in (
        ("half a tokenizer", "tokenizer.json", (tiny / "tokenizer.json").read_text(encoding="utf-8")[:5000]),
        ("calibration", "dspark_calibration.json", '{"temperatures": [1, 1]}'),
    ):
        (copy(name) / file).write_text(text, encoding="utf-8")
    other = (tiny / "tokenizer.json").read_text(encoding="utf-8").replace("<｜User｜>", "<｜Someone｜>")
    (copy("other tokenizer") / "tokenizer.json").write_text(other, encoding="utf-8")
    return root


BROKEN = {  # copy -> words of the refusal
    "v4": ["ConfigError", "model_type='deepseek_v4'"],
    "field": ["ConfigError", "scoring_func='softmax'"],
    "window": ["ConflictError", "sliding_window=64", "--deepinfer-exact-prefix"],
    "shard": ["CheckpointError", "00002-of"],
    "config": ["ConfigError", "config.json does not exist"],
    "nowhere": ["ConflictError", "not a directory"],
    "no tokenizer": ["ConflictError", "tokenizer.json: missing"],
    "no tokenizer config": ["ConflictError", "tokenizer_config.json: missing"],
    "half a tokenizer": ["ConflictError", "tokenizer.json: "],
    "other tokenizer": ["ConflictError", "tokenizer.json: ", "<｜User｜>"],
    "calibration": ["ConflictError", "dspark_calibration.json", "5 positive numbers"],
}


@pytest.fixture(scope="module")
def answers(tiny, broken):
    """One child process resolves everything."""

    taken = socket.create_server(("127.0.0.1", 0))

    def argv(extra="", path=tiny):
        return ["--model-path", str(path), "--model-impl", "deepinfer", "--port", "0", *extra.split()]

    given = "--page-size 64 --max-running-requests 5 --max-total-tokens 2048 --context-length 1024 "
    given += "--chunked-prefill-size 256 --reasoning-parser deepseek-r1"
    questions = {
        "default": ("resolved", {"argv": argv()}),
        "given": ("resolved", {"argv": argv(given)}),
        "small": ("resolved", {"argv": argv("--max-total-tokens 1000")}),
        "speculation": ("resolved", {"argv": argv("--deepinfer-speculation fixed")}),
        "no speculation": ("resolved", {"argv": argv("--deepinfer-speculation off")}),
        "speculation by SGLang's flag": ("resolved", {"argv": argv("--speculative-algorithm DEEPINFER_DSPARK")}),
        "ranks": ("resolved", {"argv": argv("--tp-size 4 --dp-size 2 --enable-dp-attention --ep-size 4")}),
        "balanced": ("resolved", {"argv": argv("--tp-size 2 --enable-eplb --ep-num-redundant-experts 2")}),
        "exact": ("resolved", {"argv": argv("--deepinfer-exact-prefix --deepinfer-profile float32")}),
        "variables": (
            "resolved",
            {"argv": argv(), "env": {"DEEPINFER_EXACT_PREFIX": "1", "DEEPINFER_CPU_KV_MIB": "2"}},
        ),
        "refused": ("errors", {"argvs": [argv(line) for line, _ in REFUSALS]}),
        "accepted": ("errors", {"argvs": [argv(line) for line in ACCEPTED]}),
        "all at once": (
            "errors",
            {
                "argvs": [
                    argv("--pp-size 2 --enable-lora --page-size 63 --kv-cache-dtype bfloat16"),
                    argv("--context-length 0 --max-running-requests 0 --mem-fraction-static 2 --port 99999"),
                ]
            },
        ),
        "port": ("errors", {"argvs": [argv(f"--port {taken.getsockname()[1]}")]}),
        "deterministic": ("resolved", {"argv": argv("--enable-deterministic-inference")}),
        "variable": ("errors", {"argvs": [argv()], "env": {"DEEPINFER_PROFIL": "float32"}}),
        "broken": (
            "errors",
            {"argvs": [argv(path=broken / name) for name in BROKEN]},
        ),
    }
    with taken:
        return dict(zip(questions, ask(*questions.values()), strict=True))


def test_resolved_arguments(answers, tiny):
    found = answers["default"]
    arguments = found["arguments"]
    print(json.dumps(arguments, indent=1))
    assert {name: arguments[name] for name in EXPECTED} == EXPECTED
    assert arguments["cuda_graph_config"]["prefill"]["backend"] == "disabled"
    assert arguments["cuda_graph_config"]["decode"]["backend"] == "disabled"
    assert found["architecture"] == "DeepInferDeepseekV41ForCausalLM"
    assert found["model_type"] == "deepseek_v41", "picks the V4.1 chat encoding"
    assert found["quantization"] is None and found["multimodal"] is False
    assert found["context"] == V41Config.load(tiny).max_position
    assert found["platform"] == "CpuPlatform"
    assert found["omp_num_threads"] == "1"
    assert found["in_child"], "declarations must reach SGLang's child processes"


EXPECTED = {
    "attention_backend": "deepinfer",
    "chunked_prefill_size": 512,
    "context_length": None,
    "device": "cpu",
    "disable_overlap_schedule": False,
    "disable_radix_cache": False,
    "enable_encoder_swa_bounded_replay": True,
    "grammar_backend": "xgrammar",
    "kv_cache_dtype": "auto",
    "max_running_requests": 32,
    "max_total_tokens": 32 * (8192 + 256),
    "model_config_parser": "deepinfer",
    "page_size": 128,
    "quantization": None,
    "reasoning_parser": "deepseek-v41",
    "sampling_backend": "pytorch",
    "sleep_on_idle": True,
    "speculative_algorithm": "DEEPINFER_DSPARK",
    "tool_call_parser": "deepseekv41",
}


def test_what_the_user_gives_stays(answers):
    arguments = answers["given"]["arguments"]
    assert arguments["page_size"] == 64
    assert arguments["max_running_requests"] == 5
    assert arguments["max_total_tokens"] == 2048
    assert arguments["context_length"] == 1024
    assert arguments["chunked_prefill_size"] == 256
    assert arguments["reasoning_parser"] == "deepseek-r1"


def test_requests_that_a_small_pool_could_never_admit_are_too_long(answers):
    found = answers["small"]
    assert found["arguments"]["max_total_tokens"] == 1000
    assert found["context"] == 896 - 256, "whole pages, less the page SGLang charges and one to generate into"


def test_several_attention_groups(answers):
    """SGLang counts the chunk and the requests of a server, we the pages of a rank."""
    found, alone = answers["ranks"], answers["default"]["arguments"]
    arguments = found["arguments"]
    assert (arguments["tp_size"], arguments["attn_dp_size"], arguments["dp_size"]) == (4, 2, 1)
    assert arguments["chunked_prefill_size"] == alone["chunked_prefill_size"], "of a group"
    assert arguments["max_running_requests"] == alone["max_running_requests"], "of all groups"
    assert arguments["max_total_tokens"] == alone["max_total_tokens"] / 2, "of a rank"
    assert found["in_child"]


def test_experts_are_balanced_by_us(answers):
    """For SGLang there is nothing to balance, so neither its manager nor its recorder starts."""
    arguments = answers["balanced"]["arguments"]
    assert (arguments["enable_eplb"], arguments["ep_num_redundant_experts"]) == (False, 0)
    assert arguments["expert_distribution_recorder_mode"] is None and arguments["init_expert_location"] == "trivial"
    assert answers["balanced"]["in_child"]


def test_exact_mode(answers):
    for name in ("exact", "variables"):
        assert answers[name]["arguments"]["enable_encoder_swa_bounded_replay"] is False
        assert answers[name]["arguments"]["disable_radix_cache"] is True
    assert answers["exact"]["flags"] == {"exact_prefix": "1", "profile": "float32"}
    assert answers["variables"]["arguments"]["max_total_tokens"] < answers["exact"]["arguments"]["max_total_tokens"]


def test_speculation_is_off_if_told_and_if_something_else_excludes_it(answers, tiny):
    assert answers["no speculation"]["arguments"]["speculative_algorithm"] is None
    view = SimpleNamespace(speculative_algorithm=None, enable_watermark=True)
    assert not speculates(view, V41Config.load(tiny), Settings())


@pytest.mark.parametrize("name", ["default", "speculation", "speculation by SGLang's flag"])
def test_speculation_takes_its_numbers_from_the_checkpoint(answers, tiny, name):
    block = V41Config.load(tiny).draft_block
    arguments = answers[name]["arguments"]
    assert arguments["speculative_algorithm"] == "DEEPINFER_DSPARK"
    assert arguments["speculative_num_steps"] == block
    assert arguments["speculative_num_draft_tokens"] == block + 1
    assert arguments["speculative_eagle_topk"] == 1
    assert arguments["disable_overlap_schedule"] is False


@pytest.mark.parametrize("index", range(len(REFUSALS)), ids=[line for line, _ in REFUSALS])
def test_refused_by_name(answers, index):
    error = answers["refused"][index]
    assert error.startswith(("ConflictError", "SettingsError")), error
    assert all(word in error for word in REFUSALS[index][1]), error


@pytest.mark.parametrize("index", range(len(ACCEPTED)), ids=ACCEPTED)
def test_accepted(answers, index):
    assert answers["accepted"][index] == ""


def test_every_conflict_at_once(answers):
    words = (
        ("--pp-size 2", "--enable-lora", "--page-size 63", "--kv-cache-dtype bfloat16"),
        ("--context-length 0", "--max-running-requests 0", "--mem-fraction-static 2", "--port 99999"),
    )
    for error, each in zip(answers["all at once"], words, strict=True):
        assert all(word in error for word in each), error


def test_no_speculation_without_a_draft_head(tiny):
    headless = dataclasses.replace(V41Config.load(tiny), dspark=None)
    given = {f"speculative_{name}": None for name in ("num_steps", "num_draft_tokens", "eagle_topk")}
    given |= {"speculative_dspark_block_size": None, "speculative_dflash_block_size": None}
    view = SimpleNamespace(speculative_algorithm=None, enable_watermark=False, model_path=str(tiny), **given)
    (conflict,) = conflicts.speculation(view, headless, Settings(speculation="fixed"))
    assert "no draft head; legal: auto, off" in conflict
    for mode in ("auto", "off"):
        assert list(conflicts.speculation(view, headless, Settings(speculation=mode))) == []
        assert not speculates(view, headless, Settings(speculation=mode))


def test_memory_that_cannot_hold_the_longest_request(tiny, monkeypatch):
    """It would be accepted and wait for ever. The legal value that is named is legal."""
    config = V41Config.load(tiny)
    given = dict.fromkeys(("page_size", "chunked_prefill_size", "max_total_tokens", "context_length"))
    view = SimpleNamespace(**given, max_running_requests=4, mem_fraction_static=0.25, tp_size=1, attn_dp_size=1)
    memory = (1 << 20) + 5 * StateLayout.of(config).slot_bytes + 41 * PageLayout.of(config, 128).page_bytes
    monkeypatch.setattr(conflicts, "_memory", lambda device, fraction, ranks: memory)
    (conflict,) = conflicts._sizes(view, config, Settings(), 1 << 20, "cpu")
    assert (
        conflict.startswith("--mem-fraction-static 0.25: --context-length 8192: ") and "4 running requests" in conflict
    )
    view.context_length = int(re.search(r"largest legal value is (\d+)", conflict)[1])
    assert 0 < view.context_length < 8192 and not list(conflicts._sizes(view, config, Settings(), 1 << 20, "cpu"))
    view.context_length += 1
    assert list(conflicts._sizes(view, config, Settings(), 1 << 20, "cpu"))


def test_a_mistyped_variable_is_not_ignored(answers):
    (error,) = answers["variable"]
    assert error.startswith("SettingsError: DEEPINFER_PROFIL is not a setting") and "DEEPINFER_PROFILE" in error


@pytest.mark.parametrize("index", range(len(BROKEN)), ids=BROKEN)
def test_checkpoints_are_refused_before_anything_starts(answers, index):
    error, words = answers["broken"][index], list(BROKEN.values())[index]
    assert error.startswith(words[0]) and all(word in error for word in words[1:]), error


def test_a_port_in_use(answers):
    (error,) = answers["port"]
    assert "--port" in error and "cannot listen there" in error and "name another" in error


def test_deterministic_inference_reuses_no_prefix(answers):
    arguments = answers["deterministic"]["arguments"]
    assert arguments["disable_radix_cache"] is True and arguments["enable_encoder_swa_bounded_replay"] is False
    assert arguments["attention_backend"] == "deepinfer" and arguments["sampling_backend"] == "pytorch"


def test_default_pages_on_a_cpu(tiny):
    config, budget = V41Config.load(tiny), 8 << 20
    page_bytes = PageLayout.of(config, 128).page_bytes
    assert cpu_tokens(config, 128, 32, None, budget) == budget // page_bytes * 128, "the budget is the limit"
    assert cpu_tokens(config, 128, 1, None, 1 << 40) == tokens_for_context(8192, 128), "no more than can be filled"
    assert cpu_tokens(config, 128, 32, 8192, 1 << 10) == tokens_for_context(8192, 128), "no less than was asked for"
    assert cpu_tokens(config, 128, 32, None, 1 << 10) == 384, "no less than the least legal number"


def test_settings():
    assert Settings.read({}, {}) == Settings()
    assert Settings.read({"profile": "model"}, {"DEEPINFER_PROFILE": "float32"}).profile == "model", "flags win"
    assert Settings.read({}, {"DEEPINFER_OPS": "linear=reference, rope = reference"}).ops == (
        ("linear", "reference"),
        ("rope", "reference"),
    )
    assert Settings.read({}, {"DEEPINFER_DEBUG": "off"}).debug is False
    with pytest.raises(SettingsError, match="DEEPINFER_DEBUG='maybe' is not supported; legal: 1 or 0"):
        Settings.read({}, {"DEEPINFER_DEBUG": "maybe"})
