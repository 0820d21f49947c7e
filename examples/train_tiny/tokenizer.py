"""A byte-level BPE tokenizer of the training text, with DeepSeek's special tokens. Digits stay single: sums are then
made of digits.
"""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from deepinfer_plugin.model.tiny_tokenizer import BOS, CONTROL, EOS, MARKUP, PAD, PLACEHOLDER

PLACEHOLDERS = 1  # the noise token of a draft row
# A word with the blank before it, digits one by one, runs of punctuation, an end of line with the indentation after it.
PIECES = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+[ \t]*|\s+"


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Exactly ``vocab_size`` ids: 0 bos, 1 eos, 2 pad, bytes and merges, then the other special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(MARKUP) - len(CONTROL) - PLACEHOLDERS,
        special_tokens=[BOS, EOS, PAD],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        max_token_length=24,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    filling = vocab_size - tokenizer.get_vocab_size() - len(MARKUP) - len(CONTROL)
    tokenizer.add_special_tokens([PLACEHOLDER.format(i) for i in range(filling)])
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in MARKUP])
    tokenizer.add_special_tokens(list(CONTROL))
    return tokenizer
