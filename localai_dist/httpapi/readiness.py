"""Whether this frontend should be sent requests, and why not."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

from twisted.internet.interfaces import IReactorTime

from localai_dist.errors import without_coordinates


@dataclass(frozen=True, slots=True)
class Check:
    """
    One thing readiness depends on.

    Attributes:
        reason: why it is not well, for operators; ``told`` for everybody else.
        since: when it last changed (s since the epoch).
    """

    ok: bool
    reason: str
    since: float
    told: str = ""


class Readiness:
    """
    The checks of a frontend, and whether it is going away.

    ``starting`` until every expected check was good once; then ``ready``, or ``degraded`` while one is bad;
    ``draining`` for good once told so. Only ``ready`` answers 200. Source: design §8.

    Args:
        expected: the names of the checks that must be good before this frontend is ready.
    """

    def __init__(self, *expected: str, clock: IReactorTime) -> None:
        self._clock = clock
        self._started = False
        self._draining = False
        self._checks = {name: Check(False, "not checked yet", clock.seconds(), "not checked yet") for name in expected}

    def note(self, name: str, ok: bool, reason: str = "", told: str = "") -> None:
        """
        Record how the check ``name`` stands now.

        Args:
            told: the reason for who is no operator; the reason without coordinates unless given.
        """
        before = self._checks.get(name)
        if before is not None and before.ok == ok and before.reason == reason:
            return
        since = before.since if before is not None and before.ok == ok else self._clock.seconds()
        self._checks[name] = Check(ok, reason, since, told or without_coordinates(reason))
        self._started = self._started or all(check.ok for check in self._checks.values())

    def drain(self) -> None:
        """From now on this frontend is going away."""
        self._draining = True

    @property
    def status(self) -> str:
        """``starting``, ``ready``, ``degraded`` or ``draining``."""
        if self._draining:
            return "draining"
        if not self._started:
            return "starting"
        return "ready" if all(check.ok for check in self._checks.values()) else "degraded"

    def as_json(self, *, operator: bool = False) -> dict[str, object]:
        """The body of ``/readyz``; an ``operator`` is told where the database is."""
        checks = {
            name: {"ok": check.ok, "reason": check.reason if operator else check.told, "since": _timestamp(check.since)}
            for name, check in self._checks.items()
        }
        return {"status": self.status, "checks": checks}


def _timestamp(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()
