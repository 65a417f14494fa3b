"""What ``ITCPTransport`` asks for besides the bytes, answered for a stream, which has no socket of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from localai_dist.net.session import MuxSession


class Socketless:
    """Addresses are the connection's; socket options do nothing, because the session has what they are for."""

    session: MuxSession

    def getPeer(self) -> Any:
        """The far address of the session's connection."""
        return self.session.peer

    def getHost(self) -> Any:
        """Our address of the session's connection."""
        return self.session.host

    def setTcpNoDelay(self, enabled: bool) -> None:
        """Nothing to do: a stream never waits to fill a frame."""

    def getTcpNoDelay(self) -> bool:
        """Always true."""
        return True

    def setTcpKeepAlive(self, enabled: bool) -> None:
        """Nothing to do: the session has a keepalive."""

    def getTcpKeepAlive(self) -> bool:
        """Always true."""
        return True
