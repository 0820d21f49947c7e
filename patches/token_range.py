"""A prompt the network cannot read is a client's mistake, not the server's end.

``/generate`` takes ids as they come and SGLang checks their number only: an id outside the vocabulary would be read out
of bounds in the scheduler, which takes every other request down with it; so would a text of no tokens at all, and
embeddings in place of ids, from which Engram could hash nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..model_impl import serves
from .hook import Hook


def validate_one_request(original: Callable[..., None], self: Any, obj: Any, input_ids: Any) -> None:
    original(self, obj, input_ids)
    if not serves(self.model_config):
        return
    if getattr(obj, "input_embeds", None) is not None:
        raise ValueError("input_embeds is not supported by this model; send input_ids or text")
    if input_ids is None or not len(input_ids):
        raise ValueError("the prompt is empty: it has no tokens")
    vocabulary = self.model_config.vocab_size
    for token in (min(input_ids), max(input_ids)):
        if not 0 <= token < vocabulary:
            raise ValueError(f"input_ids contains {token}; legal: 0 to {vocabulary - 1}")


HOOK = Hook(
    "token_range",
    "sglang.srt.managers.tokenizer_manager.TokenizerManager._validate_one_request",
    validate_one_request,
    "a request with a token id outside the vocabulary stops the server",
    required=False,
)
