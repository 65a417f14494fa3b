"""Addresses, read or refused."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from localai_dist.urls import FRONTEND_SCHEMES, InvalidUrl, Url, bracketed, parse_url


class ParseTests(SynchronousTestCase):
    """``scheme://user:password@host:port/path?query``."""

    def test_parts(self) -> None:
        """An address with everything in it, one with nothing but a host, and IPv6."""
        self.assertEqual(
            parse_url("HTTPS://joe:p%40ss@Front.Example:8080/ai/?x=1#y"),
            Url("https", "front.example", 8080, "joe:p%40ss@Front.Example:8080", "/ai/", "x=1", "joe", "p%40ss"),
        )
        self.assertNotIn("joe", repr(parse_url("https://joe:p%40ss@f")))
        self.assertEqual(parse_url("ws://f"), Url("ws", "f", None, "f", "", "", None, None))
        self.assertEqual(parse_url("http://f:").port, None)
        there = parse_url("http://[FD00::1]:80")
        self.assertEqual((there.host, there.port, there.authority), ("fd00::1", 80, "[FD00::1]:80"))
        self.assertEqual(parse_url("http://joe@[fe80::1%eth0]").host, "fe80::1%eth0")
        for host in ("a_b", "f.example.", "10.0.0.7", 63 * "x"):
            self.assertEqual(parse_url(f"http://{host}:80").host, host)
        self.assertEqual((bracketed(there.host), bracketed("f")), ("[fd00::1]", "f"))

    def test_why_not(self) -> None:
        """What is no address is told why, and nothing of it is repeated: there may be a password in it (WALK-23)."""
        for text, why in (
            ("", "does not begin with http:// or https:// or ws:// or wss://"),
            ("s3cret:8080", "does not begin with"),
            ("s3cret://f", "does not begin with"),
            ("/s3cret", "does not begin with"),
            ("http://", "names no host"),
            ("http:///s3cret", "names no host"),
            ("http://joe:s3cret@", "names no host"),
            ("http://[::1", "its host is none"),
            ("http://[s3cret]", "its host is none"),
            ("http://joe:s3cret@a\u2100b", "its host is none"),
            ("http://joe:s3cret@m\u00fcnchen", "not written in ASCII"),
            ("http://s3cret\u00a0:80", "not written in ASCII"),
            ("http://s3..cret", "its host is none"),
            ("http://s3\\cret", "its host is none"),
            ("http://s3cret;http", "its host is none"),
            (f"http://s3{62 * 'x'}", "its host is none"),
            ("http://[::1]s3:80", "its host is none"),
            ("http://[v3.s3]", "its host is none"),
            ("http://f:99999", "its port is none"),
            ("http://f:s3cret", "its port is none"),
            ("http://joe:s3/cret@f", "its port is none"),
            ("http://f:0", "its port is none"),
            ("http://s3cret f", "a space or a line break"),
            ("http://f\r\nX-S3cret: y", "a space or a line break"),
            (" http://f", "a space or a line break"),
            ("http://f\x7f", "a space or a line break"),
        ):
            error = self.assertRaises(InvalidUrl, parse_url, text, FRONTEND_SCHEMES)
            self.assertIn(why, str(error), text)
            self.assertNotIn("s3", str(error).lower())
            self.assertIsNone(error.__cause__)

    @given(st.text(alphabet="htps:/@[]?#%. a0\u2100\udcff\n", max_size=20))
    def test_any_text(self, text: str) -> None:
        """Whatever it is, it is an address with a host or refused in these words."""
        try:
            self.assertTrue(parse_url(text).host)
        except InvalidUrl as error:
            self.assertTrue(str(error))
