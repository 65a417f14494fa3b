"""A few healing connections, each lent to one statement (or one transaction) at a time."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, TypeVar

from twisted.internet.defer import Deferred
from twisted.internet.task import LoopingCall
from twisted.logger import Logger

from localai_dist.store.connection import Connection, Row
from localai_dist.store.dsn import redact
from localai_dist.store.errors import StoreError, StoreUnavailable
from localai_dist.store.healing import KeptConnection
from localai_dist.store.names import Names
from localai_dist.store.transaction import Transaction, in_transaction

T = TypeVar("T")

MAX_WAITING = 1000  # statements that may wait for a connection; further ones are refused


class Pool:
    """
    The database, as callers see it.

    Every verb answers within ``patience`` (no connection open) or ``statement_timeout`` for a connection plus
    ``statement_timeout`` + 1 s for each statement. Cancelling a verb fails it at once; a single statement may still
    have its effect, a transaction has none.

    Args:
        dsn: libpq URL or words.
        reactor: ``IReactorFDSet`` and ``IReactorTime``.
        size: connections kept open.
        statement_timeout: how long one statement may take (s).
        patience: how long a statement waits while no connection is open at all (s).
        beat: an idle connection is asked something this often (s), so that a dead one is found before it is needed.
    """

    _log = Logger()

    def __init__(
        self,
        dsn: str,
        *,
        reactor: Any,
        size: int = 4,
        statement_timeout: float = 5.0,
        connect_timeout: float = 5.0,
        patience: float = 1.0,
        beat: float = 5.0,
        application_name: str = "localai-dist",
        chance: Callable[[], float] = random.random,
        make: Callable[..., Connection] = Connection,
    ) -> None:
        self._reactor = reactor
        self._where = redact(dsn)
        self._statement_timeout, self._connect_timeout, self._patience = statement_timeout, connect_timeout, patience
        self._beat = LoopingCall(self._ask_idle)
        self._beat.clock = reactor
        self._beat_every = beat
        self._idle: list[Connection] = []
        self._open: set[Connection] = set()
        self._waiting: deque[Deferred[Connection]] = deque()
        self._problem: StoreError | None = None
        self._running = False
        fresh = partial(
            make,
            dsn,
            reactor=reactor,
            names=Names(reactor),
            application_name=application_name,
            connect_timeout=connect_timeout,
            statement_timeout=statement_timeout,
        )
        self._kept = [
            KeptConnection(fresh, opened=self._opened, failed=self._failed, reactor=reactor, chance=chance)
            for _ in range(size)
        ]

    @property
    def healthy(self) -> bool:
        """Whether at least one connection is open."""
        return bool(self._open)

    @property
    def problem(self) -> str | None:
        """Why the pool is not healthy, in words; None when it is."""
        return None if self.healthy else str(self._problem or "no connection to the database yet")

    @property
    def problem_told(self) -> str | None:
        """The same for whoever is no operator."""
        if self.healthy:
            return None
        return (self._problem or StoreUnavailable("no connection to the database yet")).told

    async def start(self) -> None:
        """
        Open the connections; returns when the first is open.

        Raises:
            StoreUnavailable: none could be opened in time (the pool is stopped again).
        """
        self._running = True
        for kept in self._kept:
            kept.start()
        self._beat.start(self._beat_every, now=False).addErrback(self._beat_failed)
        try:
            self._put_back(await self._borrow(self._connect_timeout + 1))
        except StoreUnavailable:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Close everything; statements under way and waiting ones fail with ``StoreUnavailable``."""
        self._running = False
        if self._beat.running:
            self._beat.stop()
        for kept in self._kept:
            kept.stop()
        self._idle.clear()
        self._open.clear()
        while self._waiting:
            self._waiting.popleft().errback(StoreUnavailable("the database pool was stopped"))

    async def fetch(self, statement: str, params: Mapping[str, Any] | None = None) -> list[Row]:
        """
        The rows of ``statement`` (psycopg2 ``%(name)s`` parameters), as dictionaries.

        Raises:
            StoreUnavailable, StatementFailed: see ``store.errors``.
        """

        async def work(connection: Connection) -> list[Row]:
            return (await connection.run(statement, params)).rows

        return await self._with(work)

    async def fetch_one(self, statement: str, params: Mapping[str, Any] | None = None) -> Row | None:
        """The first row of ``statement``, or None; raises as ``fetch``."""
        rows = await self.fetch(statement, params)
        return rows[0] if rows else None

    async def execute(self, statement: str, params: Mapping[str, Any] | None = None) -> int:
        """How many rows ``statement`` changed; raises as ``fetch``."""

        async def work(connection: Connection) -> int:
            return (await connection.run(statement, params)).count

        return await self._with(work)

    async def transaction(self, fn: Callable[[Transaction], Awaitable[T]]) -> T:
        """
        What ``fn`` returns, its statements committed together; rolled back if it raises or is cancelled.

        Raises:
            StoreUnavailable, StatementFailed: see ``store.transaction.in_transaction``.
        """

        async def work(connection: Connection) -> T:
            return await in_transaction(connection, fn)

        return await self._with(work)

    async def _with(self, work: Callable[[Connection], Awaitable[T]]) -> T:
        connection = await self._borrow(self._statement_timeout if self._open else self._patience)
        try:
            return await work(connection)
        finally:
            self._put_back(connection)

    async def _borrow(self, seconds: float) -> Connection:
        """A live connection nobody uses; cancelling gives up the place in the queue."""
        while self._idle:
            connection = self._idle.pop(0)  # the longest idle one: each statement spares it a beat
            if connection.alive:
                return connection
        if not self._running:
            raise StoreUnavailable("the database pool is stopped")
        if len(self._waiting) >= MAX_WAITING:
            raise StoreUnavailable(f"{MAX_WAITING} statements wait for the database already")
        waiter: Deferred[Connection] = Deferred(lambda d: self._waiting.remove(d))
        self._waiting.append(waiter)
        timer = self._reactor.callLater(seconds, self._give_up, waiter, seconds)
        try:
            return await waiter
        finally:
            if timer.active():
                timer.cancel()

    def _give_up(self, waiter: Deferred[Connection], seconds: float) -> None:
        self._waiting.remove(waiter)
        why = self.problem or "every connection is in use"
        waiter.errback(StoreUnavailable(f"no connection to the database at {self._where} in {seconds:g} s: {why}"))

    def _put_back(self, connection: Connection) -> None:
        if connection.busy:  # its caller was cancelled; the statement runs on, bounded by its timeout
            connection.when_idle().addCallback(lambda _: self._put_back(connection))
        elif connection.alive and self._running:
            if self._waiting:
                self._waiting.popleft().callback(connection)
            else:
                self._idle.append(connection)

    async def _opened(self, connection: Connection) -> None:
        if not self._open:
            self._log.info("connected to the database at {where}", where=self._where)
        self._open.add(connection)
        connection.when_lost().addCallback(lambda _: self._lost(connection))
        self._put_back(connection)

    def _lost(self, connection: Connection) -> None:
        self._open.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    def _failed(self, reason: StoreError) -> None:
        if not self._open and str(reason) != str(self._problem):
            self._log.warn("the database at {where} is unavailable: {reason}", where=self._where, reason=str(reason))
        self._problem = reason

    def _ask_idle(self) -> None:
        """Ask each connection that was idle for a whole beat; one that does not answer in time drops itself."""
        now = self._reactor.seconds()
        for connection in [c for c in self._idle if now - c.used_at >= self._beat_every]:
            self._idle.remove(connection)
            asked = connection.run("select 1")
            asked.addErrback(lambda failure: failure.trap(StoreError))
            asked.addCallback(lambda _, c: self._put_back(c), connection)

    def _beat_failed(self, failure: Any) -> None:
        self._log.failure("the database pool's heartbeat stopped", failure)
