"""Shared fixtures: one tiny checkpoint a session, one thread (the machine runs several processes), no hub access."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """Directory of a tiny checkpoint with every layer kind and feature."""
    from deepinfer_plugin.model.tiny import write_tiny

    path = tmp_path_factory.mktemp("tiny")
    write_tiny(path)
    return path
