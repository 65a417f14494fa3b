"""Doubles for the tunnel's neighbours: ownership rows in a dict, and sessions that only live and end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from twisted.internet.defer import Deferred, succeed
from twisted.python.failure import Failure

from localai_dist.ids import Epoch, InstanceId, NodeId
from localai_dist.mux.errors import SessionDead
from localai_dist.net.errors import SessionLost
from localai_dist.net.session import SessionEnd
from localai_dist.store.errors import FencedOut, StoreUnavailable


class Rows:
    """Ownership as the database keeps it: one row a node, epochs from a sequence; ``hold`` delays every answer."""

    def __init__(self) -> None:
        self.rows: dict[NodeId, tuple[InstanceId, Epoch]] = {}
        self.released: list[NodeId] = []
        self.down = False
        self.hold: list[Deferred[None]] | None = None
        self._epoch = 0

    async def _answer(self) -> None:
        if self.hold is not None:
            waiting: Deferred[None] = Deferred()
            self.hold.append(waiting)
            await waiting
        if self.down:
            raise StoreUnavailable("the database is away")

    async def claim(self, node: NodeId, instance: InstanceId) -> Epoch:
        """The last one wins."""
        await self._answer()
        self._epoch += 1
        self.rows[node] = (instance, Epoch(self._epoch))
        return Epoch(self._epoch)

    async def reclaim(self, node: NodeId, instance: InstanceId, epoch: Epoch) -> Epoch:
        """Only if nobody claimed it since."""
        _, known = self.rows.get(node, (instance, epoch))
        if known != epoch:
            await self._answer()
            raise FencedOut("not yours")
        return await self.claim(node, instance)

    async def release(self, node: NodeId, instance: InstanceId, epoch: Epoch) -> None:
        """Only exactly that claim."""
        await self._answer()
        if self.rows.get(node) != (instance, epoch):
            raise FencedOut("not yours")
        del self.rows[node]
        self.released.append(node)

    async def adopt(self, nodes: Sequence[NodeId], instance: InstanceId) -> dict[NodeId, Epoch]:
        """Those that were given up and have no owner now."""
        await self._answer()
        lost = [node for node in nodes if node in self.released and node not in self.rows]
        return {node: await self.claim(node, instance) for node in lost}

    async def held_by(self, instance: InstanceId) -> dict[NodeId, Epoch]:
        """Every row of that instance."""
        await self._answer()
        return {node: epoch for node, (owner, epoch) in self.rows.items() if owner == instance}


class ASession:
    """A session that can be told to go, and that ends."""

    def __init__(self, opened_at: float = 0.0) -> None:
        self.is_open = True
        self.is_going_away = False
        self.opened_at = opened_at
        self.told = 0
        self.stream_count = 0
        self.on_idle: Callable[[], None] | None = None
        self.closed_here = False
        self.on_go_away: Callable[[], None] | None = None
        self._end: SessionEnd | None = None
        self._watchers: list[Deferred[SessionEnd]] = []

    def when_closed(self) -> Deferred[SessionEnd]:
        """As ``MuxSession``'s."""
        if self._end is not None:
            return succeed(self._end)
        watcher: Deferred[SessionEnd] = Deferred()
        self._watchers.append(watcher)
        return watcher

    def go_away(self) -> None:
        """Count it."""
        self.told += 1

    def close(self) -> None:
        """End from this side."""
        self.closed_here = True
        self.end(SessionLost("the session was closed here"))

    def abort(self, reason: Exception) -> None:
        """End from this side, at once."""
        self.closed_here = True
        self.end(reason)

    def end(self, reason: Exception | None = None) -> None:
        """The session is over."""
        if not self.is_open:
            return
        self.is_open = False
        self._end = SessionEnd(Failure(reason or SessionDead("the connection was lost")))
        watchers, self._watchers = self._watchers, []
        for watcher in watchers:
            watcher.callback(self._end)


def session(opened_at: float = 0.0) -> Any:
    """A session double, typed so that it passes for a ``MuxSession``."""
    return ASession(opened_at)
