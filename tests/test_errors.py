"""What errors tell, and to whom."""

from __future__ import annotations

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
