"""Bytes of gRPC inside HTTP/2: message prefixes, timeouts, and the one HTTP/2 frame kept from h2 (pure)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from localai_dist.errors import LocalAIDistError
from localai_dist.grpcclient.status import Origin, RpcError, StatusCode
from localai_dist.units import KiB, MiB

MESSAGE_LIMIT: Final = 50 * MiB
"""No message is larger, either way. Source: surface §4.4."""

FRAME_LIMIT: Final = 64 * KiB
"""The longest HTTP/2 frame we announce to take (SETTINGS_MAX_FRAME_SIZE), and the longest we send."""

_PREFIX: Final = 5
_LONGEST_TIMEOUT: Final = 99_999_999


def encode_message(payload: bytes) -> bytes:
    """
    ``payload`` with its prefix (uncompressed).

    Raises:
        RpcError: RESOURCE_EXHAUSTED, over ``MESSAGE_LIMIT``.
    """
    if len(payload) > MESSAGE_LIMIT:
        raise RpcError(
            StatusCode.RESOURCE_EXHAUSTED,
            f"the request is {len(payload)} bytes long, more than the {MESSAGE_LIMIT} allowed",
            Origin.CALLER,
        )
    return b"\0" + len(payload).to_bytes(4, "big") + payload


def encode_timeout(seconds: float) -> str:
    """``seconds`` as ``grpc-timeout`` wants it: at most eight digits and a unit, never less than a microsecond."""
    micros = max(1, int(seconds * 1e6))
    for unit, size in (("u", 1), ("m", 1000), ("S", 1_000_000)):
        if micros // size <= _LONGEST_TIMEOUT:
            return f"{micros // size}{unit}"
    return f"{_LONGEST_TIMEOUT}S"


class MessageBuffer:
    """Cuts the bytes of one call back into messages; holds at most one unfinished message besides what was fed last."""

    def __init__(self, limit: int = MESSAGE_LIMIT) -> None:
        self._limit = limit
        self._held = bytearray()

    def __len__(self) -> int:
        """Bytes of the unfinished message held."""
        return len(self._held)

    def feed(self, data: bytes) -> list[bytes]:
        """
        The messages that ``data`` completes.

        Raises:
            RpcError: INTERNAL for a compressed message (none was offered), RESOURCE_EXHAUSTED for one over the limit;
                raised as soon as the prefix is read.
        """
        held = self._held
        if not held:
            whole = self._whole(data)
            if whole is not None:
                return [whole]
        held += data
        found: list[bytes] = []
        start = 0
        while len(held) - start >= _PREFIX:
            end = start + _PREFIX + self._length(held[start : start + _PREFIX])
            if end > len(held):
                break
            found.append(bytes(held[start + _PREFIX : end]))
            start = end
        del held[:start]
        return found

    def _whole(self, data: bytes) -> bytes | None:
        """The common case, one frame that is one message, without a copy into the buffer."""
        if len(data) >= _PREFIX and _PREFIX + self._length(data[:_PREFIX]) == len(data):
            return data[_PREFIX:]
        return None

    def _length(self, prefix: bytes | bytearray) -> int:
        if prefix[0]:
            raise RpcError(StatusCode.INTERNAL, "the reply is compressed, which was not offered", Origin.CALLER)
        length = int.from_bytes(prefix[1:], "big")
        if length > self._limit:
            text = f"the reply is {length} bytes long, more than the {self._limit} allowed"
            raise RpcError(StatusCode.RESOURCE_EXHAUSTED, text, Origin.CALLER)
        return length


class FrameTooLong(LocalAIDistError):
    """A frame longer than we announced to take."""


@dataclass(frozen=True, slots=True)
class GoAway:
    """
    The peer takes no new calls.

    Attributes:
        last_stream: calls with a higher id were not processed.
        code: its HTTP/2 error code, 0 for a graceful ending.
    """

    last_stream: int
    code: int


class GoAwayFilter:
    """
    Takes GOAWAY frames out of a byte stream of HTTP/2 frames.

    h2 closes the whole connection for sending *and receiving* on GOAWAY, so calls that the peer promised to finish
    would be lost; RFC 9113 §6.8 says they go on. Everything else passes through in order and unbuffered, except an
    unfinished frame header. Frames longer than announced are refused by their header, which h2 checks only once it
    holds the whole frame.
    """

    _HEADER: Final = 9
    _GOAWAY: Final = 7

    def __init__(self) -> None:
        self._partial = b""
        self._body = 0
        self._going = bytearray()
        self._missing = 0

    def feed(self, data: bytes) -> tuple[bytes, list[GoAway]]:
        """
        The bytes h2 shall see, and the go-aways found among them.

        Raises:
            FrameTooLong: this is no HTTP/2, or none we announced.
        """
        if len(data) <= self._body:
            self._body -= len(data)
            return data, []
        return self._scan(data)

    def _scan(self, data: bytes) -> tuple[bytes, list[GoAway]]:
        passed: list[bytes] = []
        found: list[GoAway] = []
        start = 0  # of what was not passed on yet
        at = self._body
        self._body = 0
        if self._partial:
            data, self._partial, at = self._partial + data, b"", 0
        if self._missing:
            at = start = self._collect(data, 0, found)
        while len(data) - at >= self._HEADER:
            length = int.from_bytes(data[at : at + 3], "big")
            if length > FRAME_LIMIT:
                raise FrameTooLong(f"a frame of {length} bytes, more than the {FRAME_LIMIT} announced")
            if data[at + 3] == self._GOAWAY:
                passed.append(data[start:at])
                self._missing = length
                at = start = self._collect(data, at + self._HEADER, found)
            else:
                at += self._HEADER + length
        if at > len(data):
            self._body = at - len(data)
            passed.append(data[start:])
        else:
            passed.append(data[start:at])
            self._partial = data[at:]
        return b"".join(passed), found

    def _collect(self, data: bytes, at: int, found: list[GoAway]) -> int:
        taken = data[at : at + self._missing]
        self._going += taken
        self._missing -= len(taken)
        if not self._missing:
            body = bytes(self._going)
            self._going.clear()
            found.append(GoAway(int.from_bytes(body[:4], "big") & 0x7FFFFFFF, int.from_bytes(body[4:8], "big")))
        return at + len(taken)
