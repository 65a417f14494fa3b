"""A message as text: what fits, what is a subject, what matches."""

from __future__ import annotations

import json

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from localai_dist.bus.envelope import (
    INLINE_LIMIT,
    PAYLOAD_LIMIT,
    ROOTS,
    Filter,
    Message,
    Spilled,
    channel_of,
    decode,
    encode,
    fits,
    fits_inline,
    payload_of,
)
from localai_dist.bus.errors import BadEnvelope, UnknownSubject, Unpublishable

values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(st.characters(codec="utf-8")),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(st.characters(codec="utf-8")), inner, max_size=4)
    ),
    max_leaves=12,
)
FILLERS = ("x", "\U0001f600", '"', "\n", "\0", "é")


def padded(filler: str, size: int, subject: str = "cache.invalidate.models") -> Message:
    """A message on ``subject`` that is ``size`` bytes long when encoded."""
    step = len(payload_of(filler)) - 2
    room = size - len(encode(Message(subject, payload_of(""))))
    return Message(subject, payload_of(filler * (room // step) + "x" * (room % step)))


class EnvelopeTests(SynchronousTestCase):
    """The codec."""

    @given(values)
    def test_round_trip(self, value: object) -> None:
        """What is published is what arrives, byte for byte, and it is the contract's JSON (CLUS-14)."""
        message = Message("state.tasks.delta", payload_of(value))
        encoded = encode(message)
        self.assertEqual(decode(encoded), message)
        self.assertEqual(decode(encoded.decode()), message)
        self.assertEqual(message.value(), value)
        self.assertEqual(json.loads(encoded), {"s": message.subject, "d": value})

    def test_spilled(self) -> None:
        """A message that is too long names its row."""
        encoded = encode(Spilled("jobs.1.progress", "id-1"))
        self.assertEqual(encoded, b'{"s":"jobs.1.progress","i":"id-1"}')
        self.assertEqual(decode(encoded), Spilled("jobs.1.progress", "id-1"))

    def test_the_limit_is_of_encoded_bytes(self) -> None:
        """7999 encoded bytes travel inline, 8000 do not, whatever they are made of (CLUS-14)."""
        for filler in FILLERS:
            for size in range(7990, 8011):
                message = padded(filler, size)
                self.assertEqual(len(encode(message)), size, filler)
                self.assertEqual(fits_inline(message), size < 8000, (filler, size))
                self.assertEqual(fits(encode(message)), fits_inline(message))
        self.assertEqual(INLINE_LIMIT, 8000)

    def test_what_is_none_of_ours(self) -> None:
        """A notification that is no message of the bus is told apart, not guessed at."""
        for text in ("", "x", "[]", "{}", '{"s":"a"}', '{"s":1,"d":1}', '{"s":"a","i":7}', '{"s":"a","d":1,"i":"x"}'):
            self.assertRaises(BadEnvelope, decode, text)
        self.assertRaises(BadEnvelope, decode, b'{"s":"\xff","d":1}')
        self.assertRaises(BadEnvelope, Message("jobs.x", b'"text"').read, dict)
        self.assertEqual(Message("jobs.x", b'{"a":1}').read(dict[str, int]), {"a": 1})

    def test_what_cannot_be_published(self) -> None:
        """A value that is no JSON, or too large, is refused before anything is sent."""
        for value in (object(), {1j: 2}, "\ud800"):
            self.assertRaises(Unpublishable, payload_of, value)
        self.assertRaises(Unpublishable, payload_of, "x" * PAYLOAD_LIMIT)
        self.assertEqual(payload_of(msgspec.Raw(b'{"a" : 1}')), b'{"a" : 1}')


class SubjectTests(SynchronousTestCase):
    """Subjects, channels and filters."""

    def test_channels(self) -> None:
        """The first word names the channel, and only the known ones are used."""
        for root in ROOTS:
            self.assertEqual(channel_of(f"{root}.a.b"), f"localai_{root}")
        self.assertIn("Jobs", str(self.assertRaises(UnknownSubject, channel_of, "Jobs.a")))

    def test_malformed(self) -> None:
        """An empty word, a wildcard in a subject, '>' anywhere, or an endless subject is refused, named in the text."""
        for bad in (
            "",
            ".",
            "jobs.",
            ".jobs",
            "jobs..a",
            "jobs.*",
            "jobs.a*",
            "jobs.>",
            "jobs.\0",
            "jobs." + "x" * 255,
        ):
            self.assertRaises(UnknownSubject, channel_of, bad)
        for bad in ("*", "*.a", "jobs.a*", "jobs.>", "jobs..*", "other.*", ""):
            self.assertRaises(UnknownSubject, Filter.parse, bad)

    def test_matching(self) -> None:
        """A filter is one subject, or has '*' for exactly one word."""
        for text, subject, matches in [
            ("jobs.a.progress", "jobs.a.progress", True),
            ("jobs.*.progress", "jobs.a.progress", True),
            ("jobs.*.*", "jobs.a.result", True),
            ("jobs.*", "jobs.a.progress", False),
            ("jobs.*.progress", "jobs.progress", False),
            ("jobs.a.progress", "jobs.b.progress", False),
            ("jobs.a", "jobs.a.b", False),
        ]:
            self.assertEqual(Filter.parse(text).matches(subject), matches, (text, subject))
            self.assertEqual(str(Filter.parse(text)), text)
