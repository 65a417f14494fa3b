"""Two mux sessions joined by memory: ``SessionPair``, over carriers whose bytes move when the test says so."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from twisted.internet.address import IPv4Address
from twisted.internet.error import ConnectionDone, ConnectionLost
from twisted.internet.task import Clock
from twisted.python.failure import Failure

from localai_dist.net.carrier import CarrierUser
from localai_dist.net.session import MuxSession, SessionConfig
from localai_dist.net.stream import MuxStream
from localai_dist.units import KiB

ADDRESS = IPv4Address("TCP", "127.0.0.1", 1)


class MemoryCarrier:
    """
    One end of a ``CarrierPair``: messages wait in ``outbox`` until the pair moves them.

    Attributes:
        outbox: messages sent and not moved.
        closed_with: the close code given, or None.
        lost: the session was told that the connection is gone, or this end closed it.
    """

    def __init__(self, *, pull: bool = True) -> None:
        self.pull = pull
        self.outbox: deque[bytes] = deque()
        self.largest = 0
        self.closed_with: int | None = None
        self.aborted = False
        self.lost = False
        self.paused = False
        self.user: CarrierUser | None = None

    def start(self, user: CarrierUser) -> None:
        """The session listens."""
        self.user = user
        user.carrier_drained()

    def send(self, parts: Sequence[bytes | memoryview]) -> None:
        """One message."""
        if self.closed_with is None and not self.lost:
            message = b"".join(parts)
            self.largest = max(self.largest, len(message))
            self.outbox.append(message)
            if not self.pull and not self.paused and sum(map(len, self.outbox)) > 64 * KiB and self.user:
                self.paused = True
                self.user.carrier_paused()

    def flush(self) -> bool:
        """Nothing is held back here."""
        return False

    def close(self, code: int, text: str) -> None:
        """Close after what was sent."""
        if self.closed_with is None:
            self.closed_with = code
        self.user = None

    def abort(self) -> None:
        """Drop the connection."""
        self.aborted = self.lost = True
        self.outbox.clear()
        self.user = None

    def lose(self, error: Exception) -> None:
        """The connection is gone."""
        self.lost = True
        user, self.user = self.user, None
        if user is not None:
            user.carrier_lost(Failure(error))

    def peer_address(self) -> IPv4Address:
        """A made-up address."""
        return ADDRESS

    def host_address(self) -> IPv4Address:
        """A made-up address."""
        return ADDRESS


class CarrierPair:
    """
    Two carriers joined; the test says when bytes move.

    Attributes:
        frozen: nothing moves while True, as with a stopped peer.
        chunk: bytes are handed over in pieces of at most this size.
    """

    def __init__(self, *, pull: bool = True) -> None:
        self.a, self.b = MemoryCarrier(pull=pull), MemoryCarrier(pull=pull)
        self.frozen = False
        self.chunk: int | None = None

    def move(self, source: MemoryCarrier, sink: MemoryCarrier, *, messages: int | None = None) -> bool:
        """Hand messages of ``source`` to ``sink``'s session; True if something moved."""
        if self.frozen or (not source.outbox and not source.lost and source.closed_with is None):
            return False
        moved = bool(source.outbox)
        count = len(source.outbox) if messages is None else messages
        while source.outbox and count:
            count -= 1
            self._hand_over(source.outbox.popleft(), sink)
        if not source.outbox:
            source.paused = False
            if source.user is not None and moved:
                source.user.carrier_drained()
            if (source.lost or source.closed_with is not None) and not sink.lost:
                sink.lose(ConnectionLost("gone") if source.closed_with is None else ConnectionDone("closed"))
                moved = True
        return moved

    def _hand_over(self, message: bytes, sink: MemoryCarrier) -> None:
        step = self.chunk or len(message) or 1
        for at in range(0, len(message), step):
            if sink.user is not None:
                sink.user.bytes_received(message[at : at + step])

    def pump(self) -> bool:
        """Move everything once, both ways."""
        moved = self.move(self.a, self.b)
        return self.move(self.b, self.a) or moved


class SessionPair:
    """
    Two sessions joined by memory, on one clock.

    Attributes:
        client, server: the sessions.
        arrived: streams the peer opened, by which session got them.
    """

    def __init__(
        self,
        *,
        config: SessionConfig | None = None,
        pull: bool = True,
        clock: Clock | None = None,
        carriers: CarrierPair | None = None,
    ) -> None:
        self.clock = clock or Clock()
        self.carriers = carriers or CarrierPair(pull=pull)
        config = config or SessionConfig()
        self.client = MuxSession(self.carriers.a, client=True, config=config, clock=self.clock)
        self.server = MuxSession(self.carriers.b, client=False, config=config, clock=self.clock)
        self.arrived: dict[MuxSession, list[MuxStream]] = {self.client: [], self.server: []}
        self.client.on_stream = self.arrived[self.client].append
        self.server.on_stream = self.arrived[self.server].append
        self.client.begin()
        self.server.begin()

    def settle(self, turns: int = 100_000) -> None:
        """Run reactor turns and move bytes until nothing happens any more; no time passes."""
        for _ in range(turns):
            self.clock.advance(0)
            if not self.carriers.pump() and not self._due():
                return
        raise AssertionError(f"still busy after {turns} turns")

    def _due(self) -> bool:
        now = self.clock.seconds()
        return any(call.getTime() <= now for call in self.clock.getDelayedCalls())

    def pass_time(self, seconds: float, step: float = 0.05) -> None:
        """Let time pass, moving bytes all along."""
        end = self.clock.seconds() + seconds
        while self.clock.seconds() < end - 1e-9:
            self.settle()
            self.clock.advance(min(step, end - self.clock.seconds()))
        self.settle()

    def open(self, **kwargs: Any) -> tuple[MuxStream, MuxStream]:
        """A stream opened by the client, and the server's end of it."""
        opened: list[MuxStream] = []
        before = len(self.arrived[self.server])
        self.client.open(**kwargs).addCallback(opened.append)
        self.settle()
        return opened[0], self.arrived[self.server][before]

    def close(self) -> None:
        """End both sessions; the clock holds nothing of them afterwards."""
        self.client.close()
        self.settle()
        self.server.close()
        self.settle()
