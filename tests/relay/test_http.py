"""HTTP and control verbs to a worker, over streams."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from twisted.internet.defer import Deferred, fail
from twisted.internet.interfaces import IConsumer
from twisted.web import resource, server
from twisted.web.iweb import IBodyProducer, IResponse
from zope.interface import implementer

from localai_dist import reach
from localai_dist.mux.classes import TrafficClass
from localai_dist.net.stream import MuxStream
from localai_dist.reach import Unreached
from localai_dist.relay.body import BodyBroken, BodyTooLarge, BytesBody, read_beginning, read_body, read_lines
from localai_dist.relay.control import VerbClient
from localai_dist.relay.http import NodeHttp
from localai_dist.wire import verbs
from tests.relay.mesh import OWNED_THERE, MeshCase, N


class WorkerServer(resource.Resource):
    """A worker's server that answers as the test says."""

    isLeaf = True

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[tuple[bytes, bytes, dict[str, str], bytes]] = []
        self.answer: Callable[[Any], Any] = lambda request: b"{}"

    def render(self, request: Any) -> Any:
        """Note the request, then answer."""
        headers = {
            name.decode().lower(): values[0].decode() for name, values in request.requestHeaders.getAllRawHeaders()
        }
        self.requests.append((request.method, request.uri, headers, request.content.read()))
        return self.answer(request)


def always(body: bytes) -> Callable[[Any], bytes]:
    """An answer that is always this."""
    return lambda request: body


class HttpCase(MeshCase):
    """A worker with an HTTP server behind its tunnel, which ends at the other frontend."""

    def setUp(self) -> None:
        super().setUp()
        self.tunnel(self.there)
        self.registry.fact = OWNED_THERE
        self.server = WorkerServer()
        site = server.Site(self.server, reactor=self.clock)
        site.timeOut = None
        site.noisy = False
        self.worker.on_joined = lambda stream: self.attach(stream, site)
        self.http = NodeHttp(self.forwarder, reactor=self.clock, token="shared")

    def attach(self, stream: MuxStream, site: server.Site) -> None:
        """The worker gives the stream to its server."""
        protocol = site.buildProtocol(stream.getPeer())
        assert protocol is not None
        protocol.callLater = self.clock.callLater
        stream.start(protocol)

    def assert_no_stream_left(self) -> None:
        """Every leg was freed."""
        self.settle()
        self.pass_time(16)
        self.assertEqual((self.links[0].client.stream_count, self.there.tunnels[N].stream_count), (0, 0))


class NodeHttpTests(HttpCase):
    """Ordinary HTTP."""

    def get(self, **options: Any) -> IResponse:
        """A response's head."""
        return self.result(self.http.request(N, "GET", "/v1/files/models/x?part=1", **options))

    def test_request_and_answer(self) -> None:
        """A request reaches the worker's server with the registration token, and its answer comes back (WALK-5)."""
        self.server.answer = lambda request: b"hello"
        response = self.get(headers={"X-Content-SHA256": "ab"})
        body = read_body(response, 100)
        self.settle()
        self.assertEqual((response.code, self.successResultOf(body)), (200, b"hello"))
        ((method, uri, headers, _),) = self.server.requests
        self.assertEqual((method, uri), (b"GET", b"/v1/files/models/x?part=1"))
        self.assertEqual(
            (headers["authorization"], headers["host"], headers["x-content-sha256"]),
            ("Bearer shared", "n-1.worker.invalid", "ab"),
        )
        self.assert_no_stream_left()

    def test_a_bulk_request_is_bulk_everywhere(self) -> None:
        """A transfer says so on every leg (MUX-15)."""
        self.get(traffic=TrafficClass.BULK)
        self.assertEqual(self.worker.requests, [b"http b"])

    def test_a_large_answer_waits_for_its_reader(self) -> None:
        """Whoever does not read stops the worker: what is under way is bounded by the windows (WALK-6)."""
        self.server.answer = lambda request: b"x" * (8 * 1024 * 1024)
        response = self.get()
        passed = sum(stream._unread_size for stream in self.links[0].client._streams.values())
        self.assertLess(passed, 1024 * 1024)
        body = read_body(response, 16 * 1024 * 1024)
        self.settle()
        self.assertEqual(len(self.successResultOf(body)), 8 * 1024 * 1024)

    def test_the_worker_goes_before_the_answer(self) -> None:
        """An end before the answer's head is "not served"."""
        self.server.answer = lambda request: server.NOT_DONE_YET
        asking = self.begin(self.http.request(N, "GET", "/x"))
        self.worker.streams[-1].abortConnection()
        self.settle()
        self.assertIsInstance(self.failureResultOf(asking, Unreached).value.outcome, reach.NotServed)

    def test_conditions_pass_through(self) -> None:
        """What kept the request from the worker is told as it is."""
        self.registry.down = True
        outcome = self.outcome(self.http.request(N, "GET", "/x"))
        self.assertIsInstance(outcome, reach.RegistryUnknown)
        self.registry.down = False
        self.worker.reply = b"err unavailable no server"
        self.assertIsInstance(self.outcome(self.http.request(N, "GET", "/x")), reach.NotServed)

    def test_deadline(self) -> None:
        """An answer that does not come ends at the caller's deadline and frees the stream (CLUS-10)."""
        self.server.answer = lambda request: server.NOT_DONE_YET
        asking = self.begin(self.http.request(N, "GET", "/x", deadline=self.clock.seconds() + 3))
        self.pass_time(3)
        self.assert_outcome(reach.DeadlineExceeded(), asking)
        self.assert_no_stream_left()

    def test_cancel(self) -> None:
        """A caller that goes away frees the stream."""
        self.server.answer = lambda request: server.NOT_DONE_YET
        asking = self.begin(self.http.request(N, "GET", "/x"))
        asking.addErrback(lambda failure: None)
        asking.cancel()
        self.assert_no_stream_left()

    def test_a_body_that_fails_is_the_callers_own_error(self) -> None:
        """A file that can't be read is not the worker's fault."""
        asking = self.begin(self.http.request(N, "PUT", "/x", body=Broken()))
        self.failureResultOf(asking, OSError)

    def test_bytes_body_of_any_size(self) -> None:
        """A body in memory arrives whole."""
        body = bytes(range(256)) * 2000
        self.result(self.http.request(N, "PUT", "/x", body=BytesBody(body)))
        self.assertEqual(self.server.requests[0][3], body)


@implementer(IBodyProducer)
class Broken:
    """A body whose file can't be read."""

    length = 10

    def startProducing(self, consumer: IConsumer) -> Deferred[None]:
        """Fail."""
        return fail(OSError("input/output error"))

    def stopProducing(self) -> None:
        """Nothing runs."""

    def pauseProducing(self) -> None:
        """Nothing runs."""

    def resumeProducing(self) -> None:
        """Nothing runs."""


class BodyTests(HttpCase):
    """Bounded reading."""

    READERS: tuple[Callable[[IResponse], Deferred[Any]], ...] = (
        lambda response: read_body(response, 100),
        lambda response: read_lines(response, 100, lambda line: False),
    )

    def response(self, answer: Callable[[Any], Any]) -> IResponse:
        """A response's head."""
        self.server.answer = answer
        return self.result(self.http.request(N, "GET", "/x"))

    def begun(self, first: bytes) -> tuple[IResponse, Any]:
        """A response whose body has begun with ``first`` and goes on when the test says."""
        requests: list[Any] = []

        def answer(request: Any) -> int:
            requests.append(request)
            request.write(first)
            return server.NOT_DONE_YET

        return self.response(answer), requests[0]

    def test_too_large(self) -> None:
        """A body over the limit is an error and drops the stream."""
        reading = read_body(self.response(lambda request: b"x" * 101), 100)
        self.settle()
        self.failureResultOf(reading, BodyTooLarge)

    def test_beginning(self) -> None:
        """The beginning of a body is enough to quote, however it goes on or ends."""
        reading = read_beginning(self.response(lambda request: b"x" * 1000), 10)
        self.settle()
        self.assertEqual(self.successResultOf(reading), b"x" * 10)
        response, _ = self.begun(b"half")
        reading = read_beginning(response, 10)
        self.worker.streams[-1].abortConnection()
        self.settle()
        self.assertEqual(self.successResultOf(reading), b"half")

    def test_broken_off(self) -> None:
        """A body that breaks off is never taken for a whole one."""
        for read in self.READERS:
            response, _ = self.begun(b"half")
            reading = read(response)
            self.worker.streams[-1].abortConnection()
            self.settle()
            self.failureResultOf(reading, BodyBroken)

    def test_lines_however_they_are_cut(self) -> None:
        """Lines come whole, empty ones are skipped, the last may lack its newline."""
        response, request = self.begun(b"on")
        lines: list[bytes] = []
        reading = read_lines(response, 100, lambda line: lines.append(line) or False)  # type: ignore[func-returns-value]
        for piece in (b"e\ntw", b"o\n\n", b"thr", b"ee"):
            request.write(piece)
            self.settle()
        request.finish()
        self.settle()
        self.successResultOf(reading)
        self.assertEqual(lines, [b"one", b"two", b"three"])

    def test_a_line_too_long(self) -> None:
        """A line over the limit is an error, with its newline or without."""
        for body in (b"x" * 101, b"x" * 101 + b"\ny"):
            reading = read_lines(self.response(always(body)), 100, lambda line: False)
            self.settle()
            self.failureResultOf(reading, BodyTooLarge)

    def test_cancel_drops_the_stream(self) -> None:
        """A reader that gives up frees the stream."""
        for read in self.READERS:
            response, _ = self.begun(b"half")
            reading = read(response)
            reading.addErrback(lambda failure: None)
            reading.cancel()
            self.assert_no_stream_left()


class VerbClientTests(HttpCase):
    """Control verbs."""

    def setUp(self) -> None:
        super().setUp()
        self.verbs = VerbClient(self.http, clock=self.clock)

    def status(self, code: int, body: bytes) -> Callable[[Any], bytes]:
        """An answer with that status."""

        def answer(request: Any) -> bytes:
            request.setResponseCode(code)
            return body

        return answer

    def call_list(self) -> Any:
        """The unary verb, with its outcome or its reply."""
        return self.begin(self.verbs.call(N, verbs.LIST, verbs.Empty()))

    def test_unary(self) -> None:
        """A verb is a POST with JSON, its answer a value; it goes as control traffic (WALK-11)."""
        self.server.answer = lambda request: b'{"success":false,"error":"it runs"}'
        reply = self.result(self.verbs.call(N, verbs.MODEL_DELETE, verbs.ModelDeleteRequest("tiny")))
        self.assertEqual(reply, verbs.DoneReply(False, "it runs"))
        ((method, uri, headers, body),) = self.server.requests
        self.assertEqual(
            (method, uri, json.loads(body)), (b"POST", b"/v1/control/model/delete", {"model_name": "tiny"})
        )
        self.assertEqual((headers["content-type"], self.worker.requests), ("application/json", [b"http c"]))

    def test_silent(self) -> None:
        """A verb without an answer is 204."""
        self.server.answer = self.status(204, b"")
        self.assertEqual(self.result(self.verbs.call(N, verbs.STOP, verbs.StopRequest("llama-cpp"))), verbs.Empty())

    def test_stream(self) -> None:
        """A long verb reports its progress and then exactly one reply; what comes after it is dropped."""
        lines = [
            verbs.INSTALL.encode_line(verbs.progress_line(verbs.InstallProgress(phase)))
            for phase in ("resolving", "starting")
        ]
        lines.append(verbs.INSTALL.encode_line(verbs.StreamLine(reply=verbs.InstallReply(True, "127.0.0.1:20001"))))
        lines.append(lines[0])
        self.server.answer = lambda request: b"".join(lines)
        steps: list[str] = []

        def on_progress(line: verbs.StreamLine[verbs.InstallReply]) -> None:
            step = verbs.read_progress(line)
            assert step is not None
            steps.append(step.phase)

        reply = self.result(
            self.verbs.call(N, verbs.INSTALL, verbs.InstallRequest("llama-cpp"), on_progress=on_progress)
        )
        self.assertEqual((reply.address, steps), ("127.0.0.1:20001", ["resolving", "starting"]))
        self.assertTrue(self.result(self.verbs.call(N, verbs.INSTALL, verbs.InstallRequest())).success)

    def test_statuses(self) -> None:
        """404 is an older worker, another 4xx our request, anything else nobody's verdict; all quote the body."""
        for code, kind in [
            (404, reach.VerbNotServed),
            (400, reach.Refused),
            (401, reach.Refused),
            (405, reach.Refused),
            (500, reach.NotServed),
            (503, reach.NotServed),
            (302, reach.NotServed),
        ]:
            self.server.answer = self.status(code, b"because " + b"y" * 5000)
            outcome = self.failureResultOf(self.call_list(), Unreached).value.outcome
            self.assertIsInstance(outcome, kind, code)
            self.assertFalse(reach.may_reap(outcome))
            self.assertLess(len(reach.describe(outcome)), 900)
            if code != 404:
                self.assertIn("because", reach.describe(outcome))

    def test_answers_that_can_not_be_read(self) -> None:
        """No JSON, the wrong shape, a stream without its reply: never taken for an answer, nor for a failure."""
        cases: list[tuple[verbs.Verb[Any, Any], bytes]] = [
            (verbs.LIST, b"<html>"),
            (verbs.LIST, b'{"backends":7}'),
            (verbs.LIST, b" " * (9 * 1024 * 1024)),
            (verbs.INSTALL, b""),
            (verbs.INSTALL, b'{"progress":{"phase":"resolving"}}\n'),
            (verbs.INSTALL, b"nonsense\n"),
            (verbs.INSTALL, b'{"reply":{}}\n'),
        ]
        for verb, body in cases:
            self.server.answer = always(body)
            outcome = self.outcome(self.verbs.call(N, verb, verb.request()))
            self.assertIsInstance(outcome, reach.NotServed, body[:40])

    def test_budget(self) -> None:
        """A verb that is not answered ends at its budget, or at the caller's, and says which verb."""
        self.server.answer = lambda request: server.NOT_DONE_YET
        for timeout, wait in ((None, verbs.LIST.budget), (4.0, 4.0)):
            calling = self.begin(self.verbs.call(N, verbs.LIST, verbs.Empty(), timeout=timeout))
            self.pass_time(wait - 1)
            self.assertNoResult(calling)
            self.pass_time(1)
            outcome = self.failureResultOf(calling, Unreached).value.outcome
            self.assertIsInstance(outcome, reach.DeadlineExceeded)
            self.assertIn("/v1/control/backend/list", reach.describe(outcome))

    def test_budget_during_a_streamed_answer(self) -> None:
        """A stream that never comes to its reply ends at the budget too, and is freed."""

        def answer(request: Any) -> int:
            request.write(verbs.INSTALL.encode_line(verbs.progress_line(verbs.InstallProgress("downloading"))))
            return server.NOT_DONE_YET

        self.server.answer = answer
        calling = self.begin(self.verbs.call(N, verbs.INSTALL, verbs.InstallRequest(), timeout=5.0))
        self.pass_time(5)
        self.assertIsInstance(self.failureResultOf(calling, Unreached).value.outcome, reach.DeadlineExceeded)
        self.assert_no_stream_left()
