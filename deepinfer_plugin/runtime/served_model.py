"""The class SGLang loads: our network behind SGLang's model interface, sampling side included."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessor, LogitsProcessorOutput
from sglang.srt.model_executor.forward_context import get_attn_backend
from sglang.srt.runtime_context import get_model, get_parallel
from torch import Tensor, nn

from deepinfer_plugin.eplb.balancer import Balancer
from deepinfer_plugin.kernels import select
from deepinfer_plugin.model.engram_table import EngramTable
from deepinfer_plugin.model.network import Network
from deepinfer_plugin.model.profiles import profile_named
from deepinfer_plugin.model.rows import Rows
from deepinfer_plugin.model.weights import Checkpoint, load_into
from deepinfer_plugin.model_impl import config_of
from deepinfer_plugin.runtime.balancing import balancer_of_server
from deepinfer_plugin.runtime.checks import check_stream_mix, check_window
from deepinfer_plugin.runtime.parallel import parallel_of_server
from deepinfer_plugin.runtime.threads import compute_threads
from deepinfer_plugin.settings import Settings

logger = logging.getLogger(__name__)


class DeepInferForCausalLM(nn.Module):
    """One rank's network. SGLang builds it on the target device, then calls ``load_weights`` once and ``forward``
    for ever."""

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = ""):
        """
        config: SGLang's model config as our parser made it; quant_config and prefix are SGLang's and unused.

        Raises:
            CheckpointError, EngramError: the directory is not a complete V4.1-Flash checkpoint.
        """
        super().__init__()
        device = torch.get_default_device()
        settings = Settings.current()
        path, v41 = get_model().model_path, config_of(config)
        if device.type == "cpu":
            cores = len(os.sched_getaffinity(0)) // get_parallel().tp_size
            torch.set_num_threads(compute_threads(v41.hidden_size, max(cores, 1)))
        self.checkpoint: Checkpoint | None = Checkpoint.open(path, v41)
        self.debug = settings.debug
        ops = select(device.type, settings.provider, dict(settings.ops), profile=settings.profile)
        for name in dict.fromkeys(ops.choices.values()):
            logger.info("ops of %s: %s", name, ", ".join(op for op, chosen in ops.choices.items() if chosen == name))
        self.parallel = parallel_of_server(settings, v41)
        self.balancer: Balancer | None = None
        table = EngramTable.load(path, v41)
        self.network = Network(v41, ops, profile_named(settings.profile), table, self.parallel)
        self.lm_head = Head(self.network)
        self.logits_processor = LogitsProcessor(config, skip_all_gather=True)  # the network gathers its own logits

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Read the checkpoint straight into the parameters, a progress bar on stderr. SGLang's own iterator is left
        alone: it would hold whole shards in memory, and cannot say which shard a wrong tensor came from."""
        del weights
        if self.checkpoint is None:
            raise NotImplementedError("weights are loaded once; restart the server to serve others")
        load_into(self.network, self.checkpoint.part(self.parallel.place, self.network.config))
        if self.network.dspark is not None:
            self.network.dspark.has_confidence = self.checkpoint.has_confidence
        self.checkpoint = None
        self.network.prepare()
        torch.cuda.empty_cache()  # of what was loaded: SGLang asks the device what is free
        check_stream_mix(self.network)
        self.balancer = balancer_of_server(self.network, Settings.current())

    @torch.no_grad()  # not inference_mode: SGLang's sampler divides the logits in place, outside of it
    def forward(self, input_ids: Tensor, positions: Tensor, forward_batch: Any) -> LogitsProcessorOutput:
        """Next-token logits float32, and what else the batch asks of SGLang's LogitsProcessor (prompt logprobs,
        hidden states)."""
        if self.balancer is not None:  # not before: while the server starts, forwards are of made-up rows
            self.balancer.start()
        backend: Any = get_attn_backend()
        rows = backend.forward_metadata
        if rows is None:
            if self.parallel.groups > 1:  # others may have rows for the experts that lie here
                backend.step(Rows.none(input_ids.device))
            return LogitsProcessorOutput(
                next_token_logits=torch.empty(0, self.network.config.vocab_size, device=input_ids.device)
            )
        if self.debug:
            check_window(rows, backend.token_to_kv_pool.state, self.network.config.window)
        hidden = backend.step(rows)
        return self.logits_processor(input_ids, hidden, self.lm_head, forward_batch)


class Head(nn.Module):
    """The output head as LogitsProcessor takes one: no ``weight`` to multiply with, everything through
    ``quant_method``."""

    def __init__(self, network: Network):
        super().__init__()
        self.quant_method = HeadMethod(network)


class HeadMethod:
    """float32 logits, because a bf16 result would tie tokens that the model ranks."""

    def __init__(self, network: Network):
        self.network = network

    def apply(self, head: nn.Module, hidden: Tensor, bias: Tensor | None = None) -> Tensor:
        return self.network.logits(hidden.to(self.network.profile.dtype))

    def process_weights_after_loading(self, module: nn.Module) -> None:
        """Nothing: ``Network.prepare`` has laid the head out."""
