"""The kit's balancer: what it promises to the tests that stand on it."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from localai_dist.testing.balancer import Balancer, one_request
from localai_dist.testing.waiting import until
from localai_dist.testing.web import ask


class Origin(ThreadingHTTPServer):
    """A frontend's stand-in that can be told not to be ready."""

    daemon_threads = True
    ready = True

    def __init__(self, name: str) -> None:
        super().__init__(("127.0.0.1", 0), Answering)
        self.name = name
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.server_address[1]}"


class Answering(BaseHTTPRequestHandler):
    """Answers with its server's name, or with what it was sent."""

    protocol_version = "HTTP/1.1"
    server: Origin

    def do_GET(self) -> None:
        self.answer(503 if self.path == "/readyz" and not self.server.ready else 200, self.server.name.encode())

    def do_POST(self) -> None:
        self.answer(200, self.rfile.read(int(self.headers["Content-Length"])))

    def answer(self, status: int, body: bytes) -> None:
        """Send that."""
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def origins() -> Iterator[list[Origin]]:
    """Two stand-ins."""
    pair = [Origin("a"), Origin("b")]
    yield pair
    for origin in pair:
        origin.shutdown()
        origin.server_close()


def test_takes_turns_and_follows_readiness(origins: list[Origin]) -> None:
    """Requests go to the frontends in turn; one that says it is not ready gets none, and gets some again later."""
    with Balancer([origin.url for origin in origins], every=0.02) as balancer:
        assert sorted(ask(balancer.url + "/").text for _ in range(4)) == ["a", "a", "b", "b"]
        origins[0].ready = False
        until("the balancer's notice", lambda: not balancer.takes(origins[0].url), 5)
        assert {ask(balancer.url + "/").text for _ in range(4)} == {"b"}
        origins[1].ready = False
        until("nobody ready", lambda: ask(balancer.url + "/").status == 503, 5)
        origins[0].ready = True
        until("the return", lambda: balancer.takes(origins[0].url), 5)
        assert ask(balancer.url + "/").text == "a"


def test_passes_over_the_dead(origins: list[Origin]) -> None:
    """A frontend that refuses the connection before a probe noticed costs no request."""
    with Balancer([origin.url for origin in origins], every=30) as balancer:
        origins[0].shutdown()
        origins[0].server_close()
        assert {ask(balancer.url + "/").text for _ in range(6)} == {"b"}


def test_bodies_pass_whole(origins: list[Origin]) -> None:
    """Large bodies pass unchanged in both directions."""
    text = "x" * 3_000_000
    with Balancer([origin.url for origin in origins]) as balancer:
        assert ask(balancer.url + "/", method="POST", body=text).json() == text


def test_one_request_per_connection() -> None:
    """The head asks for an end after the answer; a WebSocket's upgrade is left alone."""
    head = b"GET / HTTP/1.1\r\nHost: x\r\nconnection: keep-alive\r\n\r\n"
    assert one_request(head) == b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    upgrade = b"GET / HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
    assert one_request(upgrade) == upgrade
