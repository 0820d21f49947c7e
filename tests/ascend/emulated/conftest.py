"""Tier C: emitted AscendC, compiled and run on the host. Collected only where TileLang is installed."""

from __future__ import annotations

from importlib.util import find_spec

if find_spec("tilelang") is None:
    collect_ignore_glob = ["test_*.py"]
