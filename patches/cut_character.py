"""An answer cut off in the middle of a character keeps the text before it.

``max_tokens`` may end an answer between two tokens of one character; an emoji alone is three or four. SGLang then hands
all tokens to the parser of the V4.1 format in one piece, the parser waits for the rest of the character, and the whole
answer comes back empty. Given one at a time, as streaming gives them, only the cut character is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..model_impl import selected
from .hook import Hook


def finish(
    original: Callable[..., Any], self: Any, token_ids: Sequence[int], finish_reason: dict[str, Any], **options: Any
) -> Any:
    from sglang.srt.runtime_context import get_model

    if not token_ids or not selected(get_model().model_impl):
        return original(self, token_ids, finish_reason, **options)
    *before, last = token_ids
    deltas = [self.feed([token]) for token in before]
    deltas.append(original(self, [last], finish_reason, **options))
    return type(deltas[-1])(
        reasoning="".join(delta.reasoning for delta in deltas),
        content="".join(delta.content for delta in deltas),
        tool_calls=tuple(call for delta in deltas for call in delta.tool_calls),
    )


HOOK = Hook(
    "cut_character",
    "sglang.srt.parser.deepseek_recipe_output.DeepSeekRecipeOutputParser.finish",
    finish,
    "an answer that max_tokens cuts inside a character comes back empty",
    required=False,
)
