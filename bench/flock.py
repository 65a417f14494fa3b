"""
The reactor's side of ``fleet``, each a process of its own: ``python -m bench.flock workers | bus | look ...``.

``workers FOLDER URL ...`` are simulated: a real registration, real heartbeats, a real tunnel each, at the default
knobs, but nothing behind them. A number on standard input is how many there shall be; once all are registered and
connected, the number comes back. ``bus DSN`` and ``look DSN`` print the seconds of each message, or of each look at
every node.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twisted.internet import reactor as untyped_reactor
from twisted.internet.defer import Deferred
from twisted.internet.protocol import connectionDone
from twisted.internet.stdio import StandardIO
from twisted.internet.task import LoopingCall, deferLater
from twisted.protocols.basic import LineReceiver
from twisted.python.failure import Failure

from localai_dist.bus.service import Bus
from localai_dist.health.departure import SUBSCRIBERS, Departures
from localai_dist.health.monitor import HealthMonitor
from localai_dist.net.stream import MuxStream
from localai_dist.registry.nodes import Nodes
from localai_dist.registry.ownership import Ownership
from localai_dist.roles.membership import Member, boot_id, make_member
from localai_dist.store.pool import Pool
from localai_dist.worker.registration import HEARTBEAT_INTERVAL, Profile

reactor: Any = untyped_reactor
STARTS_PER_SECOND = 25
"""How fast simulated workers are started: a fleet that comes up, not a thunderclap."""
RATE = 500
MESSAGES = 10 * RATE
SUBJECT = "cache.bench"
LOOKS = 20
LIVE_WINDOW = 30.0


@dataclass(frozen=True, slots=True)
class Told:
    """What a simulated worker is told."""

    register_to: tuple[str, ...]
    registration_token: str
    data_path: str
    program: str = "localai-worker"
    heartbeat_interval: float = HEARTBEAT_INTERVAL
    tunnel_keepalive: float = 5.0


class Flock(LineReceiver):
    """Simulated workers, told by lines how many there shall be."""

    delimiter = b"\n"

    def __init__(self, folder: Path, urls: list[str], token: str) -> None:
        self._folder, self._urls, self._token = folder, urls, token
        self.members: list[Member] = []

    def lineReceived(self, line: bytes) -> None:
        """Grow to that many."""
        Deferred.fromCoroutine(self._grow(int(line))).addErrback(_ended_badly)

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        """Whoever started this process is gone."""
        os._exit(0)

    async def _grow(self, wanted: int) -> None:
        for number in range(len(self.members), wanted):
            self.members.append(self._member(number))
            await deferLater(reactor, 1 / STARTS_PER_SECOND)
        while not all(member.tunnel.connected for member in self.members):
            await deferLater(reactor, 0.1)
        self.sendLine(str(wanted).encode())

    def _member(self, number: int) -> Member:
        turn = number % len(self._urls)
        urls = (*self._urls[turn:], *self._urls[:turn])
        member = make_member(
            Told(urls, self._token, str(self._folder / str(number))),
            reactor,
            profile=Profile(name=f"simulated-{number}", node_type="backend", boot_id=boot_id()),
            on_stream=MuxStream.abortConnection,
        )
        member.registration.startService()
        member.tunnel.startService()
        return member


async def _bus(dsn: str) -> list[float]:
    """Seconds from ``publish`` on one bus to the subscriber of another, for each of ``MESSAGES`` at ``RATE``."""
    pools = [Pool(dsn, reactor=reactor) for _ in range(2)]
    buses = []
    for pool in pools:
        await pool.start()
        buses.append(Bus(dsn, pool, reactor=reactor))
        await buses[-1].start()
    took: list[float] = []
    await buses[1].subscriber.subscribe(SUBJECT, lambda message: took.append(time.monotonic() - message.value()))
    began = time.monotonic()
    sent = 0

    def due() -> None:
        nonlocal sent
        while sent < min(MESSAGES, (time.monotonic() - began) * RATE):
            sent += 1
            Deferred.fromCoroutine(buses[0].publisher.publish(SUBJECT, time.monotonic())).addErrback(_ended_badly)

    pacing = LoopingCall(due)
    pacing.start(1 / RATE / 2).addErrback(_ended_badly)
    while len(took) < MESSAGES:
        await deferLater(reactor, 0.1)
    pacing.stop()
    for bus, pool in zip(buses, pools, strict=True):
        await bus.stop()
        await pool.stop()
    return took


async def _look(dsn: str) -> list[float]:
    """Seconds of each of ``LOOKS`` looks of the health monitor at every node."""
    pool = Pool(dsn, reactor=reactor)
    await pool.start()
    nobody = Departures({name: lambda departure: None for name in SUBSCRIBERS})
    monitor = HealthMonitor(Nodes(pool), Ownership(pool, live_window=LIVE_WINDOW), nobody, clock=reactor)
    took = []
    for _ in range(LOOKS):
        began = time.monotonic()
        await monitor.look()
        took.append(time.monotonic() - began)
        await deferLater(reactor, 0.1)
    await pool.stop()
    return took


def _ended_badly(failure: Failure) -> None:
    sys.stderr.write(failure.getTraceback())
    sys.stderr.flush()
    os._exit(1)


def _printed(measured: Callable[[str], Coroutine[Any, Any, list[float]]], dsn: str) -> None:
    async def run() -> None:
        sys.stdout.write(json.dumps(await measured(dsn)) + "\n")
        reactor.stop()

    Deferred.fromCoroutine(run()).addErrback(_ended_badly)


def main(arguments: list[str]) -> None:
    """Run one of them until it is done, or until standard input ends."""
    match arguments:
        case ["workers", folder, *urls]:
            random.seed()
            reactor.callWhenRunning(StandardIO, Flock(Path(folder), urls, os.environ["LOCALAI_REGISTRATION_TOKEN"]))
        case ["bus", dsn]:
            reactor.callWhenRunning(_printed, _bus, dsn)
        case ["look", dsn]:
            reactor.callWhenRunning(_printed, _look, dsn)
        case _:
            sys.exit("usage: python -m bench.flock workers FOLDER URL ... | bus DSN | look DSN")
    reactor.run()


if __name__ == "__main__":
    main(sys.argv[1:])
