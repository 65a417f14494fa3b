"""
Replicas of older configurations and of deleted models, stopped exactly, one by one, until they are gone.

A replica whose configuration is not the model's any more takes no new request, because every request asks for its own
revision. A few seconds later (other frontends read their models folder too) its row says ``unloading``; what runs on it
ends, then its process is stopped and its row goes. What fails is tried again later: the row keeps when and why, so a
restart of every frontend loses nothing.

A model that was deleted here may be served elsewhere: each frontend that has no file of it says so in the replica's
row, again and again, and only when every live one said so a moment ago is the replica retired. A file or a folder that
can't be read is no deletion. After the start and after a time without the database nobody knows yet who is live: that
takes a whole live window of looks that found the database.

Source: LOAD-22.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from twisted.internet.defer import Deferred
from twisted.internet.task import LoopingCall
from twisted.logger import Logger

from localai_dist.backoff import Backoff
from localai_dist.catalog.model import ModelConfig
from localai_dist.ids import InstanceId
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

_VOTES = 3
"""For how many looks a frontend's word that it serves a model no more counts."""

_GAP = 2
"""So many looks' time without the database is one in which others could not say that they are live."""

_Key = tuple[str, str, int, str, str]


class RetirementTable:
    """
    The rows' side; raises ``StoreUnavailable``.

    Args:
        instance: this frontend.
        live_window: seconds after which a silent frontend is not live.
    """

    def __init__(self, pool: PoolLike, instance: InstanceId, live_window: float) -> None:
        self._pool = pool
        self._instance = instance
        self._live_window = live_window

    async def vote(self, replica: Replica) -> None:
        """This frontend does not serve the model of ``replica``."""
        await self._pool.execute(_SQL["vote"], {**_values(replica), "owner": self._instance})

    @acts_on("asked", "retirement.mark_unserved")
    async def mark_unserved(self, replica: Replica, fresh: float) -> bool:
        """
        No new request to ``replica``, as no frontend serves its model; False when one may, or it is another one by now.

        Args:
            fresh: a frontend's word counts for so long (s).
        """
        values = {"revision": replica.config_revision, "live_window": self._live_window, "fresh": fresh}
        values["owner"] = self._instance
        return await self._pool.execute(_SQL["mark_unserved"], {**_values(replica), **values}) > 0

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
        is_gone: whether this frontend has no file of a model, not even a broken one.
    """

    log = Logger()

    def __init__(
        self,
        tools: Tools,
        find_model: Callable[[str], ModelConfig | None],
        is_gone: Callable[[str], bool],
        table: RetirementTable,
    ) -> None:
        self._tools = tools
        self._find_model = find_model
        self._is_gone = is_gone
        self._table = table
        self._old_since: dict[_Key, float] = {}
        self._unserved_since: dict[_Key, float] = {}
        self._found: tuple[float, float] | None = None  # since when each look found the database; the last that did
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
        """Mark what is old or unserved, and stop what is marked, one after the other."""
        try:
            rows = await self._tools.fleet.replicas.all()
            self._note_found()
            marked = await self._mark_old([row for row in rows if self._is_old(row)])
            marked += await self._mark_unserved([row for row in rows if self._is_unserved(row)])
            if not marked and not any(row.state == "unloading" for row in rows):
                return
            while (taken := await self._table.take(self._tools.settings.drain)) is not None:
                await self._stop(*taken)
        except StoreError as error:
            self._found = None
            self.log.info("old replicas were not looked after: {error}", error=error)

    async def _mark_old(self, rows: Sequence[Replica]) -> int:
        marked = 0
        self._old_since = self._since(self._old_since, rows)
        for row in rows:
            if self._is_due(self._old_since[_key(row)]) and await self._table.mark(row):
                marked += 1
                self._tell(row, "has an older configuration")
        return marked

    async def _mark_unserved(self, rows: Sequence[Replica]) -> int:
        """Say what this frontend does not serve; retire what no frontend serves."""
        marked = 0
        self._unserved_since = self._since(self._unserved_since, rows)
        for row in rows:
            if not self._is_due(self._unserved_since[_key(row)]):
                continue
            await self._table.vote(row)
            if self._knows_who_is_live() and await self._table.mark_unserved(
                row, fresh=_VOTES * self._tools.settings.retire
            ):
                marked += 1
                self._tell(row, "is of a model that no frontend serves any more")
        return marked

    def _note_found(self) -> None:
        now = self._tools.clock.seconds()
        first, last = self._found or (now, now)
        self._found = (first if now - last <= _GAP * self._tools.settings.retire else now, now)

    def _knows_who_is_live(self) -> bool:
        first, last = self._found or (0.0, 0.0)
        return last - first >= self._tools.settings.live_window

    def _since(self, before: Mapping[_Key, float], rows: Sequence[Replica]) -> dict[_Key, float]:
        now = self._tools.clock.seconds()
        return {_key(row): before.get(_key(row), now) for row in rows}

    def _is_due(self, since: float) -> bool:
        return self._tools.clock.seconds() - since >= self._tools.settings.retire

    def _tell(self, row: Replica, why: str) -> None:
        self.log.info(
            "{model} #{index} on node {node} {why}: it takes no new request",
            model=row.model_name,
            index=row.replica_index,
            node=row.node_called,
            why=why,
        )

    def _is_unserved(self, row: Replica) -> bool:
        return row.state == "loaded" and self._find_model(row.model_name) is None and self._is_gone(row.model_name)

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
                name=self._tools.called(replica.node_id),
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
