"""Starting: a checkpoint that cannot be served stops the command, and other models are SGLang's own business."""

from __future__ import annotations

import shutil

import pytest
import requests

from deepinfer_plugin.local_server import LocalServer, ServerDied

from .reference import random_ids, same
from .serving import CHECKS, GRACE_S


def test_a_truncated_checkpoint_stops_the_command(tiny, tmp_path):
    """(``tests/model/test_checkpoint.py`` breaks it in every other way.)"""
    broken = tmp_path / "broken"
    shutil.copytree(tiny, broken)
    shard = sorted(broken.glob("*.safetensors"))[-1]
    shard.write_bytes(shard.read_bytes()[:-1000])
    server = LocalServer(broken, log=tmp_path / "server.log")
    server.start()
    with pytest.raises(ServerDied, match="exited with 1\n") as died:
        server.wait_ready()
    assert f"error: {broken}: 1 problem" in str(died.value) and f"{shard.name}: file is truncated" in str(died.value)
    assert "Traceback" not in server.log.read_text()


@pytest.fixture(scope="module")
def llama(tiny, tmp_path_factory):
    """A tiny model that SGLang implements itself, with our tokenizer."""
    transformers = pytest.importorskip("transformers")
    path = tmp_path_factory.mktemp("llama")
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=1280,
        max_position_embeddings=2048,
        initializer_range=0.2,
        bos_token_id=0,
        eos_token_id=1,
    )
    transformers.set_seed(0)
    model = transformers.LlamaForCausalLM(config).float().eval()
    model.save_pretrained(path)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny / file, path)
    return path, model


@pytest.mark.usefixtures("servers")  # of which the first starts beside this one
def test_without_the_flag_sglang_serves_its_own_models(llama, tmp_path):
    """Nothing of ours but the platform, without which it has no way to run here. Right tokens, and not one argument,
    pool or field of ours."""
    path, model = llama
    flags = ("--attention-backend", "torch_native", "--dtype", "float32", "--max-total-tokens", "4096")
    env = {name: value for name, value in CHECKS.items() if name != "DEEPINFER_DEBUG"}
    with LocalServer(path, *flags, log=tmp_path / "server.log", env=env, model_impl=None) as server:
        info = requests.get(f"{server.url}/server_info", timeout=60).json()
        prompts = [random_ids(length, seed=70) for length in (3, 130, 300)]
        body = {"input_ids": prompts, "sampling_params": {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}}
        answers = requests.post(f"{server.url}/generate", json=body, timeout=240).json()
        again = requests.post(f"{server.url}/generate", json=body, timeout=240).json()
        log = server.log.read_text(errors="replace")
        server.stop(GRACE_S)
    import torch

    for ids, answer, hit in zip(prompts, answers, again, strict=True):
        expected = model.generate(torch.tensor([ids]), max_new_tokens=8, min_new_tokens=8, do_sample=False)
        same(answer["output_ids"], expected[0, len(ids) :].tolist(), f"prompt of {len(ids)}")
        assert hit["output_ids"] == answer["output_ids"]
        assert hit["meta_info"]["cached_tokens"] == len(ids) - 1, "single tokens are cached, not pages of ours"
        assert "replayed_tokens" not in hit["meta_info"]
    assert info["model_impl"] == "auto" and info["model_config_parser"] == "auto"
    assert info["page_size"] == 1 and not info["enable_encoder_swa_bounded_replay"] and not info["sleep_on_idle"]
    assert "deepinfer declares" not in log and "deepinfer memory" not in log
