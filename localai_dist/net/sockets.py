"""Socket options autobahn and Twisted do not set."""

from __future__ import annotations

import socket
from typing import Any, Final

from localai_dist.units import KiB, MiB

TCP_NOTSENT_LOWAT: Final = 25
NOTSENT: Final = 128 * KiB
"""Unsent bytes the kernel holds before it says the socket is full; 16 KiB doubles the delay. Source: traffic-classes
rule 4."""

CHUNK: Final = 256 * KiB
"""What one read of a tunnel's socket takes and one write offers at most: all that a session hands over at once."""

HEAP_KEPT: Final = 4 * MiB
"""Freeing one block of this size tells glibc's allocator to keep freed memory of up to twice of it. Else each read and
each message of ``CHUNK`` is given back to the kernel, and its 64 pages are faulted in for the next one: measured, a
third of a sender's time. Never touched, so it costs no memory itself."""


def tune(transport: Any) -> None:
    """
    Send small frames at once, and keep the kernel's unsent queue short.

    With Nagle's algorithm a small frame waits for the acknowledgement of the one before, which the far kernel delays
    by 40 ms: measured, a short request through the tunnel took 57 ms instead of 20. autobahn's own option comes too
    late on the dialling side. Where there is no TCP socket (and for the queue: no Linux) nothing happens.
    """
    while hasattr(transport, "transport") and not isinstance(getattr(transport, "socket", None), socket.socket):
        transport = transport.transport
    handle = getattr(transport, "socket", None)
    if isinstance(handle, socket.socket):
        try:
            handle.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            handle.setsockopt(socket.IPPROTO_TCP, TCP_NOTSENT_LOWAT, NOTSENT)
        except OSError:
            pass


def widen(transport: Any) -> None:
    """Let a TCP transport read and write in pieces of ``CHUNK``: a quarter of the turns Twisted's own sizes take."""
    bytes(HEAP_KEPT)
    transport.bufferSize = transport.SEND_LIMIT = CHUNK
