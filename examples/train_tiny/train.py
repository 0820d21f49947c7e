"""Train a small V4.1-Flash: text to tokens, the network, then its draft head.

    python examples/train_tiny/train.py DIR                      the shipped size; one GPU, under 10 minutes
    python examples/train_tiny/train.py DIR --setting small      a minute or two on two CPU cores

DIR gets config, tokenizer and corpus, unless they are there already, and then shards of the released checkpoint format,
rewritten every minute. Another machine can train in a DIR that was prepared here: only the text needs SGLang's encoder.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from batches import CODE_SHARE, DRAFT_CODE_SHARE, Batch, Batches, Code, Conversations
from corpus import CORPUS, Corpus
from draft import DraftTrainer, train_draft
from masters import export, initialise, load_masters
from recording import Figures
from settings import SETTINGS, Setting
from target import evaluate, train_target
from torch import Tensor
from training_ops import ServedFormats, TrainingOps, Unquantised

from deepinfer_plugin.model.network import Network

SAVE_SECONDS = 60
LOG = "train.jsonl"


class Progress:
    """Prints and logs figures now and then, and saves the network every minute."""

    def __init__(self, network: Network, out: Path, stage: str, steps: int, every: int):
        self.network, self.out, self.stage, self.steps, self.every = network, out, stage, steps, every
        self.began = self.saved = time.monotonic()
        out.mkdir(parents=True, exist_ok=True)

    def __call__(self, step: int, figures: Figures) -> None:
        if step % self.every == 0 or step == self.steps - 1:
            seconds = round(time.monotonic() - self.began, 1)
            self.write({"step": step, "s": seconds} | {name: rounded(value) for name, value in figures.items()})
        if time.monotonic() - self.saved > SAVE_SECONDS:
            export(self.network, self.out)
            self.saved = time.monotonic()

    def write(self, figures: dict[str, Any]) -> None:
        line = json.dumps({"stage": self.stage} | figures)
        print(line, flush=True)
        with (self.out / LOG).open("a") as file:
            file.write(line + "\n")


def rounded(value: Tensor) -> Any:
    places = [round(v, 4) for v in value.flatten().tolist()]
    return places[0] if value.dim() == 0 else places


def stream(batches: Batches) -> Iterator[Batch]:
    while True:
        yield batches.draw()


def held_out(corpus: Corpus, setting: Setting, device: torch.device) -> dict[str, list[Batch]]:
    """Fixed batches of the report split."""
    code, chats = Code(corpus.code["report"], device), Conversations(corpus.chats["report"], setting.lengths, device)
    length, generator = setting.lengths[-2], torch.Generator().manual_seed(1)
    return {
        "code": [code.draw(setting.batch_tokens // length, length, generator) for _ in range(4)],
        "chat": list(chats.each(setting.batch_tokens, generator)),
    }


def network_stage(network: Network, ops: TrainingOps, corpus: Corpus, setting: Setting, out: Path) -> None:
    device = network.norm.weight.device
    progress = Progress(network, out, "target", setting.target_steps, max(1, setting.target_steps // 60))
    head = network.dspark
    train_target(network, ops, stream(Batches(corpus, setting, device, CODE_SHARE, seed=0)), setting, progress)
    for name, formats in (("bf16", Unquantised()), ("served", ServedFormats())):
        ops.formats = formats
        with torch.no_grad():
            network.prepare()
        for part, batches in held_out(corpus, setting, device).items():
            progress.write({f"held_out_{part}_{name}": evaluate(network, ops, batches)})
    network.dspark = head
    export(network, out)


def draft_stage(network: Network, ops: TrainingOps, corpus: Corpus, setting: Setting, out: Path) -> None:
    device = network.norm.weight.device
    progress = Progress(network, out, "draft", setting.draft_steps, max(1, setting.draft_steps // 60))
    trainer = DraftTrainer(network, ops, setting)
    train_draft(trainer, stream(Batches(corpus, setting, device, DRAFT_CODE_SHARE, seed=1)), setting, progress)
    export(network, out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--setting", choices=SETTINGS, default="shipped")
    parser.add_argument("--out", type=Path, help="where the shards go (default: DIR)")
    parser.add_argument("--draft-only", action="store_true", help="keep the network of the checkpoint in --out")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    setting, out = SETTINGS[args.setting], args.out or args.directory
    torch.manual_seed(0)
    if args.device != "cpu":
        torch.set_float32_matmul_precision("high")  # TF32 holds every bf16 operand exactly
        torch._dynamo.config.recompile_limit = 64  # one for every shape of every body

    if not (args.directory / CORPUS).exists():
        from data import prepare

        prepare(setting, args.directory)
    corpus = Corpus.load(args.directory / CORPUS)
    ops = TrainingOps()
    network = load_masters(args.directory, ops, args.device, out if args.draft_only else None)
    if not args.draft_only:
        initialise(network, seed=0)
        network_stage(network, ops, corpus, setting, out)
    draft_stage(network, ops, corpus, setting, out)


if __name__ == "__main__":
    main()
