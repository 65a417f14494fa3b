"""Whoever watches a load that another frontend runs: the row, and what became of it."""

from __future__ import annotations

from enum import Enum

from localai_dist.loads.cause import decode_cause
from localai_dist.loads.errors import LoadCancelled
from localai_dist.loads.flight import Flight
from localai_dist.loads.lack import Resort
from localai_dist.loads.rows import JobRow
from localai_dist.loads.status import JobState
from localai_dist.loads.tools import Tools
from localai_dist.store.errors import StoreUnavailable


class Seen(Enum):
    """How a watched job left the hands it was in."""

    GONE = "gone"
    ORPHANED = "orphaned"
    NOBODY_WAITS = "nobody waits"


async def watch(tools: Tools, flight: Flight) -> Seen:
    """Look at the row until it is gone or anybody's; raises the cause when that attempt failed or was cancelled."""
    name = flight.model.name
    attempt: int | None = None
    while True:
        if not flight.waiting:
            return Seen.NOBODY_WAITS
        row = await _glance(tools, name)
        if row is Seen.GONE:
            if attempt is not None and (reason := await _why_cancelled(tools, name, attempt)) is not None:
                raise LoadCancelled(f"the load of {name} was cancelled: {reason}")
            return Seen.GONE
        if isinstance(row, JobRow):
            flight.seen = row.status
            _raise_ending(row, attempt, waited=tools.clock.seconds() - flight.began)
            if _is_for(tools, row):
                return Seen.ORPHANED
            attempt = attempt if row.cancelled else row.attempt
        await flight.pause(tools.clock, tools.settings.poll)


def _is_for(tools: Tools, row: JobRow) -> bool:
    """Whether this frontend may claim the job now."""
    if not row.orphaned or row.cancelled:
        return False
    return tools.instance not in row.lacking or row.resort(tools.instance, tools.settings.offer) is Resort.RUN


def _raise_ending(row: JobRow, attempt: int | None, *, waited: float) -> None:
    # A failure that was claimed anew before we looked has left its cause in the row.
    if row.state is JobState.FAILED or (attempt not in (None, row.attempt) and row.error):
        raise decode_cause(row.error)
    # One that was cancelled before this wait began is none of its business: it is only waited out.
    if row.cancelled and (attempt is not None or waited > row.cancelled_for):
        raise LoadCancelled(f"the load of {row.key} was cancelled: {row.cancel_reason}")


async def _glance(tools: Tools, name: str) -> JobRow | Seen | None:
    """The row; ``GONE`` when there is none, None when the database did not say."""
    try:
        return await tools.table.read(name) or Seen.GONE
    except StoreUnavailable:
        return None


async def _why_cancelled(tools: Tools, name: str, attempt: int) -> str | None:
    try:
        return await tools.endings.cancelled(name, attempt)
    except StoreUnavailable:
        return None
