"""Whether a server could listen: every address of a name, as the server will resolve it."""

from __future__ import annotations

import socket
from types import SimpleNamespace

import pytest

from deepinfer_plugin import conflicts

LOCAL, FOREIGN = ("127.0.0.1", 0), ("192.0.2.1", 0)


@pytest.fixture(autouse=True)
def command_line(monkeypatch):
    monkeypatch.setattr(conflicts, "from_command_line", lambda server_args: True)


def complaints(host: str, port: int) -> list[str]:
    return list(conflicts._address(None, SimpleNamespace(host=host, port=port)))


def resolve_to(monkeypatch, *addresses):
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", address) for address in addresses]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **named: found)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0", ""])
def test_any_free_port(host):
    assert complaints(host, 0) == []


@pytest.mark.parametrize(("host", "port", "why"), [
    ("127.0.0.1", 65536, "a port is 0 to 65535"), ("127.0.0.1", -1, "a port is 0 to 65535"),
    ("192.0.2.1", 0, "assign"), ("no.such.name.invalid", 0, "name"),
])  # fmt: skip
def test_what_cannot_be(host, port, why):
    (text,) = complaints(host, port)
    assert text.startswith(f"--host {host} --port {port}: cannot listen there") and why in text.lower()


def test_a_taken_port_is_one_on_any_address(monkeypatch):
    with socket.create_server(LOCAL) as taken:
        resolve_to(monkeypatch, FOREIGN, taken.getsockname(), LOCAL)
        (text,) = complaints("name", taken.getsockname()[1])
        assert "in use" in text


def test_an_address_this_machine_lacks_does_not_matter_beside_one_it_has(monkeypatch):
    resolve_to(monkeypatch, FOREIGN, LOCAL)
    assert complaints("name", 0) == []
    resolve_to(monkeypatch, FOREIGN, FOREIGN)
    assert len(complaints("name", 0)) == 1
