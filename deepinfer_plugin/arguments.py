"""What SGLang must be told so that ``--model-impl deepinfer --model-path DIR`` is enough.

One step does it all: the first one of SGLang's argument resolution that knows the model path, before anything is
derived from the model. It reads the architecture, refuses everything that cannot work at once, and declares the rest.
A value the user gave is never replaced. Declarations, not assignments, because SGLang carries those to its child
processes.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import model_impl, patches, ranks, refusals, termination
from .conflicts import ConflictError, refuse
from .expert_arguments import NOTHING, ExpertArguments
from .ranks import RankCounts
from .settings import Settings, from_command_line
from .speculative import algorithm

if TYPE_CHECKING:
    from .model.config import V41Config

logger = logging.getLogger(__name__)

SOURCE = "deepinfer"  # who declared it, in SGLang's records
ATTENTION_BACKEND = "deepinfer"
PAGE_SIZE = 128
RUNNING_REQUESTS = 256  # 0.8 GB of request state at released sizes
RUNNING_REQUESTS_CPU = 32
CHUNK_CPU = 512  # rows of a prefill step; the reference ops hold float64 scores of each row against the whole prefix
MEMORY_CPU = 0.8  # of the free memory, for weights, state and pages; the pages are capped on their own


def register() -> None:
    """Register the resolution step and the attention backend."""
    from sglang.srt.arg_groups.choices import (
        add_attention_backend_choices,
        add_deterministic_attention_backend_choices,
        add_radix_supported_deterministic_attention_backend_choices,
    )
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    register_resolution_hook("handle_model_source_paths")(resolve)
    add_attention_backend_choices([ATTENTION_BACKEND])
    add_deterministic_attention_backend_choices([ATTENTION_BACKEND])
    add_radix_supported_deterministic_attention_backend_choices([ATTENTION_BACKEND])  # we switch the tree off ourselves
    register_attention_backend(ATTENTION_BACKEND)(_attention_backend)


def _attention_backend(runner: Any) -> Any:
    from .runtime.backend import DeepInferBackend

    return DeepInferBackend(runner)


def resolve(server_args: Any, previous: Callable[[Any], None]) -> None:
    """SGLang's step ``handle_model_source_paths`` and, for our models, everything there is to declare.

    Raises:
        HookError: a hook that serving needs is not in place.
        SettingsError: a ``--deepinfer-*`` flag or ``DEEPINFER_*`` variable is wrong.
        ConfigError, CheckpointError, EngramError: the checkpoint is not one that can be served.
        ConflictError: arguments that cannot work; all of them.
    """
    from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view

    previous(server_args)
    view = resolving_view(server_args)
    if not model_impl.selected(view.model_impl):
        return
    if from_command_line(server_args):
        refusals.print_plainly()
    patches.verify()
    settings = Settings.of(server_args)
    if view.enable_deterministic_inference:
        # A replayed window is an approximation, and how much of a prompt is cached depends on what ran before.
        logger.info("--enable-deterministic-inference implies --deepinfer-exact-prefix")
        settings = replace(settings, exact_prefix=True)
    declare_resolution(server_args, SOURCE, model_config_parser=model_impl.PARSER)
    experts = ExpertArguments.of(server_args)
    device = device_of(view)
    config, weight_bytes = _read_checkpoint(view, experts, device)
    refuse(server_args, config, settings, weight_bytes, device)
    if device == "cpu":
        # The scheduler takes all cores when it builds the network. The other processes only move text and tokens, and
        # a thread pool each would fight it for every core.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        ranks.share_machine(RankCounts.of(view), sorted(os.sched_getaffinity(0)))
    elif device == "npu":
        from .platform.ascend import apply_environment

        apply_environment()
    if from_command_line(server_args):
        termination.exit_on_sigterm()
    declared = declarations(view, config, settings, device)
    if not experts.as_usual:
        declared |= NOTHING  # for SGLang to balance: the balancer is ours
    logger.info("deepinfer declares %s", declared)
    declare_resolution(server_args, SOURCE, **declared)


def device_of(view: Any) -> str:
    """The device type SGLang is going to resolve to."""
    from sglang.srt.platforms import current_platform

    return str(view.device or current_platform.device_type).split(":")[0]


def _read_checkpoint(view: Any, experts: ExpertArguments, device: str) -> tuple[V41Config, int]:
    """The architecture and the bytes of one rank's weights, replicas and what moves them included, from files that are
    all checked here: a bad checkpoint should cost seconds, not a load."""
    from .model.checkpoint import Checkpoint
    from .model.config import V41Config
    from .model.engram_table import EngramTable
    from .runtime.memory_plan import weight_bytes_of
    from .tokenizer_check import tokenizer_problem

    path = Path(view.model_path)
    if not path.is_dir():
        raise ConflictError([f"--model-path {path}: not a directory; download the checkpoint and name the directory"])
    config = V41Config.load(path)
    place = RankCounts.of(view).largest(config, experts.redundant)
    part = Checkpoint.open(path, config).part(place, config)
    problem = None if view.skip_tokenizer_init or view.tokenizer_path else tokenizer_problem(path)
    if problem:
        raise ConflictError([f"--model-path {path}: {problem}; it comes with the checkpoint"])
    EngramTable.load(path, config)
    return config, weight_bytes_of(part, config, device, experts.balanced)


def declarations(view: Any, config: V41Config, settings: Settings, device: str) -> dict[str, Any]:
    """Field -> value for SGLang's ``ServerArgs``, for arguments that are already known to be legal."""
    on_cpu = device == "cpu"
    page_size = view.page_size or PAGE_SIZE
    running, groups = view.max_running_requests or default_running(on_cpu), RankCounts.of(view).groups
    tokens = view.max_total_tokens
    if tokens is None and on_cpu:
        tokens = cpu_tokens(config, page_size, running // groups, view.context_length, settings.cpu_kv_mib << 20)
    unset = {
        "attention_backend": ATTENTION_BACKEND,
        "page_size": page_size,
        "max_running_requests": running,  # state is sized before SGLang would pick a number, and it picks thousands
        "max_total_tokens": tokens,
        "chunked_prefill_size": CHUNK_CPU * groups if on_cpu else None,  # SGLang divides it among them
        # SGLang guesses activations from the sizes of a GPU; unchunked prompts would leave a CPU less than nothing.
        "mem_fraction_static": MEMORY_CPU if on_cpu else None,
        "context_length": context_length(config, page_size, tokens),
        "reasoning_parser": "auto",  # detected from the checkpoint, but only when asked for
        "tool_call_parser": "auto",
        # SGLang's graphs replay attention layers of its own kind, and know requests where ours know rows
        # (runtime/graphs.py).
        "cuda_graph_backend_prefill": "disabled",
        "cuda_graph_backend_decode": "disabled",
    }
    declared = {name: value for name, value in unset.items() if value is not None and getattr(view, name) is None}
    if speculates(view, config, settings):
        declared |= speculative(config)
    if settings.exact_prefix:
        declared["disable_radix_cache"] = True
    else:
        declared["enable_encoder_swa_bounded_replay"] = True
    if on_cpu:
        declared["sleep_on_idle"] = True  # an idle scheduler polls, which on a CPU takes one of the cores that compute
    return declared


def default_running(on_cpu: bool) -> int:
    """Requests that run at a time unless the user says how many."""
    return RUNNING_REQUESTS_CPU if on_cpu else RUNNING_REQUESTS


def speculates(view: Any, config: V41Config, settings: Settings) -> bool:
    """Whether the server decodes speculatively: where it can, unless told not to."""
    if settings.speculation == "auto" and view.speculative_algorithm is None:
        return bool(config.draft_block) and not view.enable_watermark
    return settings.speculation != "off"


def speculative(config: V41Config) -> dict[str, Any]:
    """The only values that fit a checkpoint with a draft head: SGLang reserves room for a whole block and the token
    before it."""
    return {
        "speculative_algorithm": algorithm.NAME,
        "speculative_num_steps": config.draft_block,
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": config.draft_block + 1,
    }


def cpu_tokens(config: V41Config, page_size: int, running: int, context: int | None, budget: int) -> int:
    """Pages for a machine without accelerator, where SGLang would take nine tenths of the memory: as many tokens as
    ``budget`` bytes hold, but no more than the running requests can fill and no fewer than one of them needs."""
    from .model.memory import PageLayout
    from .runtime.memory_plan import least_tokens

    fitting = budget // PageLayout.of(config, page_size).page_bytes * page_size
    fillable = running * tokens_for_context(context or config.max_position, page_size)
    needed = least_tokens(config, page_size) if context is None else tokens_for_context(context, page_size)
    return max(min(fitting, fillable), needed)


def tokens_for_context(context: int, page_size: int) -> int:
    """Tokens a pool must have so that one request of ``context`` tokens is always admitted. SGLang charges the prompt
    in whole pages and a page on top; a prompt that it accepts and cannot charge would wait for ever."""
    return -(-context // page_size) * page_size + 2 * page_size


def context_length(config: V41Config, page_size: int, tokens: int | None) -> int | None:
    """The longest request that a pool of ``tokens`` can serve, if that is less than the model can: longer ones are
    then refused by name instead of never being admitted. None: the model's own length."""
    if tokens is None or tokens >= tokens_for_context(config.max_position, page_size):
        return None
    return tokens // page_size * page_size - 2 * page_size
