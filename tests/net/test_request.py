"""Streamed request bodies over real loopback sockets, and the private names of twisted.web this leans on."""

from __future__ import annotations

import json
from typing import Any

from twisted.internet import reactor as untyped_reactor
from twisted.internet.defer import Deferred
from twisted.internet.endpoints import TCP4ServerEndpoint, clientFromString, connectProtocol
from twisted.internet.error import ConnectionDone
from twisted.internet.protocol import Protocol
from twisted.logger import globalLogPublisher
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase, TestCase
from twisted.web import http
from twisted.web.resource import Resource
from twisted.web.server import NOT_DONE_YET
from twisted.web.test.requesthelper import DummyRequest

from localai_dist.net.body import BODY_HIGH
from localai_dist.net.request import StreamingRequest, StreamingSite, json_error
from localai_dist.units import KiB, MiB

reactor: Any = untyped_reactor


def pause(seconds: float) -> Deferred[None]:
    done: Deferred[None] = Deferred()
    reactor.callLater(seconds, done.callback, None)
    return done


class Whole(Resource):
    """Answers how long the body was, at its end."""

    isLeaf = True

    def render_POST(self, request: Any) -> bytes:
        return b"%d" % len(request.content.read())

    def render_GET(self, request: Any) -> bytes:
        return json_error(
            request, 404, "not_found", "no", "invalid_request_error", param="p", retry_after=3, headers=[("x-a", "b")]
        )


class Streamed(Resource):
    """Runs ``serve(request)`` once the headers are in."""

    isLeaf = True
    streams_body = True

    def __init__(self) -> None:
        super().__init__()
        self.serve: Any = None
        self.failures: list[Failure] = []
        self.requests: list[Any] = []

    def render(self, request: Any) -> Any:
        self.requests.append(request)
        Deferred.fromCoroutine(self.serve(request)).addErrback(self.failures.append)
        return NOT_DONE_YET


class Client(Protocol):
    """Keeps what it receives."""

    def __init__(self) -> None:
        self.data = b""
        self.lost: Deferred[None] = Deferred()

    def dataReceived(self, data: bytes) -> None:
        self.data += data

    def connectionLost(self, reason: Failure = Failure(ConnectionDone())) -> None:
        self.lost.callback(None)


class RequestCase(TestCase):
    timeout = 120

    async def setUp(self) -> None:
        root = Resource()
        self.streamed = Streamed()
        root.putChild(b"whole", Whole())
        root.putChild(b"streamed", self.streamed)
        self.site = StreamingSite(root, max_body=1 * MiB, reactor=reactor)
        self.port = await TCP4ServerEndpoint(reactor, 0, interface="127.0.0.1").listen(self.site)
        self.clients: list[Client] = []

    async def tearDown(self) -> None:
        for client in self.clients:
            client.transport.abortConnection()
            if not client.lost.called:
                await client.lost
        await self.port.stopListening()
        while any(type(end).__name__ == "Server" for end in [*reactor.getReaders(), *reactor.getWriters()]):
            await pause(0.01)

    async def connect(self, *data: bytes) -> Client:
        endpoint = clientFromString(reactor, f"tcp:127.0.0.1:{self.port.getHost().port}")
        client: Client = await connectProtocol(endpoint, Client())
        self.clients.append(client)
        for piece in data:
            client.transport.write(piece)
        return client

    async def until(self, fact: Any, what: str) -> None:
        for _ in range(1500):
            if fact():
                return
            await pause(0.01)
        self.fail(f"not in 15 s: {what}")


def head(method: str, path: str, *headers: str) -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: x", *headers, "", ""]).encode()


class WholeBodyTests(RequestCase):
    async def test_bodies_within_the_limit(self) -> None:
        """Two requests on one connection, one of them chunked, get their whole bodies."""
        client = await self.connect(
            head("POST", "/whole", "Content-Length: 300000") + b"x" * 300000,
            head("POST", "/whole", "Transfer-Encoding: chunked", "Connection: close") + b"5\r\nhello\r\n0\r\n\r\n",
        )
        await client.lost
        self.assertEqual(client.data.count(b" 200 "), 2)
        self.assertIn(b"\r\n\r\n300000HTTP", client.data)
        self.assertTrue(client.data.endswith(b"\r\n\r\n5"))

    async def test_too_long_by_its_header(self) -> None:
        """A body over the limit is answered 413 before a byte of it was sent, with no 100 Continue (WALK-17)."""
        client = await self.connect(head("POST", "/whole", "Content-Length: 1048577", "Expect: 100-continue"))
        await self.until(lambda: client.data.endswith(b"}"), "an answer")
        self.assertTrue(client.data.startswith(b"HTTP/1.1 413 "))
        self.assertNotIn(b"100 Continue", client.data)
        error = json.loads(client.data.partition(b"\r\n\r\n")[2])["error"]
        self.assertEqual((error["code"], error["type"]), ("request_too_large", "invalid_request_error"))
        self.assertIn(b"x-request-id", client.data.lower())

    async def test_too_long_and_sent_anyway(self) -> None:
        """A client that sends its long body all the same sees the 413 and not a reset."""
        client = await self.connect(head("POST", "/whole", "Content-Length: 2097152"), b"x" * 2097152)
        await client.lost
        self.assertTrue(client.data.startswith(b"HTTP/1.1 413 "))

    async def test_too_long_while_chunked(self) -> None:
        """A chunked body is refused where it passes the limit, only so much of it is read, and its spool is closed."""
        spools = []
        made = http._getContentFile  # type: ignore[attr-defined]
        self.patch(http, "_getContentFile", lambda length: spools.append(made(length)) or spools[-1])
        chunk = b"10000\r\n" + b"x" * 65536 + b"\r\n"
        client = await self.connect(head("POST", "/whole", "Transfer-Encoding: chunked"), *[chunk] * 1600)
        await client.lost
        self.assertEqual(client.data.count(b"HTTP/1.1 "), 1)
        self.assertIn(b" 413 ", client.data)
        self.assertEqual([spool.closed for spool in spools], [True])

    async def test_no_body(self) -> None:
        """A request without a body, to a resource that streams, has an empty one."""

        async def serve(request: Any) -> None:
            request.write(b"got %r" % (await request.body.read(),))
            request.finish()

        self.streamed.serve = serve
        client = await self.connect(head("GET", "/streamed", "Connection: close"))
        await client.lost
        self.assertIn(b"got b''", client.data)


class TargetTests(RequestCase):
    async def test_absolute_form(self) -> None:
        """A target with scheme and host, as one sends to a proxy, is the path alone; its host counts as Host."""
        for target, reached in (
            ("http://far.example/streamed/a%2Fb?q=1", "/streamed/a%2Fb?q=1"),
            ("HTTPS://far.example:8080/streamed", "/streamed"),
            ("http://me:word@far.example/streamed", "/streamed"),
            ("/streamed?to=http://far.example/x", "/streamed?to=http://far.example/x"),
        ):
            for length in ("0", "3"):

                async def serve(request: Any) -> None:
                    body = await request.body.read(10) if request.body else b""
                    host = request.requestHeaders.getRawHeaders(b"host")[0]
                    request.write(b" ".join([request.uri, request.path, host, body]))
                    request.finish()

                self.streamed.serve = serve
                sent = head("PUT", target, "Connection: close", f"Content-Length: {length}")
                client = await self.connect(sent + b"abc"[: int(length)])
                await client.lost
                host = "x" if target.startswith("/") else "far.example" + (":8080" if "8080" in target else "")
                said = f"{reached} {reached.partition('?')[0]} {host} " + "abc"[: int(length)]
                self.assertTrue(client.data.startswith(b"HTTP/1.1 200"), client.data)
                self.assertIn(said.encode(), client.data)
        self.assertEqual(self.streamed.failures, [])

    async def test_no_path_is_the_root(self) -> None:
        """An absolute target without a path asks for the root, and what is no such target leads nowhere."""
        for target in ("http://far.example", "http://far.example?q=1", "http:///streamed", "ftp://x/streamed"):
            client = await self.connect(head("GET", target, "Connection: close"))
            await client.lost
            self.assertTrue(client.data.startswith(b"HTTP/1.1 404"), client.data)


class ErrorTests(RequestCase):
    async def test_nowhere_and_wrong_method(self) -> None:
        """A path that leads nowhere and a method that is not served are JSON, to a HEAD without the body, unlogged."""
        logged: list[Any] = []
        globalLogPublisher.addObserver(logged.append)
        self.addCleanup(globalLogPublisher.removeObserver, logged.append)
        for method in ("GET", "HEAD", "DELETE"):
            for path, status in (("/", 404), ("/none/x", 404), ("/whole", 405 if method == "DELETE" else 404)):
                client = await self.connect(head(method, path, "Connection: close"))
                await client.lost
                top, _, body = client.data.partition(b"\r\n\r\n")
                lines = top.lower().splitlines()
                self.assertTrue(lines[0].startswith(b"http/1.1 %d" % status), client.data)
                self.assertIn(b"content-type: application/json", lines)
                if method == "HEAD":
                    self.assertEqual(body, b"")
                    self.assertNotIn(b"content-length: 0", lines)
                else:
                    self.assertIn("message", json.loads(body)["error"])
        self.assertEqual([event for event in logged if "HEAD" in str(event.get("log_format"))], [])

    async def test_a_resource_that_breaks(self) -> None:
        """A fault of ours is a JSON 500 that tells nothing, and a traceback in the log."""
        self.patch(Whole, "render", lambda _self, _request: 1 // 0)
        client = await self.connect(head("GET", "/whole", "Connection: close"))
        await client.lost
        top, _, body = client.data.partition(b"\r\n\r\n")
        self.assertTrue(top.startswith(b"HTTP/1.1 500"), client.data)
        self.assertEqual(json.loads(body)["error"]["code"], "internal_error")
        self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), 1)


class StreamedBodyTests(RequestCase):
    async def test_render_before_the_body(self) -> None:
        """The resource runs once the headers are in, and sees bytes as they come; args and paths are there."""
        seen: list[Any] = []

        async def serve(request: Any) -> None:
            seen.append((request.method, request.path, request.args, request.clientproto))
            async for chunk in request.body:
                seen.append(chunk)
            request.write(b"done")
            request.finish()

        self.streamed.serve = serve
        client = await self.connect(head("PUT", "/streamed?a=1&a=2", "Content-Length: 6"))
        await self.until(lambda: len(seen) == 1, "render")
        self.assertEqual(seen[0], (b"PUT", b"/streamed", {b"a": [b"1", b"2"]}, b"HTTP/1.1"))
        client.transport.write(b"abc")
        await self.until(lambda: seen[1:] == [b"abc"], "the first chunk")
        client.transport.write(b"def")
        await self.until(lambda: client.data.endswith(b"done\r\n0\r\n\r\n"), "the answer")
        self.assertEqual(seen[2:], [b"def"])

    async def test_connection_is_used_again(self) -> None:
        """After a streamed body, chunked or not, the same connection serves the next request."""

        async def serve(request: Any) -> None:
            total = 0
            while chunk := await request.body.read(1000):
                total += len(chunk)
            request.write(b"%d;" % total)
            request.finish()

        self.streamed.serve = serve
        client = await self.connect(
            head("PUT", "/streamed", "Content-Length: 5000") + b"x" * 5000,
            head("PUT", "/streamed", "Transfer-Encoding: chunked") + b"3\r\nabc\r\n0\r\n\r\n",
            head("POST", "/whole", "Content-Length: 2") + b"ab",
        )
        await self.until(lambda: client.data.count(b" 200 ") == 3, "three answers")
        self.assertIn(b"5000;", client.data)
        self.assertIn(b"3;", client.data)

    async def test_slow_reader_stops_the_client(self) -> None:
        """While nobody reads the body, at most 256 KiB and one read wait, though the answer is being written."""
        go: Deferred[None] = Deferred()

        async def serve(request: Any) -> None:
            request.write(b"working")
            await go
            total = 0
            async for chunk in request.body:
                total += len(chunk)
            request.write(b"%d" % total)
            request.finish()

        self.streamed.serve = serve
        client = await self.connect(head("PUT", "/streamed", f"Content-Length: {64 * MiB}"))
        for _ in range(64):
            client.transport.write(b"x" * MiB)
        await self.until(lambda: self.streamed.requests and self.streamed.requests[0].body.paused, "a pause")
        await pause(0.1)
        self.streamed.requests[0].write(b"still")
        await pause(0.1)
        self.assertLessEqual(self.streamed.requests[0].body.received, BODY_HIGH + 128 * KiB)
        go.callback(None)
        await self.until(lambda: str(64 * MiB).encode() in client.data, "the answer")

    async def test_answer_before_the_end(self) -> None:
        """An answer finished before the body was read closes the connection; the rest is no second request."""

        async def serve(request: Any) -> None:
            request.setResponseCode(409)
            request.write(b"no")
            request.finish()

        self.streamed.serve = serve
        client = await self.connect(
            head("PUT", "/streamed", "Content-Length: 200"), head("POST", "/whole", "Content-Length: 0")
        )
        await client.lost
        self.assertEqual(client.data.count(b"HTTP/1.1 "), 1)
        self.assertIn(b" 409 ", client.data)

    async def test_client_leaves_inside_the_body(self) -> None:
        """A client that leaves in the middle ends the reader with an error and fires when_gone."""
        gone: list[object] = []

        async def serve(request: Any) -> None:
            request.when_gone().addCallback(gone.append)
            async for _ in request.body:
                pass

        self.streamed.serve = serve
        client = await self.connect(head("PUT", "/streamed", "Content-Length: 100") + b"abc")
        await self.until(lambda: self.streamed.requests, "render")
        client.transport.abortConnection()
        await self.until(lambda: self.streamed.failures, "an error")
        self.assertEqual(gone, [None])
        late: list[object] = []
        self.streamed.requests[0].when_gone().addCallback(late.append)
        self.assertEqual(late, [None])

    async def test_client_leaves_while_waiting(self) -> None:
        """A client that leaves while its answer is awaited fires when_gone; a finished answer does not."""
        gone: list[object] = []

        async def serve(request: Any) -> None:
            request.when_gone().addCallback(gone.append)
            if request.args:
                request.finish()

        self.streamed.serve = serve
        done = await self.connect(head("GET", "/streamed?finish=1", "Connection: close"))
        await done.lost
        client = await self.connect(head("GET", "/streamed"))
        await self.until(lambda: len(self.streamed.requests) == 2, "render")
        client.transport.abortConnection()
        await self.until(lambda: gone, "when_gone")
        self.assertEqual(gone, [None])


class JsonErrorTests(SynchronousTestCase):
    def test_envelope(self) -> None:
        """An error is the documented envelope, with the request's own id."""
        request = DummyRequest([b"x"])
        request.requestHeaders.setRawHeaders(b"x-correlation-id", [b"abc"])
        body = json_error(
            request, 404, "not_found", "no", "invalid_request_error", param="p", retry_after=3, headers=[("x-a", "b")]
        )
        self.assertEqual(
            json.loads(body),
            {"error": {"message": "no", "type": "invalid_request_error", "code": "not_found", "param": "p"}},
        )
        self.assertEqual(request.responseCode, 404)
        sent = {name.lower(): values for name, values in request.responseHeaders.getAllRawHeaders()}
        for name, value in ((b"retry-after", b"3"), (b"x-a", b"b"), (b"x-request-id", b"abc")):
            self.assertEqual(sent[name], [value])
        self.assertEqual(sent[b"x-correlation-id"], [b"abc"])

    def test_ids_that_can_not_be_sent_back(self) -> None:
        """An id with odd characters, or an endless one, is replaced."""
        for bad in (b"a b", b"x" * 300, b""):
            request = DummyRequest([b"x"])
            request.requestHeaders.setRawHeaders(b"x-request-id", [bad])
            json_error(request, 400, "c", "m", "t")
            (sent,) = request.responseHeaders.getRawHeaders(b"x-request-id")
            self.assertEqual(len(sent), 32)


class PrivateNamesTests(SynchronousTestCase):
    def test_twisted_web_still_has_them(self) -> None:
        """The names of twisted.web that streaming leans on are still what they were."""
        for name in ("_savedTimeOut", "setTimeout", "allContentReceived", "resumeProducing", "persistent"):
            self.assertTrue(hasattr(http.HTTPChannel, name), name)
        lines = http.HTTPChannel.lineReceived.__code__.co_names
        for name in ("_command", "_path", "_version", "allHeadersReceived"):
            self.assertIn(name, lines)
        self.assertIn("_networkProducer", http.HTTPChannel.connectionMade.__code__.co_names)
        self.assertIn("gotLength", http.HTTPChannel.allHeadersReceived.__code__.co_names)
        self.assertIn("allContentReceived", http.HTTPChannel._finishRequestBody.__code__.co_names)
        for name in ("gotLength", "handleContentChunk", "requestReceived", "finish", "connectionLost"):
            self.assertTrue(callable(getattr(StreamingRequest, name)))
