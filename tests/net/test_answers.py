"""The id of a request, as given by whoever asks."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase
from twisted.web.test.requesthelper import DummyRequest

from localai_dist.net.answers import request_id


class RequestIdTests(SynchronousTestCase):
    """Taken over, or made."""

    def asked(self, **headers: bytes) -> tuple[str, DummyRequest]:
        """The id of a request with these headers."""
        request = DummyRequest([b"x"])
        for name, value in headers.items():
            request.requestHeaders.setRawHeaders(name.replace("_", "-").encode(), [value])
        return request_id(request), request

    def test_a_given_id_is_taken_over(self) -> None:
        """The request's own id is the answer's, and a correlation id is echoed."""
        found, request = self.asked(x_correlation_id=b"abc-1")
        self.assertEqual((found, request_id(request)), ("abc-1", "abc-1"))
        self.assertEqual(request.responseHeaders.getRawHeaders(b"x-correlation-id"), [b"abc-1"])
        self.assertEqual(self.asked(x_request_id=b"r", x_correlation_id=b"c")[0], "r")

    def test_odd_bytes_are_no_id_and_no_fault(self) -> None:
        """An id that is no UTF-8, too long or has spaces gets a fresh one instead of a traceback (WALK-17)."""
        for odd in (b"\xff\xfe", b"a b", b"x" * 129, b"", "\u00e9".encode()):
            found, request = self.asked(x_request_id=odd, x_correlation_id=odd)
            self.assertRegex(found, r"\A[0-9a-f]{32}\Z")
            self.assertFalse(request.responseHeaders.hasHeader(b"x-correlation-id"))
