"""Servers of two ranks on the trained checkpoint. They start one beside the other, and a test that ends its server
comes last of those that use it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.server.serving import TRAINED, Servers, Variant

CHECKED = ("--max-running-requests", "8", "--deepinfer-check-ranks")
TWO_GROUPS = ("--tp-size", "2", "--dp-size", "2", "--enable-dp-attention", "--ep-size", "2")
RESTLESS = (
    "--enable-eplb",
    "--ep-num-redundant-experts",
    "4",
    "--eplb-rebalance-num-iterations",
    "20",
    "--enable-metrics",
)

FORMS = {
    "TP2": Variant(128, 512, replay=True, flags=(*CHECKED, "--tp-size", "2"), slots=8),
    # With experts that never rest: every 20 steps some move, at random.
    "DP2xEP2": Variant(
        128, 512, replay=True, flags=(*CHECKED, *TWO_GROUPS, *RESTLESS), env={"DEEPINFER_SHUFFLE_EXPERTS": "1"}, slots=8
    ),
}


HERE = Path(__file__).parent


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All tests of a server one after another, in the order in which they are written."""
    ours = [item for item in items if item.path.parent == HERE]
    ordered = iter(sorted(ours, key=lambda item: [None, *FORMS].index(_form_of(item))))
    items[:] = [next(ordered) if item.path.parent == HERE else item for item in items]


def _form_of(item: pytest.Item) -> str | None:
    callspec = getattr(item, "callspec", None)
    return callspec.params.get("form") if callspec else None


@pytest.fixture(scope="session")
def rank_servers(tmp_path_factory, request):
    needed = {_form_of(item) for item in request.session.items}
    planned = [name for name in FORMS if name in needed]
    servers = Servers(TRAINED, tmp_path_factory.mktemp("rank_logs"), planned, FORMS)
    servers.begin()
    yield servers
    servers.stop()


@pytest.fixture
def form(rank_servers, request):
    """A running server of that form."""
    return rank_servers.get(request.param)
