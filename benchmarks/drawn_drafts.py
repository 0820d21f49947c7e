"""How many tokens a verification yields when a request samples: with greedy drafts, and with drafts drawn with the
noise of the network's own draws.

    python benchmarks/drawn_drafts.py [--prompts 6] [--tokens 64] [--json FILE] [--model-path DIR]

The library's network continues held-out source text and conversations; every draft is verified. Counts, not times:
they are the same on every machine of one kind. The tokens are the seeds' whatever is drafted, which is checked.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from dspark_cpu import TRAINED, prompts
from torch import Tensor

from deepinfer_plugin.model import V41
from deepinfer_plugin.runtime.seeded_draw import draw, filtered
from deepinfer_plugin.runtime.shared_noise import Draws, draft

KINDS = ((0.7, 1.0), (1.0, 1.0), (1.0, 0.9))  # temperature and top_p
FREE = 1 << 30  # a top_k that excludes nothing


def network_draws(logits: Tensor, positions: Tensor, draws: Draws) -> Tensor:
    """int64 [R]: what SGLang's sampler draws from the seed of one request (``draws`` of one), row by row."""
    count = len(logits)
    limits = (draws.top_ks.expand(count), draws.top_ps.expand(count), draws.min_ps.expand(count))
    ranked, order = filtered(torch.softmax(logits / draws.temperatures, -1), *limits)
    return draw(torch.zeros_like(ranked).scatter(1, order, ranked), draws.seeds.expand(count), positions)


@torch.inference_mode()
def speculate(
    model: V41, prompt: Sequence[int], count: int, draws: Draws, choose: Callable[[Tensor, Tensor], Tensor] | None
) -> tuple[list[int], int, int]:
    """``count`` tokens, unless the text ends before; verifications, and tokens they yielded."""
    block, end = model.config.draft_block, model.config.eos_token_id
    session = model.session(len(prompt) + count + 2 * block + 2)
    session.extend(torch.tensor(prompt))
    tokens = network_draws(session.logits(), torch.tensor([len(prompt) - 1]), draws).tolist()
    rounds = 0
    while len(tokens) < count and end not in tokens:
        drafts = session.draft(tokens[-1], choose).tokens[0].tolist()
        positions = session.length + torch.arange(block + 1)
        hidden = session.extend([tokens[-1], *drafts])
        drawn = network_draws(model.network.logits(hidden), positions, draws).tolist()
        accepted = next((j for j in range(block) if drafts[j] != drawn[j]), block)
        session.tokens = session.tokens[: session.length - (block - accepted)]
        tokens += drawn[: accepted + 1]
        rounds += 1
    whole = tokens.index(end) + 1 if end in tokens else count
    return tokens[:whole], rounds, len(tokens) - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=6, help="of each kind")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--model-path", type=Path, default=TRAINED / "checkpoint")
    args = parser.parse_args()
    model, found = V41.load(args.model_path), {}
    asked = prompts(args.model_path, 2 * args.prompts)
    for temperature, top_p in KINDS:
        lengths, texts = {}, {}
        for name in ("greedy", "shared noise"):
            rounds = tokens = 0
            texts[name] = []
            for seed, prompt in enumerate(asked):
                numbers = torch.tensor([seed]), torch.tensor([FREE])
                draws = Draws(*numbers, *(torch.tensor([value]) for value in (temperature, top_p, 0.0)))
                choose = None if name == "greedy" else partial(draft, draws=draws)
                text, more, yielded = speculate(model, prompt, args.tokens, draws, choose)
                rounds, tokens = rounds + more, tokens + yielded
                texts[name].append(text)
            lengths[name] = tokens / rounds
        assert texts["greedy"] == texts["shared noise"], "drafts changed what was drawn"
        found[f"temperature {temperature}, top_p {top_p}"] = lengths
        greedy, shared = lengths.values()
        print(f"temperature {temperature}, top_p {top_p}: tokens a round, greedy drafts {greedy:.3f}, ", end="")
        print(f"shared noise {shared:.3f}: {shared / greedy - 1:+.1%}", flush=True)
    if args.json:
        Path(args.json).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
