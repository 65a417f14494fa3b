"""Work that would block the reactor, done in a thread."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, ParamSpec, Protocol, TypeVar

from twisted.internet.threads import deferToThreadPool

P = ParamSpec("P")
T = TypeVar("T")


class Offload(Protocol):
    """Runs a function elsewhere; the awaited result or exception is the function's."""

    def __call__(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Awaitable[T]:
        """Start it. Cancelling the wait does not stop it."""


class ThreadOffload:
    """In the reactor's thread pool."""

    def __init__(self, reactor: Any) -> None:
        self._reactor = reactor

    def __call__(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Awaitable[T]:
        """Start ``function`` in the pool."""
        return deferToThreadPool(self._reactor, self._reactor.getThreadPool(), function, *args, **kwargs)
