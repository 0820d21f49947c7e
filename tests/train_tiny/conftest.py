"""The small training, prepared and done once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_tiny"


@pytest.fixture(scope="session")
def prepared(tmp_path_factory):
    """Config, tokenizer and corpus of the small setting, without weights."""
    from data import prepare
    from settings import SMALL

    path = tmp_path_factory.mktemp("prepared")
    prepare(SMALL, path)
    return path


@pytest.fixture(scope="session")
def trained(prepared):
    """The one command, at the small setting, on the prepared text: a checkpoint and its log."""
    command = [sys.executable, str(EXAMPLE / "train.py"), str(prepared), "--setting", "small", "--device", "cpu"]
    subprocess.run(command, check=True, timeout=900)
    return prepared
