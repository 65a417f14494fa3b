"""
Join two transports: what arrives on one is written to the other, with backpressure both ways.

The first direction to finish ends both. After a clean ending what was read is flushed first; only a failure aborts.
The splice is over when both transports are.

Source: wire contract §4d, design §5.14.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.error import ConnectionAborted, ConnectionDone
from twisted.internet.interfaces import IPushProducer, IStreamClientEndpoint
from twisted.internet.protocol import Factory, Protocol
from twisted.python.failure import Failure
from zope.interface import implementer

from localai_dist.mux.errors import SessionDead, StreamReset
from localai_dist.net.errors import SessionClosedHere
from localai_dist.net.sockets import tune, widen
from localai_dist.net.stream import MuxStream


@dataclass(frozen=True, slots=True)
class SpliceEnd:
    """
    How a splice ended.

    Attributes:
        clean: the first ending was one, so that everything read before it was passed on.
        first: the reason of the first ending.
        a_to_b: bytes passed from the first transport to the second.
        b_to_a: bytes passed back.
    """

    clean: bool
    first: Failure
    a_to_b: int
    b_to_a: int


def is_clean(reason: Failure) -> bool:
    """
    Whether a transport that ended for ``reason`` ended cleanly.

    The mux's own endings come first: a dead session wraps whatever the connection below said, an end of data included.
    Only the plain shutdown of a session by this end is clean.
    """
    error = reason.value
    if isinstance(error, SessionDead):
        return type(error) is SessionClosedHere
    if isinstance(error, StreamReset):
        return not error.remote
    return isinstance(error, ConnectionDone | ConnectionAborted)


@implementer(IPushProducer)
class _Valve:
    """Pauses the reading side; a consumer that ends tells ``connectionLost``, so stopping is not its business."""

    def __init__(self, transport: Any) -> None:
        self._transport = transport

    def pauseProducing(self) -> None:
        self._transport.pauseProducing()

    def resumeProducing(self) -> None:
        self._transport.resumeProducing()

    def stopProducing(self) -> None:
        pass


class _Side(Protocol):
    """One end's protocol."""

    other: _Side

    def __init__(self, transport: Any, ended: Callable[[Failure], None]) -> None:
        self.end = transport
        self.passed = 0
        self.lost = False
        self._ended = ended

    def dataReceived(self, data: bytes) -> None:
        self.passed += len(data)
        self.other.end.write(data)

    def connectionLost(self, reason: Failure = Failure(ConnectionDone())) -> None:
        self.lost = True
        self._ended(reason)

    def attach(self) -> None:
        """Take the transport over from whatever protocol it had; bytes it holds come at once."""
        self.other.end.registerProducer(_Valve(self.end), True)
        if hasattr(self.end, "start"):
            self.end.start(self)
        else:
            self.end.protocol = self
            widen(self.end)
            self.makeConnection(self.end)
            self.end.resumeProducing()

    def finish(self, clean: bool) -> None:
        """The other end is over: end this one too."""
        if self.lost:
            return
        self.end.unregisterProducer()
        if clean:
            self.end.loseConnection()
        else:
            self.end.abortConnection()


def splice(a: Any, b: Any) -> Deferred[SpliceEnd]:
    """
    Join ``a`` and ``b``, each a ``MuxStream`` or a TCP-like transport; both are owned by the splice from now on.

    Fires, never errs, when both are over. Cancelling aborts both.
    """
    first: list[Failure] = []

    def cancelled(_: Deferred[SpliceEnd]) -> None:
        a.abortConnection()
        b.abortConnection()

    done: Deferred[SpliceEnd] = Deferred(cancelled)

    def ended(reason: Failure) -> None:
        if not first:
            first.append(reason)
            clean = is_clean(reason)
            left.finish(clean)
            right.finish(clean)
        if left.lost and right.lost and not done.called:
            done.callback(SpliceEnd(is_clean(first[0]), first[0], left.passed, right.passed))

    left, right = _Side(a, ended), _Side(b, ended)
    left.other, right.other = right, left
    left.attach()
    right.attach()
    return done


async def splice_stream_to_endpoint(
    stream: MuxStream, endpoint: IStreamClientEndpoint, *, connected: Callable[[], None] | None = None
) -> SpliceEnd:
    """
    Connect to ``endpoint``, then join it with ``stream``.

    A connect that fails raises its own error; no byte of the stream is taken by then and the stream still lives.
    Cancelling gives the connect up, or aborts both.

    Args:
        connected: called once connected and before any byte is passed, to write the reply of an opening frame.
    """
    transport = await connect_held(endpoint)
    if connected is not None:
        connected()
    return await splice(stream, transport)


async def connect_held(endpoint: IStreamClientEndpoint) -> Any:
    """A connected transport that is not read from until it is spliced; raises what the endpoint's connect raises."""
    holder: Any = await endpoint.connect(Factory.forProtocol(_Holder))
    return holder.transport


class _Holder(Protocol):
    """Keeps a fresh connection's bytes in the transport."""

    reason: Failure | None = None

    def connectionMade(self) -> None:
        tune(self.transport)
        self.transport.pauseProducing()  # type: ignore[union-attr]
