"""Where this frontend saw each load stand, and when: an estimate is measured, never guessed."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from twisted.internet.interfaces import IReactorTime

from localai_dist.loads.status import JobState, LoadStatus, Rate
from localai_dist.loads.table import JobRow


class Sightings:
    """One measurement per load that was seen staging; ``keep`` bounds them to the loads that exist."""

    def __init__(self, clock: IReactorTime) -> None:
        self._clock = clock
        self._rates: dict[str, Rate] = {}

    def saw(self, key: str, attempt: int, count: int) -> None:
        """``count`` bytes of ``key`` were on the node just now, in this attempt's staging."""
        now = self._clock.seconds()
        known = self._rates.get(key)
        if known is None or known.attempt != attempt:
            self._rates[key] = Rate(attempt, now, count, now, count)
        else:
            self._rates[key] = known.seen(now, count)

    def saw_row(self, row: JobRow) -> None:
        """The same, from the job's row."""
        if row.state is JobState.STAGING:
            self.saw(row.key, row.attempt, row.status.bytes_sent)

    def with_eta(self, row: JobRow) -> LoadStatus:
        """The row's status, with the estimate if there is a measurement."""
        self.saw_row(row)
        rate = self._rates.get(row.key)
        if row.state is not JobState.STAGING or rate is None:
            return row.status
        return replace(row.status, eta_seconds=rate.eta(row.status.total_bytes))

    def keep(self, keys: Collection[str]) -> None:
        """Forget every other load."""
        self._rates = {key: rate for key, rate in self._rates.items() if key in keys}
