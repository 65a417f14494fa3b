"""
The data path of an open WebSocket, below autobahn's messages.

Whole binary messages in one frame, the only ones our peers send, are parsed here and delivered piece by piece as they
arrive; ours are sent as one sequence of byte strings. Everything else is autobahn's: the handshake, control frames,
text, fragments, frames above the limit and whatever breaks the rules. It gets those frames' bytes, and is left out
again as soon as it stands between two messages.

Private names of autobahn this leans on, pinned by a test: ``state``, ``data``, ``current_frame``,
``current_frame_masker``, ``inside_message`` and ``_dataReceived``.

Source: stack.md §C and D (autobahn's own path costs 0.5 to 0.8 CPU-s/GiB more).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from localai_dist.mux.frame import HEADER_SIZE
from localai_dist.net.websocket_mask import NO_KEY, masked, unmasked
from localai_dist.units import KiB, MiB

MESSAGE_MAX: Final = 1 * MiB + 4 * KiB

ALONE: Final = 4 * KiB
"""Of a longer piece the session's header is passed on alone."""

_BINARY: Final = 0x82  # FIN, opcode 2
_MASKED: Final = 0x80
_CONTROL: Final = 0x08
_CONTROL_PAYLOAD_MAX: Final = 125
_LENGTH_16: Final = 126
_LENGTH_64: Final = 127
_HEADER_MOST: Final = 14


class FramedWire:
    """
    Mixed in before autobahn's protocol, on both ends.

    Attributes:
        masks: this end masks what it sends, and the other one does not.
    """

    masks: bool
    transport: Any
    STATE_OPEN: int
    state: int
    data: bytes
    current_frame: Any
    current_frame_masker: Any
    inside_message: bool
    _dataReceived: Callable[[bytes], None]

    _left = 0
    _offset = 0
    _key = NO_KEY

    def payload_received(self, payload: bytes | memoryview) -> None:
        """A piece of a binary message, valid during the call only; autobahn's ``onMessage`` has the other messages."""
        raise NotImplementedError

    def read_began(self) -> None:
        """What one read of the transport brought follows."""
        raise NotImplementedError

    def read_ended(self) -> None:
        """That was all of it."""
        raise NotImplementedError

    def binary_frame(self, parts: Sequence[bytes | memoryview]) -> bytes:
        """``parts`` as one binary message."""
        size = sum(map(len, parts))
        if self.masks:
            return masked(_header(size, _MASKED), parts, size)
        return b"".join((_header(size, 0), *parts))

    def dataReceived(self, data: bytes) -> None:
        """Bytes of the transport; autobahn's method of this name formats a debug line for each read."""
        self.read_began()
        try:
            self._read(memoryview(data))
        finally:
            self.read_ended()

    def _read(self, rest: memoryview) -> None:
        while rest:
            if self._left:
                rest = self._deliver(rest)
            elif self.state != self.STATE_OPEN:
                rest = self._to_autobahn(rest, len(rest))
            elif self.current_frame is not None:
                rest = self._to_autobahn(rest, self.current_frame.length - self.current_frame_masker.pointer())
            elif self.inside_message:
                rest = self._to_autobahn(rest, len(rest))
            else:
                if self.data:  # the beginning of a header, kept here or by autobahn
                    rest, self.data = memoryview(self.data + rest), b""
                rest = self._begin_frame(rest)

    def _deliver(self, rest: memoryview) -> memoryview:
        """Pass on what is there of the frame under way; what follows it."""
        count = min(self._left, len(rest))
        if self._key == NO_KEY:
            piece: bytes | memoryview = rest[:count]
        else:
            if not self._offset and count > ALONE:
                count = HEADER_SIZE  # what is behind it becomes a string of its own, which nobody copies again
            piece = unmasked(self._key, self._offset, rest[:count])
        self._left -= count
        self._offset += count
        self.payload_received(piece)
        return rest[count:]

    def _begin_frame(self, rest: memoryview) -> memoryview:
        """Read a header and leave its payload to ``_deliver``; or let autobahn have the frame. What follows."""
        head = bytes(rest[:_HEADER_MOST])
        if len(head) < 2:
            return self._keep(rest)
        first, size = head[0], head[1] & ~_MASKED
        at = 2 if size < _LENGTH_16 else 4 if size == _LENGTH_16 else 10
        end = at if self.masks else at + 4
        if first != _BINARY or (head[1] >= _MASKED) is self.masks:
            alone = first & _CONTROL and size <= _CONTROL_PAYLOAD_MAX
            return self._to_autobahn(rest, end + size if alone else len(rest))
        if len(head) < end:
            return self._keep(rest)
        if at > 2:
            size = int.from_bytes(head[2:at], "big")
            if size > MESSAGE_MAX or size < (_LENGTH_16 if at == 4 else 64 * KiB):
                return self._to_autobahn(rest, len(rest))  # which refuses it
        self._left, self._offset = size, 0
        self._key = NO_KEY if self.masks else head[at:end]
        return rest[end:]

    def _keep(self, rest: memoryview) -> memoryview:
        self.data = bytes(rest)
        return rest[:0]

    def _to_autobahn(self, rest: memoryview, count: int) -> memoryview:
        self._dataReceived(bytes(rest[:count]))
        return rest[count:]


def _header(size: int, mask: int) -> bytes:
    if size < _LENGTH_16:
        return bytes((_BINARY, mask | size))
    if size < 64 * KiB:
        return bytes((_BINARY, mask | _LENGTH_16)) + size.to_bytes(2, "big")
    return bytes((_BINARY, mask | _LENGTH_64)) + size.to_bytes(8, "big")
