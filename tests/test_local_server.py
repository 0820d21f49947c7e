"""A server must not outlive whoever started it."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys

import psutil
import pytest

from deepinfer_plugin import local_server
from deepinfer_plugin.local_server import LocalServer, ServerDied, claim_port

STARTER = """
import os, signal, sys
from deepinfer_plugin.local_server import LocalServer
server = LocalServer("nowhere", log=sys.argv[1])
server.command = [sys.executable, "-c", "import time; time.sleep(600)"]
server.start()
print(server.process.pid, flush=True)
os.kill(os.getpid(), getattr(signal, sys.argv[2]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child")
@pytest.mark.parametrize("end", ["SIGTERM", "SIGKILL"])
def test_a_server_ends_with_its_starter(tmp_path, end):
    done = subprocess.run([sys.executable, "-c", STARTER, str(tmp_path / "log"), end], capture_output=True, text=True)
    pid = int(done.stdout)
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(pid).wait(timeout=20)


def test_a_server_that_dies_says_why(tmp_path):
    server = LocalServer("nowhere", log=tmp_path / "log")
    server.command = [sys.executable, "-c", "print('no such model'); raise SystemExit(3)"]
    with pytest.raises(ServerDied, match=r"exited with 3\nno such model"), server:
        pass
    assert server.processes() == []


def test_a_refusal_is_all_that_is_said(tmp_path):
    server = LocalServer("nowhere", log=tmp_path / "log")
    server.command = [sys.executable, "-c", "print('loading'); raise SystemExit('error: no port:\\n  name another')"]
    with pytest.raises(ServerDied) as died, server:
        pass
    assert str(died.value) == "server exited with 1\nerror: no port:\n  name another"


def test_all_of_a_group_ends(tmp_path):
    """Also what does not listen to SIGTERM."""
    server = LocalServer("nowhere", log=tmp_path / "log")
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(99)"
    server.command = [sys.executable, "-c", f"import subprocess, sys; subprocess.run([sys.executable, '-c', {deaf!r}])"]
    server.start()
    while "up" not in server.tail():
        assert server.process.poll() is None
    members = server.processes()
    assert len(members) == 2
    server.stop(grace_s=1)
    assert not any(member.is_running() and member.status() != psutil.STATUS_ZOMBIE for member in members)


CLAIM = """
from deepinfer_plugin.local_server import claim_port
port, claim = claim_port()
print(port, flush=True)
input()
"""


def test_no_port_is_given_out_twice(monkeypatch):
    """Neither here nor to another process, before anybody listens; nor one on which somebody does."""
    command = [sys.executable, "-c", CLAIM]
    with contextlib.ExitStack() as held:
        other = held.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        taken = [int(other.stdout.readline())]
        monkeypatch.setattr(local_server, "PORTS", (*taken, 10241, 10243, 10245))
        held.enter_context(socket.create_server(("127.0.0.1", 10245)))
        for _ in range(2):
            port, claim = claim_port()
            held.enter_context(claim)
            taken.append(port)
        assert sorted(taken[1:]) == [10241, 10243]
        with pytest.raises(OSError, match="no free port among"):
            claim_port()
        other.communicate("\n")
    port, claim = claim_port()
    claim.close()


ANSWERS = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def test_a_server_that_is_asked_for_late_is_ready(tmp_path):
    """It started beside others that were used for longer than it may take."""
    server = LocalServer("nowhere", log=tmp_path / "log", timeout_s=60)
    server.command = [sys.executable, "-c", ANSWERS, str(server.port)]
    with server:
        server.started -= 100
        server.ready_s = 0.0
        server.wait_ready()
        assert server.ready_s > 100


def test_a_server_that_never_answers(tmp_path):
    server = LocalServer("nowhere", log=tmp_path / "log", timeout_s=1)
    server.command = [sys.executable, "-c", "import time; time.sleep(99)"]
    with pytest.raises(TimeoutError, match="not ready after 1 s"), server:
        pass
