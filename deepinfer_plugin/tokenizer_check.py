"""Whether a tokenizer can speak the V4.1 dialogue: asked by the doctor, and at every start before weights load."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def tokenizer_problem(path: Path) -> str | None:
    """Of a checkpoint directory: what is wrong, beginning with the file; None if nothing is.

    A dialogue is rendered the way the server does: the codec refuses a tokenizer that lacks one of its special tokens.
    Without the codec, which is a problem of its own, only the files are looked at.
    """
    for name in ("tokenizer.json", "tokenizer_config.json"):  # transformers takes a directory without for a hub's name
        if not (path / name).is_file():
            return f"{name}: missing"
    import tokenizers

    try:
        from sglang.srt.parser.deepseek_recipe_renderer import DeepSeekRecipe
    except ImportError:
        return None
    try:
        codec: Any = DeepSeekRecipe("dsv41", tokenizers.Tokenizer.from_file(str(path / "tokenizer.json")))
        codec.encode({"messages": [{"role": "user", "content": "hello"}], "thinking": True})
    except Exception as error:  # three libraries' errors, all meaning the same here
        return f"tokenizer.json: {error}"
    return None
