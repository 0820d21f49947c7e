"""The two memories as SGLang sees them: one opaque pool of pages for its allocator, radix tree and caches, with the
state beside it.

SGLang's paged pools are arrays of token rows. A page of ours is not: it holds four sources whose groups span
tokens, so a token has no bytes of its own and only whole pages move, copy or travel. Everything that would treat a
token as a row is refused here by name.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from sglang.srt.constants import GPU_MEMORY_TYPE_KV_CACHE
from sglang.srt.mem_cache.device_pool_info import DevicePoolInfo, PageRowBufferInfo
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool
from sglang.srt.model_executor.pool_configurator import MemoryPoolConfig, MemoryPoolConfigurator
from sglang.srt.runtime_context import get_disagg, get_exec, get_schedule
from torch import Tensor

from deepinfer_plugin.arguments import context_length, tokens_for_context
from deepinfer_plugin.model.config import V41Config
from deepinfer_plugin.model.memory import PageLayout, PagePool, StateLayout, StatePool
from deepinfer_plugin.runtime.memory_plan import CapacityError, gib, plan, token_extra

logger = logging.getLogger(__name__)


class PoolSizer(MemoryPoolConfigurator):
    """Turns the bytes left after loading into pages, once the state of every running request is paid for."""

    def __init__(self, configurator: Any):
        self.config: V41Config = configurator.model.network.config
        self.running_requests = running_requests(configurator.attn_dp_size)
        self.context = configurator.model_config.context_len
        self.token_extra = token_extra(torch.device(configurator.device).type == "cpu")

    def calculate_pool_sizes(self, available_bytes: int, page_size: int) -> MemoryPoolConfig:
        """
        Raises:
            CapacityError: the bytes left cannot hold the state and the smallest page pool, or a request of the whole
                context would be accepted and then wait for ever.
        """
        sizes = plan(
            self.config,
            page_size=page_size,
            running_requests=self.running_requests,
            budget_bytes=available_bytes,
            token_extra=self.token_extra,
        )
        wanted = tokens_for_context(self.context, page_size)
        if cap := get_schedule().max_total_tokens:  # the context was cut to fit it when arguments were resolved
            wanted = min(wanted, cap // page_size * page_size)
        if sizes.tokens < wanted:
            longest = context_length(self.config, page_size, sizes.tokens)
            raise CapacityError(
                f"--context-length {self.context}: the {gib(available_bytes)} left after loading hold {sizes.tokens} "
                f"tokens; the largest legal value is {longest}, or make room with fewer --max-running-requests than "
                f"{self.running_requests}"
            )
        return MemoryPoolConfig(max_total_num_tokens=sizes.tokens)

    def calculate_pool_sizes_from_max_tokens(self, max_total_num_tokens: int, page_size: int) -> MemoryPoolConfig:
        """A token count below what ``calculate_pool_sizes`` found, so the state is already paid for.

        Raises:
            CapacityError: fewer tokens than one request needs.
        """
        sizes = plan(
            self.config, page_size=page_size, running_requests=self.running_requests, max_tokens=max_total_num_tokens
        )
        return MemoryPoolConfig(max_total_num_tokens=sizes.tokens)


def running_requests(dp_size: int) -> int:
    """State slots of one rank, the junk slot not counted: SGLang's request rows, which a PD decode server has more
    of.

    Raises:
        CapacityError: ``max_running_requests`` is unset; state is sized before SGLang would pick it.
    """
    declared = get_schedule().max_running_requests
    if declared is None:
        raise CapacityError(
            "--max-running-requests must be declared: request state is sized before SGLang picks a number"
        )
    extra = get_disagg().disaggregation_decode_extra_slots if get_disagg().disaggregation_mode == "decode" else 0
    return max(1, declared // dp_size) + (extra or 0)


def build_pool(configurator: Any, sizes: Any, req_to_token_pool: Any) -> PagePoolForSGLang:
    """The pool for SGLang's sizes; state gets one slot per row of ``req_to_token``, row 0 included.

    Raises:
        CapacityError: SGLang made more request rows than the sizer paid for.
    """
    rows, paid = req_to_token_pool.req_to_token.shape[0], running_requests(configurator.attn_dp_size) + 1
    if rows > paid:
        raise CapacityError(
            f"SGLang allocated {rows} request rows but state was sized for {paid}; lower --max-running-requests"
        )
    return PagePoolForSGLang(
        configurator.model.network.config,
        tokens=sizes.max_total_num_tokens,
        page_size=configurator.page_size,
        slots=rows,
        device=configurator.device,
        enable_memory_saver=get_exec().features.enable_memory_saver,
    )


class PagePoolForSGLang(MLATokenToKVPool):
    """``pages`` is the network's page pool and the only buffer SGLang sees, uint8 [tokens / page_size + 1,
    page_bytes], page 0 junk; ``state`` is the network's state pool. SGLang's token location t lies in page t //
    page_size."""

    def __init__(
        self,
        config: V41Config,
        tokens: int,
        page_size: int,
        slots: int,
        device: str,
        enable_memory_saver: bool = False,
    ):
        if tokens % page_size:
            raise ValueError(f"PagePoolForSGLang: {tokens} tokens are not whole pages of {page_size}")
        self.layout = PageLayout.of(config, page_size)
        super().__init__(
            size=tokens,
            page_size=page_size,
            dtype=torch.uint8,
            kv_lora_rank=self.layout.token_bytes,
            qk_rope_head_dim=0,
            layer_num=1,
            device=device,
            enable_memory_saver=enable_memory_saver,
            start_layer=0,
            end_layer=0,
        )
        self.state = StatePool(StateLayout.of(config), slots, device)
        self.request_window = RequestWindow(self.state)
        slot_bytes = self.state.layout.slot_bytes
        logger.info(
            "deepinfer memory: %d tokens at %g bytes = %s of pages, %d request slots at %d bytes = %s of state",
            tokens,
            self.layout.page_bytes / page_size,
            gib(self.pages.pages.nbytes),
            slots,
            slot_bytes,
            gib(slots * slot_bytes),
        )

    def _create_buffers(self) -> None:
        with self.memory_saver_adapter.region(GPU_MEMORY_TYPE_KV_CACHE):
            self.pages = PagePool.allocate(self.layout, self.size // self.page_size + 1, self.device)
        self.kv_buffer = [self.pages.pages]

    # ---- reading ---------------------------------------------------------------------------------------------------

    def wait_loaded(self) -> None:
        """Wait, on the current stream, for pages on their way back from a host cache. Kernels read the buffer
        directly, past SGLang's ``get_key_buffer`` that would wait; so this is called once before the first read of
        a forward."""
        if self.layer_transfer_counter is not None:
            self.layer_transfer_counter.wait_until(0)

    def get_key_buffer(self, layer_id: int) -> Tensor:
        self.wait_loaded()
        return self.pages.pages

    get_value_buffer = get_key_buffer

    # ---- moving: whole pages only ----------------------------------------------------------------------------------

    def page_ids(self, indices: Tensor) -> Tensor:
        """Pages int64 [ceil(n / page_size)] under token locations [n] of one sequence from a page boundary on.

        Raises:
            ValueError: the locations do not start a page or do not run through their pages in order.
        """
        size = self.page_size
        indices = indices.to(torch.int64)
        pages = indices[::size] // size
        expected = (
            torch.arange(len(indices), device=indices.device) % size
            + pages.repeat_interleave(size)[: len(indices)] * size
        )
        if not torch.equal(indices, expected):
            raise ValueError(f"only whole pages of {size} tokens can be copied; the given locations tear a page")
        return pages

    def get_cpu_copy(self, indices: Tensor, mamba_indices: Any = None, req_pool_index: Any = None) -> dict[str, Tensor]:
        """Host copy of a retracted request: its pages (the last one may be partly filled) and, if its slot is
        given, its state, so that it can go on without a replay."""
        copy = {"pages": self.pages.pages[self.page_ids(indices)].cpu()}
        if req_pool_index is not None:
            copy |= {name: tensor.select(dim, int(req_pool_index)).cpu() for name, dim, tensor in self._state_tensors()}
        return copy

    def load_cpu_copy(
        self, kv_cache_cpu: dict[str, Tensor], indices: Tensor, mamba_indices: Any = None, req_pool_index: Any = None
    ) -> None:
        pages, saved = self.page_ids(indices), kv_cache_cpu["pages"]
        if len(pages) != len(saved):
            raise ValueError(f"a copy of {len(saved)} pages cannot be loaded into {len(pages)}")
        self.pages.pages[pages] = saved.to(self.device)
        if req_pool_index is not None and "rings" in kv_cache_cpu:
            for name, dim, tensor in self._state_tensors():
                tensor.select(dim, int(req_pool_index)).copy_(kv_cache_cpu[name])

    def _state_tensors(self) -> tuple[tuple[str, int, Tensor], ...]:
        """Name, slot dimension and storage of everything a slot holds."""
        state = self.state
        return (
            ("rings", 1, state.rings),
            ("tags", 1, state.tags),
            ("tails", 1, state.tails),
            ("ngrams", 0, state.ngrams),
        )

    def move_kv_cache(self, tgt_loc: Tensor, src_loc: Tensor) -> None:
        raise NotImplementedError(
            "a page is not an array of token rows: single tokens cannot be moved between locations"
        )

    def _refuse_rows(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(
            "a page is not an array of token rows: the network writes and reads it through the op table"
        )

    set_kv_buffer = set_mla_kv_buffer = get_mla_kv_buffer = _refuse_rows

    # ---- describing ------------------------------------------------------------------------------------------------

    def get_contiguous_buf_infos(self) -> tuple[list[int], list[int], list[int]]:
        pages = self.pages.pages
        return [pages.data_ptr()], [pages.nbytes], [self.layout.page_bytes]

    def get_device_pool_infos(self) -> tuple[DevicePoolInfo, ...]:
        pages = self.pages.pages
        info = PageRowBufferInfo(
            slab=pages.unsqueeze(0),
            rows=(pages,),
            row_bytes=self.layout.page_bytes,
            page_size=self.page_size,
            num_pages=pages.shape[0],
        )
        return (DevicePoolInfo(pool_name=PoolName.KV, indices_from_pool=PoolName.KV, layer_ids=(0,), buffer_info=info),)


class RequestWindow:
    """What SGLang's replay fold asks of a pool: forget a slot's window when a request takes it over. Called on the
    forward stream."""

    def __init__(self, state: StatePool):
        self.state = state

    def reset(self, slots: Tensor) -> None:
        self.state.reset(slots.to(torch.int64))

    def initialize_dummy_history(self) -> None:
        """Dummy batches run on the junk slot, whose contents never matter."""
