"""Arguments that cannot work with our model, refused by name and all at once.

Most are features of SGLang that nobody has taught this model yet, or that would read memory of ours as something it
is not. Silence would serve wrong tokens or ignore a flag; SGLang's own checks are keyed on the names of its models
and do not fire for ours.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from . import expert_arguments, ranks
from .expert_arguments import ExpertArguments
from .ranks import RankCounts
from .settings import from_command_line

if TYPE_CHECKING:
    from .model.config import V41Config
    from .runtime.memory_plan import MemoryPlan
    from .settings import Settings

PAGE_SIZES = (64, 128)
REPLAY_WINDOW = 128  # SGLang's replay runs this many cached tokens again, whatever the model
DEVICES = ("cpu", "cuda", "npu")

# Field of ServerArgs -> why any value but its default (or those in ALSO_LEGAL) is refused.
REFUSED = {
    "tokenizer_worker_num": "worker processes do not load plugins and cannot read this model's config",
    "pp_size": "the network has no pipeline stages",
    "attn_cp_size": "context parallelism is not there yet",
    "moe_dp_size": "data-parallel experts are not there yet",
    "dcp_size": "context parallelism is not there yet",
    "dwdp_size": "distributed weights are not there yet",
    "enable_prefill_cp": "context parallelism is not there yet",
    "nnodes": "one node only so far",
    "speculative_draft_model_path": "the checkpoint drafts for itself",
    "speculative_draft_model_quantization": "the checkpoint drafts for itself",
    "speculative_draft_attention_backend": "the checkpoint drafts for itself",
    "speculative_draft_kv_cache_dtype": "the formats of pages and windows are part of the model",
    "speculative_draft_window_size": "the draft window is part of the model",
    "speculative_draft_sink_size": "the draft window is part of the model",
    "speculative_token_map": "the checkpoint drafts over its whole vocabulary",
    "speculative_accept_threshold_single": "acceptance is exact",
    "speculative_accept_threshold_acc": "acceptance is exact",
    "speculative_use_rejection_sampling": "acceptance is exact without it",
    "speculative_use_block_verification": "drafts are verified one by one",
    "speculative_adaptive": "it changes the draft length, which is part of the model",
    "speculative_dspark_sps_table_path": "it belongs to SGLang's own DSPARK",
    "speculative_dspark_confidence_sts_path": "it belongs to SGLang's own DSPARK",
    "uno_lora_path": "there are no LoRA layers in this network",
    "disaggregation_mode": "prefill/decode disaggregation is not there yet",
    "enable_pdmux": "prefill/decode multiplexing is not there yet",
    "enable_hierarchical_cache": "host tiers of the prefix cache are not there yet",
    "hicache_storage_backend": "host tiers of the prefix cache are not there yet",
    "enable_lmcache": "it moves token rows; a page of this model has none",
    "enable_flexkv": "it moves token rows; a page of this model has none",
    "enable_unified_cache_external_linker": "it moves token rows; a page of this model has none",
    "enable_mixed_chunk": "replayed rows and decode rows cannot share a batch in SGLang",
    "enable_lora": "there are no LoRA layers in this network",
    "lora_paths": "there are no LoRA layers in this network",
    "enable_streaming_session": "sessions keep a request slot whose window would belong to an earlier turn",
    "enable_session_radix_cache": "sessions keep a request slot whose window would belong to an earlier turn",
    "enable_hisparse": "the model selects its own sparse groups",
    "enable_two_batch_overlap": "batches are not split",
    "enable_single_batch_overlap": "batches are not split",
    "kv_cache_dtype": "the formats of pages and windows are part of the model",
    "quantization": "the formats of the weights are part of the checkpoint",
    "dtype": "activations are bfloat16; --deepinfer-profile float32 is for debugging",
    "load_format": "the checkpoint is read by our own loader, from safetensors",
    "startup_weight_load_mode": "the checkpoint is read by our own loader, once",
    "weight_cache_mode": "the checkpoint is read by our own loader, once",
    "cpu_offload_gb": "weights stay on their device",
    "offload_group_size": "weights stay on their device",
    "kt_weight_path": "experts run where their weights are",
    "enable_paged_experts": "experts run where their weights are",
    "enable_torch_compile": "the network is not compiled",
    "moe_runner_backend": "experts run through our own ops; see --deepinfer-ops",
    "moe_a2a_backend": "expert outputs travel by torch.distributed so far",
    "eplb_algorithm": "experts are placed by our own policy; legal: auto, deepinfer",
    "eplb_rebalance_layers_per_chunk": "experts move by bytes, not layers; see --deepinfer-expert-chunk-kib",
    "eplb_min_rebalancing_utilization_threshold": "experts move when the forecast gain exceeds the cost",
    "ep_dispatch_algorithm": "replicas share a step's rows by its own counts",
    "expert_distribution_recorder_mode": "our own balancer counts; its metrics are deepinfer_eplb_*",
    "expert_distribution_recorder_buffer_size": "our own balancer counts; its metrics are deepinfer_eplb_*",
    "expert_balancedness_report_mode": "our own balancer counts; its metrics are deepinfer_eplb_*",
    "enable_elastic_expert_backup": "the number of ranks is fixed",
    "elastic_ep_backend": "the number of ranks is fixed",
    "attention_backend": "attention reads pages and windows that only our backend knows",
    "prefill_attention_backend": "attention reads pages and windows that only our backend knows",
    "decode_attention_backend": "attention reads pages and windows that only our backend knows",
    "radix_cache_backend": "only SGLang's own prefix tree is known to keep whole pages",
    "enable_unified_memory": "pages are a pool of their own",
    "enable_page_major_kv_layout": "pages have a layout of their own",
    "enable_kv_cache_sharding": "a page is not divided",
    "prefill_only_disable_kv_cache": "the network reads what it wrote to pages",
    "enable_decoder_swa_bounded_replay": "replay of the upper layers is not there yet",
    "enable_multimodal": "images are not served yet",
    "encoder_only": "images are not served yet",
    "language_only": "images are not served yet",
    "is_embedding": "there is no embedding head",
    "rl_on_policy_target": "the ops are not those of a trainer",
    "dllm_algorithm": "this is not a diffusion model",
    "model_config_parser": "the config must be read by our own parser",
    "json_model_override_args": "the network is built from config.json as released; change the file",
    "cuda_graph_backend_prefill": "prefill is not captured",
    "cuda_graph_backend_decode": "decode runs our own graphs, or none",
    "cuda_graph_bs_decode": "graphs are captured by rows, for as many requests as may run",
    "cuda_graph_max_bs_decode": "graphs are captured by rows, for as many requests as may run",
    "disable_cuda_graph_padding": "steps are padded to a captured number of rows, or run op by op",
    "debug_cuda_graph": "it looks into SGLang's own graphs",
}
ALSO_LEGAL = {
    "eplb_algorithm": ("deepinfer",),
    "dtype": ("bfloat16",),
    "load_format": ("safetensors",),
    "attention_backend": ("deepinfer",),
    "prefill_attention_backend": ("deepinfer",),
    "decode_attention_backend": ("deepinfer",),
    "model_config_parser": ("deepinfer",),
    "json_model_override_args": ("", "{}"),
    "enable_lora": (False,),
    "enable_multimodal": (False,),
    "enable_decoder_swa_bounded_replay": (False,),
    "cuda_graph_backend_prefill": ("disabled",),
    "cuda_graph_backend_decode": ("disabled",),
}


class ConflictError(ValueError):
    """Arguments that cannot work together with this model. ``conflicts`` has every one; so does the text."""

    def __init__(self, conflicts: list[str]):
        self.conflicts = conflicts
        super().__init__(
            "--model-impl deepinfer cannot serve with these arguments:\n" + "\n".join(f"  {c}" for c in conflicts)
        )


def refuse(server_args: Any, config: V41Config, settings: Settings, weight_bytes: int, device: str) -> None:
    """
    Raises:
        ConflictError: at least one argument cannot work.
    """
    from sglang.srt.arg_groups.overrides import resolving_view

    view, experts = resolving_view(server_args), ExpertArguments.of(server_args)
    found = [
        *_refused_fields(server_args),
        *_device(device),
        *_address(server_args, view),
        *ranks.conflicts(view, config, experts.redundant),
        *expert_arguments.conflicts(experts, RankCounts.of(view), config, settings),
        *_ops(settings, device),
        *speculation(view, config, settings),
        *_sizes(view, config, settings, weight_bytes, device),
    ]
    if found:
        raise ConflictError(found)


def _refused_fields(server_args: Any) -> Iterator[str]:
    """What the user gave, not what SGLang made of it: some refused fields are set by earlier steps for every model."""
    from msgspec.structs import fields

    defaults = {field.name: field.default for field in fields(type(server_args))}
    for name, why in REFUSED.items():
        value = getattr(server_args, name)
        if value != defaults[name] and value not in ALSO_LEGAL.get(name, ()):
            yield f"{_flag(name, value)}: {why}"
    for phase, name in (("prefill", "backend"), ("decode", "backend"), ("decode", "bs"), ("decode", "max_bs")):
        value = graph_field(server_args.cuda_graph_config, phase, name)
        if value not in (None, "disabled"):
            yield f"--cuda-graph-config {phase}.{name}={value}: {REFUSED[f'cuda_graph_{name}_{phase}']}"


def graph_field(given: Any, phase: str, name: str) -> Any:
    """A field of ``--cuda-graph-config`` as given: None, JSON, or SGLang's object."""
    if given is None or isinstance(given, dict):
        return ((given or {}).get(phase) or {}).get(name)
    return getattr(getattr(given, phase, None), name, None)


def _flag(name: str, value: Any) -> str:
    flag = f"--{name.replace('_', '-')}"
    return flag if value is True else f"{flag} {value}"


def _device(device: str) -> Iterator[str]:
    from sglang.srt.platforms import current_platform

    if device not in DEVICES:
        yield f"--device {device}: legal: {', '.join(DEVICES)}"
    elif device == "npu":
        from .kernels.ascend import soc
        from .platform.ascend import device_conflict

        if problem := soc.machine().problem() or device_conflict():
            yield f"--device npu: {problem}"
    elif device == "cpu" and not current_platform.is_out_of_tree():
        if os.environ.get("SGLANG_USE_CPU_ENGINE", "0") == "1":
            yield "SGLANG_USE_CPU_ENGINE=1: it selects SGLang's own CPU engine; unset it"
        else:
            yield "--device cpu: this machine has an accelerator; hide it (CUDA_VISIBLE_DEVICES=) to serve on the CPU"


def _address(server_args: Any, view: Any) -> Iterator[str]:
    """Whether the server will be able to listen, which SGLang tries once everything is loaded. Only asked of a command
    line: ``Engine`` never listens."""
    if not from_command_line(server_args):
        return
    try:
        if not 0 <= view.port <= 65535:  # resolving would take it modulo 65536
            raise OverflowError("a port is 0 to 65535")
        found = socket.getaddrinfo(view.host or None, view.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        failed = [error for family, *_, address in found if (error := _cannot_listen(family, address))]
        # Of a name's addresses this machine may lack some, an IPv6 one perhaps.
        failed.sort(key=lambda error: error.errno == errno.EADDRNOTAVAIL)
        if failed and (len(failed) == len(found) or failed[0].errno != errno.EADDRNOTAVAIL):
            raise failed[0]
    except (OSError, OverflowError) as error:
        why = str(getattr(error, "strerror", None) or error).partition(" (while")[0]
        yield f"--host {view.host} --port {view.port}: cannot listen there ({why}); name another"


def _cannot_listen(family: int, address: Any) -> OSError | None:
    try:
        socket.create_server(address, family=family).close()
    except OSError as error:
        return error
    return None


def _ops(settings: Settings, device: str) -> Iterator[str]:
    import torch

    from .kernels import select

    if device not in DEVICES or (device == "npu" and not hasattr(torch, "npu")):
        return  # refused already; torch cannot even name an NPU without torch_npu
    try:
        # The device is not used in this process: what its ops compute is checked where the model is made.
        select(device, settings.provider, dict(settings.ops), profile=settings.profile, check=False)
    except ValueError as error:
        yield str(error)


def speculation(view: Any, config: V41Config, settings: Settings) -> Iterator[str]:
    """Speculative decoding as the checkpoint can do it, and no other."""
    from .arguments import speculates
    from .speculative.algorithm import NAME
    from .speculative.calibration import CalibrationError, calibration_of

    given, block, speculating = view.speculative_algorithm, config.draft_block, speculates(view, config, settings)
    if given is not None and given.upper() != NAME:
        yield f"--speculative-algorithm {given}: legal: {NAME}, or --deepinfer-speculation"
    elif given is not None and settings.speculation == "off":
        yield f"--deepinfer-speculation off: it contradicts --speculative-algorithm {given}"
    elif speculating and not block:
        yield "--deepinfer-speculation: this checkpoint has no draft head; legal: auto, off"
    elif speculating:
        try:
            calibration_of(view.model_path, settings.calibration, block)
        except CalibrationError as error:
            yield f"--deepinfer-calibration: {error}"
    for name, legal in (
        ("speculative_num_steps", block),
        ("speculative_num_draft_tokens", block + 1),
        ("speculative_eagle_topk", 1),
        ("speculative_dspark_block_size", block),
        ("speculative_dflash_block_size", block),
    ):
        value = getattr(view, name)
        if value is not None and value != legal:
            yield f"--{name.replace('_', '-')} {value}: the checkpoint drafts blocks of {block}; legal: {legal}"
    if speculating and view.enable_watermark:
        yield "--enable-watermark: it is not applied to verified drafts; add --deepinfer-speculation off"


def _memory(device: str, fraction: float | None, ranks: int) -> int:
    """Bytes of the device that weights, state and pages of one rank may take at most, asked without opening it in this
    process; where they cannot be known, more than any has. A ``fraction`` is one of what is free; of a GPU that is not
    known yet, so all of it counts as free. ``ranks`` share the memory of a machine without accelerators."""
    from sglang.srt.utils.common import get_available_gpu_memory, get_device_memory_capacity

    if device == "cpu" and fraction is not None:
        return int(get_available_gpu_memory(device, 0, empty_cache=False) * 2**30 * fraction) // ranks
    mebibytes = get_device_memory_capacity(device) if device in DEVICES else None
    return 1 << 62 if mebibytes is None else int((int(mebibytes) << 20) * (fraction or 1))


def _sizes(view: Any, config: V41Config, settings: Settings, weight_bytes: int, device: str) -> Iterator[str]:
    """Numbers that must fit each other, with the legal value next to each that does not."""
    from .arguments import PAGE_SIZE, cpu_tokens, default_running, tokens_for_context
    from .runtime.memory_plan import CapacityError, plan, token_extra

    page_size = PAGE_SIZE if view.page_size is None else view.page_size
    if page_size not in PAGE_SIZES:
        yield f"--page-size {page_size}: legal: {', '.join(map(str, PAGE_SIZES))}"
        return  # every other size is counted in pages

    groups, chunk = RankCounts.of(view).groups, view.chunked_prefill_size  # which SGLang divides among the groups
    if settings.exact_prefix:
        if chunk is not None and 0 < chunk < page_size * groups:
            yield (
                f"--chunked-prefill-size {chunk}: chunks are whole pages; the least legal value is {page_size * groups}"
            )
    else:
        if config.window != REPLAY_WINDOW:
            yield (
                f"sliding_window={config.window} in config.json: a cached prefix is replayed over {REPLAY_WINDOW} "
                "tokens, which does not rebuild this window; add --deepinfer-exact-prefix"
            )
        least = (REPLAY_WINDOW + page_size) * groups
        if chunk is not None and chunk < least:
            given = "off (-1)" if chunk <= 0 else chunk
            yield (
                f"--chunked-prefill-size {given}: a replayed prefix of {REPLAY_WINDOW} tokens and a page must fit a "
                f"chunk; the least legal value is {least}, or add --deepinfer-exact-prefix"
            )

    running, fraction = view.max_running_requests, view.mem_fraction_static
    context, tokens = view.context_length, view.max_total_tokens
    if running is None:
        running = default_running(device == "cpu")
    running = running // groups or min(running, 1)  # of one group
    if fraction is not None and not 0 < fraction <= 1:
        yield f"--mem-fraction-static {fraction}: legal: a number above 0, at most 1"
        fraction = None
    if context is not None and not 0 < context <= config.max_position:
        positions = config.max_position
        yield f"--context-length {context}: the model has positions for {positions} tokens; legal: 1 to {positions}"
        context = None
    try:
        sizes = plan(
            config,
            page_size=page_size,
            running_requests=running,
            weight_bytes=weight_bytes,
            budget_bytes=_memory(device, fraction, RankCounts.of(view).total),
            max_tokens=tokens,
            token_extra=token_extra(device == "cpu"),
        )
    except CapacityError as error:
        yield str(error) if fraction is None else f"--mem-fraction-static {fraction}: {error}"
        sizes = None
    if tokens is not None and context is not None and tokens < (least := tokens_for_context(context, page_size)):
        yield (
            f"--max-total-tokens {tokens}: one request of --context-length {context} tokens does not fit; "
            f"the least legal value is {least}"
        )
    elif sizes is not None:
        if tokens is None and device == "cpu":
            tokens = cpu_tokens(config, page_size, running, context, settings.cpu_kv_mib << 20)
        yield from _longest_request(config, sizes, tokens, context, fraction)


def _longest_request(
    config: V41Config, sizes: MemoryPlan, tokens: int | None, context: int | None, fraction: float | None
) -> Iterator[str]:
    """The pages that memory leaves must hold one request of the longest context that is accepted, or it waits for ever.
    tokens: the cap of the page pool; context: as given."""
    from .arguments import context_length, tokens_for_context
    from .runtime.memory_plan import gib

    page_size = sizes.page_size
    if context is None:
        fitting = context_length(config, page_size, tokens)
        context = config.max_position if fitting is None else fitting
    if sizes.tokens < tokens_for_context(context, page_size):
        given = "" if fraction is None else f"--mem-fraction-static {fraction}: "
        yield (
            f"{given}--context-length {context}: beside {gib(sizes.weight_bytes)} of weights and "
            f"{gib(sizes.state_bytes)} for {sizes.running_requests} running requests, memory holds {sizes.tokens} "
            f"tokens; the largest legal value is {context_length(config, page_size, sizes.tokens)}, or make room with "
            "fewer --max-running-requests"
        )
