"""What speculative decoding brings a server on this machine's CPU: tokens per second without it, with every draft
verified, and scheduled.

    python benchmarks/dspark_cpu.py [--json FILE] [--model-path DIR] [--loads 1,4,16] [--repeats 3]

Three servers run side by side, and every load goes to one after the other, several times over: what else the machine
does meets all three. The prompts are the trained checkpoint's held-out source text and conversations, the answers are
greedy, and the three servers must give the same ones. ``tokens_per_s`` is all output tokens over the time from the
first request to the last answer, prompts included; the middle one of the repeats. ``cpu_ms_a_token`` is the processor
time of the process that computes, which other work on the machine disturbs less than the clock.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import requests
from cpu_smoke import where
from lossless import speculation

from deepinfer_plugin.local_server import LocalServer

TRAINED = Path(__file__).parents[1] / "examples" / "train_tiny"
MODES = {"off": "off", "fixed5": "fixed", "scheduled": "scheduled"}
PROMPT, NEW = 64, 128  # tokens of source text before a continuation; tokens of an answer, unless it ends before
LONGEST = 160  # tokens of a conversation before an answer


def prompts(checkpoint: Path, count: int) -> list[list[int]]:
    """Source text and conversations in turn."""
    sys.path.insert(0, str(TRAINED))
    from heldout import HeldOut, chat_prompts, code_prompts

    text = HeldOut.load(checkpoint)
    code = [prompt[-PROMPT:] for prompt in code_prompts(text.code, count // 2)]
    return [ids for pair in zip(code, chat_prompts(text.chats, count // 2, LONGEST), strict=True) for ids in pair]


def answer(url: str, ids: list[int], tokens: int = NEW, **sampling: Any) -> dict[str, Any]:
    params = {"temperature": 0, "max_new_tokens": tokens, **sampling}
    response = requests.post(f"{url}/generate", json={"input_ids": ids, "sampling_params": params}, timeout=600)
    response.raise_for_status()
    return response.json()


def timed(
    url: str, asked: list[list[int]], load: int, tokens: int = NEW, **sampling: Any
) -> tuple[float, list[dict[str, Any]]]:
    """Seconds until all are answered, ``load`` at a time, from an empty cache, and the answers."""
    requests.post(f"{url}/flush_cache", timeout=60).raise_for_status()
    started = time.perf_counter()
    with ThreadPoolExecutor(load) as pool:
        answers = list(pool.map(lambda ids: answer(url, ids, tokens, **sampling), asked))
    return time.perf_counter() - started, answers


def run(url: str, asked: list[list[int]], load: int) -> tuple[float, list[dict[str, Any]]]:
    """Tokens per second with ``load`` requests at a time, and the answers."""
    seconds, answers = timed(url, asked, load)
    return sum(len(each["output_ids"]) for each in answers) / seconds, answers


def cpu_seconds(server: LocalServer) -> float:
    """Processor time so far of the server's scheduler, which runs the network."""
    assert server.process is not None
    children = psutil.Process(server.process.pid).children(recursive=True)
    return sum(sum(each.cpu_times()[:2]) for each in children if "scheduler" in " ".join(each.cmdline()))


def tokens_a_round(answers: list[dict[str, Any]]) -> float:
    """Tokens per verification, over all answers; 1 without speculation."""
    tokens = rounds = 0
    for each in answers:
        if each["meta_info"].get("spec_verify_ct"):
            tokens += len(each["output_ids"]) - 1  # the first comes from the prefill
            rounds += each["meta_info"]["spec_verify_ct"]
    return tokens / rounds if rounds else 1.0


def table(figures: dict[str, Any]) -> str:
    lines = [
        "| requests | mode | tokens/s | over off | spread | CPU ms a token | tokens a round | rows a request |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for load, modes in figures["loads"].items():
        for mode, found in modes.items():
            bar = "#" * round(8 * found["over_off"])
            lines.append(
                f"| {load} | {mode} | {found['tokens_per_s']:.1f} | {found['over_off']:.2f} `{bar}` | "
                f"{found['spread']:.1%} | {found['cpu_ms_a_token']:.1f} | {found['tokens_a_round']:.2f} | "
                f"{found['rows_a_request']:.2f} |"
            )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-path", type=Path, default=TRAINED / "checkpoint")
    parser.add_argument("--loads", default="1,4,16")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    loads = [int(load) for load in args.loads.split(",")]
    asked = {load: prompts(args.model_path, max(6, 2 * load)) for load in loads}
    rates: dict[tuple[int, str], list[float]] = {(load, mode): [] for load in loads for mode in MODES}
    computed: dict[tuple[int, str], list[float]] = {key: [] for key in rates}
    answers: dict[tuple[int, str], list[dict[str, Any]]] = {}
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        servers = {
            mode: stack.enter_context(
                LocalServer(args.model_path, "--deepinfer-speculation", flag, log=scratch / f"{mode}.log")
            )
            for mode, flag in MODES.items()
        }
        for server in servers.values():
            run(server.url, asked[loads[0]], loads[0])
        for repeat in range(args.repeats):
            for load in loads:
                for mode, server in servers.items():
                    before = cpu_seconds(server)
                    rate, given = run(server.url, asked[load], load)
                    spent = cpu_seconds(server) - before
                    rates[load, mode].append(rate)
                    computed[load, mode].append(1e3 * spent / sum(len(each["output_ids"]) for each in given))
                    answers[load, mode] = given
                    print(f"repeat {repeat}, {load:2d} requests, {mode:9s} {rate:7.1f} tokens/s", flush=True)
    figures: dict[str, Any] = {"loads": {}, "different_answers": 0}
    for load in loads:
        plain = [each["output_ids"] for each in answers[load, "off"]]
        off = statistics.median(rates[load, "off"])
        modes = figures["loads"][str(load)] = {}
        for mode in MODES:
            found, given = rates[load, mode], answers[load, mode]
            figures["different_answers"] += sum(a["output_ids"] != b for a, b in zip(given, plain, strict=True))
            drafts = speculation(given)
            modes[mode] = {
                "tokens_per_s": statistics.median(found),
                "over_off": statistics.median(found) / off,
                "spread": (max(found) - min(found)) / statistics.median(found),
                "cpu_ms_a_token": statistics.median(computed[load, mode]),
                "tokens_a_round": tokens_a_round(given),
                "rows_a_request": 1 + drafts["verified"] / max(1, drafts["verifications"]),
            }
    scheduled = {load: modes["scheduled"]["over_off"] for load, modes in figures["loads"].items()}
    figures |= {"worst_vs_off": min(scheduled.values()), "speedup_at_1": scheduled.get("1")}
    figures["where"] = where()
    print(table(figures))
    print({name: value for name, value in figures.items() if name != "loads"})
    if args.json:
        Path(args.json).write_text(json.dumps(figures, indent=1) + "\n")
    return 1 if figures["different_answers"] else 0


if __name__ == "__main__":
    sys.exit(main())
