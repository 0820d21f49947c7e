"""V4.1-Flash as a library: ``V41.load(path).generate(ids, 64)``, no server, no SGLang.

This is what the server is compared with. A ``Session`` is one sequence in its own pages and state; it can be extended
in chunks of any size, and forked at a cached prefix, whose window it rebuilds by replay exactly as the server does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from deepinfer_plugin.kernels import select

from .config import V41Config
from .dspark import Draft
from .engram_table import EngramTable
from .memory import PageLayout, PagePool, StateLayout, StatePool
from .network import Network, Observer
from .parallel import Parallel
from .profiles import profile_named
from .rows import Rows
from .step import Step
from .weights import Checkpoint, load_into

Ids = Sequence[int] | Tensor
DEFAULT_PAGE_SIZE = 128


class V41:
    """A loaded checkpoint."""

    def __init__(self, network: Network, page_size: int = DEFAULT_PAGE_SIZE):
        self.network, self.config, self.ops = network, network.config, network.ops
        self.page_layout = PageLayout.of(self.config, page_size)
        self.state_layout = StateLayout.of(self.config)
        self.device = network.norm.weight.device

    @classmethod
    def load(
        cls,
        path: str | Path,
        provider: str = "reference",
        profile: str = "model",
        *,
        device: str | torch.device = "cpu",
        page_size: int = DEFAULT_PAGE_SIZE,
        force: Mapping[str, str] | None = None,
        progress: bool = False,
        parallel: Parallel | None = None,
    ) -> V41:
        """Load a checkpoint directory of the released format.

        provider, force: which implementation of the op table to use (see ``deepinfer doctor``).
        profile: ``model``, ``deepinfer`` or ``float32`` (``model/profiles.py``).
        parallel: the ranks among which the checkpoint is divided; only this one's part is read.

        Raises:
            ConfigError, CheckpointError: the files are not a complete V4.1-Flash checkpoint; found before
            any weight is read. ValueError: unknown provider, op or profile, an odd page size, or a number of ranks
            that does not divide the model (PlaceError).
        """
        rounding = profile_named(profile)
        config = V41Config.load(path)
        PageLayout.of(config, page_size)
        ops = select(device, provider, force, profile=profile)
        checkpoint = Checkpoint.open(path, config)
        table = EngramTable.load(path, config)
        with torch.device(device):
            network = Network(config, ops, rounding, table, parallel)
        load_into(network, checkpoint.part(network.parallel.place, config), progress=progress)
        if network.dspark is not None:
            network.dspark.has_confidence = checkpoint.has_confidence
        network.prepare()
        return cls(network, page_size)

    # ---- one shot -----------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def logits(self, ids: Ids, image_mask: Tensor | None = None) -> Tensor:
        """float32 [T, vocab]: next-token logits after every token of one sequence, computed in a single forward."""
        tokens = self._tokens(ids)
        session = self.session(len(tokens))
        return self.network.logits(session.extend(tokens, image_mask=image_mask))

    @torch.inference_mode()
    def streams(self, ids: Ids, layers: Iterable[int], chunk: int | None = None) -> dict[int, Tensor]:
        """Residual streams [T, hc_mult, H] after each of ``layers``; ``chunk`` rows per forward, default all
        at once."""
        wanted, tokens = set(layers), self._tokens(ids)
        for layer in wanted:
            if not 0 <= layer < self.config.num_layers:
                raise ValueError(f"streams: layer {layer} does not exist; legal: 0..{self.config.num_layers - 1}")
        seen: dict[int, list[Tensor]] = {layer: [] for layer in sorted(wanted)}

        def observe(layer: int, streams: Tensor) -> None:
            if layer in seen:
                seen[layer].append(streams)

        self.session(len(tokens)).extend(tokens, chunk=chunk, observe=observe)
        return {layer: torch.cat(parts) for layer, parts in seen.items()}

    @torch.inference_mode()
    def engram_rows(self, ids: Ids, image_mask: Tensor | None = None) -> Tensor:
        """int64 [T, Engram layers, columns]: the table rows each token looks up."""
        if self.config.engram is None:
            raise ValueError("engram_rows: this checkpoint has no Engram layers (engram_layer_ids is empty)")
        session = self.session(len(tokens := self._tokens(ids)))
        rows = session.rows(tokens, image_mask)
        step = session.step(rows)
        classes = self.network.classes(rows)
        layers = (self.network.get_submodule(f"layers.{layer}.engram") for layer in self.config.engram.layers)
        return torch.stack([layer.rows(classes, step) for layer in layers], dim=1)  # type: ignore[operator]

    @torch.inference_mode()
    def draft(self, ids: Ids) -> Draft:
        """Drafts after a prompt: the greedy next token is the anchor (not part of the result), ``block_size``
        drafts follow it.

        Returns a ``Draft`` of one request: tokens [1, block], base logits before the Markov head, raw confidences.
        """
        tokens = self._tokens(ids)
        session = self.session(len(tokens) + self.config.draft_block + 1)
        session.extend(tokens)
        return session.draft(session.next_token())

    # ---- generation ---------------------------------------------------------------------------------------------

    def generate(
        self,
        ids: Ids,
        max_new_tokens: int,
        *,
        chunk: int | None = None,
        ignore_eos: bool = False,
        temperature: float = 0.0,
        seed: int = 0,
    ) -> list[int]:
        """New token ids after ``ids``: greedy at temperature 0, else sampled from the full distribution with
        ``seed``. Stops after the end-of-sequence token unless ``ignore_eos``. ``chunk`` rows of the prompt
        per forward, default all at once."""
        tokens = self._tokens(ids)
        session = self.session(len(tokens) + max_new_tokens)
        session.extend(tokens, chunk=chunk)
        return list(session.generate(max_new_tokens, ignore_eos=ignore_eos, temperature=temperature, seed=seed))

    def session(self, capacity: int) -> Session:
        """An empty sequence with room for ``capacity`` tokens."""
        if capacity > self.config.max_position:
            raise ValueError(f"{capacity} tokens do not fit the context of {self.config.max_position} positions")
        return Session(self, capacity)

    def _tokens(self, ids: Ids) -> Tensor:
        tokens = torch.as_tensor(ids, dtype=torch.int64, device=self.device)
        if tokens.dim() != 1 or tokens.numel() == 0:
            raise ValueError(f"token ids must be a non-empty list of integers, got shape {tuple(tokens.shape)}")
        if int(tokens.min()) < 0 or int(tokens.max()) >= self.config.vocab_size:
            raise ValueError(f"token ids must be in 0..{self.config.vocab_size - 1}")
        return tokens


class Session:
    """One sequence: its tokens, pages and state. ``length`` tokens are in the pages; ``replay`` of them must run
    again before the next new token because their window state was not inherited."""

    def __init__(self, model: V41, capacity: int):
        self.model, self.network = model, model.network
        layout, device = model.page_layout, model.device
        self.capacity = capacity
        self.num_pages = -(-capacity // layout.page_size)
        self.pages = PagePool.allocate(layout, self.num_pages + 1, device)
        self.state = StatePool(model.state_layout, 2, device)
        self.page_table = torch.arange(1, self.num_pages + 1, device=device).unsqueeze(0)
        self.tokens = torch.empty(0, dtype=torch.int64, device=device)
        self.replay = 0
        self.hidden: Tensor | None = None  # [1, H] of the last token

    @property
    def length(self) -> int:
        return self.tokens.shape[0]

    def rows(self, new: Tensor, image_mask: Tensor | None = None) -> Rows:
        """The rows of the next forward: pending replay, then ``new`` tokens."""
        start = self.length - self.replay
        ids = torch.cat([self.tokens[start:], new])
        if image_mask is not None and self.replay:
            raise ValueError("image_mask is not supported right after a fork")
        return Rows.build(ids, [start], [len(ids)], [1], self.page_table, [self.replay], image_mask)

    def step(self, rows: Rows) -> Step:
        return Step(rows, self.pages, self.state)

    @torch.inference_mode()
    def extend(
        self,
        ids: Ids,
        *,
        chunk: int | None = None,
        image_mask: Tensor | None = None,
        observe: Observer | None = None,
    ) -> Tensor:
        """Append tokens, ``chunk`` per forward (default all). Returns their hidden states [T, H]."""
        tokens = self.model._tokens(ids)
        if self.length + len(tokens) > self.capacity:
            raise ValueError(f"session holds {self.capacity} tokens; {self.length} + {len(tokens)} do not fit")
        if chunk is not None and chunk < 1:
            raise ValueError(f"chunk={chunk} is not supported; legal: a positive number of rows")
        size, outputs = chunk or len(tokens), []
        for start in range(0, len(tokens), size):
            part = tokens[start : start + size]
            mask = None if image_mask is None else image_mask[start : start + size]
            hidden = self.network(self.rows(part, mask), self.pages, self.state, observe)
            self.tokens, self.replay = torch.cat([self.tokens, part]), 0
            outputs.append(hidden[-len(part) :])
        self.hidden = outputs[-1][-1:]
        return torch.cat(outputs)

    def logits(self) -> Tensor:
        """float32 [1, vocab] after the last token."""
        if self.hidden is None:
            raise ValueError("the session has not run a token yet")
        return self.network.logits(self.hidden)

    def next_token(self) -> int:
        return int(self.logits().argmax())

    @torch.inference_mode()
    def generate(
        self, max_new_tokens: int, *, ignore_eos: bool = False, temperature: float = 0.0, seed: int = 0
    ) -> Iterator[int]:
        """Yield tokens as they are chosen. The last one is not run through the network."""
        generator = torch.Generator(self.model.device).manual_seed(seed)
        for index in range(max_new_tokens):
            logits = self.logits()
            if temperature > 0:
                token = int(torch.multinomial(torch.softmax(logits / temperature, -1), 1, generator=generator))
            else:
                token = int(logits.argmax())
            yield token
            if token == self.model.config.eos_token_id and not ignore_eos:
                return
            if index + 1 < max_new_tokens:
                self.extend([token])

    @torch.inference_mode()
    def draft(self, anchor: int, choose: Callable[[Tensor, Tensor], Tensor] | None = None) -> Draft:
        """Draft the tokens after ``anchor``, which follows the session's last token and has not been run. choose: as
        ``DSpark.draft``'s; default: greedy."""
        if self.network.dspark is None:
            raise ValueError("draft: this checkpoint has no DSpark head (dspark_block_size is 0)")
        if self.replay or not self.length:
            raise ValueError("draft: the session has no window of earlier tokens yet; extend it first")
        device = self.model.device
        anchors, positions = torch.tensor([[anchor], [self.length]], device=device)
        slots = torch.ones(1, dtype=torch.int64, device=device)
        return self.network.dspark.draft(anchors, positions, slots, self.state, self.pages, choose)

    def fork(self, prefix: int, capacity: int | None = None) -> Session:
        """A new sequence that shares the first ``prefix`` tokens, as a prefix-cache hit does: it inherits
        their pages and nothing else. Before its first new token the last ``min(prefix, window)`` of them run
        again to rebuild the window, reading the pages, not writing them, and seeing no window key before the
        replay: an approximation, and the same one the server makes.

        Raises:
            ValueError: ``prefix`` is not a positive multiple of the page size within the session.
        """
        size = self.model.page_layout.page_size
        if prefix <= 0 or prefix % size or prefix > self.length:
            raise ValueError(f"fork: prefix={prefix} is not supported; legal: a multiple of {size} up to {self.length}")
        other = Session(self.model, capacity or self.capacity)
        count = prefix // size
        other.pages.pages[1 : count + 1] = self.pages.pages[1 : count + 1]
        other.tokens = self.tokens[:prefix].clone()
        other.replay = min(prefix, self.model.config.window)
        engram = self.model.config.engram
        if engram is not None:
            start = prefix - other.replay
            before = self.network.token_class[self.tokens[max(start - engram.lookback, 0) : start]]
            classes = torch.full((1, engram.lookback), -1, dtype=torch.int64, device=self.model.device)
            if len(before):
                classes[0, -len(before) :] = before
            slot = torch.ones(1, dtype=torch.int64, device=self.model.device)
            other.state.seed_ngrams(slot, torch.tensor([start], device=self.model.device), classes)
        return other
