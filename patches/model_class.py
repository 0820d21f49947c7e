"""Our class for our architecture name.

SGLang's model registry is keyed on the architecture alone and imports every model it has when asked; one function in
front of it knows ``model_impl``. Answering there also saves the scheduler those imports. It is the last point before
weights are read, so this is where a missing hook stops the start.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..model_impl import ARCHITECTURE, MODEL_IMPL, selected, serves
from .hook import Hook


def get_model_architecture(original: Callable[..., Any], model_config: Any) -> tuple[type, str]:
    if not selected(model_config.model_impl):
        return original(model_config)
    if not serves(model_config):
        raise ValueError(
            f"--model-impl {MODEL_IMPL} serves DeepSeek-V4.1 as its own config parser describes it, not "
            f"{model_config.hf_config.architectures}"
        )
    from sglang.srt.configs.model_config import ModelImpl

    from ..runtime.served_model import DeepInferForCausalLM
    from . import verify

    verify()
    model_config._resolved_model_arch = ARCHITECTURE
    model_config._resolved_model_impl = ModelImpl.SGLANG
    return DeepInferForCausalLM, ARCHITECTURE


HOOK = Hook(
    "model_class",
    "sglang.srt.model_loader.utils.get_model_architecture",
    get_model_architecture,
    "SGLang finds no class for the architecture",
)
