"""Making a random model say a given text through a real server: a grammar that allows nothing else, and a bias towards
the format's own tokens, which a grammar would let the model spell byte by byte."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

DSML = "｜DSML｜"
THINK_END = "</think>"
MODEL = "deepseek-flash"  # any name is served

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of the coming days.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city", "days"],
        },
    },
}
SWITCH = {  # nothing free in it, so that a grammar alone brings a call to its end
    "type": "function",
    "function": {
        "name": "switch",
        "description": "Turn the light on or off.",
        "parameters": {
            "type": "object",
            "properties": {"on": {"type": "boolean"}},
            "required": ["on"],
            "additionalProperties": False,
        },
    },
}


@cache
def tokenizer(path: Path) -> Tokenizer:
    return Tokenizer.from_file(str(path / "tokenizer.json"))


def saying(text: str, path: Path, thinking: bool = False) -> dict[str, Any]:
    """Fields of a chat request whose answer will be ``text``; with ``thinking``, after an empty reasoning."""
    bias = {DSML: 50, **({THINK_END: 100} if thinking else {})}
    return {
        "ebnf": f"root ::= {json.dumps(text, ensure_ascii=False)}",
        "logit_bias": {str(tokenizer(path).token_to_id(token)): value for token, value in bias.items()},
        "temperature": 0,
        "max_tokens": 400,
    }


def towards(path: Path, **tokens: float) -> dict[str, float]:
    """A logit bias; names: ``dsml``, ``think_end``, ``open`` for "<", ``close`` for "</", ``space`` for every token of
    white space."""
    vocabulary = tokenizer(path)
    named = {"dsml": [vocabulary.token_to_id(DSML)], "think_end": [vocabulary.token_to_id(THINK_END)]}
    named |= {"open": vocabulary.encode("<").ids, "close": vocabulary.encode("</").ids}
    texts = ((token, vocabulary.decode([token])) for token in range(vocabulary.get_vocab_size()))
    named["space"] = [token for token, text in texts if text and not text.strip()]
    return {str(token): value for name, value in tokens.items() for token in named[name]}


def invoke(name: str, *parameters: tuple[str, bool, str], close: bool = True) -> str:
    """One call as the model writes it. Parameters: name, whether a string, value."""
    lines = [f'<{DSML} invoke name="{name}">']
    for key, is_string, value in parameters:
        kind = "true" if is_string else "false"
        lines.append(f'<{DSML} parameter name="{key}" string="{kind}">{value}</{DSML} parameter>')
    return "\n".join([*lines, *([f"</{DSML} invoke>"] if close else [])])


def calls(*invokes: str, close: bool = True) -> str:
    return "\n".join([f"<{DSML} calls>", *invokes, *([f"</{DSML} calls>"] if close else [])])


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]
