"""How much memory serving takes, from ``config.json`` and the shard headers alone: no SGLang, no device, no weights
read.

Asked three times with the same rules: when arguments are resolved (nothing is loaded yet, so a refusal costs
seconds), when the pools are sized after loading, and by ``deepinfer plan``. Two numbers describe a deployment and
are kept apart: bytes per token of prefix, and bytes per running request.
"""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer_plugin.model.checkpoint import Checkpoint
from deepinfer_plugin.model.config import QUANT_BLOCK, V41Config
from deepinfer_plugin.model.layout import expert_sets
from deepinfer_plugin.model.memory import PageLayout, StateLayout

WINDOW = 100  # steps that a decision about experts looks at
JUNK_PAGES = JUNK_SLOTS = 1  # page 0 and slot 0 take what padding rows write
# SGLang's eager runner keeps its inputs in buffers with a row for every token of the page pool: token ids, positions,
# locations, three M-RoPE positions. A CPU never touches most of theirs.
INPUT_BYTES = 6 * 8


def token_extra(on_cpu: bool) -> int:
    """Bytes beside the pages for each of their tokens."""
    return 0 if on_cpu else INPUT_BYTES


def weight_bytes_of(part: Checkpoint, config: V41Config, device: str, balanced: bool) -> int:
    """What a rank holds once its part of a checkpoint is laid out (``Network.prepare``), and, if ``balanced``, what it
    needs to move experts. Layouts hold every weight once and pad little; those of an Ascend (``device`` "npu") hold the
    values of experts twice, and the first half of the output projection in bf16 too; scales that they repeat are not
    counted."""
    held = part.nbytes + (balancing_bytes(config) if balanced else 0)
    if device == "npu":
        sizes = {name: tensor.nbytes for name, tensor in part.tensors.items() if name.endswith(".weight")}
        held += sum(size for name, size in sizes.items() if ".experts." in name)
        held += sum(2 * size for name, size in sizes.items() if name.endswith("wo_a.weight"))
    return held


def balancing_bytes(config: V41Config) -> int:
    """What a rank needs to move experts (``--enable-eplb``): for each set of them one that leaves, one that arrives,
    and the counts of a window of steps."""
    values = 3 * config.hidden_size * config.expert_dim
    expert = values // 2 + values // QUANT_BLOCK
    return sum(2 * expert + 4 * WINDOW * layers * experts for layers, experts in expert_sets(config).values() if layers)


class CapacityError(ValueError):
    """The machine or the arguments leave no room to serve; the message names the argument and its nearest legal
    value."""


@dataclass(frozen=True)
class MemoryPlan:
    """One rank's memory. All sizes in bytes, ``tokens`` a whole number of pages."""

    page_size: int
    page_bytes: int
    slot_bytes: int
    running_requests: int
    tokens: int
    weight_bytes: int
    token_extra: int = 0

    @property
    def token_bytes(self) -> float:
        """Prefix memory per token."""
        return self.page_bytes / self.page_size

    @property
    def state_bytes(self) -> int:
        return (self.running_requests + JUNK_SLOTS) * self.slot_bytes

    @property
    def pool_bytes(self) -> int:
        return (self.tokens // self.page_size + JUNK_PAGES) * self.page_bytes

    @property
    def input_bytes(self) -> int:
        return self.tokens * self.token_extra

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.state_bytes + self.pool_bytes + self.input_bytes

    def __str__(self) -> str:
        return (
            f"{self.tokens} tokens at {self.token_bytes:g} bytes = {gib(self.pool_bytes)}, "
            f"{self.running_requests} requests at {self.slot_bytes} bytes = {gib(self.state_bytes)}, "
            f"weights {gib(self.weight_bytes)}"
        )


def gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 10 << 20 else f"{size / 2**20:.2f} MiB"


def least_tokens(config: V41Config, page_size: int) -> int:
    """The smallest page pool that never leaves a request waiting for ever: one full window with the drafts verified
    beside it, and one page to grow into."""
    rows = config.window + config.draft_block + 1
    return -(-rows // page_size) * page_size + page_size


def plan(
    config: V41Config,
    *,
    page_size: int,
    running_requests: int,
    weight_bytes: int = 0,
    budget_bytes: int | None = None,
    max_tokens: int | None = None,
    token_extra: int = 0,
) -> MemoryPlan:
    """Share ``budget_bytes`` of one rank between weights, request state and pages.

    weight_bytes: what is still to be loaded into the budget (``weight_bytes_of``); 0 once it is in place.
    budget_bytes: None means memory is not the limit; then ``max_tokens`` must be given.
    max_tokens: a cap on the page pool (``--max-total-tokens``); rounded down to whole pages.
    token_extra: bytes beside the pages for each of their tokens (the function of that name).

    Raises:
        CapacityError: the cap or the budget is too small to serve one request; names the least legal value.
    """
    page_bytes, slot_bytes = PageLayout.of(config, page_size).page_bytes, StateLayout.of(config).slot_bytes
    least = least_tokens(config, page_size)
    if running_requests < 1:
        raise CapacityError(
            f"--max-running-requests {running_requests} is not supported; the least legal value is 1 per rank"
        )
    if max_tokens is not None and max_tokens < least:
        raise CapacityError(
            f"--max-total-tokens {max_tokens} is too small for pages of {page_size} tokens: one request needs its "
            f"window of {config.window} tokens, {config.draft_block} drafts and a page to grow into; "
            f"the least legal value is {least}"
        )
    if budget_bytes is None:
        if max_tokens is None:
            raise ValueError("plan needs budget_bytes, max_tokens or both")
        tokens = max_tokens // page_size * page_size
        return MemoryPlan(page_size, page_bytes, slot_bytes, running_requests, tokens, weight_bytes, token_extra)

    least_pages = (least // page_size + JUNK_PAGES) * page_bytes + least * token_extra
    room = budget_bytes - weight_bytes - least_pages
    fitting = room // slot_bytes - JUNK_SLOTS
    if fitting < 1:
        needed = weight_bytes + least_pages + (1 + JUNK_SLOTS) * slot_bytes
        raise CapacityError(
            f"{gib(budget_bytes)} of memory cannot serve this model: weights take {gib(weight_bytes)}, one request's "
            f"state {gib(slot_bytes)}, the smallest page pool {gib(least_pages)}; "
            f"the least that works is {gib(needed)} ({needed} bytes)"
        )
    if running_requests > fitting:
        raise CapacityError(
            f"--max-running-requests {running_requests} does not fit {gib(budget_bytes)} of memory: state takes "
            f"{slot_bytes} bytes a request, weights {gib(weight_bytes)}, the smallest page pool {gib(least_pages)}; "
            f"the largest legal value is {fitting}"
        )
    state_bytes = (running_requests + JUNK_SLOTS) * slot_bytes
    room = budget_bytes - weight_bytes - state_bytes - JUNK_PAGES * page_bytes
    tokens = room // (page_bytes + page_size * token_extra) * page_size
    if max_tokens is not None:
        tokens = min(tokens, max_tokens // page_size * page_size)
    return MemoryPlan(page_size, page_bytes, slot_bytes, running_requests, tokens, weight_bytes, token_extra)
