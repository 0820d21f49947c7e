"""Tier D: Triton through the A5 compiler. Collected only where both are installed."""

from __future__ import annotations

from importlib.util import find_spec

if find_spec("ascendnpuir") is None:
    collect_ignore_glob = ["test_*.py"]
