"""``--model-impl deepinfer``: from a released config to an architecture name of our own.

SGLang has a V4.1 implementation whose behaviour is keyed on the architecture name, on ``quantization_config`` and on
the vision fields. Our parser changes exactly those, so none of it fires, and keeps ``model_type``, which picks the
V4.1 chat encoding and enables SGLang's encoder replay. What the network itself needs is taken from the released JSON,
never from SGLang's reading of it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .model.config import V41Config

MODEL_IMPL = "deepinfer"
PARSER = "deepinfer"
ARCHITECTURE = "DeepInferDeepseekV41ForCausalLM"
RELEASED_JSON = "deepinfer_config"  # attribute of SGLang's config that holds the JSON as released


def selected(model_impl: Any) -> bool:
    """Whether a ``model_impl`` value of SGLang's (a string or an enum of strings) means this package."""
    return str(getattr(model_impl, "value", model_impl)).lower() == MODEL_IMPL


def serves(model_config: Any) -> bool:
    """Whether SGLang's ``ModelConfig`` describes a model of ours."""
    return ARCHITECTURE in (model_config.hf_config.architectures or ())


def config_of(hf_config: Any) -> V41Config:
    """The architecture behind a config that our parser made."""
    from .model.config import V41Config

    return V41Config.from_dict(getattr(hf_config, RELEASED_JSON))


def register() -> None:
    """Register the parser ``deepinfer``; ``arguments`` selects it."""
    from sglang.srt.configs.model_config_parser_registry import ModelConfigParserBase, register_model_config_parser

    @register_model_config_parser(PARSER)
    class Parser(ModelConfigParserBase):
        def parse(self, model: str | Path, trust_remote_code: bool, revision: str | None = None, **kwargs: Any) -> Any:
            return parse(model, trust_remote_code, revision, **kwargs)


def parse(model: str | Path, trust_remote_code: bool, revision: str | None = None, **kwargs: Any) -> Any:
    """SGLang's config object for a V4.1 checkpoint.

    Raises:
        ConfigError: another model, or a field that cannot be run; names it.
    """
    from sglang.srt.utils.hf_transformers.config import HfModelConfigParser
    from transformers import PretrainedConfig

    from .model.config import V41Config

    if Path(model).is_dir():
        V41Config.load(model)
    released, _ = PretrainedConfig.get_config_dict(model, revision=revision, **kwargs)
    V41Config.from_dict(released)

    config = HfModelConfigParser().parse(model, trust_remote_code, revision, **kwargs)
    setattr(config, RELEASED_JSON, released)
    config.architectures = [ARCHITECTURE]
    if hasattr(config, "quantization_config"):
        del (
            config.quantization_config
        )  # the formats are ours to read; SGLang would pick quantised layers and GEMMs for them
    config.vision_n_layers = 0  # text only: SGLang then refuses images by itself
    config.engram_layer_ids = ()  # SGLang would look for its own hasher in the model
    config.candidate_source_layer_id = -1  # ... and double the decode graphs for its own indexer
    return config
