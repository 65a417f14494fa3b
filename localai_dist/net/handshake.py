"""
Opening frames written to a stream and read from it, never past their end.

Source: docs/wire/preamble.md (``wire.preamble`` has the bytes).
"""

from __future__ import annotations

from typing import Any

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.interfaces import IReactorTime

from localai_dist.net.errors import HandshakeLate, StreamEnded
from localai_dist.net.stream import MuxStream
from localai_dist.wire.preamble import LENGTH_BYTES, MalformedPreamble, encode_frame, frame_length


def write_frame(stream: MuxStream, payload: bytes) -> None:
    """
    Send one opening frame, in one write.

    Raises:
        MalformedPreamble: ``payload`` is too long for one.
    """
    stream.write(encode_frame(payload))


async def read_frame(stream: MuxStream, *, clock: IReactorTime, timeout: float) -> bytes:
    """
    The payload of the next opening frame; the byte after it stays on the stream.

    Cancelling aborts the stream.

    Args:
        timeout: the whole frame must be there after this long (s).

    Raises:
        HandshakeLate: it was not; the stream is aborted.
        StreamEnded: the stream ended, or the frame claims to be longer than one may be (the stream is aborted).
        ConnectionLost: the stream or its session was lost.
    """
    call = clock.callLater(timeout, lambda: waiting[0].cancel())
    waiting: list[Deferred[Any]] = []
    try:
        size = frame_length(await _next(stream, LENGTH_BYTES, waiting))
        return await _next(stream, size, waiting)
    except MalformedPreamble as error:
        stream.abortConnection()
        raise StreamEnded(str(error)) from error
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
