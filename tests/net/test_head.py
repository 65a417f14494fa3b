"""What the head of a request says."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase
from twisted.web.test.requesthelper import DummyRequest

from localai_dist.net.head import header, query


class HeaderTests(SynchronousTestCase):
    """Lines of the head, by their name."""

    def said(self, *lines: bytes) -> str | None:
        """The header of a request with these lines of one name."""
        request = DummyRequest([b"x"])
        for line in lines:
            request.requestHeaders.addRawHeader(b"x-thing", line)
        return header(request, "X-Thing")

    def test_as_sent(self) -> None:
        """A header is its line, in any letters; one that was not sent is none, an empty one is empty."""
        self.assertEqual((self.said(b"Bearer t"), self.said(b""), self.said()), ("Bearer t", "", None))

    def test_sent_twice(self) -> None:
        """Lines of one name are one list, in their order, as a proxy may make them one line: neither of two is
        preferred, nor are two that agree taken for one."""
        self.assertEqual(self.said(b"Bearer good", b"Bearer bad"), "Bearer good, Bearer bad")
        self.assertEqual(self.said(b"a", b"a"), "a, a")
        self.assertEqual(self.said(b"", b"a"), ", a")

    def test_bytes_that_are_no_text(self) -> None:
        """Bytes that are no UTF-8 are kept apart: two different secrets never look the same."""
        self.assertEqual(self.said("\u00e9".encode()), "\u00e9")
        self.assertNotEqual(self.said(b"\xff"), self.said(b"\xfe"))


class QueryTests(SynchronousTestCase):
    """Arguments of the query, by their name."""

    def test_first_or_none(self) -> None:
        """The first argument of a name, none if there is none, and odd bytes are no fault."""
        request = DummyRequest([b"x"])
        self.assertIsNone(query(request, "id"))
        request.args = {b"id": [b"a", b"b"], b"odd": [b"\xff"], b"empty": [b""]}
        self.assertEqual([query(request, name) for name in ("id", "odd", "empty")], ["a", "\ufffd", ""])
        request.args = None  # as twisted.web has it before the head is read
        self.assertIsNone(query(request, "id"))
