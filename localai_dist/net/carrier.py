"""What a session needs of the connection that carries it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from twisted.internet.interfaces import IAddress
from twisted.python.failure import Failure


class CarrierUser(Protocol):
    """What a carrier calls: the session."""

    def bytes_received(self, data: bytes | memoryview) -> None:
        """Bytes of the peer arrived, valid during the call only; how they were cut into messages is invisible."""

    def read_began(self) -> None:
        """``bytes_received`` will be called for what one read brought; a carrier need not tell."""

    def read_ended(self) -> None:
        """That was all of it."""

    def carrier_drained(self) -> None:
        """Everything given to ``send`` has left for the kernel."""

    def carrier_paused(self) -> None:
        """The transport's buffer is full (push carriers only); ``carrier_drained`` follows."""

    def carrier_lost(self, reason: Failure) -> None:
        """The connection is gone; nothing is called after this."""


class Carrier(Protocol):
    """
    A connection that carries one session; it is open when the session gets it.

    Attributes:
        pull: True when ``carrier_drained`` comes each time the transport's queue runs empty; False when it only
            follows ``carrier_paused`` (a TLS transport polls a pull producer without end, so it is pushed).
    """

    pull: bool

    def start(self, user: CarrierUser) -> None:
        """Deliver to ``user`` from now on; what came before is delivered first."""

    def send(self, parts: Sequence[bytes | memoryview]) -> None:
        """Send ``parts`` as one message, with the next ``flush`` at the latest; ignored once closed."""

    def flush(self) -> bool:
        """Give the transport what was sent; True when all of it left for the kernel: no ``carrier_drained`` follows."""

    def close(self, code: int, text: str) -> None:
        """Send what was given, then close cleanly; abort when the peer does not follow in time."""

    def abort(self) -> None:
        """Drop the connection now."""

    def peer_address(self) -> IAddress:
        """The far address."""

    def host_address(self) -> IAddress:
        """Our address."""
