"""Servers that live for a session, one test after another.

A test takes ``served`` and, unless it says otherwise, talks to the server with default flags:
``@pytest.mark.parametrize("served", ["exact"], indirect=True)`` picks others. Tests are sorted by the server they need;
with several workers, all tests of one server go to one of them (``tests/workers.py``).
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from deepinfer_plugin.model import V41

from ..workers import group_of
from .reference import Reference
from .serving import VARIANTS, Servers

HERE = Path(__file__).parent
DIRECTORY = "my-deepseek-v4-copy"  # a name that must not decide anything


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """The default server is one of the parameters too, so that every test's id says which it talks to."""
    parametrized = [mark.args[0] for mark in metafunc.definition.iter_markers("parametrize")]
    if "served" in metafunc.fixturenames and "served" not in parametrized:
        metafunc.parametrize("served", ["default"], indirect=True)


def _server_of(item: pytest.Item) -> str | None:
    callspec = getattr(item, "callspec", None)
    return callspec.params.get("served") if callspec else None


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Marks, before ``-m`` looks at them; the order, after everybody else. Workers begin with what takes long, so that
    they end together: the servers, then the other files from the last to the first."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker("server")
            name = _server_of(item)
            assert group_of(item.nodeid) == (f"server {name}" if name else item.nodeid.partition("::")[0]), item.nodeid
    yield
    order = [None, *VARIANTS]
    ours = sorted((item for item in items if HERE in item.path.parents), key=lambda item: order.index(_server_of(item)))
    if _one_of_several(config):
        others = [item for item in items if HERE not in item.path.parents]
        places = {path: place for place, path in enumerate(dict.fromkeys(item.path for item in others))}
        items[:] = ours + sorted(others, key=lambda item: -places[item.path])
    else:
        ordered = iter(ours)
        items[:] = [next(ordered) if HERE in item.path.parents else item for item in items]


def _one_of_several(config: pytest.Config) -> bool:
    """Whether this session is a worker."""
    return hasattr(config, "workerinput")


@pytest.fixture(scope="session")
def servers(tiny, tmp_path_factory, request):
    model_path = tmp_path_factory.mktemp("models") / DIRECTORY
    shutil.copytree(tiny, model_path)
    # A worker does not know which server it will need next, and its neighbours have work for the other cores.
    needed = set() if _one_of_several(request.config) else {_server_of(item) for item in request.session.items}
    servers = Servers(model_path, tmp_path_factory.mktemp("logs"), [name for name in VARIANTS if name in needed])
    servers.begin()
    yield servers
    servers.stop()


@pytest.fixture
def served(servers, request):
    """A running server with no request on it and nothing held, before the test and after."""
    served = servers.get(request.param)
    served.flush()
    yield served
    served.wait_idle()


@pytest.fixture(scope="session")
def reference(tiny) -> Reference:
    return Reference(V41.load(tiny))
