"""Opens a connection, and the next one whenever it was lost, until told to stop."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.task import deferLater
from twisted.logger import Logger

from localai_dist.backoff import Backoff
from localai_dist.store.connection import Connection
from localai_dist.store.errors import StoreError, StoreUnavailable

BACKOFF = Backoff(first=0.2, cap=2.0)
STEADY = 10.0  # s; a connection that lived so long is replaced without delay


class KeptConnection:
    """
    A connection that comes back.

    Args:
        make: a fresh, unopened connection.
        opened: awaited with each connection that opened; if it raises ``StoreError`` the connection counts as failed.
        failed: called with the reason each time opening failed or a connection was lost.
        reactor: ``IReactorTime``.
        chance: a random number from 0 to 1, for the jitter.
    """

    _log = Logger()

    def __init__(
        self,
        make: Callable[[], Connection],
        *,
        opened: Callable[[Connection], Awaitable[None]],
        failed: Callable[[StoreError], None],
        reactor: Any,
        chance: Callable[[], float],
    ) -> None:
        self._make = make
        self._opened = opened
        self._failed = failed
        self._reactor = reactor
        self._chance = chance
        self._loop: Deferred[None] | None = None
        self._stopped = False
        self.current: Connection | None = None

    def start(self) -> None:
        """Open, and keep open."""
        self._stopped = False
        self._loop = Deferred.fromCoroutine(self._keep())
        self._loop.addErrback(lambda failure: failure.trap(CancelledError))
        self._loop.addErrback(lambda failure: self._log.failure("keeping a database connection open failed", failure))

    def stop(self) -> None:
        """End the connection and open no other; also from inside ``opened`` or ``failed``."""
        self._stopped = True
        if self._loop is not None:
            self._loop.cancel()
            self._loop = None
        if self.current is not None:
            self.current.drop(StoreUnavailable("the database connection was closed by this program"))
            self.current = None

    async def _keep(self) -> None:
        failures = 0
        while True:
            began = self._reactor.seconds()
            reason = await self._one()
            if self._stopped:
                return
            failures = 1 if self._reactor.seconds() - began >= STEADY else failures + 1
            self._failed(reason)
            await deferLater(self._reactor, BACKOFF.delay(failures, self._chance()))

    async def _one(self) -> StoreError:
        """Open one connection and stay with it; why it ended."""
        connection = self.current = self._make()
        try:
            await connection.open()
            await self._opened(connection)
        except StoreError as error:
            connection.drop(error)
            return error
        return await connection.when_lost()
