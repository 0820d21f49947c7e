"""``--enable-deterministic-inference`` for our model: seeds decide what is drawn, and the network is left as it is.

With that flag SGLang draws from seeds, and puts batch-invariant kernels of Triton under torch's matrix products. Our
ops are batch-invariant by contract, some of them in float64, which those kernels do not know; a CPU has no Triton.
Why the draws are ours as well: ``runtime/seeded_draw.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .hook import Hook


def _ours() -> bool:
    from sglang.srt.runtime_context import attention_backends

    from ..arguments import ATTENTION_BACKEND

    try:
        return ATTENTION_BACKEND in attention_backends()
    except ValueError:  # no server's arguments: somebody uses SGLang as a library
        return False


def enable_batch_invariant_mode(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    if not _ours():
        original(*args, **kwargs)


def sampling_from_probs(
    original: Callable[..., Any], probs: Any, sampling_seed: Any = None, positions: Any = None
) -> Any:
    if sampling_seed is None or not _ours():
        return original(probs, sampling_seed=sampling_seed, positions=positions)
    import torch

    from ..runtime.seeded_draw import draw

    return draw(probs, sampling_seed, positions).to(torch.int32)


def limited_sampling_from_probs(
    original: Callable[..., Any],
    probs: Any,
    top_ks: Any,
    top_ps: Any,
    min_ps: Any,
    need_min_p_sampling: bool,
    sampling_seed: Any,
    positions: Any,
    *,
    return_filtered_probs: bool = False,
    max_top_k: int | None = None,
) -> Any:
    """As SGLang's: tokens int32 [R]; with ``return_filtered_probs`` also what was left to draw from, by rank, the token
    of each rank, and the weight of the token drawn."""
    if sampling_seed is None or not _ours():
        options = {"return_filtered_probs": return_filtered_probs, "max_top_k": max_top_k}
        limits = (top_ks, top_ps, min_ps, need_min_p_sampling)
        return original(probs, *limits, sampling_seed, positions, **options)
    import torch

    from ..runtime.seeded_draw import draw, filtered

    ranked, order = filtered(probs, top_ks, top_ps, min_ps)
    weights = torch.zeros_like(ranked).scatter(1, order, ranked)
    tokens = draw(weights, sampling_seed, positions)
    if not return_filtered_probs:
        return tokens.to(torch.int32)
    return tokens.to(torch.int32), ranked, order.to(torch.int32), weights.gather(1, tokens[:, None])[:, 0]


SAMPLER = "sglang.srt.layers.sampler"
HOOKS = (
    Hook(
        "batch_invariant_mode",
        "sglang.srt.batch_invariant_ops.enable_batch_invariant_mode",
        enable_batch_invariant_mode,
        "--enable-deterministic-inference puts Triton kernels under the network, which a CPU does not have",
        required=False,
    ),
    Hook(
        "seeded_draw",
        f"{SAMPLER}.sampling_from_probs_torch",
        sampling_from_probs,
        "with --enable-deterministic-inference a seeded request ends a server on a CPU",
        required=False,
    ),
    Hook(
        "seeded_limited_draw",
        f"{SAMPLER}.top_k_top_p_min_p_sampling_from_probs_torch",
        limited_sampling_from_probs,
        "with --enable-deterministic-inference a seeded request with min_p ends the server",
        required=False,
    ),
)
