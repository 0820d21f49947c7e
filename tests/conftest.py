"""Shared fixtures: one tiny checkpoint a session, one thread (the machine runs several processes), no hub access."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # for what tests start: on busy cores threads wait for each other

import pytest
import torch

ROOT = Path(__file__).parents[1]
# Scripts are imported by plain name, as they import each other when they are run.
sys.path[:0] = [str(ROOT / folder) for folder in ("examples/train_tiny", "examples", "benchmarks")]
torch.set_num_threads(1)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    from .workers import scheduler

    return scheduler(config, log)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """Directory of a tiny checkpoint with every layer kind and feature."""
    from deepinfer_plugin.model.tiny import write_tiny

    path = tmp_path_factory.mktemp("tiny")
    write_tiny(path)
    return path


@pytest.fixture
def deepinfer(capsys):
    """The ``deepinfer`` command with these arguments: exit code, what it printed, what it complained about."""
    from deepinfer_plugin.cli import main

    def run(*argv):
        try:
            code = main([*map(str, argv)])
        except SystemExit as exit:  # argparse
            code = exit.code
        return code, *capsys.readouterr()

    return run
