"""Servers of several ranks against one rank, on the trained small model.

    python benchmarks/ranks.py [--forms NAME,...] [--json FILE]

For each parallel form, with speculation and without: a server on this machine's CPU, held-out code and chat prompts at
once and one at a time, greedy. ``tokens_equal``: every answer is the library's on one rank. In the form whose name says
so, experts move at random every 20 steps. Seconds are printed for the record; with several ranks on two cores they say
little about anything else. ``stall_ratio``: how much longer a step takes while experts move (``rebalancing.py``).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import rebalancing
import requests

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples" / "train_tiny"))

from heldout import HeldOut, chat_prompts, code_prompts  # noqa: E402

from deepinfer_plugin.local_server import LocalServer, ServerDied  # noqa: E402
from deepinfer_plugin.model import V41  # noqa: E402

CHECKPOINT = ROOT / "examples" / "train_tiny" / "checkpoint"
GROUPS = ("--dp-size", "2", "--enable-dp-attention")
RESTLESS = ("--enable-eplb", "--ep-num-redundant-experts", "4", "--eplb-rebalance-num-iterations", "20")
FORMS = {
    "TP2": ("--tp-size", "2"),
    "TP2xEP2": ("--tp-size", "2", "--ep-size", "2"),
    "DP2xEP2": ("--tp-size", "2", *GROUPS, "--ep-size", "2"),
    "DP2xTP2xEP4": ("--tp-size", "4", *GROUPS, "--ep-size", "4"),
    "DP2xTP2xEP4 restless": ("--tp-size", "4", *GROUPS, "--ep-size", "4", *RESTLESS),
}
SPECULATION = {"speculation": "auto", "no speculation": "off"}
EACH, NEW = 4, 48  # prompts of each kind, most tokens of an answer


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--forms", default=",".join(FORMS), help=f"some of {', '.join(FORMS)}")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    held_out, model = HeldOut.load(CHECKPOINT), V41.load(CHECKPOINT)
    prompts = code_prompts(held_out.code, EACH) + chat_prompts(held_out.chats, EACH)
    right = [model.generate(prompt, NEW) for prompt in prompts]

    found: dict[str, Any] = {}
    for form in args.forms.split(","):
        for name, mode in SPECULATION.items():
            what = f"{form}, {name}"
            try:
                equal, ready, seconds = serve((*FORMS[form], "--deepinfer-speculation", mode), prompts, right)
            except (ServerDied, TimeoutError, requests.RequestException) as error:
                found[what] = False
                print(f"{what:28} no answer: {error}", flush=True)
                continue
            found[what] = equal
            verdict = "equal" if equal else "DIFFERENT"
            print(f"{what:28} {verdict}, ready in {ready:.0f} s, {seconds:.0f} s to answer", flush=True)
    stall = rebalancing.measure()
    print(f"a step takes up to {stall['stall_ratio']:.2f} times the median while experts move", flush=True)
    if args.json:
        counts = {"prompts": len(prompts), "tokens": sum(map(len, right))}
        args.json.write_text(json.dumps({"tokens_equal": found, **counts, **stall}, indent=1))
    return 0 if all(found.values()) else 1


def serve(flags: tuple[str, ...], prompts: list[list[int]], right: list[list[int]]) -> tuple[bool, float, float]:
    """Whether the server's answers are right, all at once and one at a time; seconds to start, and to answer."""
    with tempfile.TemporaryDirectory() as folder:
        checks = ("--max-running-requests", "8", "--deepinfer-check-ranks")
        env = {"OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": folder, "DEEPINFER_SHUFFLE_EXPERTS": "1"}
        with LocalServer(CHECKPOINT, *flags, *checks, log=Path(folder) / "log", env=env) as server:

            def ask(prompt: list[int]) -> list[int]:
                body = {"input_ids": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": NEW}}
                return requests.post(f"{server.url}/generate", json=body, timeout=600).json()["output_ids"]

            start = time.monotonic()
            with ThreadPoolExecutor(len(prompts)) as pool:
                together = list(pool.map(ask, prompts))
            one_by_one = [ask(prompt) for prompt in prompts[::3]]
            return together == right and one_by_one == right[::3], server.ready_s, time.monotonic() - start


if __name__ == "__main__":
    sys.exit(main())
