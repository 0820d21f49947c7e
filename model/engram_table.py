"""What Engram's hash needs besides the weights: token classes, multipliers, primes and offsets.

All of it is a pure function of the tokenizer and the config. One different class, prime or multiplier sends every
n-gram to another row of the table, and the model still answers, only worse. A checkpoint declares two sums, its table
rows and its number of classes: both are checked here, and a disagreement is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from sympy import nextprime
from tokenizers import Regex, Tokenizer, normalizers
from torch import Tensor

from .config import EngramConfig, V41Config

LONE_SPACE = "\ue000"  # private use: stands for a token that is one space while Strip runs
REPLACEMENT = "\ufffd"  # what decoding puts for bytes that are not UTF-8


class EngramError(ValueError):
    """Tokenizer, config and table do not belong together; the message has both numbers."""


@dataclass(frozen=True)
class EngramTable:
    """int64 constants of the hash; the first axis of the last three is the Engram layer, as in ``EngramConfig.layers``.

    The hash of the n tokens up to a position is the exclusive or of their ``class * multiplier``; modulo ``prime`` it
    is a row in the range of that hash, which begins at ``offset`` in the layer's table.
    """

    token_class: Tensor  # [vocab_size]; tokens that differ only in case, accents, width or outer blanks share a class
    pad_class: int  # stands for whatever is before the sequence or inside an image
    multipliers: Tensor  # [layers, max_ngram]: for the token itself, one back, two back, ...
    primes: Tensor  # [layers, max_ngram - 1, heads]: n-gram sizes from 2 up
    offsets: Tensor  # [layers, (max_ngram - 1) * heads]

    @classmethod
    def load(cls, path: str | Path, config: V41Config) -> EngramTable | None:
        """From ``path/tokenizer.json``; None for a model without Engram layers.

        Raises:
            EngramError: no tokenizer, one that cannot be read, or one that does not belong to the config (see ``of``).
        """
        if config.engram is None:
            return None
        file = Path(path) / "tokenizer.json"
        if not file.exists():
            raise EngramError(f"{file} does not exist; Engram needs the tokenizer that the checkpoint was trained with")
        try:
            tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises nothing more special
            raise EngramError(f"{file} cannot be read: {error}") from None
        return cls.of(config.engram, tokenizer, config.vocab_size)

    @classmethod
    def of(cls, engram: EngramConfig, tokenizer: Tokenizer, vocab_size: int) -> EngramTable:
        """Ids beyond the tokenizer (an embedding may be padded) take the pad token's class.

        Raises:
            EngramError: more token ids than ``vocab_size``, a pad token that does not exist, another number of classes
                than the config says, or primes that do not add up to the rows of a table.
        """
        classes = token_classes(tokenizer)
        size, count = len(classes), max(classes, default=-1) + 1
        if not engram.pad_token_id < size <= vocab_size:
            raise EngramError(
                f"the tokenizer has {size} ids, config.json says vocab_size={vocab_size} and "
                f"engram_pad_token_id={engram.pad_token_id}"
            )
        if count != engram.token_classes:
            raise EngramError(
                f"the tokenizer has {count} token classes, config.json says "
                f"engram_compressed_vocab_size={engram.token_classes}: tokenizer and checkpoint do not belong together"
            )
        pad_class = classes[engram.pad_token_id]
        padded = classes + [pad_class] * (vocab_size - size)
        primes = torch.tensor(_primes(engram), dtype=torch.int64)
        flat = primes.flatten(1)
        multipliers = [_multipliers(layer, engram) for layer in engram.layers]
        return cls(torch.tensor(padded), pad_class, torch.tensor(multipliers), primes, flat.cumsum(1) - flat)


# ---- token classes --------------------------------------------------------------------------------------------------


def token_classes(tokenizer: Tokenizer) -> list[int]:
    """The class of every token id, numbered in the order in which the texts of ids 0, 1, ... first appear."""
    normalize = _normalizer().normalize_str
    numbers: dict[str, int] = {}
    classes = []
    for token in range(tokenizer.get_vocab_size(with_added_tokens=True)):
        text = tokenizer.decode([token], skip_special_tokens=False)
        # Part of a character has no text to normalise; its raw spelling keeps it apart.
        key = tokenizer.id_to_token(token) if REPLACEMENT in text else normalize(text)
        key = key or text
        classes.append(numbers.setdefault(key, len(numbers)))
    return classes


def _normalizer() -> normalizers.Normalizer:
    """Compatibility forms, no accents, lower case, runs of blanks as one space, none at the ends unless alone."""
    return normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex("[ \t\r\n]+"), " "),
            normalizers.Replace(Regex("^ $"), LONE_SPACE),
            normalizers.Strip(),
            normalizers.Replace(LONE_SPACE, " "),
        ]
    )


# ---- hash constants -------------------------------------------------------------------------------------------------


def prime_walk(layers: int, max_ngram: int, heads: int, vocab_size: int) -> list[list[list[int]]]:
    """[layer][n-gram size][head]: primes from ``vocab_size`` up, none used twice; each n-gram size starts over."""
    used: set[int] = set()
    walk = []
    for _ in range(layers):
        sizes = []
        for _ in range(max_ngram - 1):
            prime, row = vocab_size - 1, []
            for _ in range(heads):
                prime = nextprime(prime)
                while prime in used:
                    prime = nextprime(prime)
                used.add(prime)
                row.append(int(prime))
            sizes.append(row)
        walk.append(sizes)
    return walk


def table_rows(layers: int, max_ngram: int, heads: int, vocab_size: int) -> list[int]:
    """Rows of each layer's table: what ``engram_num_embeddings`` of a config must say."""
    return [sum(map(sum, sizes)) for sizes in prime_walk(layers, max_ngram, heads, vocab_size)]


def _primes(engram: EngramConfig) -> list[list[list[int]]]:
    walk = prime_walk(len(engram.layers), engram.max_ngram, engram.heads, engram.vocab_size)
    for layer, declared, sizes in zip(engram.layers, engram.rows, walk, strict=True):
        total = sum(map(sum, sizes))
        if total != declared:
            raise EngramError(
                f"layer {layer}: config.json says engram_num_embeddings={declared}, but the primes that follow from "
                f"engram_vocab_size={engram.vocab_size}, engram_n_heads={engram.heads} and "
                f"engram_max_ngram_size={engram.max_ngram} add up to {total}"
            )
    return walk


def _multipliers(layer: int, engram: EngramConfig) -> list[int]:
    """Odd numbers, small enough that a class times one of them stays inside int64."""
    bound = max(1, np.iinfo(np.int64).max // engram.token_classes // 2)
    return (np.random.default_rng(10007 * layer).integers(0, bound, engram.max_ngram) * 2 + 1).tolist()
