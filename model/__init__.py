"""The DeepSeek-V4.1-Flash network, usable without SGLang: ``from deepinfer_plugin.model import V41``."""

from .config import ConfigError, V41Config
from .dspark import Draft
from .profiles import PROFILES, Profile
from .v41 import V41, Session
from .weights import CheckpointError

__all__ = ["PROFILES", "V41", "CheckpointError", "ConfigError", "Draft", "Profile", "Session", "V41Config"]
