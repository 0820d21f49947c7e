"""``--eplb-algorithm deepinfer`` through SGLang's own argument parser, rebalance and metadata, on a CPU, without a
server."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

CHILD = """
import json, sys
import torch
from sglang.srt.eplb import eplb_algorithms, expert_location
from sglang.srt.eplb.expert_location import ExpertLocationMetadata, ModelConfigForExpertLocation
from sglang.srt.plugins import load_plugins
from sglang.srt.runtime_context import get_context
from sglang.srt.server_args import prepare_server_args
from deepinfer_plugin.eplb import policy

torch.set_num_threads(1)
LAYERS, EXPERTS, RANKS, SPARE = 3, 8, 4, 4
argv = ["--model-path", sys.argv[1], "--device", "cpu", "--tp", "4", "--ep", "4", "--enable-eplb"]
argv += ["--ep-num-redundant-experts", str(SPARE), "--eplb-algorithm"]


def resolve(algorithm):
    args = prepare_server_args([*argv, algorithm])
    args.resolve_once()
    return args.resolved_dict()


def rebalance(algorithm, current=None, dispatch="dynamic"):
    calls.clear()
    ModelConfigForExpertLocation.from_model_config = staticmethod(
        lambda config: ModelConfigForExpertLocation(num_layers=LAYERS, num_logical_experts=EXPERTS)
    )
    expert_location.get_global_expert_location_metadata = lambda: current
    fields = dict(eplb_algorithm=algorithm, ep_num_redundant_experts=SPARE, ep_dispatch_algorithm=dispatch)
    with get_context().override_server_args(device="cpu", tp_size=RANKS, ep_size=RANKS, **fields):
        return ExpertLocationMetadata.init_by_eplb(None, counts)


def tables(found):
    return {
        "physical_to_logical": found.physical_to_logical_map.tolist(),
        "logical_to_physical": found.logical_to_all_physical_map.tolist(),
        "replicas": found.logical_to_all_physical_map_num_valid.tolist(),
        "calls": list(calls),
    }


calls = []
true_place = policy.place
def place(counts, *args, **kwargs):
    calls.append([list(counts.shape), kwargs["even_split"], args[3] is not None])
    return true_place(counts, *args, **kwargs)
policy.place = place

counts = torch.poisson(torch.full((20, LAYERS, EXPERTS), 50.0), generator=torch.Generator().manual_seed(0)).int()
counts[:, :, 5] *= 6
counts[12:] = 0  # the ring is not full yet
others = ("deepseek", "deepseek_vec")
answer = {"stock": {name: tables(rebalance(name)) for name in others}}
try:
    rebalance("deepinfer")
except KeyError as error:
    answer["unknown"] = str(error)
load_plugins()
answer["argument"] = resolve("deepinfer")["eplb_algorithm"]
answer["with us"] = {name: tables(rebalance(name)) for name in others}
first = rebalance("deepinfer")
answer["first"] = tables(first)
answer["again"] = tables(rebalance("deepinfer", first))
answer["lp"] = tables(rebalance("deepinfer", first, "lp"))
torch.distributed.init_process_group("gloo", init_method=sys.argv[2], rank=0, world_size=1)
answer["distributed"] = tables(rebalance("deepinfer"))
print(json.dumps(answer))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The config of a small mixture of experts that is none of ours."""
    path = tmp_path_factory.mktemp("moe")
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 64,
        "intermediate_size": 128,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "vocab_size": 512,
        "max_position_embeddings": 2048,
        "torch_dtype": "bfloat16",
    }
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


@pytest.fixture(scope="module")
def answer(model, tmp_path_factory):
    """One child process, before and after it loads plugins."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD, model, f"file://{tmp_path_factory.mktemp('meeting') / 'file'}"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_the_argument_is_accepted(answer):
    assert answer["argument"] == "deepinfer"


def test_rebalance_calls_our_policy(answer):
    assert answer["first"]["calls"] == [[[12, 3, 8], True, False]], "steps that nobody recorded are left out"
    assert answer["again"]["calls"] == [[[12, 3, 8], True, True]], "the placement in force is the start"
    assert answer["lp"]["calls"] == [[[12, 3, 8], False, True]], "SGLang's LP dispatch does not split evenly"
    assert answer["again"]["physical_to_logical"] == answer["first"]["physical_to_logical"]
    assert answer["distributed"]["physical_to_logical"] == answer["first"]["physical_to_logical"]


@pytest.mark.parametrize("case", ["first", "again", "lp"])
def test_the_three_tables_agree(answer, case):
    found = answer[case]
    for physical, logical, replicas in zip(
        found["physical_to_logical"], found["logical_to_physical"], found["replicas"], strict=True
    ):
        for expert, row in enumerate(logical):
            where = [slot for slot, holds in enumerate(physical) if holds == expert]
            assert [slot for slot in row if slot >= 0] == where and replicas[expert] == len(where) >= 1
        assert max(replicas) == replicas[5], "the busiest expert has most replicas"


def test_nothing_changes_for_other_algorithms(answer):
    assert answer["with us"] == answer["stock"]
    assert all(found["calls"] == [] for found in answer["stock"].values())
    assert "deepinfer" in answer["unknown"], "stock SGLang does not know the name"
