"""Connections without a database, for the decisions around them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from twisted.internet.defer import Deferred

from localai_dist.store.connection import Connection, Result
from localai_dist.store.errors import StoreError, StoreUnavailable


class FakeConnection(Connection):
    """A connection whose opening and statements are answered by the test."""

    def __init__(self, dsn: str, *, reactor: Any, notified: Any = None, names: Any = None, **options: Any) -> None:
        self._reactor = reactor
        self._reason: StoreError | None = None
        self._lost_waiters: list[Deferred[StoreError]] = []
        self._idle_waiters: list[Deferred[None]] = []
        self.notified = notified
        self.options = options
        self.busy = False
        self.opened = False
        self.used_at = 0.0
        self.opening: Deferred[None] = Deferred()
        self.statements: list[tuple[str, Deferred[Result]]] = []

    def open(self) -> Deferred[None]:
        """Wait for the test."""
        return self.opening

    def succeed(self) -> None:
        """Opened."""
        self.opened = True
        self.opening.callback(None)

    def fail(self, text: str = "refused") -> None:
        """Could not be opened."""
        self.opening.errback(StoreUnavailable(text))

    def run(
        self, sql: str, parameters: Mapping[str, Any] | None = None, *, timeout: float | None = None
    ) -> Deferred[Result]:
        """Wait for the test."""
        assert not self.busy, "two statements at once"
        answer: Deferred[Result] = Deferred()
        if not self.alive:
            answer.errback(self._reason or StoreUnavailable("not open"))
            return answer
        self.busy = True
        self.statements.append((sql, answer))
        return answer

    def answer(self, *rows: dict[str, Any], tag: str = "SELECT", error: Exception | None = None) -> str:
        """Answer the running statement; which it was."""
        sql, answer = self.statements[-1]
        self.busy = False
        self.used_at = self._reactor.seconds()
        if error is not None:
            answer.errback(error)
        else:
            answer.callback(Result(list(rows), len(rows), tag))
        waiters, self._idle_waiters = self._idle_waiters, []
        for waiter in waiters:
            waiter.callback(None)
        return sql

    def drop(self, reason: StoreError) -> None:
        """Lost."""
        if self._reason is not None:
            return
        self._reason = reason
        waiters, self._lost_waiters = self._lost_waiters, []
        for waiter in waiters:
            waiter.callback(reason)
        if self.busy:
            self.answer(error=reason)


class Makes:
    """Makes fake connections and keeps them."""

    def __init__(self) -> None:
        self.made: list[FakeConnection] = []

    def __call__(self, dsn: str, **options: Any) -> FakeConnection:
        connection = FakeConnection(dsn, **options)
        self.made.append(connection)
        return connection
