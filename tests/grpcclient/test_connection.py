"""The client against a scripted backend in memory: endings, cancel, deadlines, and who may send how much."""

from __future__ import annotations

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.error import ConnectionLost
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase

from localai_dist.grpcclient.call import WINDOW
from localai_dist.grpcclient.channel import ReplyStream
from localai_dist.grpcclient.framing import encode_message
from localai_dist.grpcclient.status import Origin, RpcError, StatusCode
from localai_dist.rpc import backend_pb2 as pb
from tests.grpcclient.backend_double import BackendDouble

CANCEL = 8


class ClientTests(SynchronousTestCase):
    """Vocabulary."""

    def setUp(self) -> None:
        self.backend = BackendDouble()
        self.channel = self.backend.channel
        self.addCleanup(self.backend.client.connectionLost)

    def predict(self, prompt: str = "hi", timeout: float | None = None) -> Deferred[pb.Reply]:
        """A unary call whose request has arrived."""
        call = Deferred.fromCoroutine(self.channel.predict(pb.PredictOptions(Prompt=prompt), timeout=timeout))
        self.addCleanup(call.addErrback, lambda _lost: None)
        self.backend.hear()
        return call

    def stream(self, timeout: float | None = None) -> ReplyStream[pb.Reply]:
        """A streaming call whose request has arrived, with its answer begun."""
        stream = self.channel.predict_stream(pb.PredictOptions(Prompt="hi"), timeout=timeout)
        self.backend.hear()
        self.backend.say_headers(max(self.backend.requests))
        return stream

    def read(self, stream: ReplyStream[pb.Reply]) -> Deferred[pb.Reply]:
        """The next reply."""
        return Deferred.fromCoroutine(stream.__anext__())

    def assert_error(self, call: Deferred[pb.Reply], status: StatusCode, origin: Origin) -> RpcError:
        """The call failed so."""
        error = self.failureResultOf(call, RpcError).value
        assert isinstance(error, RpcError)
        self.assertEqual((error.status, error.origin), (status, origin), error.details)
        return error

    def assert_nothing_left(self) -> None:
        """No timer runs and no call is remembered."""
        self.assertEqual(self.backend.clock.getDelayedCalls(), [])
        self.assertEqual(self.channel.call_count, 0)


class EndingTests(ClientTests):
    def test_request_carries_what_grpc_wants(self) -> None:
        """
        A call names its method, presents the backend's token and tells its deadline.
        """
        self.predict(timeout=2.0)
        headers = self.backend.requests[1]
        self.assertEqual(headers[":path"], "/backend.Backend/Predict")
        self.assertEqual(headers["authorization"], "Bearer secret")
        self.assertEqual(headers["grpc-timeout"], "2000000u")
        self.assertEqual(headers["te"], "trailers")
        self.assertEqual(self.backend.bodies[1], encode_message(pb.PredictOptions(Prompt="hi").SerializeToString()))

    def test_reply(self) -> None:
        """
        The reply arrives once the backend said OK, and nothing is left behind.
        """
        call = self.predict(timeout=5)
        self.backend.say_headers(1)
        self.backend.say_reply(1)
        self.assertNoResult(call)
        self.backend.say_trailers(1)
        self.assertEqual(self.successResultOf(call).message, b"hello")
        self.assert_nothing_left()

    def test_trailers_only(self) -> None:
        """
        An error without any answer before it arrives with its status and text.
        """
        call = self.predict(timeout=5)
        self.backend.say_trailers(1, 5, "model identity mismatch", only=True)
        error = self.assert_error(call, StatusCode.NOT_FOUND, Origin.BACKEND)
        self.assertEqual(error.details, "model identity mismatch")
        self.assert_nothing_left()

    def test_ok_without_reply(self) -> None:
        """
        A call that ends well but says nothing is an error, not an empty success.
        """
        call = self.predict()
        self.backend.say_trailers(1, 0, only=True)
        self.assert_error(call, StatusCode.INTERNAL, Origin.BACKEND)

    def test_second_reply(self) -> None:
        """
        Two replies to a unary call are an error.
        """
        call = self.predict()
        self.backend.say_headers(1)
        self.backend.say_reply(1)
        self.backend.say_reply(1)
        self.assert_error(call, StatusCode.INTERNAL, Origin.BACKEND)
        self.assert_nothing_left()

    def test_garbage_reply(self) -> None:
        """
        A reply that is no message is an error with the message's name.
        """
        call = self.predict()
        self.backend.say_headers(1)
        self.backend.say_bytes(1, encode_message(b"\xff\xff\xff"))
        self.backend.say_trailers(1)
        self.assertIn("Reply", self.assert_error(call, StatusCode.INTERNAL, Origin.BACKEND).details)

    def test_half_a_reply(self) -> None:
        """
        An answer that ends in the middle of a reply is an error.
        """
        call = self.predict()
        self.backend.say_headers(1)
        self.backend.say_bytes(1, b"\0\0\0\0\5he")
        self.backend.say_trailers(1)
        self.assert_error(call, StatusCode.INTERNAL, Origin.BACKEND)

    def test_reset_by_the_backend(self) -> None:
        """
        A reset call fails with the status its code stands for.
        """
        call = self.predict()
        self.backend.http2.reset_stream(1, 7)
        self.backend.say()
        self.assert_error(call, StatusCode.UNAVAILABLE, Origin.BACKEND)

    def test_plain_http(self) -> None:
        """
        Something that answers HTTP but no gRPC is reported as such.
        """
        call = self.predict()
        self.backend.http2.send_headers(1, [(":status", "503")], end_stream=True)
        self.backend.say()
        self.assertIn("503", self.assert_error(call, StatusCode.UNAVAILABLE, Origin.BACKEND).details)

    def test_replies_before_an_error_are_read(self) -> None:
        """
        A stream that fails gives what came before, then the error.
        """
        stream = self.stream()
        self.backend.say_reply(1, b"one")
        self.backend.say_trailers(1, 13, "broke")
        self.assertEqual(self.successResultOf(self.read(stream)).message, b"one")
        self.assert_error(self.read(stream), StatusCode.INTERNAL, Origin.BACKEND)

    def test_stream_ends(self) -> None:
        """
        A stream that ends well ends the loop.
        """
        stream = self.stream()
        self.backend.say_reply(1)
        self.backend.say_trailers(1)
        self.successResultOf(self.read(stream))
        self.failureResultOf(self.read(stream), StopAsyncIteration)


class TransportTests(ClientTests):
    def test_lost_connection(self) -> None:
        """
        When the connection is lost every running call fails as unavailable, by nobody's word.
        """
        call, stream = self.predict(timeout=9), self.stream()
        waiting = self.read(stream)
        closed = self.channel.when_closed()
        self.backend.client.connectionLost(Failure(ConnectionLost()))
        self.assert_error(call, StatusCode.UNAVAILABLE, Origin.TRANSPORT)
        self.assert_error(waiting, StatusCode.UNAVAILABLE, Origin.TRANSPORT)
        self.assertEqual(self.successResultOf(closed).status, StatusCode.UNAVAILABLE)
        self.assertEqual(self.successResultOf(self.channel.when_closed()).status, StatusCode.UNAVAILABLE)
        self.assertFalse(self.channel.is_open)
        self.assert_nothing_left()
        self.assert_error(
            Deferred.fromCoroutine(self.channel.predict(pb.PredictOptions())), StatusCode.UNAVAILABLE, Origin.TRANSPORT
        )

    def test_go_away_lets_running_calls_finish(self) -> None:
        """
        After a go-away new calls are refused, running ones finish, and then the connection closes.
        """
        call = self.predict()
        self.backend.say_goodbye(2**31 - 1)
        self.assertFalse(self.channel.is_open)
        late = Deferred.fromCoroutine(self.channel.predict(pb.PredictOptions()))
        self.assert_error(late, StatusCode.UNAVAILABLE, Origin.TRANSPORT)
        self.backend.say_headers(1)
        self.backend.say_reply(1)
        self.assertFalse(self.backend.transport.disconnecting)
        self.backend.say_trailers(1)
        self.successResultOf(call)
        self.assertTrue(self.backend.transport.disconnecting)

    def test_go_away_before_a_call(self) -> None:
        """
        A call the backend says it did not process fails at once, so that it can be tried elsewhere.
        """
        first, second = self.predict(), self.predict()
        self.backend.say_goodbye(1)
        self.assert_error(second, StatusCode.UNAVAILABLE, Origin.TRANSPORT)
        self.assertNoResult(first)

    def test_broken_http2(self) -> None:
        """
        A backend that does not speak HTTP/2 fails the calls and loses the connection.
        """
        call = self.predict()
        self.backend.client.dataReceived(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 4)
        self.assert_error(call, StatusCode.UNAVAILABLE, Origin.TRANSPORT)
        self.assertTrue(self.backend.transport.disconnected or self.backend.transport.disconnecting)

    def test_close(self) -> None:
        """
        Closing the channel cancels what runs, on the backend too, and closes the connection.
        """
        call = self.predict(timeout=5)
        self.channel.close()
        self.channel.close()
        self.assert_error(call, StatusCode.CANCELLED, Origin.CALLER)
        self.backend.hear(answer=False)
        self.assertEqual(self.backend.resets, {1: CANCEL})
        self.assertTrue(self.backend.transport.disconnecting)
        self.assert_nothing_left()

    def test_flood_of_pings_while_paused(self) -> None:
        """
        A backend that reads nothing but asks for answers is cut off instead of filling our memory.
        """
        self.backend.client.pauseProducing()
        for _ in range(70_000):
            self.backend.http2.ping(b"12345678")
        self.backend.say()
        self.assertFalse(self.channel.is_open)
        self.assertLess(len(self.backend.transport.value()), 3 * 1024 * 1024)


class CancelTests(ClientTests):
    def test_cancel_resets_the_call(self) -> None:
        """
        Cancelling a stream resets it on the backend, and its waiting reader is told (WALK-7).
        """
        stream = self.stream(timeout=30)
        waiting = self.read(stream)
        stream.cancel()
        self.backend.hear()
        self.assertEqual(self.backend.resets, {1: CANCEL})
        self.assert_error(waiting, StatusCode.CANCELLED, Origin.CALLER)
        stream.cancel()
        self.assert_nothing_left()

    def test_cancelling_the_awaiting_coroutine(self) -> None:
        """
        Cancelling whoever awaits a call cancels the call on the backend.
        """
        call = self.predict(timeout=30)
        call.cancel()
        self.failureResultOf(call, CancelledError)
        self.backend.hear()
        self.assertEqual(self.backend.resets, {1: CANCEL})
        self.assert_nothing_left()

    def test_leaving_the_block(self) -> None:
        """
        A reader that leaves ``async with`` early cancels the rest.
        """
        stream = self.stream()

        async def first() -> bytes:
            async with stream:
                async for reply in stream:
                    return reply.message
            return b""

        reading = Deferred.fromCoroutine(first())
        self.backend.say_reply(1, b"one")
        self.assertEqual(self.successResultOf(reading), b"one")
        self.backend.hear()
        self.assertEqual(self.backend.resets, {1: CANCEL})

    def test_late_replies_of_a_cancelled_call(self) -> None:
        """
        What the backend sent before it learned of the cancel is dropped, and the next call works.
        """
        stream = self.stream()
        self.backend.http2.send_data(1, encode_message(b""))
        late = self.backend.http2.data_to_send()
        stream.cancel()
        self.backend.client.dataReceived(late)
        self.backend.hear()
        call = self.predict()
        self.backend.say_headers(3)
        self.backend.say_reply(3)
        self.backend.say_trailers(3)
        self.successResultOf(call)

    def test_cancel_of_one_leaves_the_other(self) -> None:
        """
        Calls on one connection do not feel each other's cancel.
        """
        one, other = self.predict(), self.predict()
        one.cancel()
        self.failureResultOf(one, CancelledError)
        self.backend.hear()
        self.backend.say_headers(3)
        self.backend.say_reply(3)
        self.backend.say_trailers(3)
        self.successResultOf(other)


class DeadlineTests(ClientTests):
    def test_silent_backend(self) -> None:
        """
        A backend that says nothing cannot hold a call beyond its deadline.
        """
        call = self.predict(timeout=2.0)
        self.backend.clock.advance(1.9)
        self.assertNoResult(call)
        self.backend.clock.advance(0.2)
        self.assert_error(call, StatusCode.DEADLINE_EXCEEDED, Origin.CALLER)
        self.backend.hear()
        self.assertEqual(self.backend.resets, {1: CANCEL})
        self.assert_nothing_left()

    def test_the_backend_says_it_first(self) -> None:
        """
        A backend that reports the caller's deadline is not blamed for it.
        """
        call = self.predict(timeout=2.0)
        self.backend.say_trailers(1, 4, "Deadline Exceeded", only=True)
        self.assert_error(call, StatusCode.DEADLINE_EXCEEDED, Origin.CALLER)

    def test_no_deadline_of_ours(self) -> None:
        """
        DEADLINE_EXCEEDED of a call without a deadline is the backend's own.
        """
        call = self.predict()
        self.backend.say_trailers(1, 4, "upstream", only=True)
        self.assert_error(call, StatusCode.DEADLINE_EXCEEDED, Origin.BACKEND)


class FlowTests(ClientTests):
    def window(self, stream_id: int) -> int:
        """Bytes the backend may still send of a call."""
        return self.backend.http2.local_flow_control_window(stream_id)

    def test_a_reader_that_stops_stops_the_backend(self) -> None:
        """
        Replies nobody reads use up the call's window and are not credited; reading them opens it again (WALK-6).
        """
        stream = self.stream()
        reply = b"x" * 16000
        sent = 0
        while self.window(1) > 16384:
            self.backend.say_reply(1, reply)
            self.backend.hear()
            sent += 1
        self.assertLess(sent * 16000, WINDOW)
        self.assertLess(self.window(1), 16384)
        for _ in range(sent):
            self.successResultOf(self.read(stream))
        self.backend.hear()
        self.assertGreater(self.window(1), WINDOW // 2)

    def test_the_others_go_on(self) -> None:
        """
        A call nobody reads does not stop the other calls of the connection.
        """
        self.stream()
        while self.window(1) > 16384:
            self.backend.say_reply(1, b"x" * 16000)
        for _ in range(200):
            other = self.stream()
            number = max(self.backend.requests)
            reading = self.read(other)
            self.backend.say_bytes(number, encode_message(b"\x0a\x80\x80\x06" + b"y" * 98304))
            self.successResultOf(reading)
            other.cancel()
            self.backend.hear()

    def test_a_reply_larger_than_the_window(self) -> None:
        """
        A reader that waits gets a reply of any allowed size, credited as its bytes come.
        """
        reading = self.read(self.stream())
        size = 3 * WINDOW
        data = encode_message(pb.Reply(message=b"z" * size).SerializeToString())
        while data:
            room = min(self.window(1), 16384)
            self.assertGreater(room, 0, "the backend is stuck")
            self.backend.http2.send_data(1, data[:room])
            data = data[room:]
            self.backend.say()
            self.backend.hear()
        self.assertEqual(len(self.successResultOf(reading).message), size)

    def test_requests_wait_for_the_backends_window(self) -> None:
        """
        A large request goes out as fast as the backend takes it, not faster.
        """
        prompt = "p" * 300_000
        call = Deferred.fromCoroutine(self.channel.predict(pb.PredictOptions(Prompt=prompt)))
        self.backend.hear(answer=False)
        self.assertEqual(len(self.backend.bodies[1]), 65_535)
        self.backend.http2.increment_flow_control_window(1_000_000)
        self.backend.http2.increment_flow_control_window(1_000_000, 1)
        self.backend.say()
        self.backend.hear(answer=False)
        self.assertEqual(pb.PredictOptions.FromString(self.backend.bodies[1][5:]).Prompt, prompt)
        self.assertNoResult(call)
        self.channel.close()
        self.failureResultOf(call, RpcError)

    def test_requests_wait_for_the_transport(self) -> None:
        """
        A paused transport holds requests back; resumed, they go.
        """
        self.backend.client.pauseProducing()
        call = self.predict()
        self.assertEqual(self.backend.bodies.get(1, b""), b"")
        self.backend.client.resumeProducing()
        self.backend.hear()
        self.assertNotEqual(self.backend.bodies[1], b"")
        self.backend.say_headers(1)
        self.backend.say_reply(1)
        self.backend.say_trailers(1)
        self.successResultOf(call)

    def test_answered_before_the_request_was_sent(self) -> None:
        """
        A backend that refuses early gets no more of the request.
        """
        call = Deferred.fromCoroutine(self.channel.predict(pb.PredictOptions(Prompt="p" * 300_000)))
        self.backend.hear(answer=False)
        self.backend.say_trailers(1, 8, "too long", only=True)
        self.assert_error(call, StatusCode.RESOURCE_EXHAUSTED, Origin.BACKEND)
        self.backend.hear(answer=False)
        self.assertEqual(self.backend.resets, {1: CANCEL})
        self.assert_nothing_left()

    def test_oversized_reply(self) -> None:
        """
        A reply that announces more than the limit is refused at once, and the backend is stopped.
        """
        stream = self.stream()
        waiting = self.read(stream)
        self.backend.say_bytes(1, b"\0" + (60 * 1024 * 1024).to_bytes(4, "big") + b"x" * 100)
        self.assert_error(waiting, StatusCode.RESOURCE_EXHAUSTED, Origin.CALLER)
        self.backend.hear()
        self.assertEqual(self.backend.resets, {1: CANCEL})
        self.assert_nothing_left()

    def test_no_more_calls_allowed(self) -> None:
        """
        A backend that allows no further call at once makes the next one fail here, not the connection.
        """
        self.backend.http2.update_settings({3: 1})
        self.backend.say()
        self.backend.hear()
        self.predict()
        second = self.predict()
        self.assert_error(second, StatusCode.RESOURCE_EXHAUSTED, Origin.CALLER)
        self.assertTrue(self.channel.is_open)

    def test_two_readers(self) -> None:
        """
        Two readers of one stream are a mistake that is reported to the second.
        """
        stream = self.stream()
        first = self.read(stream)
        self.failureResultOf(self.read(stream), RuntimeError)
        stream.cancel()
        self.failureResultOf(first, RpcError)

    def test_oversized_request(self) -> None:
        """
        A request over the limit fails here and leaves the connection usable.
        """
        huge = pb.PredictOptions(Prompt="p" * (50 * 1024 * 1024))
        call = Deferred.fromCoroutine(self.channel.predict(huge))
        self.assert_error(call, StatusCode.RESOURCE_EXHAUSTED, Origin.CALLER)
        self.assertTrue(self.channel.is_open)
        self.assert_nothing_left()
