"""A session's carrier that is plain TCP, as other people's yamux uses it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from twisted.internet.error import ConnectionDone
from twisted.internet.protocol import Protocol
from twisted.python.failure import Failure

from localai_dist.net.carrier import CarrierUser


class TcpCarrier(Protocol):
    """One TCP connection as a ``Carrier``."""

    pull = True
    transport: Any

    def __init__(self) -> None:
        self._user: CarrierUser | None = None

    def connectionMade(self) -> None:
        self.transport.setTcpNoDelay(True)
        self.transport.pauseProducing()

    def dataReceived(self, data: bytes) -> None:
        if self._user is not None:
            self._user.bytes_received(data)

    def connectionLost(self, reason: Failure = Failure(ConnectionDone())) -> None:
        user, self._user = self._user, None
        if user is not None:
            user.carrier_lost(reason)

    def start(self, user: CarrierUser) -> None:
        """Deliver from now on."""
        self._user = user
        self.transport.registerProducer(_Drained(user), False)
        self.transport.resumeProducing()

    def send(self, parts: Sequence[bytes | memoryview]) -> None:
        """Messages mean nothing here."""
        self.transport.write(b"".join(parts))

    def flush(self) -> bool:
        """Nothing is held back here."""
        return False

    def close(self, code: int, text: str) -> None:
        """There is nothing to tell a code with."""
        self._user = None
        self.transport.unregisterProducer()
        self.transport.loseConnection()

    def abort(self) -> None:
        """Drop it."""
        self._user = None
        self.transport.abortConnection()

    def peer_address(self) -> Any:
        """The far address."""
        return self.transport.getPeer()

    def host_address(self) -> Any:
        """Our address."""
        return self.transport.getHost()


class _Drained:
    """A pull producer that produces nothing itself: the transport's queue is empty."""

    def __init__(self, user: CarrierUser) -> None:
        self._user = user

    def resumeProducing(self) -> None:
        self._user.carrier_drained()

    def stopProducing(self) -> None:
        pass
