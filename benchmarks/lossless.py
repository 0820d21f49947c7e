"""Does a server that speculates sample from the network's own distribution?

    python benchmarks/lossless.py [--draws 20000] [--json FILE] [--model-path DIR] [--flags ...]

A server with default flags, or those after ``--flags`` (the last argument), continues a few tokens of source text by
four more, over and over, at two temperatures with top_p 0.9. The first token comes from the prefill, the others from
verifications, and Pearson's chi-square test compares them with what the library says: all pairs of tokens 1 and 2,
token 3 after the most frequent pair, token 4 after the most frequent three. Exit 1 if a p-value is below 1e-4.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import requests
import torch
from chi_square import LEAST, p_value
from cpu_smoke import where
from tokenizers import Tokenizer
from torch import Tensor

from deepinfer_plugin.local_server import LocalServer
from deepinfer_plugin.model import V41
from deepinfer_plugin.runtime.seeded_draw import filtered

TRAINED = Path(__file__).parents[1] / "examples" / "train_tiny" / "checkpoint"
TEXT = "class A("  # what follows is open, and yet drafts are often right
TEMPERATURES, TOP_P = (0.7, 1.0), 0.9
NEW, EACH = 4, 32  # tokens of a draw, draws of a request
AT_ONCE = 2  # requests: while one ends the next one's draws join
IMPROBABLE = 1e-4

Tokens = tuple[int, ...]
After = Callable[[Tokens], Tensor]  # float64 [vocab] probabilities of the token that follows


def prefix_of(path: Path) -> list[int]:
    return Tokenizer.from_file(str(path / "tokenizer.json")).encode(TEXT, add_special_tokens=False).ids


def target(model: V41, prefix: Sequence[int], temperature: float) -> After:
    """What the token after ``prefix`` and some more is sampled from."""
    limits = torch.tensor([1 << 30]), torch.tensor([TOP_P]), torch.tensor([0.0])

    @cache
    def after(tokens: Tokens) -> Tensor:
        ranked, order = filtered(torch.softmax(model.logits([*prefix, *tokens])[-1:] / temperature, -1), *limits)
        weights = torch.zeros_like(ranked).scatter(1, order, ranked)[0].double()
        return weights / weights.sum()

    return after


def draw(url: str, prefix: Sequence[int], temperature: float, count: int) -> list[dict[str, Any]]:
    """``count`` answers of the server, a multiple of ``EACH``."""
    sampling = {"temperature": temperature, "top_p": TOP_P, "n": EACH, "max_new_tokens": NEW, "ignore_eos": True}

    def ask(_: int) -> list[dict[str, Any]]:
        body = {"input_ids": list(prefix), "sampling_params": sampling}
        response = requests.post(f"{url}/generate", json=body, timeout=600)
        response.raise_for_status()
        return response.json()

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return [answer for answers in pool.map(ask, range(count // EACH)) for answer in answers]


def p_values(drawn: Sequence[Tokens], after: After) -> dict[str, float]:
    """Of draws of ``NEW`` tokens, by what is tested."""
    first = after(())
    common = (first * len(drawn) >= LEAST).nonzero()[:, 0].tolist()
    rare = first.clone()
    rare[common] = 0
    # A row for each common first token, by what follows, and one for all others, which are pooled whatever follows.
    expected = torch.stack([*(first[token] * after((token,)) for token in common), rare])
    observed, row = torch.zeros_like(expected), {token: index for index, token in enumerate(common)}
    for one, two, *_ in drawn:
        observed[(row[one], two) if one in row else (-1, one)] += 1
    found = {"tokens 1-2": p_value(observed, expected * len(drawn))}
    for length in range(2, NEW):
        ((head, _),) = Counter(tokens[:length] for tokens in drawn).most_common(1)
        following = [tokens[length] for tokens in drawn if tokens[:length] == head]
        observed = torch.bincount(torch.tensor(following), minlength=len(first))
        found[f"token {length + 1}"] = p_value(observed, after(head) * len(following))
    return found


def speculation(answers: Sequence[dict[str, Any]]) -> dict[str, int]:
    """Verifications of one request, and drafts in them that were verified and right."""
    metas = [answer["meta_info"] for answer in answers]
    rounds = [meta.get("spec_verify_ct", 0) for meta in metas]
    rows = [round(meta.get("spec_cap_length", 1) * count) for meta, count in zip(metas, rounds, strict=True)]
    accepted = sum(meta.get("spec_num_correct_drafts", 0) for meta in metas)
    return {"verifications": sum(rounds), "verified": sum(rows) - sum(rounds), "accepted": accepted}


def compare(url: str, model: V41, prefix: Sequence[int], temperature: float, count: int) -> dict[str, Any]:
    """Everything about one temperature."""
    answers = draw(url, prefix, temperature, count)
    drawn = [tuple(answer["output_ids"]) for answer in answers]
    return {
        "draws": len(drawn),
        "p_values": p_values(drawn, target(model, prefix, temperature)),
        **speculation(answers),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=20_000, help="at each temperature")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--model-path", type=Path, default=TRAINED)
    parser.add_argument("--flags", nargs=argparse.REMAINDER, default=[])
    args = parser.parse_args()
    prefix, model = prefix_of(args.model_path), V41.load(args.model_path)
    figures: dict[str, Any] = {}
    place = where()
    print(", ".join(f"{name} {value}" for name, value in place.items()))
    with (
        tempfile.TemporaryDirectory() as scratch,
        LocalServer(args.model_path, *args.flags, log=Path(scratch) / "server.log") as server,
    ):
        for temperature in TEMPERATURES:
            found = figures[str(temperature)] = compare(server.url, model, prefix, temperature, args.draws)
            print(f"temperature {temperature}, top_p {TOP_P}: {found['draws']} draws after {prefix}")
            print(f"  {found['verifications']} verifications of a request: ", end="")
            print(f"{found['verified']} drafts verified, {found['accepted']} accepted")
            for name, value in found["p_values"].items():
                print(f"  {name:10}  p = {value:.4f}", flush=True)
    least = min(value for found in figures.values() for value in found["p_values"].values())
    print(f"least p-value {least:.2g}: {'no sign of a difference' if least >= IMPROBABLE else 'DIFFERENT'}")
    if args.json:
        result = {"temperatures": figures, "top_p": TOP_P, "prefix": prefix, "flags": args.flags, "where": place}
        Path(args.json).write_text(json.dumps(result, indent=1) + "\n")
    return 0 if least >= IMPROBABLE else 1


if __name__ == "__main__":
    sys.exit(main())
