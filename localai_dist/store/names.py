"""
Host names of the database, looked up in a thread.

libpq looks names up while the whole reactor waits, which is seconds when the name server is away.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.threads import deferToThreadPool
from twisted.python.failure import Failure

from localai_dist.store.dsn import names_in, with_addresses


def look_up(name: str) -> list[str]:
    """
    The addresses of ``name``; blocks.

    Raises:
        OSError: it has none, or nobody answers.
    """
    found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


class Names:
    """
    Looks names up, each at most once at a time: a name server that is away holds one thread, however often it is asked.

    Args:
        reactor: ``IReactorThreads``; its thread pool is used.
        blocking: the lookup itself.
    """

    def __init__(self, reactor: Any, *, blocking: Callable[[str], list[str]] = look_up) -> None:
        self._reactor = reactor
        self._blocking = blocking
        self._asked: dict[str, list[Deferred[list[str]]]] = {}

    async def resolved(self, dsn: str) -> str:
        """
        ``dsn`` with addresses beside its names; itself if it has none.

        Raises:
            OSError: a name has no address.
        """
        names = names_in(dsn)
        if not names:
            return dsn
        return with_addresses(dsn, {name: await self._addresses(name) for name in names})

    def _addresses(self, name: str) -> Deferred[list[str]]:
        answer: Deferred[list[str]] = Deferred()
        if name in self._asked:
            self._asked[name].append(answer)
            return answer
        self._asked[name] = [answer]
        looking = deferToThreadPool(self._reactor, self._reactor.getThreadPool(), self._blocking, name)
        looking.addBoth(self._told, name)
        return answer

    def _told(self, result: list[str] | Failure, name: str) -> None:
        for answer in self._asked.pop(name):
            if isinstance(result, Failure):
                answer.errback(result)
            else:
                answer.callback(result)
