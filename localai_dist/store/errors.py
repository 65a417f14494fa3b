"""
What can go wrong with the database, and what the driver's errors mean.

::

    StoreError
    ├── StoreUnavailable   unreachable, lost, or too slow: nothing is known about what was asked
    ├── StatementFailed    the database answered that this statement can't be
    ├── NewerSchema        the tables were written by a newer version of this program
    └── FencedOut          the row to change belongs to somebody else by now
"""

from __future__ import annotations

from dataclasses import dataclass

import psycopg2

from localai_dist.errors import LocalAIDistError


class StoreError(LocalAIDistError):
    """Anything that went wrong with the database."""

    @property
    def told(self) -> str:
        """No word of the driver's, which names host, user and table."""
        return "the registry database did not do what was asked of it"


class StoreUnavailable(StoreError):
    """The database can't be reached, was lost, or is too slow: nothing is known about what was asked."""

    @property
    def told(self) -> str:
        """The cause, without where the database is and who asks it."""
        return "the registry database can't be reached, or does not answer in time"


class StatementFailed(StoreError):
    """
    The database answered, and its answer was an error.

    Attributes:
        sqlstate: PostgreSQL's five-character code.
    """

    def __init__(self, text: str, sqlstate: str) -> None:
        super().__init__(text)
        self.sqlstate = sqlstate

    @property
    def refers_to_nothing(self) -> bool:
        """Whether a row was to refer to one that is not there."""
        return self.sqlstate == _FOREIGN_KEY


class NewerSchema(StoreError):
    """
    The tables were written by a newer version of this program, which this one must not touch.

    Attributes:
        found: the schema version in the database.
        known: the newest schema version this program knows.
    """

    def __init__(self, found: int, known: int, writer: str, program: str) -> None:
        super().__init__(
            f"the database has schema version {found}, written by localai-dist {writer}; this is localai-dist "
            f"{program}, which knows schema version {known}: upgrade this program, or use another database"
        )
        self.found = found
        self.known = known


class FencedOut(StoreError):
    """The row to change is owned by somebody else by now; nothing was changed."""


@dataclass(frozen=True, slots=True)
class Fault:
    """
    What an error of the driver means.

    Attributes:
        error: what the caller is told.
        lost: whether the connection must not be used again.
    """

    error: StoreError
    lost: bool


_FOREIGN_KEY = "23503"  # foreign_key_violation
_TOO_SLOW = {"57014", "55P03"}  # query_canceled (statement_timeout), lock_not_available
_AGAIN = {"40001", "40P01"}  # serialization_failure, deadlock_detected
_GOING = {"57P01", "57P02", "57P03", "57P05", "25006", "25P03"}  # shutdown, idle timeouts, read-only standby
_LOST_CLASSES = {"08", "58", "XX"}  # connection exception, system error, internal error
_SCARCE = "53"  # insufficient resources: disk, memory, connections


def fault_of(error: psycopg2.Error) -> Fault:
    """
    What ``error`` means for the caller and for the connection it came from.

    An error without a code never came from the server: the connection broke, or the driver is in a state we do not
    know (a wedged connection answers "another command is already in progress" for ever). Both end the connection.
    """
    code = error.pgcode or ""
    text = " ".join(str(error).split()) or type(error).__name__
    if not code:
        return Fault(StoreUnavailable(f"the database connection was lost: {text}"), lost=True)
    if code in _GOING or code[:2] in _LOST_CLASSES:
        return Fault(StoreUnavailable(f"the database ended the connection: {text}"), lost=True)
    if code in _TOO_SLOW or code in _AGAIN or code.startswith(_SCARCE):
        return Fault(StoreUnavailable(f"the database did not get it done: {text}"), lost=False)
    return Fault(StatementFailed(text, code), lost=False)
