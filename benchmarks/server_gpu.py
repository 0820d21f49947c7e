"""A server on one NVIDIA GPU with six layers of the released shapes, one of each kind, and the draft stages: tokens per
second and the time of a step, scheduled speculation beside none, tokens beside the library's.

    python benchmarks/server_gpu.py DIR [--experts 384] [--requests 64] [--prompt 512] [--output 256] [--json FILE]

Writes a random checkpoint into DIR if none is there (52 GB with 384 experts: a tmpfs is fastest). Its head favours one
successor of every token, so that some drafts come true; how many says nothing about the released model. All requests
run at the same time and answer greedily. A rate is that of the tokens beyond the first 32 of each answer, so that
prefill is not in it; a step is a round of verification and drafting. ``tokens_equal``: short answers of the server, of
the library on the cuda provider and on the reference provider, all on this GPU.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from cuda_timing import machine
from dspark_cpu import answer, timed, tokens_a_round
from lossless import speculation
from tokenizers import Tokenizer

from deepinfer_plugin.local_server import LocalServer
from deepinfer_plugin.model import V41
from deepinfer_plugin.model.engram_table import table_rows, token_classes
from deepinfer_plugin.model.released import RELEASED
from deepinfer_plugin.model.tiny import write_random
from deepinfer_plugin.model.tiny_tokenizer import BOS, EOS, IMAGE, NOISE, PAD, build_tokenizer

COMPARED = 12  # tokens of the answers that must be equal
SKIPPED = 32  # tokens of an answer before the clock counts
ENGRAM_VOCAB = 250_000  # of 16 million: tables of 3.2 GB, not 198
MODES = {  # rounding profile, flags
    "off": ("model", "--deepinfer-speculation", "off"),
    "scheduled": ("model",),
    "fast": ("deepinfer",),  # scheduled, with the fast class of products and experts
}


def wide_tokenizer(size: int) -> Tokenizer:
    """Of ``size`` ids, most of which no text becomes. (As special tokens they would take a minute to load.)"""
    small = build_tokenizer(4096)
    content = json.loads(small.to_str())
    content["model"]["vocab"] |= {f"<unused {token}>": token for token in range(small.get_vocab_size(), size)}
    return Tokenizer.from_str(json.dumps(content))


def six_layers(experts: int) -> tuple[dict[str, Any], Tokenizer]:
    """config.json: window only, the same with Engram, a source of pairs with Engram, one of its readers, a source of
    single tokens and of candidates, a second index source among those."""
    raw, tokenizer = copy.deepcopy(RELEASED), wide_tokenizer(RELEASED["text_config"]["vocab_size"])
    ids = {name: tokenizer.token_to_id(name) for name in (BOS, EOS, PAD, IMAGE, NOISE)}
    text = raw["text_config"]
    text |= {
        "num_hidden_layers": 6,
        "compress_ratios": [0, 0, 2, 2, 1, 1, 0, 0, 0],
        "kv_source_layer_ids": [2, 4],
        "index_source_layer_ids": [2, 4, 5],
        "candidate_source_layer_id": 4,
        "engram_layer_ids": [1, 2],
        "engram_num_embeddings": table_rows(2, text["engram_max_ngram_size"], text["engram_n_heads"], ENGRAM_VOCAB),
        "engram_vocab_size": ENGRAM_VOCAB,
        "engram_compressed_vocab_size": max(token_classes(tokenizer)) + 1,
        "engram_pad_token_id": ids[PAD],
        "dspark_target_layer_ids": [3, 4, 5],
        "dspark_noise_token_id": ids[NOISE],
        "n_routed_experts": experts,
        "dspark_n_routed_experts": max(experts // 3, 3),
    }
    raw |= {"image_token_id": ids[IMAGE], "bos_token_id": ids[BOS], "eos_token_id": ids[EOS], "pad_token_id": ids[PAD]}
    return raw, tokenizer


def rounds(answers: list[dict[str, Any]]) -> int:
    """Steps of the request that took most."""
    return max(
        each["meta_info"].get("spec_verify_ct") or each["meta_info"]["completion_tokens"] - 1 for each in answers
    )


def measure(url: str, prompts: list[list[int]], output: int) -> dict[str, Any]:
    timed(url, prompts, len(prompts), SKIPPED, ignore_eos=True)
    short, first = timed(url, prompts, len(prompts), SKIPPED, ignore_eos=True)
    long, answers = timed(url, prompts, len(prompts), output, ignore_eos=True)
    seconds = long - short
    drafts = speculation(answers)
    return {
        "tokens_per_s": len(prompts) * (output - SKIPPED) / seconds,
        "step_ms": 1e3 * seconds / (rounds(answers) - rounds(first)),
        "with_prefill_tokens_per_s": len(prompts) * output / long,
        "rows_a_request": 1 + drafts["verified"] / max(1, drafts["verifications"]),
        "tokens_a_round": tokens_a_round(answers),
    }


def of_library(path: Path, provider: str, profile: str, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    model = V41.load(path, provider, profile, device="cuda")
    found = [model.generate(ids, tokens, ignore_eos=True) for ids in prompts]
    del model
    gc.collect()
    torch.cuda.empty_cache()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, metavar="DIR")
    parser.add_argument("--experts", type=int, default=384)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--output", type=int, default=256)
    parser.add_argument("--modes", default=",".join(MODES), help="of the servers, one after the other")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if not (args.path / "config.json").exists():
        started = time.perf_counter()
        write_random(args.path, *six_layers(args.experts), device="cuda")
        gc.collect()
        torch.cuda.empty_cache()
        print(f"written in {time.perf_counter() - started:.0f} s", flush=True)
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(3, 1200, (args.requests, args.prompt), generator=generator).tolist()
    short = [ids[: 20 + 7 * i] for i, ids in enumerate(prompts[:2])]
    shape = {name: getattr(args, name) for name in ("experts", "requests", "prompt", "output")}
    figures: dict[str, Any] = {**machine(), **shape, "modes": {}, "tokens_equal": {}}
    told: dict[str, list[list[int]]] = {}
    room = 128 * (2 + args.requests * (2 + (args.prompt + args.output) // 128))  # whole pages
    flags = ("--max-running-requests", str(args.requests), "--max-total-tokens", str(room))
    with tempfile.TemporaryDirectory() as scratch:
        for mode in args.modes.split(","):
            profile, *more = MODES[mode]
            own = (*flags, *more, "--deepinfer-profile", profile)
            with LocalServer(args.path, *own, log=Path(scratch) / "server.log", timeout_s=300) as server:
                told[mode] = [answer(server.url, ids, COMPARED, ignore_eos=True)["output_ids"] for ids in short]
                figures["modes"][mode] = {"ready_s": server.ready_s, **measure(server.url, prompts, args.output)}
            found = figures["modes"][mode]
            print(f"{mode:10}" + "".join(f" {name} {value:.2f}" for name, value in found.items()), flush=True)
    for profile in dict.fromkeys(MODES[mode][0] for mode in told):
        for provider in ("auto", "reference"):
            want = of_library(args.path, provider, profile, short, COMPARED)
            for mode in (mode for mode in told if MODES[mode][0] == profile):
                same = sum(a == b for x, y in zip(told[mode], want, strict=True) for a, b in zip(x, y, strict=True))
                figures["tokens_equal"][f"{mode}, {provider}"] = f"{same} of {sum(map(len, want))}"
    print(figures["tokens_equal"])
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
