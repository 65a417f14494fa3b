"""The numbers of a session, and how its end is told."""

from __future__ import annotations

from dataclasses import dataclass

from twisted.python.failure import Failure

from localai_dist.mux.limits import Limits
from localai_dist.units import KiB, MiB


@dataclass(frozen=True)
class SessionConfig:
    """
    The numbers of a session.

    Attributes:
        initial_window: receive window of each stream (bytes, at least 256 KiB).
        max_window: no receive window grows beyond this (bytes).
        keepalive_interval: PING after this long without a received byte (s).
        keepalive_timeout: session death after this long without one (s).
        max_streams: concurrent streams each end may open.
        backlog: opens the far side has not accepted yet.
        session_pool: what all windows may grow by, together (bytes).

    Source: design §7.
    """

    initial_window: int = 256 * KiB
    max_window: int = 16 * MiB
    keepalive_interval: float = 5.0
    keepalive_timeout: float = 15.0
    max_streams: int = 1000
    backlog: int = 256
    session_pool: int = 64 * MiB

    def limits(self) -> Limits:
        """The same, as the pure session takes them."""
        return Limits(self.initial_window, self.max_window, self.max_streams, self.backlog, self.session_pool)


@dataclass(frozen=True)
class SessionEnd:
    """
    Why a session ended; a ``Failure`` itself would turn the callback that carries it into an errback.

    Attributes:
        failure: what every stream still open was told.
    """

    failure: Failure

    @property
    def value(self) -> BaseException:
        """The exception."""
        value = self.failure.value
        assert value is not None
        return value

    def getErrorMessage(self) -> str:
        """Its text."""
        return self.failure.getErrorMessage()

    def check(self, *types: type[BaseException]) -> type[BaseException] | None:
        """Which of ``types`` the exception is, as ``Failure.check``."""
        found: type[BaseException] | None = self.failure.check(*types)
        return found
