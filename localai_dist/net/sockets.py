"""Socket options autobahn and Twisted do not set."""

from __future__ import annotations

import socket
from typing import Any, Final

from localai_dist.units import KiB

TCP_NOTSENT_LOWAT: Final = 25
NOTSENT: Final = 128 * KiB
"""Unsent bytes the kernel holds before it says the socket is full; 16 KiB doubles the delay. Source: traffic-classes
rule 4."""


def hold_little_unsent(transport: Any) -> None:
    """Keep the kernel's unsent queue short (Linux; elsewhere, and for what is no TCP socket, nothing happens)."""
    while hasattr(transport, "transport") and not isinstance(getattr(transport, "socket", None), socket.socket):
        transport = transport.transport
    handle = getattr(transport, "socket", None)
    if isinstance(handle, socket.socket):
        try:
            handle.setsockopt(socket.IPPROTO_TCP, TCP_NOTSENT_LOWAT, NOTSENT)
        except OSError:
            pass
