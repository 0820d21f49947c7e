"""Which part of the model a rank holds.

Whatever is divided is divided by rows of its stored matrix, that is by *outputs*: heads, output groups, columns of the
residual, tokens of the vocabulary, whole experts, rows of a hash table. No sum is ever cut in two, so a rank computes
the same bits for its outputs as one rank that holds everything, and a rank's part is one run of bytes in a file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .config import QUANT_BLOCK, V41Config
from .layout import DRAFT, TARGET, Layout, expert_sets


class PlaceError(ValueError):
    """A model cannot be divided among so many ranks; ``problems`` has every size that does not fit, with the legal
    numbers of ranks."""

    def __init__(self, problems: list[str]):
        self.problems = problems
        super().__init__("\n".join(problems))


@dataclass(frozen=True)
class Share:
    """Part ``index`` of ``of`` parts."""

    index: int = 0
    of: int = 1

    def part(self, total: int) -> range:
        """Its contiguous part of 0 .. total-1; where the parts cannot be equal, the last ones are shorter."""
        each = -(-total // self.of)
        return range(min(self.index * each, total), min((self.index + 1) * each, total))


@dataclass(frozen=True)
class Place:
    """``heads``: the share of attention heads, output projections and vocabulary; ``experts``: the share of routed
    experts and of the rows of Engram's tables. Everything else is held whole: it is small, or, like the embedding, read
    a row at a time. ``layout``: which experts lie in which slots; None: each once, in order."""

    heads: Share = Share()
    experts: Share = Share()
    layout: Layout | None = None

    def part(self, name: str, rows: int, config: V41Config) -> range | None:
        """Rows of a checkpoint tensor of ``rows`` rows that belong here; None for a tensor of another rank."""
        if expert := _EXPERT.fullmatch(name):
            held = self.held(config, TARGET if expert["draft"] is None else DRAFT, int(expert["layer"]))
            return range(rows) if int(expert["id"]) in held else None
        if _BY_HEADS.fullmatch(name):
            return self.heads.part(rows)
        if _TABLE.fullmatch(name):
            return self.experts.part(rows)
        return range(rows)

    def held(self, config: V41Config, name: str, layer: int) -> Sequence[int]:
        """The experts of a set (``layout.py``) in this rank's slots of a layer, in order."""
        if self.layout is None:
            return self.experts.part(expert_sets(config)[name][1])
        return self.layout.held(name, layer, self.experts.index, self.experts.of)


_EXPERT = re.compile(r"(layers|(?P<draft>mtp))\.(?P<layer>\d+)\.ffn\.experts\.(?P<id>\d+)\..+")
_BY_HEADS = re.compile(r"head\.weight|(layers|mtp)\.\d+\.attn\.(attn_sink|(wq_b|wo_a|wo_b)\.(weight|scale))")
_TABLE = re.compile(r"layers\.\d+\.engram\.embed\.(weight|scale)")


def check_place(config: V41Config, heads: int, experts: int, redundant: int = 0) -> None:
    """Whether the model divides among ``heads`` ranks of an attention group and ``experts`` ranks of all groups, which
    hold ``redundant`` replicas of experts.

    Raises:
        PlaceError: at least one size does not; names each with the legal numbers of ranks, or of replicas.
    """
    problems = [
        *_heads(config, heads),
        *(_replicas(config, experts, redundant) if redundant else _experts(config, experts)),
    ]
    if problems:
        raise PlaceError(problems)


def _heads(config: V41Config, ranks: int) -> Iterator[str]:
    unfit = _undivided(config, ranks)
    if unfit:
        legal = ", ".join(str(n) for n in range(1, config.num_heads + 1) if not _undivided(config, n))
        yield from (f"{what} do not divide among {ranks} ranks of attention; legal: {legal}" for what in unfit)


def _undivided(config: V41Config, ranks: int) -> list[str]:
    rows = config.o_groups * config.o_lora_rank
    counts = {
        f"{config.num_heads} attention heads": (config.num_heads, 1),
        f"{config.o_groups} output groups": (config.o_groups, 1),
        # The scales of an FP8 matrix cover 32 rows.
        f"{rows} rows of output groups, in tiles of {QUANT_BLOCK},": (rows, QUANT_BLOCK),
        f"{config.hidden_size} channels, in tiles of {QUANT_BLOCK},": (config.hidden_size, QUANT_BLOCK),
        f"{config.vocab_size} tokens of the vocabulary": (config.vocab_size, 1),
    }
    return [what for what, (count, tile) in counts.items() if count % (ranks * tile)]


def _experts(config: V41Config, ranks: int) -> Iterator[str]:
    for name, (_, count) in expert_sets(config).items():
        if count % ranks:
            what = "experts" if name == TARGET else "draft experts"
            legal = (str(n) for n in range(1, count + 1) if count % n == 0)
            yield f"{count} {what} do not divide among {ranks} ranks; legal: {', '.join(legal)}"


def _replicas(config: V41Config, ranks: int, redundant: int) -> Iterator[str]:
    most = min(count * (ranks - 1) for _, count in expert_sets(config).values() if count)
    if not 0 < redundant <= most:
        yield f"{redundant} redundant experts on {ranks} ranks; legal: 0 to {most}, a rank holds an expert once"
