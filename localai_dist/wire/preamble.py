"""
The first bytes of a stream: two bytes of length (big endian), then at most 1024 bytes of UTF-8.

Two vocabularies that share no word. The tunnel request is asked of a worker (``grpc 127.0.0.1:20001``, ``http b``) and
answered ``ok`` or ``err <code> <text>``. The relay request is asked of the frontend that owns a tunnel
(``<node id> <ms|-> [c|i|b]``) and answered ``relay-ok`` or ``err relay-<code> <text>``.

Source: docs/wire/preamble.md.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from typing import Final, TypeAlias

from localai_dist.errors import LocalAIDistError
from localai_dist.ids import NodeId
from localai_dist.reach import Answer, Answered, NotServed, Outcome, Refused

LENGTH_BYTES: Final = 2
MAX_PAYLOAD: Final = 1024
HANDSHAKE_TIMEOUT: Final = 15.0
"""Seconds a frame or its reply may take, unless the caller's own deadline is sooner. Source: design §7."""
MAX_BUDGET_MS: Final = 86_400_000
"""A relayed budget is never taken for longer than a day (ms)."""

GRPC: Final = "grpc"
HTTP: Final = "http"
TRAFFIC_LETTERS: Final = frozenset("cib")
"""control, inference, bulk: the letters of ``mux.classes.TrafficClass``."""

_LINE_BREAKS = re.compile(r"[\r\n]")


class MalformedPreamble(LocalAIDistError):
    """A frame that can't be sent, or that the far side should not have sent; the text says what is wrong."""


class TunnelCode(Enum):
    """Why a worker does not serve a stream."""

    UNKNOWN_TAG = "unknown-tag"
    UNAVAILABLE = "unavailable"
    BAD_REQUEST = "bad-request"
    NOT_SERVED = "not-served"


class RelayCode(Enum):
    """Why a frontend does not relay a stream; each word is foreign to ``TunnelCode``."""

    NOT_OWNER = "relay-not-owner"
    UNAVAILABLE = "relay-unavailable"
    BAD_REQUEST = "relay-bad-request"


@dataclass(frozen=True, slots=True)
class TunnelRequest:
    """
    What a frontend asks a worker to join a stream to.

    Attributes:
        tag: the inner protocol, ``grpc`` or ``http``; not empty, without spaces.
        target: ``host:port`` for ``grpc`` (a worker uses only the port); a traffic letter or nothing for ``http``.
    """

    tag: str
    target: str = ""

    @property
    def traffic(self) -> str | None:
        """The traffic letter an ``http`` request names, else None."""
        return self.target if self.tag == HTTP and self.target in TRAFFIC_LETTERS else None


@dataclass(frozen=True, slots=True)
class RelayRequest:
    """
    What a frontend asks the owner of a tunnel.

    Attributes:
        node: whose tunnel.
        budget_ms: what is left of the original caller's deadline (ms, at least 1), or None if there is none.
        traffic: the class letter the owner's leg is to have, or None.
    """

    node: NodeId
    budget_ms: int | None = None
    traffic: str | None = None


@dataclass(frozen=True, slots=True)
class TunnelOk:
    """The worker joined the stream: the next byte belongs to the inner protocol."""


@dataclass(frozen=True, slots=True)
class TunnelErr:
    """The worker's refusal; ``code`` as sent, which may be one this build does not know."""

    code: str
    text: str


@dataclass(frozen=True, slots=True)
class RelayOk:
    """The owner opened a stream to the worker: the next bytes are the tunnel request."""


@dataclass(frozen=True, slots=True)
class RelayErr:
    """The owner's refusal."""

    code: RelayCode
    text: str


@dataclass(frozen=True, slots=True)
class Unknown:
    """A reply outside the vocabulary: a fact about nothing."""

    text: str


TunnelReply: TypeAlias = TunnelOk | TunnelErr | Unknown
RelayReply: TypeAlias = RelayOk | RelayErr | Unknown


def encode_frame(payload: bytes) -> bytes:
    """
    The whole frame, to be written in one piece.

    Raises:
        MalformedPreamble: more than 1024 bytes.
    """
    return len(payload).to_bytes(LENGTH_BYTES, "big") + _fitting(payload)


def frame_length(head: bytes) -> int:
    """
    How many payload bytes follow the two length bytes ``head``.

    Raises:
        MalformedPreamble: more than 1024 announced, or ``head`` is not two bytes.
    """
    if len(head) != LENGTH_BYTES:
        raise MalformedPreamble(f"a frame starts with {LENGTH_BYTES} length bytes, got {len(head)}")
    length = int.from_bytes(head, "big")
    if length > MAX_PAYLOAD:
        raise MalformedPreamble(f"the far side announced a frame of {length} bytes, the limit is {MAX_PAYLOAD}")
    return length


def encode_tunnel_request(request: TunnelRequest) -> bytes:
    """
    The payload ``<tag> <target>``.

    Raises:
        MalformedPreamble: the tag is empty or has a space in it, or the whole is too long.
    """
    if not request.tag or " " in request.tag:
        raise MalformedPreamble(f"a tag is one word, got {request.tag[:48]!r}")
    return _fitting(f"{request.tag} {request.target}".encode())


def parse_tunnel_request(payload: bytes) -> TunnelRequest:
    """
    The tunnel request in ``payload``, split at the first space; the target may be empty.

    Raises:
        MalformedPreamble: not UTF-8, no space in it, or an empty tag.
    """
    tag, space, target = _text(payload).partition(" ")
    if not tag or not space:
        raise MalformedPreamble("want '<tag> <target>'")
    return TunnelRequest(tag, target)


def encode_relay_request(request: RelayRequest) -> bytes:
    """
    The payload ``<node id> [<ms|-> [c|i|b]]``.

    Raises:
        MalformedPreamble: an empty or spaced node id, a budget below 1 ms, a letter that is no traffic class.
    """
    if not request.node or " " in request.node:
        raise MalformedPreamble(f"a node id is one word, got {request.node[:48]!r}")
    if request.budget_ms is not None and request.budget_ms < 1:
        raise MalformedPreamble(f"a relayed budget is at least 1 ms, got {request.budget_ms}")
    if request.traffic is not None and request.traffic not in TRAFFIC_LETTERS:
        raise MalformedPreamble(f"{request.traffic[:8]!r} is no traffic class")
    words: list[str] = [request.node]
    if request.budget_ms is not None or request.traffic is not None:
        words.append("-" if request.budget_ms is None else str(request.budget_ms))
    if request.traffic is not None:
        words.append(request.traffic)
    return _fitting(" ".join(words).encode("utf-8"))


def parse_relay_request(payload: bytes) -> RelayRequest:
    """
    The relay request in ``payload``.

    A class letter that is not known, and words after it, are a newer frontend's and are ignored: the class is a hint.
    A budget is not: it has to be a positive number of ms (longer than a day counts as a day) or ``-``.

    Raises:
        MalformedPreamble: not UTF-8, no node id, a budget that is none.
    """
    words = _text(payload).split(" ")
    if not words[0]:
        raise MalformedPreamble("want '<node id> [<ms|-> [c|i|b]]'")
    budget = _budget(words[1]) if len(words) > 1 else None
    traffic = words[2] if len(words) > 2 and words[2] in TRAFFIC_LETTERS else None
    return RelayRequest(NodeId(words[0]), budget, traffic)


def tunnel_ok() -> bytes:
    """The payload that says the worker joined the stream."""
    return b"ok"


def tunnel_err(code: TunnelCode, text: str) -> bytes:
    """The payload of a worker's refusal: one line, cut to the limit between characters."""
    return _cut(f"err {code.value} {_one_line(text)}")


def relay_ok() -> bytes:
    """The payload that says the owner opened a stream to the worker."""
    return b"relay-ok"


def relay_err(code: RelayCode, text: str) -> bytes:
    """The payload of an owner's refusal: one line, cut to the limit between characters."""
    return _cut(f"err {code.value} {_one_line(text)}")


def parse_tunnel_reply(payload: bytes) -> TunnelReply:
    """What a worker answered; anything outside the form is ``Unknown``, never an exception."""
    text = payload.decode("utf-8", "replace")
    if text == "ok":
        return TunnelOk()
    word, _, rest = text.partition(" ")
    code, _, reason = rest.partition(" ")
    if word != "err" or not code or code.startswith("relay-"):
        return Unknown(text)
    return TunnelErr(code, reason)


def parse_relay_reply(payload: bytes) -> RelayReply:
    """What an owner answered; anything outside its vocabulary is ``Unknown``, never an exception."""
    text = payload.decode("utf-8", "replace")
    if text == "relay-ok":
        return RelayOk()
    word, _, rest = text.partition(" ")
    code, _, reason = rest.partition(" ")
    if word != "err" or code not in {known.value for known in RelayCode}:
        return Unknown(text)
    return RelayErr(RelayCode(code), reason)


def outcome_of_tunnel_reply(payload: bytes, tag: str = GRPC) -> Outcome | None:
    """
    What a worker's reply means for the caller; None for ``ok``.

    Only ``unavailable`` is a word about the backend, and only where one was asked for: on an ``http`` stream it is
    about the worker's own server. ``not-served``, codes of a newer worker and garbage say nothing about it, so that
    nothing may be deleted on their account.

    Args:
        tag: what the stream was asked to be.

    Source: design §2, wire contract §4a.
    """
    match parse_tunnel_reply(payload):
        case TunnelOk():
            return None
        case TunnelErr(TunnelCode.UNAVAILABLE.value, text) if tag == GRPC:
            return Answered(Answer.BACKEND_UNAVAILABLE, text)
        case TunnelErr((TunnelCode.UNKNOWN_TAG.value | TunnelCode.BAD_REQUEST.value) as code, text):
            return Refused(code, text)
        case TunnelErr(code, text):
            return NotServed(f"{code}: {text}")
        case unknown:
            return NotServed(f"a reply this build does not know: {unknown.text[:120]!r}")


def _budget(word: str) -> int | None:
    if word == "-":
        return None
    if not (word.isascii() and word.isdigit()) or int(word) < 1:
        raise MalformedPreamble(f"{word[:24]!r} is no budget: want a positive number of milliseconds, or -")
    return min(int(word), MAX_BUDGET_MS)


def _text(payload: bytes) -> str:
    try:
        return payload.decode("utf-8")
    except UnicodeDecodeError as error:
        raise MalformedPreamble("an opening frame is UTF-8 text") from error


def _fitting(payload: bytes) -> bytes:
    if len(payload) > MAX_PAYLOAD:
        raise MalformedPreamble(f"an opening frame holds at most {MAX_PAYLOAD} bytes, this one has {len(payload)}")
    return payload


def _one_line(text: str) -> str:
    return _LINE_BREAKS.sub(" ", text)


def _cut(text: str) -> bytes:
    return text.encode("utf-8")[:MAX_PAYLOAD].decode("utf-8", "ignore").encode("utf-8")
