"""Statuses, message framing and verdicts, by value and by property."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from localai_dist.grpcclient.framing import GoAway, GoAwayFilter, MessageBuffer, encode_message, encode_timeout
from localai_dist.grpcclient.status import (
    Origin,
    RpcError,
    StatusCode,
    error_of_http,
    error_of_reset,
    error_of_trailers,
)
from localai_dist.grpcclient.verdict import answer_of, outcome_of
from localai_dist.reach import Answer, Answered, Cancelled, DeadlineExceeded, NotServed, may_reap


def chunks(data: bytes, cuts: list[int]) -> list[bytes]:
    """``data`` cut up by ``cuts``, the rest in one piece."""
    found = []
    for size in cuts:
        found.append(data[:size])
        data = data[size:]
    return [*found, data]


def frame(kind: int, body: bytes, stream: int = 1) -> bytes:
    """One HTTP/2 frame."""
    return len(body).to_bytes(3, "big") + bytes([kind, 0]) + stream.to_bytes(4, "big") + body


class MessageBufferTests(SynchronousTestCase):
    @given(st.lists(st.binary(max_size=60)), st.lists(st.integers(1, 20), max_size=60))
    def test_chunking_is_invisible(self, sent: list[bytes], cuts: list[int]) -> None:
        """
        However the backend's bytes are cut up, the same replies come out.
        """
        buffer = MessageBuffer()
        data = b"".join(encode_message(message) for message in sent)
        got = [message for chunk in chunks(data, cuts) for message in buffer.feed(chunk)]
        self.assertEqual(got, sent)
        self.assertEqual(len(buffer), 0)

    def test_too_long_a_reply_is_refused_by_its_prefix(self) -> None:
        """
        A reply over the limit is refused before its bytes are kept.
        """
        for cut in (5, 3):
            buffer = MessageBuffer(limit=10)
            data = encode_message(b"x" * 11)[:5]
            error = self.assertRaises(RpcError, lambda b=buffer, d=data, c=cut: [b.feed(d[:c]), b.feed(d[c:])])
            self.assertEqual(error.status, StatusCode.RESOURCE_EXHAUSTED)

    def test_compressed_reply_is_refused(self) -> None:
        """
        A compressed reply is an error with a name, not garbage.
        """
        error = self.assertRaises(RpcError, MessageBuffer().feed, b"\1\0\0\0\0")
        self.assertEqual(error.status, StatusCode.INTERNAL)

    def test_too_long_a_request_is_refused_here(self) -> None:
        """
        A request over 50 MiB is refused with the limit in its text, before anything is sent.
        """
        error = self.assertRaises(RpcError, encode_message, bytes(50 * 1024 * 1024 + 1))
        self.assertEqual((error.status, error.origin), (StatusCode.RESOURCE_EXHAUSTED, Origin.CALLER))


class TimeoutTests(SynchronousTestCase):
    def test_values(self) -> None:
        """
        A timeout is told in the finest unit that fits eight digits.
        """
        cases = {0.0: "1u", 0.5: "500000u", 99.0: "99000000u", 120.0: "120000m", 86400.0: "86400000m", 1e6: "1000000S"}
        for seconds, text in cases.items():
            self.assertEqual(encode_timeout(seconds), text)

    @given(st.floats(0, 1e12))
    def test_never_too_many_digits(self, seconds: float) -> None:
        """
        Whatever the timeout, its text is legal.
        """
        text = encode_timeout(seconds)
        self.assertTrue(text[:-1].isdigit() and len(text) <= 9 and text[-1] in "umS", text)


class GoAwayFilterTests(SynchronousTestCase):
    @given(
        st.lists(st.tuples(st.sampled_from([0, 1, 4, 7, 8]), st.binary(min_size=8, max_size=40))),
        st.lists(st.integers(1, 30), max_size=60),
    )
    def test_everything_else_passes(self, frames: list[tuple[int, bytes]], cuts: list[int]) -> None:
        """
        However the bytes are cut up, go-aways come out by themselves and all else unchanged.
        """
        data = b"".join(frame(kind, body) for kind, body in frames)
        kept = GoAwayFilter()
        passed, found = b"", []
        for chunk in chunks(data, cuts):
            shown, goodbyes = kept.feed(chunk)
            passed += shown
            found += goodbyes
        self.assertEqual(passed, b"".join(frame(kind, body) for kind, body in frames if kind != 7))
        wanted = [body for kind, body in frames if kind == 7]
        self.assertEqual(
            found,
            [GoAway(int.from_bytes(body[:4], "big") & 0x7FFFFFFF, int.from_bytes(body[4:8], "big")) for body in wanted],
        )


class StatusTests(SynchronousTestCase):
    def test_trailers(self) -> None:
        """
        A call's trailers say how it ended; without a readable status it is UNKNOWN, never OK.
        """
        self.assertIsNone(error_of_trailers({"grpc-status": "0"}))
        cases = [
            ({"grpc-status": "5", "grpc-message": "no %C3%A9"}, StatusCode.NOT_FOUND, "no é"),
            ({"grpc-status": "14"}, StatusCode.UNAVAILABLE, ""),
            ({}, StatusCode.UNKNOWN, "the call ended without a grpc-status"),
            ({"grpc-status": "x"}, StatusCode.UNKNOWN, "unknown grpc-status 'x'"),
            ({"grpc-status": "99"}, StatusCode.UNKNOWN, "unknown grpc-status '99'"),
        ]
        for trailers, status, details in cases:
            error = error_of_trailers(trailers)
            assert error is not None
            self.assertEqual((error.status, error.details, error.origin), (status, details, Origin.BACKEND))

    def test_resets_and_http(self) -> None:
        """
        Resets and plain HTTP answers become the statuses gRPC gives them.
        """
        resets = {7: StatusCode.UNAVAILABLE, 8: StatusCode.CANCELLED, 11: StatusCode.RESOURCE_EXHAUSTED}
        for code, status in {**resets, 12: StatusCode.PERMISSION_DENIED, 0: StatusCode.INTERNAL}.items():
            self.assertEqual(error_of_reset(code).status, status)
        for http, status in {"401": StatusCode.UNAUTHENTICATED, "503": StatusCode.UNAVAILABLE}.items():
            self.assertEqual(error_of_http(http).status, status)
        self.assertEqual(error_of_http("418").status, StatusCode.UNKNOWN)


class VerdictTests(SynchronousTestCase):
    def test_backends_own_words(self) -> None:
        """
        Only the backend's own "not loaded", "identity mismatch" or "unavailable" lets its row be reaped.
        """
        code = StatusCode
        cases = [
            (code.NOT_FOUND, "model identity mismatch: x", Answer.MODEL_NOT_LOADED),
            (code.NOT_FOUND, "no such file", Answer.ERROR),
            (code.INTERNAL, "model identity mismatch", Answer.ERROR),
            (code.FAILED_PRECONDITION, "model not loaded", Answer.MODEL_NOT_LOADED),
            (code.FAILED_PRECONDITION, "disk full", Answer.ERROR),
            (code.UNKNOWN, "wrong model loaded", Answer.MODEL_NOT_LOADED),
            (code.INVALID_ARGUMENT, "prompt 'model not loaded' is too long", Answer.ERROR),
            (code.UNAVAILABLE, "shutting down", Answer.BACKEND_UNAVAILABLE),
            (code.INTERNAL, "CUDA", Answer.ERROR),
        ]
        for status, text, answer in cases:
            error = RpcError(status, text)
            self.assertIs(answer_of(error), answer, text)
            self.assertEqual(outcome_of(error), Answered(answer, str(error)))
            self.assertEqual(may_reap(outcome_of(error)), answer is not Answer.ERROR)

    def test_nobody_elses(self) -> None:
        """
        A lost connection, our deadline, our cancel and our limits never let a row be reaped.
        """
        cases = [
            (RpcError(StatusCode.UNAVAILABLE, "lost", Origin.TRANSPORT), NotServed("lost")),
            (RpcError(StatusCode.DEADLINE_EXCEEDED, "", Origin.CALLER), DeadlineExceeded()),
            (RpcError(StatusCode.CANCELLED, "", Origin.CALLER), Cancelled()),
            (
                RpcError(StatusCode.RESOURCE_EXHAUSTED, "big", Origin.CALLER),
                Answered(Answer.ERROR, "RESOURCE_EXHAUSTED: big"),
            ),
        ]
        for error, outcome in cases:
            self.assertEqual(outcome_of(error), outcome)
            self.assertIs(answer_of(error), Answer.ERROR)
            self.assertFalse(may_reap(outcome_of(error)))
