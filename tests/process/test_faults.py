"""The kit's fault proxy: what it promises to the tests that stand on it."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar
from urllib.parse import urlsplit

import pytest

from localai_dist.testing.faults import FaultProxy, Faults
from localai_dist.testing.waiting import until
from localai_dist.testing.web import ask

SIZE = 200_000


class Answering(BaseHTTPRequestHandler):
    """Answers with many bytes."""

    asked: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.asked.append(self.path)
        self.send_response(200)
        self.send_header("Content-Length", str(SIZE))
        self.end_headers()
        self.wfile.write(b"x" * SIZE)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def way() -> Iterator[FaultProxy]:
    """A proxy in front of a server."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answering)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with Faults() as faults:
        yield faults.proxy(f"http://127.0.0.1:{server.server_address[1]}")
    server.shutdown()
    server.server_close()


def test_one_path_is_blocked_and_the_others_pass(way: FaultProxy) -> None:
    """A blocked path is answered with the status, every other one passes; unblocked it passes; all are counted."""
    way.block("/door", 403)
    assert [ask(way.url + path).status for path in ("/door?id=1", "/other")] == [403, 200]
    way.unblock("/door")
    assert len(ask(way.url + "/door").text) == SIZE
    assert way.heads == {"/door": 2, "/other": 1}


def test_slow_ways(way: FaultProxy) -> None:
    """A throttled way is no faster than told, a delayed one no sooner; healed it is quick again."""
    way.throttle(SIZE)
    began = time.monotonic()
    assert ask(way.url + "/").status == 200
    assert time.monotonic() - began >= 0.9
    way.heal()
    way.delay(0.3)
    began = time.monotonic()
    assert ask(way.url + "/").status == 200
    assert time.monotonic() - began >= 0.3


def _joined(way: FaultProxy) -> socket.socket:
    """A connection through the proxy whose request passed and whose answer began."""
    place = urlsplit(way.url)
    connection = socket.create_connection((place.hostname or "", place.port or 0), timeout=5)
    connection.sendall(b"GET /long HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\n\r\n")
    assert connection.recv(1000).startswith(b"HTTP/1.0 200")
    return connection


def test_cut(way: FaultProxy) -> None:
    """Connections that asked for the path are reset, and only they; none of them counts as open any more."""
    way.throttle(20_000)  # so that the answer is still under way
    with _joined(way) as connection:
        until("the connection", lambda: way.open("/long") == 1, 5)
        assert way.cut("/other") == 0
        assert way.cut("/long") == 1
        assert way.open() == 0
        with pytest.raises(ConnectionResetError):
            while connection.recv(65536):
                pass


def test_swallowed(way: FaultProxy) -> None:
    """Nothing arrives and no end is told, on old and new connections; healed, new ones work and the old are reset."""
    way.throttle(20_000)
    with _joined(way) as connection:
        way.swallow()
        connection.settimeout(0.5)
        with pytest.raises(TimeoutError):
            while connection.recv(65536):  # what was on the way already
                pass
        assert ask(way.url + "/unheard", timeout=0.5).status == 0
        way.heal()
        assert ask(way.url + "/heard").status == 200
        assert "/heard" in Answering.asked and "/unheard" not in Answering.asked
        connection.settimeout(5)
        with pytest.raises(ConnectionResetError):
            connection.recv(1)
