"""
Replicas of older configurations, stopped exactly, one by one, until they are gone.

A replica whose configuration is not the model's any more takes no new request, because every request asks for its own
revision. A few seconds later (other frontends read their models folder too) its row says ``unloading``; what runs on it
ends, then its process is stopped and its row goes. What fails is tried again later: the row keeps when and why, so a
restart of every frontend loses nothing.

Source: LOAD-22.
"""

from __future__ import annotations

from collections.abc import Callable

from twisted.internet.defer import Deferred
from twisted.internet.task import LoopingCall
from twisted.logger import Logger

from localai_dist.backoff import Backoff
from localai_dist.catalog.model import ModelConfig
from localai_dist.loads.errors import UnloadFailed
from localai_dist.loads.rows import PoolLike
from localai_dist.loads.stop import stop_exactly
from localai_dist.loads.tools import Tools
from localai_dist.reach import Unreached, may_reap
from localai_dist.registry.acting import acts_on
from localai_dist.registry.records import Replica, replica_of
from localai_dist.store.errors import StoreError
from localai_dist.store.statements import load_statements
from localai_dist.units import MINUTE

_SQL = load_statements("retirement.sql")

AGAIN = Backoff(first=2.0, cap=MINUTE)
"""Between tries to stop one replica."""

LEASE = MINUTE
"""How long a frontend has for one try before another one may begin the next (s)."""

_Key = tuple[str, str, int, str, str]


class RetirementTable:
    """The rows' side; raises ``StoreUnavailable``."""

    def __init__(self, pool: PoolLike) -> None:
        self._pool = pool

    @acts_on("asked", "retirement.mark")
    async def mark(self, replica: Replica) -> bool:
        """No new request to ``replica``; False when it is another one by now."""
        return await self._pool.execute(_SQL["mark"], {**_values(replica), "revision": replica.config_revision}) > 0

    async def take(self, drain: float) -> tuple[Replica, int] | None:
        """A replica to stop now, and which try it is; None when there is none."""
        row = await self._pool.fetch_one(_SQL["take"], {"lease": LEASE, "drain": drain})
        return None if row is None else (replica_of(row), row["cleanup_attempts"])

    async def failed(self, replica: Replica, error: str, again: float) -> None:
        """It did not go."""
        await self._pool.execute(_SQL["failed"], {**_values(replica), "error": error[:1000], "again": again})


class Retirement:
    """
    The looks of one frontend.

    Args:
        find_model: a model of this frontend by name.
    """

    log = Logger()

    def __init__(self, tools: Tools, find_model: Callable[[str], ModelConfig | None], table: RetirementTable) -> None:
        self._tools = tools
        self._find_model = find_model
        self._table = table
        self._old_since: dict[_Key, float] = {}
        self._loop = LoopingCall(lambda: Deferred.fromCoroutine(self.look()))
        self._loop.clock = tools.clock

    def start(self) -> None:
        """Begin to look."""
        done = self._loop.start(self._tools.settings.retire, now=False)
        done.addErrback(lambda failure: self.log.failure("the retirement of old replicas stopped", failure))

    def stop(self) -> None:
        """Stop looking; what is not done is done by the other frontends."""
        if self._loop.running:
            self._loop.stop()

    async def look(self) -> None:
        """Mark what is old, and stop what is marked, one after the other."""
        try:
            await self._mark_old()
            while (taken := await self._table.take(self._tools.settings.drain)) is not None:
                await self._stop(*taken)
        except StoreError as error:
            self.log.info("old replicas were not looked after: {error}", error=error)

    async def _mark_old(self) -> None:
        now = self._tools.clock.seconds()
        old = {_key(row): row for row in await self._tools.fleet.replicas.all() if self._is_old(row)}
        self._old_since = {key: self._old_since.get(key, now) for key in old}
        for key, row in old.items():
            if now - self._old_since[key] >= self._tools.settings.retire and await self._table.mark(row):
                self.log.info(
                    "{model} #{index} on node {node} has an older configuration: it takes no new request",
                    model=row.model_name,
                    index=row.replica_index,
                    node=row.node_id,
                )

    def _is_old(self, row: Replica) -> bool:
        model = self._find_model(row.model_name)
        return (
            row.state == "loaded"
            and bool(row.config_revision)
            and model is not None
            and (model.revision != row.config_revision)
        )

    async def _stop(self, replica: Replica, attempt: int) -> None:
        replicas = self._tools.fleet.replicas
        try:
            await stop_exactly(
                self._tools.verbs,
                replica.node_id,
                replica.model_name,
                replica.replica_index,
                replica.address,
                revision=replica.config_revision,
            )
        except UnloadFailed as error:
            await self._table.failed(replica, str(error), AGAIN.delay(attempt, 1.0))
            return
        except Unreached as error:
            if not may_reap(error.outcome):
                await self._table.failed(replica, str(error), AGAIN.delay(attempt, 1.0))
                return
        await replicas.remove(replica.node_id, replica.model_name, replica.replica_index, replica.address)


def _key(row: Replica) -> _Key:
    return (row.node_id, row.model_name, row.replica_index, row.address, row.config_revision)


def _values(row: Replica) -> dict[str, object]:
    return {"node": row.node_id, "model": row.model_name, "index": row.replica_index, "address": row.address}
