"""How tests are shared out among several workers (``pytest -n 2``), each a process and a session of its own.

The tests of one server go to one worker, and so do those of any other file, whose fixtures are then made once. Groups
are handed out in the order in which they were collected, to whichever worker is free.
"""

from __future__ import annotations

import re

import pytest

from .server.serving import VARIANTS


def group_of(node_id: str) -> str:
    """All that a scheduler gets to know of a test is its id; that of a test of a server has the server's name."""
    file, _, test = node_id.partition("::")
    if file.startswith("tests/server/"):
        for name in re.split(r"[][-]", test):
            if name in VARIANTS:
                return f"server {name}"
    return file


def scheduler(config: pytest.Config, log):
    from xdist.scheduler import LoadScopeScheduling

    class ByGroup(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    config.option.loadscopereorder = False
    return ByGroup(config, log)
