"""How SGLang gets to know us, and that it does not when it should not."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from deepinfer_plugin import patches, platform
from deepinfer_plugin.model_impl import ARCHITECTURE
from deepinfer_plugin.patches import administration
from deepinfer_plugin.patches.bad_requests import MOST_ANSWERS, generate_request, validate_one_request
from deepinfer_plugin.patches.replayed_tokens import update_request_meta_info

from .probes import ask

REQUIRED = {hook.name for hook in patches.HOOKS if hook.required}


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """The config of a tiny model that is none of ours."""
    path = tmp_path_factory.mktemp("llama")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "torch_dtype": "bfloat16",
    }
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


@pytest.fixture(scope="module")
def answers(llama, tiny):
    """One child process answers everything that needs SGLang as installed."""
    ours = ["--model-path", str(tiny), "--model-impl", "deepinfer", "--port", "0"]
    stock = ["--model-path", llama, "--attention-backend", "torch_native"]
    questions = {
        "hooks": ("hooks", {}),
        "wrapped": ("hooks", {"other_plugin": "AROUND"}),
        "replaced": ("hooks", {"other_plugin": "REPLACE"}),
        "off": ("hooks", {"env": {"DEEPINFER_DISABLE_HOOKS": "page_pool, replayed_tokens"}}),
        "required off": ("errors", {"argvs": [ours], "env": {"DEEPINFER_DISABLE_HOOKS": "page_pool"}}),
        "optional off": ("errors", {"argvs": [ours], "env": {"DEEPINFER_DISABLE_HOOKS": "replayed_tokens"}}),
        "unknown hook": ("errors", {"argvs": [ours], "env": {"DEEPINFER_DISABLE_HOOKS": "pagepool"}}),
        "unselected": ("applied", {"env": {"SGLANG_PLUGINS": "__none__"}}),
        "platform": ("platform", {}),
        "stock": ("resolved", {"argv": stock, "plugins": False}),
        "with us": ("resolved", {"argv": stock, "plugins": True}),
        "wrong model": ("errors", {"argvs": [["--model-path", llama, "--model-impl", "deepinfer"]]}),
        "stock v41": ("resolved", {"argv": ["--model-path", str(tiny), "--attention-backend", "torch_native"]}),
    }
    return dict(zip(questions, ask(*questions.values()), strict=True))


def test_importing_the_package_costs_nothing():
    code = "import sys\nfrom deepinfer_plugin import model_impl, patches, settings\n"
    code += "print([name for name in ('torch', 'sglang', 'numpy') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# ---- hooks ---------------------------------------------------------------------------------------------------------


def test_every_hook_is_in_place(answers):
    assert answers["hooks"] == {hook.name: "in place" for hook in patches.HOOKS}


def test_every_hook_has_its_own_target_and_a_reason():
    assert (
        len({hook.target for hook in patches.HOOKS}) == len({hook.name for hook in patches.HOOKS}) == len(patches.HOOKS)
    )
    assert all(hook.why and hook.target.startswith("sglang.srt.") for hook in patches.HOOKS)


def test_a_second_plugin_on_the_same_targets(answers):
    assert set(answers["wrapped"].values()) == {"in place"}, "another wrapper around ours does not switch ours off"
    assert set(answers["replaced"].values()) == {"missing"}, "a replacement does, although it claims to wrap ours"


def test_switching_hooks_off(answers):
    off = {name for name, state in answers["off"].items() if state == "switched off"}
    assert off == {"page_pool", "replayed_tokens"}
    (error,) = answers["required off"]
    assert error.startswith("HookError") and "page_pool" in error and "_build_token_to_kv_pool" in error
    assert answers["optional off"] == [""]
    (error,) = answers["unknown hook"]
    assert error.startswith("SettingsError: DEEPINFER_DISABLE_HOOKS='pagepool'")
    assert all(name in error for name in REQUIRED)


# ---- staying out of the way ----------------------------------------------------------------------------------------


def test_inert_without_the_flag(answers):
    assert answers["with us"] == {**answers["stock"], "flags": {}}


def test_a_v41_checkpoint_without_the_flag_is_sglangs(answers):
    found = answers["stock v41"]
    assert found["architecture"] == "DeepseekV4ForCausalLM"
    assert found["arguments"]["model_config_parser"] == "auto"


def test_the_flag_on_another_model_is_refused(answers):
    (error,) = answers["wrong model"]
    assert error.startswith("ConfigError") and "model_type='llama'" in error and "deepseek_v41" in error


def test_plugins_not_selected(answers):
    assert answers["unselected"] == []


def test_another_sglang_is_left_alone(monkeypatch, llama):
    for version in (None, "0.5.22", "0.6.0"):
        monkeypatch.setattr(patches, "sglang_version", lambda version=version: version)
        assert f"installed is {version or 'none'}" in patches.unsupported_sglang()

    stock = [
        "--model-path",
        llama,
        "--model-impl",
        "deepinfer",
        "--attention-backend",
        "torch_native",
        "--device",
        "cpu",
    ]
    questions = ("warnings", {}), ("applied", {}), ("resolved", {"argv": stock}), ("platform", {})
    warnings, applied, found, system = ask(*questions, sglang="0.6.0")
    (warning,) = warnings
    assert f"supports sglang=={patches.SGLANG_VERSION}, installed is 0.6.0" in warning
    assert applied == []
    assert found["architecture"] == "LlamaForCausalLM"
    assert system["name"] == "SRTPlatform"


# ---- platform ------------------------------------------------------------------------------------------------------


def test_the_cpu_platform_activates_by_itself(answers):
    assert answers["platform"] == {"name": "CpuPlatform", "device": "cpu", "out_of_tree": True, "triton": False}


def test_an_accelerator_keeps_its_own_platform(monkeypatch):
    import torch

    assert platform.choose() == "deepinfer_plugin.platform.cpu.CpuPlatform"
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    assert platform.choose() is None, "SGLang's own CPU engine was asked for"
    monkeypatch.delenv("SGLANG_USE_CPU_ENGINE")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    assert platform.choose() is None


# ---- hooks on requests ---------------------------------------------------------------------------------------------


def test_replayed_tokens_is_one_number_however_it_is_streamed():
    state, passed = SimpleNamespace(), []

    def original(self, meta_info, state, customized_info, index, finish_reason):
        passed.append(customized_info)

    def chunk(values):
        meta_info = {}
        update_request_meta_info(
            original, None, meta_info, state, {"replayed_tokens": [[7], values], "x": [1, 2]}, 1, None
        )
        return meta_info["replayed_tokens"]

    assert [chunk([128]), chunk([]), chunk([None, None])] == [128, 128, 128]
    assert passed == [{"x": [1, 2]}] * 3, "SGLang slices what it accumulates itself; a number cannot be sliced"
    meta_info = {}
    update_request_meta_info(original, None, meta_info, state, {"x": [1, 2]}, 1, None)
    assert meta_info == {}, "nothing of ours without the scheduler's number"


def test_prompts_the_network_cannot_read_are_refused():
    def manager(architecture):
        config = SimpleNamespace(hf_config=SimpleNamespace(architectures=[architecture]), vocab_size=10)
        return SimpleNamespace(model_config=config)

    def check(input_ids, architecture=ARCHITECTURE):
        validate_one_request(lambda *args: None, manager(architecture), None, input_ids)

    check([0, 9])
    for nothing in (None, []):
        with pytest.raises(ValueError, match="the prompt is empty"):
            check(nothing)
    with pytest.raises(ValueError, match="input_embeds is not supported"):
        validate_one_request(lambda *args: None, manager(ARCHITECTURE), SimpleNamespace(input_embeds=[[0.0]]), [1])
    for wrong in ([3, 10], [-1, 3]):
        with pytest.raises(
            ValueError, match=rf"input_ids contains {wrong[0] if wrong[0] < 0 else wrong[1]}; legal: 0 to 9"
        ):
            check(wrong)
    check([3, 10], "LlamaForCausalLM")
    check([], "LlamaForCausalLM")


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"image_data": "data:image/png;base64,"}, "image_data is not supported .* text only"),
        ({"audio_data": ["a.wav"]}, "audio_data is not supported"),
        ({"top_logprobs_num": 11}, "top_logprobs_num 11 .*legal: 0 to 10"),
        ({"top_logprobs_num": -1}, "top_logprobs_num -1 .*legal: 0 to 10"),
        ({"sampling_params": {"stop_regex": "(["}}, r"stop_regex '\(\[' is no regular expression"),
        ({"sampling_params": {"stop_regex": ["a", "*"]}}, "stop_regex .* is no regular expression"),
        ({"sampling_params": {"stop_regex": "(x+x+)+y"}}, "repeats within a repeat"),
        ({"sampling_params": {"stop_regex": ["a", "b(?:c|(?P<d>e*?f))*"]}}, "repeats within a repeat"),
        ({"sampling_params": {"stop_regex": "(a{0,50}){200}(a*)*"}}, "repeats within a repeat"),
    ],
)
def test_requests_that_would_end_or_block_the_server(asked, words):
    config = SimpleNamespace(hf_config=SimpleNamespace(architectures=[ARCHITECTURE]), vocab_size=10)
    manager = SimpleNamespace(model_config=config)
    with pytest.raises(ValueError, match=words):
        validate_one_request(lambda *args: None, manager, SimpleNamespace(**asked), [1])
    fine = {
        "top_logprobs_num": 10,
        "image_data": [None],
        "sampling_params": {"n": MOST_ANSWERS, "stop_regex": ["a+", "(b|c)", "(a+b){1,9}c*", "[+*]+(?=d+)"]},
    }
    validate_one_request(lambda *args: None, manager, SimpleNamespace(**fine), [1])


@pytest.mark.parametrize("asked", [{"n": 0}, {"n": 100_000}, [{"n": 2}, {"n": -1}]])
def test_answers_are_counted_before_they_become_requests(asked):
    """SGLang copies a request as often as it is to be answered, which takes minutes for a million."""

    def send(architecture, sampling):
        config = SimpleNamespace(hf_config=SimpleNamespace(architectures=[architecture]))
        obj = SimpleNamespace(sampling_params=sampling)
        return generate_request(lambda *_: "sent", SimpleNamespace(model_config=config), obj)

    with pytest.raises(ValueError, match=f"legal: 1 to {MOST_ANSWERS}"):
        send(ARCHITECTURE, asked)
    assert send("LlamaForCausalLM", asked) == "sent"
    assert send(ARCHITECTURE, {"n": MOST_ANSWERS}) == send(ARCHITECTURE, None) == send(ARCHITECTURE, [{}]) == "sent"


@pytest.mark.parametrize("hook", administration.HOOKS, ids=lambda hook: hook.name)
def test_administration_that_would_end_the_server(hook):
    async def original(self):
        return "done"

    def answer(architecture):
        config = SimpleNamespace(hf_config=SimpleNamespace(architectures=[architecture]))
        return asyncio.run(hook.around(original, SimpleNamespace(model_config=config)))

    assert answer("LlamaForCausalLM") == "done"
    if "memory" in hook.name:
        with pytest.raises(ValueError, match="releasing memory is not supported"):
            answer(ARCHITECTURE)
    else:
        success, message, *_ = answer(ARCHITECTURE)
        assert not success and "replacing weights is not supported" in message
