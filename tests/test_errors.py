"""What errors tell, and to whom."""

from __future__ import annotations

import time

from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from localai_dist.errors import LocalAIDistError, UserMistake, without_coordinates


class ToldTests(SynchronousTestCase):
    """The text for whoever merely uses the API."""

    def test_two_texts(self) -> None:
        """Operators read all of an error, clients all but whereabouts; of their own mistakes clients are told all."""
        text = "no answer of 10.0.0.7:80, log in /var/log/x.log"
        error = LocalAIDistError(text)
        self.assertEqual((str(error), error.told), (text, "no answer of (address), log in x.log"))
        self.assertEqual(UserMistake(text).told, text)

    def test_what_is_taken_out(self) -> None:
        """Addresses, URLs and all but the last name of a path go; words and numbers stay."""
        for text, left in [
            ("can't dial 10.0.0.7:80 (refused)", "can't dial (address) (refused)"),
            ("http://box.lan:80/x: refused", "(address) refused"),
            ("[::1]:80 and box:8080 and a.b.example:443", "(address) and (address) and (address)"),
            ("'/a/b c' and /d/e.f, /g/", "'b c' and e.f, g"),
            ("'/srv/my models/x y.gguf' and unix:/run/x.sock", "'x y.gguf' and unix:x.sock"),
            ("C:\\models\\x.gguf and 'c:\\\\models\\\\y.gguf'", "x.gguf and 'y.gguf'"),
            ("fe80::1%eth0, 2001:db8::7 and ::1", "(address), (address) and (address)"),
            ("[fe80::1%eth0]:80 and [1:2:3:4:5:6:7:8]", "(address) and (address)"),
            ("db_1:5432, db_1.lan:80", "(address), (address)"),
            ("std::abc, [12:30], x[0] and [1.5]", "std::abc, [12:30], x[0] and [1.5]"),
            (
                "3/4 of text/plain at 12:30:59, model q:14 and r:7b",
                "3/4 of text/plain at 12:30:59, model q:14 and r:7b",
            ),
        ]:
            self.assertEqual(without_coordinates(text), left)

    @given(st.text(st.characters(exclude_categories=["N"])), st.integers(1, 255), st.integers(1, 65535))
    def test_an_address_anywhere(self, around: str, last: int, port: int) -> None:
        """An address is found whatever stands around it."""
        left = without_coordinates(f"{around} 192.168.7.{last}:{port} {around}")
        self.assertNotIn("192.168.7", left)

    def test_long_texts(self) -> None:
        """A long text of whatever words is looked through at once: the time grows no faster than its length."""
        for word in ("a-", "a.", "a+.", "f:", "::", "[", "[a:", "'/", "/a", "c:\\", "1."):
            short, long = (min(_seconds(word * count) for _ in range(3)) for count in (2_000, 32_000))
            self.assertLess(long, 128 * short + 0.1, word)  # 16 times as long; the square of that is 256


def _seconds(text: str) -> float:
    begin = time.process_time()
    without_coordinates(text)
    return time.process_time() - begin
