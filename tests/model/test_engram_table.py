"""Engram's hash constants: the released numbers, the rules behind them, and refusals that name both sides."""

import json
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from deepinfer_plugin.model.config import V41Config
from deepinfer_plugin.model.engram_table import EngramError, EngramTable, prime_walk, table_rows, token_classes
from deepinfer_plugin.model.released import RELEASED
from deepinfer_plugin.model.tiny_tokenizer import build_tokenizer


def words(*texts, decoder=None):
    """A tokenizer whose id i decodes to texts[i]."""
    tokenizer = Tokenizer(models.WordLevel({text: i for i, text in enumerate(texts)}, unk_token=texts[0]))
    if decoder is not None:
        tokenizer.decoder = decoder
    return tokenizer


def tiny_table(path, **changes):
    raw = json.loads((path / "config.json").read_text())
    raw["text_config"] |= changes
    return EngramTable.load(path, V41Config.from_dict(raw))


# ---- hash constants -------------------------------------------------------------------------------------------------


def test_released_table_rows():
    assert table_rows(layers=2, max_ngram=4, heads=8, vocab_size=16_000_000) == [384006168, 384016682]


def is_prime(n):
    return n > 1 and all(n % d for d in range(2, int(n**0.5) + 1))


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 3), st.integers(2, 4), st.integers(1, 4), st.integers(2, 500))
def test_primes_are_the_smallest_unused(layers, max_ngram, heads, vocab_size):
    used = set()
    for layer in prime_walk(layers, max_ngram, heads, vocab_size):
        assert len(layer) == max_ngram - 1
        for row in layer:
            expected, candidate = [], vocab_size
            while len(expected) < heads:
                if is_prime(candidate) and candidate not in used:
                    expected.append(candidate)
                    used.add(candidate)
                candidate += 1
            assert row == expected


def test_multipliers_are_odd_and_never_overflow(tiny):
    config = V41Config.load(tiny).engram
    table = EngramTable.load(tiny, V41Config.load(tiny))
    assert table.multipliers.shape == (len(config.layers), config.max_ngram)
    for layer, row in zip(config.layers, table.multipliers.tolist(), strict=True):
        bound = np.iinfo(np.int64).max // config.token_classes // 2
        drawn = np.random.default_rng(10007 * layer).integers(0, bound, config.max_ngram)
        assert row == [2 * int(value) + 1 for value in drawn]
        assert all((config.token_classes - 1) * multiplier < 2**63 for multiplier in row)


def test_ranges_tile_the_table(tiny):
    config = V41Config.load(tiny).engram
    table = EngramTable.load(tiny, V41Config.load(tiny))
    for index, rows in enumerate(config.rows):
        ends = table.offsets[index] + table.primes[index].flatten()
        assert table.offsets[index].tolist() == [0, *ends[:-1].tolist()]
        assert ends[-1] == rows
    assert table.primes.flatten().unique().numel() == table.primes.numel()


# ---- token classes --------------------------------------------------------------------------------------------------


def test_one_class_for_one_text():
    same = ["hello", "Hello", " HELLO", "héllo", "he\u0301llo", "ｈｅｌｌｏ", "hello\n", "\t hello "]
    assert token_classes(words(*same)) == [0] * len(same)


def test_classes_keep_texts_apart():
    texts = ["a b", "ab", "a", "b", "1", "，"]
    assert token_classes(words(*texts)) == list(range(len(texts)))
    assert token_classes(words("a  b", "a\n\tb", "A B")) == [0, 0, 0]


def test_numbers_follow_first_appearance():
    assert token_classes(words("b", "a", "B", "c", "A")) == [0, 1, 0, 2, 1]


def test_blanks_are_one_class_of_their_own():
    classes = token_classes(words(" ", "\n", "\t\t", " \r\n ", "x", "\u00a0"))
    assert classes[:4] == [0] * 4
    assert classes[4] == 1
    assert classes[5] == 0  # a no-break space is compatible with a space


def test_parts_of_characters_stay_apart():
    # Bytes e4, b8, ad in the byte-level alphabet: none is UTF-8 alone, the three together are one character.
    tokenizer = words("ä", "¸", "Ń", "ä¸Ń", decoder=decoders.ByteLevel())
    assert tokenizer.decode([3]) == "中"
    assert token_classes(tokenizer) == [0, 1, 2, 3]


def test_special_tokens_are_read_as_their_text():
    tokenizer = words("x", "<｜user｜>")
    tokenizer.add_special_tokens(["<｜User｜>", "<｜System｜>"])
    assert token_classes(tokenizer) == [0, 1, 1, 2]


def test_released_vocabulary_takes_seconds():
    tokenizer = build_tokenizer(129280)
    start = time.process_time()
    classes = token_classes(tokenizer)
    assert time.process_time() - start < 5  # about one
    assert len(classes) == 129280


# ---- refusals -------------------------------------------------------------------------------------------------------


def test_padding_ids_take_the_pad_class(tiny):
    config = V41Config.load(tiny)
    table = tiny_table(tiny, vocab_size=config.vocab_size + 32)
    assert table.token_class.dtype == torch.int64
    assert table.token_class.shape == (config.vocab_size + 32,)
    assert (table.token_class[config.vocab_size :] == table.pad_class).all()
    assert table.pad_class == table.token_class[config.engram.pad_token_id]


@pytest.mark.parametrize(
    "change, numbers",
    [
        ({"engram_compressed_vocab_size": 77}, ("engram_compressed_vocab_size=77", "token classes")),
        ({"engram_n_heads": 3}, ("engram_n_heads=3", "engram_num_embeddings=")),
        ({"engram_vocab_size": 1010}, ("engram_vocab_size=1010", "engram_num_embeddings=")),
        ({"vocab_size": 1000}, ("1280 ids", "vocab_size=1000")),
        ({"engram_pad_token_id": 1280}, ("1280 ids", "engram_pad_token_id=1280")),
    ],
)
def test_refused_by_both_numbers(tiny, change, numbers):
    with pytest.raises(EngramError) as error:
        tiny_table(tiny, **change)
    assert all(number in str(error.value) for number in numbers)


def test_no_tokenizer(tiny, tmp_path):
    with pytest.raises(EngramError, match=r"tokenizer\.json does not exist"):
        EngramTable.load(tmp_path, V41Config.load(tiny))


def test_no_engram_no_table(tmp_path):
    raw = RELEASED | {"text_config": RELEASED["text_config"] | {"engram_layer_ids": []}}
    assert EngramTable.load(tmp_path, V41Config.from_dict(raw)) is None
