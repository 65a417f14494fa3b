"""
One database connection, from open to lost: txpostgres with what it lacks. Never reopened (``healing.py`` makes more).

What it adds (reference: stack.md §A): a connect timeout (libpq ignores its own in asynchronous mode), a statement
timeout by our own timer that drops the connection, cancelling that neither blocks nor logs, no traceback when an idle
connection loses its server, rows as dictionaries, notifications in order without a cooperator.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import psycopg2
from twisted.internet.base import DelayedCall
from twisted.internet.defer import CancelledError, Deferred, fail, succeed
from twisted.python.failure import Failure
from txpostgres import txpostgres

from localai_dist.store.dsn import one_line, redact, with_defaults
from localai_dist.store.errors import Fault, StoreError, StoreUnavailable, fault_of
from localai_dist.store.names import Names

Row = dict[str, Any]
Notified = Callable[[str, str], None]

IDLE_IN_TRANSACTION = 60.0  # s; a transaction whose coroutine hangs must not pin rows for ever


@dataclass(frozen=True, slots=True)
class Result:
    """
    What a statement gave.

    Attributes:
        rows: one dictionary a row, empty for a statement without rows.
        count: rows given or changed.
        tag: PostgreSQL's command tag, like ``COMMIT``.
    """

    rows: list[Row]
    count: int
    tag: str


class _Watched:
    """
    The reactor as txpostgres sees it: a descriptor that libpq has closed already is a lost connection.

    libpq closes its socket as soon as the server's farewell is read, while psycopg2 still calls the connection open;
    the real reactor would raise ValueError out of txpostgres.
    """

    def __init__(self, reactor: Any, dead: Callable[[], None]) -> None:
        self._dead = dead
        self.removeReader = reactor.removeReader
        self.removeWriter = reactor.removeWriter
        self.callLater = reactor.callLater
        self._add_reader = reactor.addReader
        self._add_writer = reactor.addWriter

    def addReader(self, descriptor: Any) -> None:
        """Watch for reading."""
        self._watch(self._add_reader, descriptor)

    def addWriter(self, descriptor: Any) -> None:
        """Watch for writing."""
        self._watch(self._add_writer, descriptor)

    def _watch(self, add: Callable[[Any], None], descriptor: Any) -> None:
        if descriptor.fileno() < 0:
            self._dead()
        else:
            add(descriptor)


class _Cursor(txpostgres.Cursor):
    """txpostgres' cursor, without its habit of turning the server's statement timeout into ``CancelledError``."""

    def _handleCancellation(self, failure: Failure) -> Failure:
        return failure


class _Wire(txpostgres.Connection):
    """txpostgres' connection with quiet reads and direct notifications."""

    cursorFactory = _Cursor

    def __init__(
        self, reactor: Any, notified: Notified, lost: Callable[[Failure], None], dead: Callable[[], None]
    ) -> None:
        # The second argument keeps txpostgres from using the global cooperator (and so the global reactor).
        super().__init__(_Watched(reactor, dead), object())
        self._notified = notified
        self._lost = lost

    def doRead(self) -> BaseException | None:
        """Read; a broken connection is told to the reactor as a reason, not as a traceback."""
        try:
            super().doRead()
        except psycopg2.Error as error:
            return error
        return None

    def checkForNotifies(self) -> None:
        """Pass notifications on in order, now."""
        notifies = self._connection.notifies
        batch = notifies[:]
        del notifies[:]
        for notify in batch:
            self._notified(notify.channel, notify.payload)

    def connectionLost(self, reason: Failure) -> None:
        """The reactor or ``close()`` says the socket is gone."""
        super().connectionLost(reason)
        self._lost(reason)


class Connection:
    """
    One connection; lend it to one statement at a time.

    Args:
        dsn: libpq URL or words.
        reactor: ``IReactorFDSet`` and ``IReactorTime``.
        application_name: what ``pg_stat_activity`` shows.
        connect_timeout: how long opening may take (s).
        statement_timeout: how long a statement may take (s); the server is asked to give up by then too.
        notified: called with channel and payload of each notification.
        names: looks the database's host up; shared by connections that are opened again and again.
    """

    def __init__(
        self,
        dsn: str,
        *,
        reactor: Any,
        application_name: str = "localai-dist",
        connect_timeout: float = 5.0,
        statement_timeout: float = 5.0,
        notified: Notified = lambda channel, payload: None,
        names: Names | None = None,
    ) -> None:
        self._names = names or Names(reactor)
        self._dsn = with_defaults(dsn, application_name=application_name)
        self._reactor = reactor
        self._connect_timeout = connect_timeout
        self._statement_timeout = statement_timeout
        self._wire = _Wire(reactor, notified, self._gone, self._dead)
        self._reason: StoreError | None = None
        self._lost_waiters: list[Deferred[StoreError]] = []
        self._idle_waiters: list[Deferred[None]] = []
        self.busy = False
        self.opened = False
        self.used_at = 0.0

    @property
    def alive(self) -> bool:
        """Open, and not known to be lost."""
        return self.opened and self._reason is None

    def open(self) -> Deferred[None]:
        """
        Connect and set the session up. Cancelling drops the connection.

        Raises:
            StoreUnavailable: it could not be opened in time; the text has no password.
        """
        return Deferred.fromCoroutine(self._open())

    async def _open(self) -> None:
        answer: Deferred[None] = Deferred(self._opening_cancelled)
        where = redact(self._dsn)
        late = StoreUnavailable(f"the database at {where} did not accept a connection in {self._connect_timeout:g} s")

        def expire() -> None:
            self.drop(late)
            if not answer.called:  # the name is still being looked up
                answer.errback(late)

        timer: DelayedCall = self._reactor.callLater(self._connect_timeout, expire)

        def done(result: Any) -> None:
            if timer.active():
                timer.cancel()
            if answer.called:  # cancelled, or late
                return
            if isinstance(result, Failure):
                error = self._reason or StoreUnavailable(
                    f"can't connect to the database at {where}: {one_line(str(result.value), self._dsn)}"
                )
                self.drop(error)
                answer.errback(error)
            else:
                answer.callback(None)

        Deferred.fromCoroutine(self._names.resolved(self._dsn)).addCallback(self._connect).addBoth(done)
        await answer
        self.opened = True
        await self.run(
            "select set_config('statement_timeout', %(statement)s, false),"
            " set_config('idle_in_transaction_session_timeout', %(idle)s, false)",
            {
                "statement": str(round(self._statement_timeout * 1000)),
                "idle": str(round(IDLE_IN_TRANSACTION * 1000)),
            },
        )

    def _connect(self, dsn: str) -> Deferred[Any]:
        if self._reason is not None:
            return fail(self._reason)
        connecting: Deferred[Any] = self._wire.connect(dsn)
        return connecting

    def _opening_cancelled(self, answer: Deferred[None]) -> None:
        answer.errback(CancelledError())
        self.drop(StoreUnavailable("opening the database connection was cancelled"))

    def run(
        self, sql: str, parameters: Mapping[str, Any] | None = None, *, timeout: float | None = None
    ) -> Deferred[Result]:
        """
        Run one statement.

        Cancelling fails the caller at once; the statement runs on (``busy`` until it ended or timed out), because
        PostgreSQL's protocol has to be finished and the driver's cancel would block the reactor.

        Args:
            timeout: seconds until the connection is dropped; by default one second more than the server's own limit.

        Raises:
            StoreUnavailable: lost, dropped or too slow.
            StatementFailed: the database's answer is an error.
        """
        answer: Deferred[Result] = Deferred()
        if self._reason is not None or not self.opened:
            answer.errback(self._reason or StoreUnavailable("the database connection is not open"))
            return answer
        if self.busy:
            raise RuntimeError("a connection runs one statement at a time")
        self.busy = True
        seconds = self._statement_timeout + 1 if timeout is None else timeout
        late = StoreUnavailable(f"the database at {redact(self._dsn)} did not answer in {seconds:g} s")
        timer: DelayedCall = self._reactor.callLater(seconds, self.drop, late)
        try:
            cursor = self._wire.cursor()
            pending: Deferred[Any] = cursor.execute(sql, parameters)
        except psycopg2.Error:
            cursor, pending = None, Deferred()
            pending.errback(Failure())
        # A failure that is there at once never reached the server.
        pending.addBoth(self._finished, cursor, timer, answer, pending.called)
        return answer

    def _finished(self, outcome: Any, cursor: Any, timer: DelayedCall, answer: Deferred[Result], unsent: bool) -> None:
        if timer.active():
            timer.cancel()
        self.busy = False
        self.used_at = self._reactor.seconds()
        result = outcome if isinstance(outcome, Failure) else _result_of(cursor)
        if isinstance(result, Failure):
            fault = self._fault(result, unsent)
            if fault is not None and fault.lost:
                self.drop(fault.error)
            answer.errback(fault.error if fault is not None else result)
        else:
            answer.callback(result)
        while self._idle_waiters and not self.busy:  # whoever was answered may have begun the next statement by now
            self._idle_waiters.pop(0).callback(None)

    def _fault(self, failure: Failure, unsent: bool) -> Fault | None:
        """What a failed statement means; None for a mistake of the caller (a missing parameter, say)."""
        if self._reason is not None:
            return Fault(self._reason, lost=True)
        if isinstance(failure.value, psycopg2.Error):
            return fault_of(failure.value)
        if unsent and isinstance(failure.value, (KeyError, TypeError, ValueError, IndexError)):
            return None
        return Fault(StoreUnavailable(f"the database connection was lost: {failure.getErrorMessage()}"), lost=True)

    def drop(self, reason: StoreError) -> None:
        """End the connection now; a running statement fails with ``reason``, an open transaction is rolled back."""
        if self._reason is not None:
            return
        self._reason = reason
        if self._wire.pollable() is not None:
            self._wire.close()
        waiters, self._lost_waiters = self._lost_waiters, []
        for waiter in waiters:
            waiter.callback(reason)

    def _dead(self) -> None:
        """libpq closed the socket."""
        self.drop(StoreUnavailable("the database connection was lost: the server closed it"))

    def _gone(self, reason: Failure) -> None:
        """The socket ended; ``drop`` is on its way here or was not the cause."""
        if self.opened:
            self.drop(StoreUnavailable(f"the database connection was lost: {_words(reason)}"))

    def when_lost(self) -> Deferred[StoreError]:
        """Fires (never fails) with the reason once the connection is lost; at once if it is."""
        if self._reason is not None:
            return succeed(self._reason)
        waiter: Deferred[StoreError] = Deferred(lambda d: self._lost_waiters.remove(d))
        self._lost_waiters.append(waiter)
        return waiter

    def when_idle(self) -> Deferred[None]:
        """Fires (never fails) when no statement runs."""
        waiter: Deferred[None] = Deferred()
        if self.busy:
            self._idle_waiters.append(waiter)
        else:
            waiter.callback(None)
        return waiter


def _result_of(cursor: Any) -> Result | Failure:
    try:
        names = [column.name for column in cursor.description or ()]
        rows = [dict(zip(names, row, strict=True)) for row in cursor.fetchall()] if names else []
        result = Result(rows, cursor.rowcount, cursor.statusmessage or "")
        cursor.close()
    except psycopg2.Error:
        return Failure()
    return result


def _words(reason: Failure) -> str:
    return " ".join(str(reason.value).split()) or type(reason.value).__name__
