"""A transaction around a coroutine."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol, TypeVar

from twisted.internet.defer import Deferred

from localai_dist.store.connection import Result, Row
from localai_dist.store.errors import StatementFailed, StoreError, StoreUnavailable

T = TypeVar("T")


class Runs(Protocol):
    """What a transaction needs of a connection."""

    busy: bool

    def run(self, sql: str, parameters: Mapping[str, Any] | None = None) -> Deferred[Result]:
        """Run one statement."""

    def drop(self, reason: StoreError) -> None:
        """End the connection."""


class Transaction:
    """An open transaction: the same verbs as the pool's, all or nothing."""

    def __init__(self, connection: Runs) -> None:
        self._connection = connection

    async def fetch(self, statement: str, params: Mapping[str, Any] | None = None) -> list[Row]:
        """The rows of ``statement``."""
        return (await self._connection.run(statement, params)).rows

    async def fetch_one(self, statement: str, params: Mapping[str, Any] | None = None) -> Row | None:
        """The first row of ``statement``, or None."""
        rows = await self.fetch(statement, params)
        return rows[0] if rows else None

    async def execute(self, statement: str, params: Mapping[str, Any] | None = None) -> int:
        """How many rows ``statement`` changed."""
        return (await self._connection.run(statement, params)).count


async def in_transaction(connection: Runs, work: Callable[[Transaction], Awaitable[T]]) -> T:
    """
    What ``work`` returns, its statements committed; rolled back if it raises or is cancelled.

    Raises:
        StoreUnavailable: lost on the way. If that was at the commit, nobody knows whether it happened.
        StatementFailed: a statement failed, also one whose failure ``work`` swallowed: nothing was committed.
    """
    try:
        await connection.run("begin")
        result = await work(Transaction(connection))
        ending = await connection.run("commit")
    except Exception:
        await _roll_back(connection)
        raise
    except BaseException:
        connection.drop(StoreUnavailable("the transaction was abandoned"))
        raise
    if ending.tag != "COMMIT":
        # PostgreSQL answers COMMIT of a failed transaction with ROLLBACK, and no error.
        raise StatementFailed("the transaction was rolled back: one of its statements had failed", "25P02")
    return result


async def _roll_back(connection: Runs) -> None:
    if connection.busy:  # cancelled in the middle of a statement: the server rolls back when the connection ends
        connection.drop(StoreUnavailable("the transaction was cancelled"))
        return
    try:
        await connection.run("rollback")
    except StoreError as error:
        connection.drop(error)
