"""What the network cannot read, and what would end or block the server, is a client's mistake: a 400.

``/generate`` takes ids as they come and SGLang checks their number only: an id outside the vocabulary would be read out
of bounds in the scheduler, which takes every other request down with it; so would a text of no tokens at all,
embeddings in place of ids, from which Engram could hash nothing, and more top log-probabilities than there are tokens.
An image beside a text would be ignored without a word.
A hundred thousand answers to one prompt keep the server from talking to anybody else, already while SGLang makes
requests of them: they are counted before that. A regular expression with repeats within repeats may never end to match,
in the scheduler, where everybody waits for it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from re import _parser  # type: ignore[attr-defined]
from typing import Any

from ..model_impl import serves
from .hook import Hook

MOST_ANSWERS = 1024  # to one prompt, ``n``; each is a request of its own, made at once
UNBOUNDED = 100  # repeats of a regular expression from which on two, one in the other, are too many


def generate_request(original: Callable[..., Any], self: Any, obj: Any, request: Any = None) -> Any:
    if serves(self.model_config):
        given = getattr(obj, "sampling_params", None) or {}
        for sampling in given if isinstance(given, list) else [given]:
            answers = sampling.get("n", 1) if isinstance(sampling, dict) else 1
            if isinstance(answers, int) and not 1 <= answers <= MOST_ANSWERS:
                raise ValueError(f"n {answers}: legal: 1 to {MOST_ANSWERS}")
    return original(self, obj, request)


def validate_one_request(original: Callable[..., None], self: Any, obj: Any, input_ids: Any) -> None:
    if serves(self.model_config):
        _check(obj, input_ids, self.model_config.vocab_size)
    original(self, obj, input_ids)


def _check(obj: Any, input_ids: Any, vocabulary: int) -> None:
    if getattr(obj, "input_embeds", None) is not None:
        raise ValueError("input_embeds is not supported by this model; send input_ids or text")
    for name in ("image_data", "video_data", "audio_data"):
        if getattr(obj, name, None) not in (None, [], [None]):
            raise ValueError(f"{name} is not supported by this model: it is served for text only")
    if input_ids is None or not len(input_ids):
        raise ValueError("the prompt is empty: it has no tokens")
    for token in (min(input_ids), max(input_ids)):
        if not 0 <= token < vocabulary:
            raise ValueError(f"input_ids contains {token}; legal: 0 to {vocabulary - 1}")
    top = getattr(obj, "top_logprobs_num", None) or 0
    if isinstance(top, int) and not 0 <= top <= vocabulary:
        raise ValueError(f"top_logprobs_num {top} (top_logprobs in chat): legal: 0 to {vocabulary}")
    sampling = getattr(obj, "sampling_params", None) or {}
    patterns = sampling.get("stop_regex") or ()
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        try:
            parsed = _parser.parse(pattern)
        except re.error as error:
            raise ValueError(f"stop_regex {pattern!r} is no regular expression: {error}") from None
        if _nested(parsed):
            raise ValueError(
                f"stop_regex {pattern!r} repeats within a repeat, which may take for ever to match; give one of them a "
                f"bound below {UNBOUNDED}, as in (a+b){{1,9}}"
            )


def _nested(parsed: Any, inside: bool = False) -> bool:
    """Whether an unbounded repeat is inside another one, in what ``re`` parsed."""
    for part in parsed:
        if isinstance(part, tuple) and part and part[0] in (_parser.MAX_REPEAT, _parser.MIN_REPEAT):
            _, most, repeated = part[1]
            unbounded = most >= UNBOUNDED
            if (unbounded and inside) or _nested(repeated, inside or unbounded):
                return True
        elif isinstance(part, tuple | list | _parser.SubPattern) and _nested(part, inside):
            return True
    return False


ANSWERS = Hook(
    "too_many_answers",
    "sglang.srt.managers.tokenizer_manager.TokenizerManager.generate_request",
    generate_request,
    "a request for a hundred thousand answers keeps the server from everybody else",
    required=False,
)
HOOK = Hook(
    "bad_requests",
    "sglang.srt.managers.tokenizer_manager.TokenizerManager._validate_one_request",
    validate_one_request,
    "a request with a token id outside the vocabulary stops the server",
    required=False,
)
