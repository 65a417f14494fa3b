"""The client's contract, against a real grpcio server on loopback TCP."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from twisted.internet import reactor
from twisted.internet.defer import CancelledError, Deferred, gatherResults
from twisted.internet.endpoints import TCP4ClientEndpoint
from twisted.internet.error import ConnectionRefusedError
from twisted.internet.threads import deferToThread
from twisted.trial.unittest import TestCase

from localai_dist.grpcclient import BackendChannel, Origin, RpcError, StatusCode, connect
from localai_dist.rpc import backend_pb2 as pb
from localai_dist.rpc import backend_pb2_grpc
from tests.support.refusing import refusing_port

LIMIT = 50 * 1024 * 1024
BOUND = 20.0


class Backend(backend_pb2_grpc.BackendServicer):
    """Says what its prompt asks for, and notes what it was cancelled at."""

    def __init__(self) -> None:
        self.sent = 0
        self.begun = threading.Event()
        self.cancelled = threading.Event()
        self.go_on = threading.Event()
        self.metadata: dict[str, Any] = {}

    def Health(self, request: pb.HealthMessage, context: Any) -> pb.Reply:
        self.metadata = dict(context.invocation_metadata())
        return pb.Reply(message=b"OK")

    def Predict(self, request: pb.PredictOptions, context: Any) -> pb.Reply:
        self.begun.set()
        if not context.add_callback(self.cancelled.set):
            self.cancelled.set()  # it was before we were
        if request.Prompt == "refuse":
            context.abort(grpc.StatusCode.NOT_FOUND, "model identity mismatch: ü\n")
        if request.Prompt == "hang":
            self.go_on.wait(BOUND)
        return pb.Reply(message=b"x" * request.Tokens, prompt_tokens=len(request.Prompt))

    def PredictStream(self, request: pb.PredictOptions, context: Any) -> Iterator[pb.Reply]:
        context.add_callback(self.cancelled.set)
        for number in range(request.Tokens):
            if request.Prompt == "wait" and number == 3:
                self.go_on.wait(BOUND)
            self.sent += 1
            yield pb.Reply(message=b"y" * request.Batch, tokens=number + 1)
        if request.Prompt == "break":
            context.abort(grpc.StatusCode.INTERNAL, "broke")


class ContractTests(TestCase):
    timeout = 60

    async def setUp(self) -> None:
        self.backend = Backend()
        options = [("grpc.max_receive_message_length", LIMIT), ("grpc.max_send_message_length", LIMIT)]
        self.pool = ThreadPoolExecutor(16)
        self.server = grpc.server(self.pool, options=options)
        backend_pb2_grpc.add_BackendServicer_to_server(self.backend, self.server)
        self.port = self.server.add_insecure_port("127.0.0.1:0")
        self.server.start()
        self.channel = await self.connected()

    async def connected(self) -> BackendChannel:
        """A channel to the server."""
        return await connect(TCP4ClientEndpoint(reactor, "127.0.0.1", self.port), token="t0", clock=reactor)

    async def tearDown(self) -> None:
        self.channel.close()
        self.backend.go_on.set()
        await deferToThread(self.server.stop(0).wait)
        self.pool.shutdown()

    async def fact(self, event: threading.Event, within: float = 2.0) -> bool:
        """Wait for ``event``, at most so long (s)."""
        return await deferToThread(event.wait, within)

    async def test_unary(self) -> None:
        """
        A call is answered, with the token presented as every backend of LocalAI wants it (WALK-12).
        """
        self.assertTrue(await self.channel.health())
        self.assertEqual(self.backend.metadata["authorization"], "Bearer t0")
        reply = await self.channel.predict(pb.PredictOptions(Prompt="four", Tokens=3))
        self.assertEqual((reply.message, reply.prompt_tokens), (b"xxx", 4))

    async def test_stream(self) -> None:
        """
        All replies of a stream arrive, in order (WALK-12).
        """
        got = [reply.tokens async for reply in self.channel.predict_stream(pb.PredictOptions(Tokens=500, Batch=10))]
        self.assertEqual(got, list(range(1, 501)))

    async def test_first_reply_before_the_last_is_made(self) -> None:
        """
        Replies arrive as they are made (WALK-7).
        """
        stream = self.channel.predict_stream(pb.PredictOptions(Prompt="wait", Tokens=5))
        self.assertEqual([(await stream.__anext__()).tokens for _ in range(3)], [1, 2, 3])
        self.assertEqual(self.backend.sent, 3)
        self.backend.go_on.set()
        self.assertEqual([reply.tokens async for reply in stream], [4, 5])

    async def test_error(self) -> None:
        """
        A backend's error arrives with its status and its words.
        """
        with self.assertRaises(RpcError) as caught:
            await self.channel.predict(pb.PredictOptions(Prompt="refuse"))
        self.assertEqual(caught.exception.status, StatusCode.NOT_FOUND)
        self.assertEqual(caught.exception.details, "model identity mismatch: ü\n")
        self.assertIs(caught.exception.origin, Origin.BACKEND)

    async def test_error_after_replies(self) -> None:
        """
        A stream that breaks gives what it said, then its error.
        """
        got = 0
        with self.assertRaises(RpcError) as caught:
            async for _reply in self.channel.predict_stream(pb.PredictOptions(Prompt="break", Tokens=7)):
                got += 1
        self.assertEqual((got, caught.exception.status), (7, StatusCode.INTERNAL))

    async def test_unknown_call(self) -> None:
        """
        A call the backend does not serve is UNIMPLEMENTED, by its own word.
        """
        with self.assertRaises(RpcError) as caught:
            await self.channel.free()
        self.assertEqual(caught.exception.status, StatusCode.UNIMPLEMENTED)

    async def test_large_messages(self) -> None:
        """
        Requests and replies of tens of megabytes pass.
        """
        size = 49 * 1024 * 1024
        reply = await self.channel.predict(pb.PredictOptions(Prompt="p" * size, Tokens=size))
        self.assertEqual((len(reply.message), reply.prompt_tokens), (size, size))

    async def test_cancel(self) -> None:
        """
        A cancelled stream is cancelled on the backend within 2 s (WALK-7).
        """
        stream = self.channel.predict_stream(pb.PredictOptions(Prompt="wait", Tokens=5))
        await stream.__anext__()
        stream.cancel()
        self.assertTrue(await self.fact(self.backend.cancelled))
        self.assertTrue(await self.channel.health())

    async def test_cancelled_caller(self) -> None:
        """
        Cancelling whoever awaits a call cancels it on the backend within 2 s.
        """
        call = Deferred.fromCoroutine(self.channel.predict(pb.PredictOptions(Prompt="hang")))
        self.assertTrue(await self.fact(self.backend.begun, BOUND))
        call.cancel()
        with self.assertRaises(CancelledError):
            await call
        self.assertTrue(await self.fact(self.backend.cancelled))

    async def test_deadline(self) -> None:
        """
        A call ends at its deadline, here and on the backend, and the backend is not blamed.
        """
        with self.assertRaises(RpcError) as caught:
            await self.channel.predict(pb.PredictOptions(Prompt="hang"), timeout=0.2)
        self.assertEqual(caught.exception.status, StatusCode.DEADLINE_EXCEEDED)
        self.assertIs(caught.exception.origin, Origin.CALLER)
        # Nothing ends there when the deadline passed before the backend had a thread for the call.
        self.assertTrue(await self.fact(self.backend.cancelled) or not self.backend.begun.is_set())

    async def test_a_reader_that_stops_stops_the_backend(self) -> None:
        """
        A stream nobody reads stops after a bounded number of bytes; the same connection serves others; reading on
        brings all of it (WALK-6).
        """
        total = 800
        stream = self.channel.predict_stream(pb.PredictOptions(Tokens=total, Batch=64 * 1024))
        await stream.__anext__()
        before = -1
        while before != self.backend.sent:
            before = self.backend.sent
            for _ in range(20):
                self.assertTrue(await self.channel.health())
        self.assertLess(before * 64 * 1024, 8 * 1024 * 1024)
        self.assertEqual(1 + len([reply async for reply in stream]), total)

    async def test_many_at_once(self) -> None:
        """
        A hundred calls at once on one connection are each answered rightly.
        """
        calls = [
            Deferred.fromCoroutine(self.channel.predict(pb.PredictOptions(Prompt="p" * n, Tokens=n * 100)))
            for n in range(100)
        ]
        replies = await gatherResults(calls)
        self.assertEqual(
            [(reply.prompt_tokens, len(reply.message)) for reply in replies], [(n, n * 100) for n in range(100)]
        )

    async def test_graceful_end_of_the_backend(self) -> None:
        """
        A backend that stops finishes what runs and takes nothing new.
        """
        stream = self.channel.predict_stream(pb.PredictOptions(Prompt="wait", Tokens=5))
        await stream.__anext__()
        closed = self.channel.when_closed()
        self.server.stop(BOUND)
        self.assertIs((await closed).origin, Origin.TRANSPORT)
        with self.assertRaises(RpcError) as caught:
            await self.channel.predict(pb.PredictOptions())
        self.assertEqual(caught.exception.status, StatusCode.UNAVAILABLE)
        self.backend.go_on.set()
        self.assertEqual([reply.tokens async for reply in stream], [2, 3, 4, 5])

    async def test_abrupt_end_of_the_backend(self) -> None:
        """
        A backend that goes while it answers fails the call as unavailable or cancelled, at once.
        """
        stream = self.channel.predict_stream(pb.PredictOptions(Prompt="wait", Tokens=5))
        for _ in range(3):
            await stream.__anext__()
        self.server.stop(0)
        with self.assertRaises(RpcError) as caught:
            await stream.__anext__()
        self.assertIn(caught.exception.status, (StatusCode.UNAVAILABLE, StatusCode.CANCELLED))

    async def test_nobody_listens(self) -> None:
        """
        The endpoint's own error says that nothing listens there.
        """
        with refusing_port() as self.port, self.assertRaises(ConnectionRefusedError):
            await self.connected()
