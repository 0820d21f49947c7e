"""Servers that live for a session, one test after another.

A test takes ``served`` and, unless it says otherwise, talks to the server with default flags:
``@pytest.mark.parametrize("served", ["exact"], indirect=True)`` picks others. Tests are sorted by the server they need.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from deepinfer_plugin.model import V41

from .reference import Reference
from .serving import VARIANTS, Servers

HERE = Path(__file__).parent
DIRECTORY = "my-deepseek-v4-copy"  # a name that must not decide anything


def _server_of(item: pytest.Item) -> str | None:
    if "served" not in getattr(item, "fixturenames", ()):
        return None
    callspec = getattr(item, "callspec", None)
    return callspec.params.get("served", "default") if callspec else "default"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    ours = [item for item in items if HERE in item.path.parents]
    for item in ours:
        item.add_marker("server")
    order = [None, *VARIANTS]
    ordered = iter(sorted(ours, key=lambda item: order.index(_server_of(item))))
    items[:] = [next(ordered) if HERE in item.path.parents else item for item in items]


@pytest.fixture(scope="session")
def servers(tiny, tmp_path_factory, request):
    model_path = tmp_path_factory.mktemp("models") / DIRECTORY
    shutil.copytree(tiny, model_path)
    needed = {_server_of(item) for item in request.session.items}
    servers = Servers(model_path, tmp_path_factory.mktemp("logs"), [name for name in VARIANTS if name in needed])
    servers.begin()
    yield servers
    servers.stop()


@pytest.fixture
def served(servers, request):
    """A running server with no request on it and nothing held, before the test and after."""
    served = servers.get(getattr(request, "param", "default"))
    served.flush()
    yield served
    served.wait_idle()


@pytest.fixture(scope="session")
def reference(tiny) -> Reference:
    return Reference(V41.load(tiny))
