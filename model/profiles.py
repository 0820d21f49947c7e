"""Rounding profiles: which of the published implementations' rounding points a model follows.

``model``      DeepSeek's published inference code. The default, and what "right" means in tests.
``deepinfer``  DeepSeek's production engine: FP8 output projection, index scores summed in float32. Providers may
serve it with a faster, less exact class of an op (Hopper: the experts; ``force={"moe_experts": "cuda"}`` does not).
``float32``    for debugging: activations are never rounded nor cast to FP8; weights, latents and index keys keep
their formats.

Two profiles legitimately disagree by 10% of a logit on random weights (expert and top-k choices flip); compare only
within one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Profile:
    name: str
    dtype: torch.dtype  # of activations; float32 switches activation rounding off inside the ops
    fp8_output: bool  # attention output and wo_a in FP8 instead of bf16
    low_precision_scores: bool  # index scores rounded to bf16 at every step instead of once


PROFILES = {
    profile.name: profile
    for profile in (
        Profile("model", torch.bfloat16, fp8_output=False, low_precision_scores=True),
        Profile("deepinfer", torch.bfloat16, fp8_output=True, low_precision_scores=False),
        Profile("float32", torch.float32, fp8_output=False, low_precision_scores=False),
    )
}


def profile_named(name: str) -> Profile:
    """
    Raises:
        ValueError: no such profile; the message lists the legal names.
    """
    try:
        return PROFILES[name]
    except KeyError:
        raise ValueError(f"profile={name!r} is not known; legal: {', '.join(PROFILES)}") from None
