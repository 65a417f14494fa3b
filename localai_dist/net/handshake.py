"""
Opening frames: a 2-byte big-endian length and at most 1024 bytes of payload, never read past.

Source: wire contract §4 (docs/wire/preamble.md has the payloads).
"""

from __future__ import annotations

from typing import Any, Final

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.interfaces import IReactorTime

from localai_dist.net.errors import HandshakeLate, StreamEnded
from localai_dist.net.stream import MuxStream

MAX_PAYLOAD: Final = 1024


def write_frame(stream: MuxStream, payload: bytes) -> None:
    """
    Send one opening frame, in one write.

    Raises:
        ValueError: ``payload`` is longer than 1024 bytes.
    """
    if len(payload) > MAX_PAYLOAD:
        raise ValueError(f"an opening frame holds {MAX_PAYLOAD} bytes, not {len(payload)}")
    stream.write(len(payload).to_bytes(2, "big") + payload)


async def read_frame(stream: MuxStream, *, clock: IReactorTime, timeout: float) -> bytes:
    """
    The payload of the next opening frame; the byte after it stays on the stream.

    Cancelling aborts the stream.

    Args:
        timeout: the whole frame must be there after this long (s).

    Raises:
        HandshakeLate: it was not; the stream is aborted.
        StreamEnded: the stream ended, or the frame claims more than 1024 bytes (the stream is aborted).
        ConnectionLost: the stream or its session was lost.
    """
    call = clock.callLater(timeout, lambda: waiting[0].cancel())
    waiting: list[Deferred[Any]] = []
    try:
        size = int.from_bytes(await _next(stream, 2, waiting), "big")
        if size > MAX_PAYLOAD:
            stream.abortConnection()
            raise StreamEnded(f"an opening frame of {size} bytes, at most {MAX_PAYLOAD} are allowed")
        return await _next(stream, size, waiting)
    except CancelledError:
        stream.abortConnection()
        if not call.active():
            raise HandshakeLate(f"no opening frame within {timeout:.1f} s") from None
        raise
    finally:
        if call.active():
            call.cancel()


async def send_frame_and_read_reply(stream: MuxStream, payload: bytes, *, clock: IReactorTime, timeout: float) -> bytes:
    """Send one opening frame and return the payload of the far side's; else as ``read_frame``."""
    write_frame(stream, payload)
    return await read_frame(stream, clock=clock, timeout=timeout)


async def _next(stream: MuxStream, count: int, waiting: list[Deferred[Any]]) -> bytes:
    if not count:
        return b""
    reading = stream.read_exactly(count)
    waiting[:] = [reading]
    return await reading
