"""The text: source of the running interpreter's standard library, and generated conversations as a server would render
them.

Held out, by file and by conversation: one part to fit calibration on, one part to report on.
"""

from __future__ import annotations

import json
import random
import sysconfig
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
from chat import Conversation, json_answer, talk
from chat_tools import tool_use
from chat_words import SYSTEMS
from corpus import CORPUS, SPLITS, Chats, Corpus, Sample
from settings import MAX_POSITION, Setting, raw_config
from sglang.srt.parser.deepseek_recipe_renderer import DeepSeekRecipe
from tokenizer import train_tokenizer
from tokenizers import Tokenizer

from deepinfer_plugin.model.tiny_tokenizer import EOS, MARKUP, write_tokenizer

HELD_OUT = 20  # one file or conversation in this many is for calibration, and one for the report
LARGEST_FILE = 200_000
TOKENIZER_BYTES = 12_000_000
GENERATED = (
    "encodings/cp",
    "encodings/mac",
    "encodings/iso",
    "encodings/koi",
    "lib2to3/tests/data",
    "test/encoded_modules",
    "pydoc_data",
)


def split_of(key: str) -> str:
    part = crc32(key.encode()) % HELD_OUT
    return {0: "report", 1: "calibration"}.get(part, "train")


# ---- code ------------------------------------------------------------------------------------------------------------


def library_files(limit: int) -> Iterator[tuple[str, str]]:
    """(relative path, text) of standard library modules in a fixed shuffled order, ``limit`` bytes of them. Tables that
    a script generated and very large files are left out.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = sorted(
        path.relative_to(root).as_posix() for path in root.rglob("*.py") if "site-packages" not in path.parts
    )
    random.Random(0).shuffle(paths)
    total = 0
    for path in paths:
        file = root / path
        if path.startswith(GENERATED) or not 200 < file.stat().st_size < LARGEST_FILE:
            continue
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        total += len(text)
        if total > limit:
            return
        yield path, text


# ---- conversations ---------------------------------------------------------------------------------------------------


def conversations(count: int, seed: int) -> Iterator[Conversation]:
    """``count`` conversations; the same seed gives the same ones."""
    rng = random.Random(seed)
    for _ in range(count):
        kind = rng.random()
        if kind < 0.35:
            made = tool_use(rng)
        elif kind < 0.5:
            made = json_answer(rng)
        else:
            messages = talk(rng)
            while rng.random() < 0.3:
                messages = messages + talk(rng)
            made = Conversation(messages)
        if rng.random() < 0.45:
            made = replace(made, messages=[{"role": "system", "content": rng.choice(SYSTEMS)}, *made.messages])
        yield replace(made, thinking=rng.random() < 0.45)


def conversation_key(conversation: Conversation) -> str:
    """What makes it the same conversation whatever its system prompt and mode."""
    said = [m["content"] for m in conversation.messages if m["role"] in ("user", "assistant")]
    return "\n".join(said)


class Renderer:
    """Conversations to tokens, through the encoder that the server uses."""

    def __init__(self, tokenizer: Tokenizer):
        self.recipe = DeepSeekRecipe("dsv41", tokenizer)
        self.eos = tokenizer.token_to_id(EOS)
        self.think_end = tokenizer.token_to_id("</think>")

    def prompt(self, conversation: Conversation, turns: int) -> list[int]:
        """The prompt after the first ``turns`` messages."""
        body: dict[str, Any] = {"messages": conversation.messages[:turns], "thinking": conversation.thinking}
        if conversation.tools:
            body["tools"] = conversation.tools
        if conversation.response_format is not None:
            body["response_format"] = conversation.response_format
        return self.recipe.encode(body)

    def _spoken(self, conversation: Conversation, turn: int) -> list[int]:
        """A plain answer as the model generates it."""
        message = conversation.messages[turn]
        ids = self.recipe.encode_text(message["content"])
        if conversation.thinking:
            ids = [*self.recipe.encode_text(message["reasoning_content"]), self.think_end, *ids]
        return [*ids, self.eos]

    def samples(self, conversation: Conversation) -> Iterator[Sample]:
        """One sample if each prompt continues what was generated; where the history drops the reasoning, one per
        answer.
        """
        turns = [turn for turn, message in enumerate(conversation.messages) if message["role"] == "assistant"]
        prompts = [self.prompt(conversation, turn) for turn in turns]
        sample = Sample([], [])
        for index, (turn, prompt) in enumerate(zip(turns, prompts, strict=True)):
            if conversation.messages[turn].get("tool_calls"):
                following = prompts[index + 1]
                spoken = following[len(prompt) : following.index(self.eos, len(prompt)) + 1]
            else:
                spoken = self._spoken(conversation, turn)
            known = len(sample.ids)
            if prompt[:known] != sample.ids:
                yield sample
                sample, known = Sample([], []), 0
            sample.ids.extend([*prompt[known:], *spoken])
            sample.answer.extend([False] * (len(prompt) - known) + [True] * len(spoken))
        yield sample


# ---- corpus ----------------------------------------------------------------------------------------------------------


def build(setting: Setting) -> tuple[Tokenizer, Corpus]:
    """The tokenizer is trained on training text only."""
    files = list(library_files(setting.code_bytes))
    made = list(conversations(setting.chats, seed=0))
    training = [text for path, text in files if split_of(path) == "train"]
    spoken = [
        message["content"]
        for one in made[:4000]
        for message in one.messages
        if split_of(conversation_key(one)) == "train"
    ]
    tokenizer = train_tokenizer(_head(training, TOKENIZER_BYTES) + spoken + _frames(), setting.vocab)

    eos = tokenizer.token_to_id(EOS)
    code: dict[str, list[int]] = {split: [] for split in SPLITS}
    for (path, _), encoding in zip(files, tokenizer.encode_batch([text for _, text in files]), strict=True):
        code[split_of(path)] += [*encoding.ids, eos]
    samples: dict[str, list[Sample]] = {split: [] for split in SPLITS}
    renderer = Renderer(tokenizer)
    for one in made:
        samples[split_of(conversation_key(one))] += renderer.samples(one)
    return tokenizer, Corpus(
        {split: np.array(ids, np.uint16) for split, ids in code.items()},
        {split: Chats.of(part) for split, part in samples.items()},
    )


def _head(texts: list[str], size: int) -> list[str]:
    """The first texts, ``size`` characters together."""
    total, count = 0, 0
    while count < len(texts) and total < size:
        total += len(texts[count])
        count += 1
    return texts[:count]


def _frames() -> list[str]:
    """What the encoder writes around tools and schemas, often enough to become long tokens: most prompts with tools are
    made of it.
    """
    plain = train_tokenizer([""], 512)
    renderer = Renderer(plain)
    texts = []
    for one in conversations(400, seed=1):
        if one.tools or one.response_format:
            first = next(turn for turn, message in enumerate(one.messages) if message["role"] == "assistant")
            text = plain.decode(renderer.prompt(one, first), skip_special_tokens=True)
            for mark in MARKUP:
                text = text.replace(mark, "\n")
            texts.append(text)
    return texts


def prepare(setting: Setting, path: Path) -> None:
    """Write into ``path`` what training needs and serving reads beside the weights: corpus, tokenizer and configs."""
    tokenizer, corpus = build(setting)
    path.mkdir(parents=True, exist_ok=True)
    config = raw_config(setting, tokenizer)
    ids = {key: config[key] for key in ("bos_token_id", "eos_token_id")}
    generation = {**ids, "do_sample": True, "temperature": 0.3, "top_p": 0.95}
    for name, content in (("config.json", config), ("generation_config.json", generation)):
        (path / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    write_tokenizer(tokenizer, path, MAX_POSITION)
    corpus.save(path / CORPUS)
