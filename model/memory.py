"""The two memories of a served model (architecture section 4).

*Pages* hold what a prefix is worth keeping: the compressed latents and index keys of every KV source, 890 bytes a
token at released size. A page is one contiguous run of bytes that covers ``page_size`` token positions of all
sources, so caches, disks and networks move it without knowing what is inside.

*State* holds what only a running request needs: sliding-window rings, the unfinished pair of the ratio-2 compressors,
the token classes Engram looks back at. One slot per running request, never shared, lost freely and rebuilt by replay.

Page 0 and slot 0 are junk: padding rows write there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .config import LATENT_BLOCK, QUANT_BLOCK, V41Config, ring_length

FORMAT_VERSION = 1  # part of every key under which a page leaves this process


@dataclass(frozen=True)
class SourceLayout:
    """Where one KV source lies inside a page: ``groups`` rows in each of four byte sections, values and scales
    apart."""

    layer: int
    ratio: int  # tokens per group
    groups: int  # groups per page
    latent: int  # byte offset of packed e2m1 latents, head_dim/2 bytes a group
    latent_scale: int  # E4M3 scales, head_dim/16 bytes a group
    key: int  # packed e2m1 index keys, index_head_dim/2 bytes a group
    key_scale: int  # UE8M0 scales, index_head_dim/32 bytes a group


@dataclass(frozen=True)
class PageLayout:
    """Byte layout of a page of ``page_size`` tokens; the same on every device."""

    page_size: int
    head_dim: int
    index_head_dim: int
    sources: tuple[SourceLayout, ...]
    page_bytes: int

    @classmethod
    def of(cls, config: V41Config, page_size: int) -> PageLayout:
        """
        Raises:
            ValueError: ``page_size`` is not a positive multiple of 2 (a ratio-2 group must not cross a page).
        """
        if page_size <= 0 or page_size % 2:
            raise ValueError(f"page_size={page_size} is not supported; legal: a positive even number (default 128)")
        latent, key = config.head_dim, config.index_head_dim
        offset, sources = 0, []
        for layer, ratio in zip(config.kv_sources, config.source_ratios, strict=True):
            groups = page_size // ratio
            starts = []
            for width in (latent // 2, latent // LATENT_BLOCK, key // 2, key // QUANT_BLOCK):
                starts.append(offset)
                offset += groups * width
            sources.append(SourceLayout(layer, ratio, groups, *starts))
        return cls(page_size, latent, key, tuple(sources), offset)

    @property
    def token_bytes(self) -> int:
        """Bytes of prefix memory per token (exact: every section holds whole groups of an even page)."""
        return self.page_bytes // self.page_size


@dataclass(frozen=True)
class StateLayout:
    """Sizes of one request's state."""

    rings: int  # one per layer, then one per DSpark stage
    ring_length: int
    row_bytes: int  # FP8 values then UE8M0 scales
    tails: int  # ratio-2 sources
    tail_length: int
    head_dim: int
    ngram_length: int

    @classmethod
    def of(cls, config: V41Config) -> StateLayout:
        spare = config.draft_block + 1  # rows that may be run and rejected
        return cls(
            rings=config.num_layers + config.draft_stages,
            ring_length=ring_length(config),
            row_bytes=config.head_dim + config.head_dim // QUANT_BLOCK,
            tails=sum(ratio == 2 for ratio in config.source_ratios),
            tail_length=1 + spare,
            head_dim=config.head_dim,
            ngram_length=(config.engram.lookback if config.engram else 0) + spare,
        )

    @property
    def slot_bytes(self) -> int:
        ring = self.rings * self.ring_length * (self.row_bytes + 4)
        return ring + self.tails * self.tail_length * 2 * self.head_dim * 4 + self.ngram_length * 8


class PagePool:
    """``pages`` [num_pages, page_bytes] uint8. Sections of a source are strided views, so one op contract fits
    any page size."""

    def __init__(self, layout: PageLayout, pages: Tensor):
        if pages.dtype != torch.uint8 or pages.dim() != 2 or pages.shape[1] != layout.page_bytes:
            raise ValueError(
                f"PagePool: pages must be uint8 [n, {layout.page_bytes}], got {pages.dtype} {tuple(pages.shape)}"
            )
        self.layout, self.pages = layout, pages
        self.sources = tuple(SourcePages.of(self, source) for source in layout.sources)

    @classmethod
    def allocate(cls, layout: PageLayout, num_pages: int, device: torch.device | str = "cpu") -> PagePool:
        return cls(layout, torch.zeros(num_pages, layout.page_bytes, dtype=torch.uint8, device=device))


@dataclass(frozen=True)
class SourcePages:
    """The sections of one KV source over the whole pool: uint8 views [num_pages, groups, bytes], strided by the
    page."""

    ratio: int
    groups: int
    latent: Tensor
    latent_scale: Tensor
    key: Tensor
    key_scale: Tensor

    @classmethod
    def of(cls, pool: PagePool, source: SourceLayout) -> SourcePages:
        layout = pool.layout

        def section(start: int, width: int) -> Tensor:
            return pool.pages[:, start : start + source.groups * width].unflatten(1, (source.groups, width))

        return cls(
            ratio=source.ratio,
            groups=source.groups,
            latent=section(source.latent, layout.head_dim // 2),
            latent_scale=section(source.latent_scale, layout.head_dim // LATENT_BLOCK),
            key=section(source.key, layout.index_head_dim // 2),
            key_scale=section(source.key_scale, layout.index_head_dim // QUANT_BLOCK),
        )


class StatePool:
    """Per-request state, indexed by slot.

    ``rings`` [rings, slots, ring_length, row_bytes] uint8, position p at p % ring_length, ``tags`` int32 the
    position each row holds (-1: none). ``tails`` float32 [ratio-2 sources, slots, tail_length, 2, head_dim]:
    value and score of a token, position p at p % tail_length. ``ngrams`` int64 [slots, ngram_length]: token
    classes, -1 = outside the sequence or inside an image.
    """

    def __init__(self, layout: StateLayout, slots: int, device: torch.device | str = "cpu"):
        self.layout = layout
        shape = (layout.rings, slots, layout.ring_length)
        self.rings = torch.zeros(*shape, layout.row_bytes, dtype=torch.uint8, device=device)
        self.tags = torch.full(shape, -1, dtype=torch.int32, device=device)
        self.tails = torch.zeros(
            layout.tails, slots, layout.tail_length, 2, layout.head_dim, dtype=torch.float32, device=device
        )
        self.ngrams = torch.full((slots, max(1, layout.ngram_length)), -1, dtype=torch.int64, device=device)

    @property
    def slots(self) -> int:
        return self.rings.shape[1]

    def reset(self, slots: Tensor) -> None:
        """Forget everything in ``slots`` (int64 [n]). Runs on the stream of the forward, never from the
        scheduler: an earlier step may still be writing the slot's previous owner."""
        self.tags[:, slots] = -1
        self.ngrams[slots] = -1

    def seed_ngrams(self, slots: Tensor, positions: Tensor, classes: Tensor) -> None:
        """Token classes [n, L] of the L positions before ``positions`` [n], for a request that starts in the
        middle of a sequence. Columns ascend by position; positions below 0 are skipped."""
        length = self.ngrams.shape[1]
        for back in range(1, classes.shape[1] + 1):
            at = positions - back
            column = at % length  # of a skipped one: some other, which keeps what it has; no wait for the device
            self.ngrams[slots, column] = torch.where(at >= 0, classes[:, -back], self.ngrams[slots, column])
