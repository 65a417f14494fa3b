"""The bus of one frontend: its LISTEN connection, its two ends, and the sweep that all frontends share."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any, Final

from twisted.internet.defer import Deferred
from twisted.internet.task import LoopingCall
from twisted.logger import Logger

from localai_dist.bus.publisher import SQL, Publisher
from localai_dist.bus.subscriber import Subscriber
from localai_dist.store.acting import acts_on
from localai_dist.store.errors import StoreError
from localai_dist.store.listener import Listener
from localai_dist.store.pool import Pool
from localai_dist.units import MINUTE

RETENTION: Final = 10 * MINUTE
"""How long a spilled payload is kept (s). Source: design §7."""

SWEEP: Final = 5 * MINUTE
"""How often each frontend removes old payloads (s). Source: design §7."""

NAME: Final = "localai_pgbus_"
"""How LISTEN connections begin their application name; the rest is unique to the process."""

QUEUE_USAGE: Final = 0.1
"""Share of PostgreSQL's notification queue (8 GB by default) from which on frozen listeners are ended."""

FROZEN: Final = 60.0
"""How long a listener must have taken nothing to count as frozen (s)."""


class Bus:
    """
    Messages to and from every frontend.

    Args:
        dsn: the pool's own database: LISTEN and NOTIFY of different databases never meet.
        pool: sends, and reads what was spilled.
        reactor: for the LISTEN connection, and times the sweep.
        retention: how long a spilled payload is kept (s).
        sweep: between two sweeps (s).
        usage: the share of the notification queue from which on frozen listeners are ended.
        silence: how long a listener must have taken nothing to count as frozen (s).
        make: how the LISTEN connection is made.
    """

    log = Logger()

    def __init__(
        self,
        dsn: str,
        pool: Pool,
        *,
        reactor: Any,
        retention: float = RETENTION,
        sweep: float = SWEEP,
        usage: float = QUEUE_USAGE,
        silence: float = FROZEN,
        make: Callable[..., Listener] = Listener,
    ) -> None:
        self.name: Final = NAME + str(uuid.uuid4())
        self._pool = pool
        self._listener = make(dsn, reactor, application_name=self.name)
        self._retention = retention
        self._every = sweep
        self._unblock: dict[str, Any] = {"usage": usage, "silence": silence, "prefix": NAME.replace("_", r"\_") + "%"}
        self._sweeping = LoopingCall(lambda: Deferred.fromCoroutine(self.sweep()))
        self._sweeping.clock = reactor
        self.publisher = Publisher(pool)
        self.subscriber = Subscriber(self._listener, pool)
        self.purged = 0

    @property
    def healthy(self) -> bool:
        """Whether messages of others arrive."""
        return self._listener.healthy

    @property
    def reconnections(self) -> int:
        """How often the LISTEN connection was made anew."""
        return max(0, self._listener.connects - 1)

    async def start(self) -> None:
        """
        Connect; subscriptions may be made now.

        Raises:
            StoreUnavailable: no LISTEN connection. It may be started again, also after a stop.
        """
        await self._listener.start()
        self._listener.on_reconnect(self._end_ghosts)
        self.subscriber.begin()
        done = self._sweeping.start(self._every, now=False)
        done.addErrback(lambda failure: self.log.failure("sweeping the bus stopped", failure))

    async def stop(self) -> None:
        """Call nobody any more, and close the connection."""
        if self._sweeping.running:
            self._sweeping.stop()
        self.subscriber.stop()
        self.publisher.stop()
        await self._listener.stop()

    @acts_on("expired", "bus.sweep")
    async def sweep(self) -> None:
        """Remove payloads that outlived their retention, and end listeners that would block everybody."""
        try:
            self.purged += await self._pool.execute(SQL["sweep"], {"retention": self._retention})
            await self._end_frozen()
        except StoreError as error:
            self.log.info("the bus was not swept: {error}", error=str(error))

    async def _end_frozen(self) -> None:
        """End the LISTEN connections of frozen frontends if the queue of notifications fills; raises ``StoreError``."""
        ended = len(await self._pool.fetch(SQL["unblock"], self._unblock))
        if ended:
            silence = self._unblock["silence"]
            self.log.warn("ended {count} LISTEN connections that took nothing for {s:.0f} s", count=ended, s=silence)

    def _end_ghosts(self) -> None:
        """After a reconnection the server may still keep the connection before: never two."""
        ending = Deferred.fromCoroutine(self._pool.fetch(SQL["end_ghosts"], {"application_name": self.name}))
        ending.addErrback(lambda failure: failure.trap(StoreError))
