"""
The near end: starts the far ones, opens connections to them, and takes time and processor time of both ends.

The processor time of another process is read from its clock, so a peer of any kind is measured the same way.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from twisted.internet.defer import Deferred
from twisted.internet.endpoints import TCP4ClientEndpoint, connectProtocol
from twisted.internet.error import ConnectionDone
from twisted.internet.interfaces import IHalfCloseableProtocol
from twisted.internet.protocol import Protocol
from twisted.python.failure import Failure
from zope.interface import implementer

from bench.ends import CONFIG, PIECE, REQUEST, Memory, reactor
from localai_dist.mux.classes import TrafficClass
from localai_dist.net.session import MuxSession
from localai_dist.net.websocket import dial
from localai_dist.units import GiB

Opener = Callable[[TrafficClass], Awaitable[Any]]
"""Opens a connection: gives a transport whose protocol is to be set with ``attach``."""


def cpu_time(pid: int) -> float:
    """Processor time ``pid`` has used (s); Linux gives every process a clock."""
    return time.clock_gettime((~pid << 3) | 2)


class Child:
    """One ``bench.ends`` process, until the block ends."""

    def __init__(self, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.ends", *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self.pid = self._process.pid
        assert self._process.stdout is not None
        ports = json.loads(self._process.stdout.readline())
        self.tunnel_url = f"ws://127.0.0.1:{ports['tunnels']}/"
        self.plain_port: int = ports["plain"]

    def __enter__(self) -> Self:
        """The process runs."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()

    def resident(self) -> int:
        """Its resident memory (bytes)."""
        with open(f"/proc/{self.pid}/statm") as file:
            return int(file.read().split()[1]) * 4096


@implementer(IHalfCloseableProtocol)
class Asking(Protocol):
    """Counts what comes; fires ``done`` with the count (or the kept bytes) at the end."""

    def __init__(self, keep: bool = False) -> None:
        self.count = 0
        self.kept = b""
        self.done: Deferred[None] = Deferred()
        self._keep = keep

    def dataReceived(self, data: bytes) -> None:
        """Count."""
        self.count += len(data)
        if self._keep:
            self.kept += data

    def readConnectionLost(self) -> None:
        """The far side said everything."""
        self.transport.loseConnection()

    def writeConnectionLost(self) -> None:
        """Nothing to do."""

    def connectionLost(self, reason: Failure = Failure(ConnectionDone())) -> None:
        """Over."""
        if not self.done.called:
            self.done.callback(None)


@dataclass(slots=True)
class Transfer:
    """
    One transfer.

    Attributes:
        size: bytes.
        seconds: how long it took.
        cpu: processor time of the near end, and of each far process (s).
    """

    size: int
    seconds: float
    cpu: list[float] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Million bytes a second."""
        return self.size / self.seconds / 1e6

    @property
    def cpu_per_gib(self) -> float:
        """Processor seconds for a GiB, of all processes."""
        return sum(self.cpu) / self.size * GiB


class Way:
    """
    A way to a far end.

    Attributes:
        name: in words.
        pids: the far processes on it.
    """

    def __init__(self, name: str, pids: list[int], open_: Callable[[TrafficClass, Asking], Awaitable[Any]]) -> None:
        self.name = name
        self.pids = pids
        self.open = open_

    async def up(self, size: int) -> Transfer:
        """From memory here to a counter there."""

        async def moved() -> None:
            asking = Asking(keep=True)
            transport = await self.open(TrafficClass.BULK, asking)
            transport.write(b"sink %d\n" % size)
            Memory(transport, size).begin()
            await asking.done
            if int(asking.kept or b"0") != size:
                raise RuntimeError(f"{self.name}: {asking.kept!r} bytes arrived of {size}")

        return await self._timed(size, moved)

    async def down(self, size: int) -> Transfer:
        """From memory there to a counter here."""

        async def moved() -> None:
            asking = Asking()
            transport = await self.open(TrafficClass.BULK, asking)
            transport.write(b"source %d\n" % size)
            await asking.done
            if asking.count != size:
                raise RuntimeError(f"{self.name}: {asking.count} bytes arrived of {size}")

        return await self._timed(size, moved)

    async def _timed(self, size: int, moved: Callable[[], Awaitable[None]]) -> Transfer:
        pids = self.pids
        before = [time.process_time(), *map(cpu_time, pids)]
        began = time.perf_counter()
        await moved()
        seconds = time.perf_counter() - began
        after = [time.process_time(), *map(cpu_time, pids)]
        return Transfer(size, seconds, [late - early for early, late in zip(before, after, strict=True)])

    async def request(self) -> float:
        """One request of 1 KiB answered with 1 KiB, on a connection of its own: the time it took (s)."""
        began = time.perf_counter()
        asking = Asking()
        transport = await self.open(TrafficClass.INFERENCE, asking)
        transport.write(b"answer\n" + PIECE[:REQUEST])
        await asking.done
        if asking.count != REQUEST:
            raise RuntimeError(f"{self.name}: answered with {asking.count} bytes")
        return time.perf_counter() - began


def tunnel_way(name: str, session: MuxSession, pids: list[int], *, relayed: bool = False) -> Way:
    """Streams of ``session``; through a relay each begins with the letter of its class."""

    async def opened(traffic: TrafficClass, asking: Asking) -> Any:
        stream = await session.open(traffic)
        stream.start(asking)
        if relayed:
            stream.write(traffic.letter.encode())
        return stream

    return Way(name, pids, opened)


def plain_way(name: str, port: int, pids: list[int]) -> Way:
    """TCP connections to ``port``."""

    async def opened(traffic: TrafficClass, asking: Asking) -> Any:
        await connectProtocol(TCP4ClientEndpoint(reactor, "127.0.0.1", port), asking)
        return asking.transport

    return Way(name, pids, opened)


async def dialled(url: str) -> MuxSession:
    """A session to ``url``, as a worker dials it."""
    return await dial(reactor, url, headers={}, client=True, config=CONFIG)


def pause(seconds: float) -> Deferred[None]:
    """Fires after so many seconds."""
    done: Deferred[None] = Deferred()
    reactor.callLater(seconds, done.callback, None)
    return done
