"""
What stands on a measured way: ``python -m bench.ends far|relay|forward [URL [PORT]]``.

A connection (a stream, or a plain TCP one) begins with one line that says what is wanted of it. ``far`` serves TCP
connections and the streams of tunnels; given a URL it also dials one as a worker does, and given a port it joins that
tunnel's streams to the port. ``relay`` joins each stream of a tunnel to one on the other tunnel; ``forward`` each plain
connection to a stream. All print their ports in one line of JSON and end with their standard input.
"""

from __future__ import annotations

import json
import resource
import sys
from typing import Any

from twisted.internet import reactor as untyped_reactor
from twisted.internet.defer import Deferred
from twisted.internet.endpoints import TCP4ClientEndpoint, TCP4ServerEndpoint
from twisted.internet.error import ConnectionDone
from twisted.internet.interfaces import IHalfCloseableProtocol, IPushProducer
from twisted.internet.protocol import Factory, Protocol
from twisted.internet.stdio import StandardIO
from twisted.python.failure import Failure
from twisted.web.resource import Resource
from zope.interface import implementer

from localai_dist.mux.classes import TrafficClass
from localai_dist.net.request import StreamingSite
from localai_dist.net.session import MuxSession, SessionConfig
from localai_dist.net.splice import splice, splice_stream_to_endpoint
from localai_dist.net.stream import MuxStream
from localai_dist.net.websocket import accept, dial
from localai_dist.units import KiB, MiB

reactor: Any = untyped_reactor
CONFIG = SessionConfig(max_streams=5000)
PIECE = bytes(64 * KiB)
REQUEST = 1 * KiB


@implementer(IPushProducer)
class Memory:
    """Writes ``total`` bytes of memory as fast as they are taken, and then closes if so told."""

    def __init__(self, transport: Any, total: int, *, closing: bool = False) -> None:
        self._transport = transport
        self._left = total
        self._paused = False
        self._closing = closing

    def begin(self) -> None:
        """Register and write."""
        self._transport.registerProducer(self, True)
        self.resumeProducing()

    def resumeProducing(self) -> None:
        """Write until told to stop."""
        self._paused = False
        while self._left and not self._paused:
            piece = PIECE if self._left >= len(PIECE) else PIECE[: self._left]
            self._left -= len(piece)
            self._transport.write(piece)
        if not self._left:
            self._transport.unregisterProducer()
            if self._closing:
                self._transport.loseConnection()

    def pauseProducing(self) -> None:
        """Stop for now."""
        self._paused = True

    def stopProducing(self) -> None:
        """The reader is gone."""
        self._left = 0
        self._paused = True


@implementer(IHalfCloseableProtocol)
class Served(Protocol):
    """Serves one connection by its first line: ``sink N``, ``source N``, ``answer``, ``hold`` or ``stall``."""

    def __init__(self) -> None:
        self._line = b""
        self._wanted = b""
        self._size = 0
        self._count = 0

    def dataReceived(self, data: bytes) -> None:
        """Bytes: the line, then what it was about."""
        if not self._wanted:
            self._line += data
            line, found, rest = self._line.partition(b"\n")
            if not found:
                return
            self._wanted = line.split()[0]
            self._begin(line)
            data = rest
        self._count += len(data)
        if self._wanted == b"answer" and self._count >= REQUEST:
            self.transport.write(PIECE[:REQUEST])
            self.transport.loseConnection()
        elif self._wanted == b"sink" and self._count >= self._size:
            self.transport.write(b"%d" % self._count)
            self.transport.loseConnection()

    def _begin(self, line: bytes) -> None:
        self._size = int(line.split()[1]) if b" " in line else 0
        if self._wanted == b"source":
            if isinstance(self.transport, MuxStream):
                self.transport.traffic = TrafficClass.BULK
            Memory(self.transport, self._size, closing=True).begin()
        elif self._wanted == b"stall":
            self.transport.pauseProducing()

    def readConnectionLost(self) -> None:
        """The near end is done."""
        self.transport.loseConnection()

    def writeConnectionLost(self) -> None:
        """Nothing to do."""


class Door(Resource):
    """Accepts tunnels."""

    isLeaf = True

    def __init__(self, serve: Any) -> None:
        super().__init__()
        self.sessions: list[MuxSession] = []
        self._serve = serve

    def render_GET(self, request: Any) -> Any:
        """The upgrade."""
        return accept(
            request, client=False, config=CONFIG, clock=reactor, on_session=self.sessions.append, on_stream=self._serve
        )


def serve_stream(stream: MuxStream) -> None:
    """Serve a stream of a tunnel."""
    stream.start(Served())


class _Relay:
    """Joins each stream of one tunnel to a new one of the other; the second tunnel is the worker's."""

    def __init__(self) -> None:
        self.door = Door(self.serve)

    def serve(self, stream: MuxStream) -> None:
        """Join ``stream`` as the relay of a frontend does: after its opening line, which names the class."""
        Deferred.fromCoroutine(self._join(stream)).addErrback(lambda _: stream.abortConnection())

    async def _join(self, stream: MuxStream) -> None:
        letter = (await stream.read_exactly(1)).decode()
        worker = next(session for session in self.door.sessions if session is not stream.session)
        stream.traffic = TrafficClass.from_letter(letter)
        await splice(stream, await worker.open(stream.traffic))


class _Forward:
    """Joins each plain connection to a stream of the first tunnel, whose other end joins it to a port."""

    def __init__(self) -> None:
        self.door = Door(None)

    def buildProtocol(self) -> Protocol:
        """One plain connection."""
        return _Taken(self.door)


class _Taken(Protocol):
    def __init__(self, door: Door) -> None:
        self._door = door

    def connectionMade(self) -> None:
        """Open the stream, then join."""
        self.transport.pauseProducing()
        Deferred.fromCoroutine(self._join()).addErrback(lambda _: self.transport.abortConnection())

    async def _join(self) -> None:
        await splice(self.transport, await self._door.sessions[0].open(TrafficClass.BULK))


def _to_port(port: int) -> Any:
    """Serves streams by joining them to ``port``."""

    def serve(stream: MuxStream) -> None:
        stream.traffic = TrafficClass.BULK
        endpoint = TCP4ClientEndpoint(reactor, "127.0.0.1", port)
        joined = Deferred.fromCoroutine(splice_stream_to_endpoint(stream, endpoint))
        joined.addErrback(lambda _: stream.abortConnection())

    return serve


class _UntilClosed(Protocol):
    def connectionLost(self, reason: Failure = Failure(ConnectionDone())) -> None:
        """Whoever started this process is gone."""
        reactor.stop()


async def _main(role: str, *arguments: str) -> None:
    forward = _Forward()
    door = {"far": Door(serve_stream), "relay": _Relay().door, "forward": forward.door}[role]
    site = StreamingSite(door, max_body=1 * MiB, reactor=reactor)
    tunnels = await TCP4ServerEndpoint(reactor, 0, interface="127.0.0.1", backlog=1500).listen(site)
    factory = Factory.forProtocol(lambda: forward.buildProtocol() if role == "forward" else Served())  # type: ignore[arg-type]
    plain = await TCP4ServerEndpoint(reactor, 0, interface="127.0.0.1").listen(factory)
    if arguments:
        serve = _to_port(int(arguments[1])) if len(arguments) > 1 else serve_stream
        await dial(reactor, arguments[0], headers={}, client=True, config=CONFIG, on_stream=serve)
    sys.stdout.write(json.dumps({"tunnels": tunnels.getHost().port, "plain": plain.getHost().port}) + "\n")
    sys.stdout.flush()
    StandardIO(_UntilClosed())


def _failed(failure: Failure) -> None:
    sys.stderr.write(failure.getTraceback())
    reactor.stop()


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
    reactor.callWhenRunning(lambda: Deferred.fromCoroutine(_main(*sys.argv[1:])).addErrback(_failed))
    reactor.run()
