"""LISTEN on one connection of its own that heals: notifications in, and word when some may have been missed."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from twisted.internet.defer import Deferred, DeferredLock
from twisted.internet.task import LoopingCall
from twisted.logger import Logger

from localai_dist.store.connection import Connection
from localai_dist.store.dsn import redact
from localai_dist.store.errors import StoreError, StoreUnavailable
from localai_dist.store.healing import KeptConnection
from localai_dist.store.names import Names

MAX_CHANNEL = 63  # PostgreSQL truncates longer identifiers


class Listener:
    """
    The process's one LISTEN connection.

    A notification is a hint: those sent while the connection was down are lost, and ``on_reconnect`` callbacks say so.
    Callbacks run in the reactor and must be quick; what one raises is logged and hurts nobody else.

    Args:
        dsn: libpq URL or words; PostgreSQL itself, not a transaction pooler.
        reactor: ``IReactorFDSet`` and ``IReactorTime``.
        beat: how often the connection is asked something (s), because silence is its normal state.
        beat_timeout: a connection that takes longer to answer is replaced (s).
    """

    _log = Logger()

    def __init__(
        self,
        dsn: str,
        reactor: Any,
        *,
        beat: float = 5.0,
        beat_timeout: float = 4.0,
        connect_timeout: float = 5.0,
        application_name: str = "localai-dist listen",
        chance: Callable[[], float] = random.random,
        make: Callable[..., Connection] = Connection,
    ) -> None:
        self._where = redact(dsn)
        self._reactor = reactor
        self._channels: dict[str, list[Callable[[str], None]]] = {}
        self._on_reconnect: list[Callable[[], None]] = []
        self._lock = DeferredLock()  # one statement at a time on the one connection
        self._connection: Connection | None = None
        self._first: list[Deferred[None]] = []
        self._connect_timeout = connect_timeout
        self._beat = LoopingCall(self._ask)
        self._beat.clock = reactor
        self._beat_every, self._beat_timeout = beat, beat_timeout
        self.connects = 0

        names = Names(reactor)

        def fresh() -> Connection:
            return make(
                dsn,
                reactor=reactor,
                names=names,
                application_name=application_name,
                connect_timeout=connect_timeout,
                statement_timeout=beat_timeout,
                notified=self._notified,
            )

        self._kept = KeptConnection(fresh, opened=self._opened, failed=self._failed, reactor=reactor, chance=chance)

    @property
    def healthy(self) -> bool:
        """Whether the connection is open and listening."""
        return self._connection is not None and self._connection.alive

    async def start(self) -> None:
        """
        Connect; returns once connected.

        Raises:
            StoreUnavailable: no connection in time (stopped again).
        """
        self._kept.start()
        self._beat.start(self._beat_every, now=False).addErrback(
            lambda failure: self._log.failure("the listener's heartbeat stopped", failure)
        )
        try:
            await self._connected()
        except StoreUnavailable:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Close the connection; nobody is called any more."""
        if self._beat.running:
            self._beat.stop()
        self._channels.clear()
        self._on_reconnect.clear()
        self._kept.stop()
        self._connection = None

    async def listen(self, channel: str, callback: Callable[[str], None]) -> None:
        """
        Call ``callback`` with the payload of each notification on ``channel``; returns once PostgreSQL acknowledged.

        Raises:
            StoreUnavailable: not acknowledged; the callback is not registered.
            ValueError: no possible channel name.
        """
        if not channel or len(channel.encode()) > MAX_CHANNEL or "\0" in channel:
            raise ValueError(f"{channel[:80]!r} can't be a channel")
        callbacks = self._channels.setdefault(channel, [])
        callbacks.append(callback)
        try:
            await self._connected()
            await self._run(f"listen {_quoted(channel)}", self._connection)
        except BaseException:  # also a caller that gave up: it must not be called for a subscription it has not got
            callbacks.remove(callback)
            if not callbacks:
                self._channels.pop(channel, None)
            raise

    def on_reconnect(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` after each reconnection, when LISTEN is in force again: something may have been missed."""
        self._on_reconnect.append(callback)

    async def _connected(self) -> None:
        if self.healthy:
            return
        waiter: Deferred[None] = Deferred(lambda d: self._first.remove(d))
        self._first.append(waiter)

        def late() -> None:
            self._first.remove(waiter)
            waiter.errback(StoreUnavailable(f"no connection to the database at {self._where} to listen on"))

        timer = self._reactor.callLater(self._connect_timeout + 1, late)
        try:
            await waiter
        finally:
            if timer.active():
                timer.cancel()

    async def _opened(self, connection: Connection) -> None:
        for channel in list(self._channels):
            await self._run(f"listen {_quoted(channel)}", connection)
        self._connection = connection
        self.connects += 1
        waiters, self._first = self._first, []
        for waiter in waiters:
            waiter.callback(None)
        if self.connects > 1:
            self._log.info("listening again on the database at {where}", where=self._where)
            for callback in list(self._on_reconnect):
                self._call(callback)

    def _failed(self, reason: StoreError) -> None:
        if self._connection is not None:
            self._log.warn("not listening on the database at {where}: {why}", where=self._where, why=str(reason))
        self._connection = None

    async def _run(self, sql: str, connection: Connection | None, *, timeout: float | None = None) -> None:
        await self._lock.acquire()
        try:
            if connection is None:
                raise StoreUnavailable("the listening connection was lost")
            await connection.run(sql, timeout=timeout)
        finally:
            if connection is not None and connection.busy:  # the caller gave up; the statement runs on
                connection.when_idle().addCallback(lambda _: self._lock.release())
            else:
                self._lock.release()

    async def _heartbeat(self) -> None:
        try:
            await self._run("select 1", self._connection, timeout=self._beat_timeout)
        except StoreError as error:
            self._log.debug("the listener's heartbeat: {error}", error=str(error))

    def _ask(self) -> Deferred[None] | None:
        return Deferred.fromCoroutine(self._heartbeat()) if self.healthy else None

    def _notified(self, channel: str, payload: str) -> None:
        for callback in list(self._channels.get(channel, ())):
            self._call(callback, payload)

    def _call(self, callback: Callable[..., None], *arguments: str) -> None:
        try:
            callback(*arguments)
        except Exception:  # noqa: BLE001 - isolates subscribers from each other; logged with its traceback
            self._log.failure("a notification callback failed")


def _quoted(channel: str) -> str:
    return '"' + channel.replace('"', '""') + '"'
