"""
A message as the text of a notification. Pure.

There is one encoder: what decides whether a message fits is the very text that is sent.

Source: wire contract §8, docs/wire/bus.md.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias, TypeVar

import msgspec

from localai_dist.bus.errors import BadEnvelope, UnknownSubject, Unpublishable
from localai_dist.units import MiB, format_size

T = TypeVar("T")

INLINE_LIMIT: Final = 8000
"""Bytes of an encoded message from which on it is spilled: PostgreSQL takes up to 7999."""

PAYLOAD_LIMIT: Final = 16 * MiB
"""Bytes of a payload at most; whatever is larger belongs into a table of its own."""

ROOTS: Final = frozenset(
    {"jobs", "agent", "gallery", "cache", "staging", "prefixcache", "responses", "state", "nodes", "loads"}
)
"""The first words a subject may have; each is a channel. The last two are ours, the others the original's."""

SUBJECT_LIMIT: Final = 255
_ANY: Final = "*"


@dataclass(frozen=True, slots=True)
class Message:
    """
    What subscribers get.

    Attributes:
        payload: a JSON document, byte for byte as it was published.
    """

    subject: str
    payload: bytes = field(repr=False)

    def value(self) -> Any:
        """The payload as plain Python values."""
        return msgspec.json.decode(self.payload)

    def read(self, kind: type[T]) -> T:
        """
        The payload as ``kind``.

        Raises:
            BadEnvelope: it is something else.
        """
        try:
            return msgspec.json.decode(self.payload, type=kind)
        except msgspec.MsgspecError as error:
            raise BadEnvelope(f"a message on {self.subject} is not what is expected there: {error}") from error


@dataclass(frozen=True, slots=True)
class Spilled:
    """A message whose payload is in the row ``id`` of ``bus_messages``."""

    subject: str
    id: str


Decoded: TypeAlias = Message | Spilled


class _Envelope(msgspec.Struct, frozen=True, omit_defaults=True):
    s: str
    d: msgspec.Raw = msgspec.Raw()
    i: str = ""


def payload_of(value: object) -> bytes:
    """
    ``value`` as a JSON document.

    Raises:
        Unpublishable: it can't be one, or is longer than ``PAYLOAD_LIMIT``.
    """
    try:
        payload = msgspec.json.encode(value)
    except (TypeError, ValueError, OverflowError, msgspec.MsgspecError) as error:
        raise Unpublishable(f"not publishable: {error}") from error
    if len(payload) > PAYLOAD_LIMIT:
        raise Unpublishable(f"{format_size(len(payload))} are not publishable: at most {format_size(PAYLOAD_LIMIT)}")
    return payload


def encode(message: Decoded) -> bytes:
    """The text of the notification, in UTF-8."""
    if isinstance(message, Spilled):
        return msgspec.json.encode(_Envelope(message.subject, i=message.id))
    return msgspec.json.encode(_Envelope(message.subject, d=msgspec.Raw(message.payload)))


def fits(encoded: bytes) -> bool:
    """Whether PostgreSQL takes this as a notification."""
    return len(encoded) < INLINE_LIMIT


def fits_inline(message: Message) -> bool:
    """Whether ``message`` would travel without a row."""
    return fits(encode(message))


def decode(text: str | bytes) -> Decoded:
    """
    The message in a notification.

    Raises:
        BadEnvelope: not one of ours.
    """
    try:
        envelope = msgspec.json.decode(text, type=_Envelope)
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise BadEnvelope(f"no message of the bus: {error}") from error
    payload = bytes(envelope.d)
    if bool(payload) == bool(envelope.i):
        raise BadEnvelope(f"a message on {envelope.s[:80]!r} wants either a payload or the id of one")
    return Spilled(envelope.s, envelope.i) if envelope.i else Message(envelope.s, payload)


def channel_of(subject: str) -> str:
    """
    The channel that carries ``subject`` (or everything a filter may match).

    Raises:
        UnknownSubject: not a subject, or of an unknown root.
    """
    return f"localai_{_words(subject)[0]}"


@dataclass(frozen=True, slots=True)
class Filter:
    """
    Which subjects a subscriber wants: exactly one, or some with ``*`` in the place of single words.

    The first word is never ``*``, because it names the channel.
    """

    words: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> Filter:
        """
        The filter in ``text``.

        Raises:
            UnknownSubject: malformed, with ``>``, or of an unknown root.
        """
        return cls(_words(text, wild=True))

    def matches(self, subject: str) -> bool:
        """Whether it lets ``subject`` through; a ``*`` stands for exactly one word."""
        words = subject.split(".")
        return len(words) == len(self.words) and all(
            wanted in (_ANY, word) for wanted, word in zip(self.words, words, strict=True)
        )

    def __str__(self) -> str:
        """As it was written."""
        return ".".join(self.words)


def _words(text: str, *, wild: bool = False) -> tuple[str, ...]:
    words = tuple(text.split("."))
    shown = repr(text[:80])
    if len(text) > SUBJECT_LIMIT or not all(words) or "\0" in text or ">" in text:
        raise UnknownSubject(f"{shown} is no subject: want words with dots between them, {SUBJECT_LIMIT} characters")
    if any(_ANY in word and not (wild and word == _ANY) for word in words):
        raise UnknownSubject(f"{shown}: '*' stands for one whole word, and only in a filter")
    if words[0] not in ROOTS:
        raise UnknownSubject(f"{shown}: {words[0][:40]!r} is not among the roots {', '.join(sorted(ROOTS))}")
    return words
