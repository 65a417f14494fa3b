"""Running frontends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from localai_dist.ids import InstanceId, NodeId
from localai_dist.registry.acting import acts_on
from localai_dist.store.errors import StoreUnavailable
from localai_dist.store.pool import Pool
from localai_dist.store.statements import load_statements

SQL = load_statements("instances.sql")


@dataclass(frozen=True, slots=True)
class Instance:
    """
    One running frontend.

    Attributes:
        address: ``host:port`` other frontends dial; None when it can't be dialled.
        live: seen within the live window, by the database's clock.
    """

    id: InstanceId
    address: str | None
    version: str
    last_seen: datetime
    live: bool


@dataclass(frozen=True, slots=True)
class Beat:
    """
    What one beat came to.

    Attributes:
        alive: False when this frontend's own row is gone: it was swept and must register and claim again.
        swept: frontends that outlived their window and were removed.
        lost: nodes whose owner is gone: their tunnels are lost from now on.
        purged: old departures forgotten.
    """

    alive: bool
    swept: list[InstanceId]
    lost: list[NodeId]
    purged: int


class Instances:
    """
    The rows of running frontends. Every method raises ``StoreUnavailable`` when the database can't answer.

    Args:
        live_window: a frontend not seen for longer is not live (s, database clock).
    """

    def __init__(self, pool: Pool, *, live_window: float) -> None:
        self._pool = pool
        self._live_window = live_window

    async def register(self, id: InstanceId, address: str | None, version: str, peer_token_hash: str) -> None:
        """Publish a running frontend (again): its address and its secret's hash in one statement."""
        await self._pool.execute(SQL["register"], _published(id, address, version, peer_token_hash))

    @acts_on("not_live", "instances.arrive")
    async def arrive(self, id: InstanceId, address: str | None, version: str, peer_token_hash: str) -> list[NodeId]:
        """As ``register``, for a process that has just started; the nodes whose tunnel its former process held."""
        rows = await self._pool.fetch(SQL["arrive"], _published(id, address, version, peer_token_hash))
        return [NodeId(row["node_id"]) for row in rows]

    async def heartbeat(self, id: InstanceId) -> bool:
        """Say that it runs; False when its row is gone."""
        return await self._pool.execute(SQL["heartbeat"], {"id": id}) > 0

    @acts_on("not_live", "instances.beat")
    async def beat(self, id: InstanceId, *, retention: float) -> Beat:
        """Heartbeat, sweep, departures and purge, in one statement (``retention``: how long departures are kept, s)."""
        row = await self._pool.fetch_one(SQL["beat"], {"id": id, "window": self._live_window, "retention": retention})
        if row is None:
            raise StoreUnavailable("the membership beat returned nothing")
        return Beat(row["alive"], list(row["swept"]), list(row["lost"]), row["purged"])

    @acts_on("not_live", "instances.sweep")
    async def sweep(self, self_id: InstanceId) -> list[InstanceId]:
        """Remove dead frontends, never ``self_id``; the tunnels they held are lost from now on."""
        rows = await self._pool.fetch(SQL["sweep"], {"self": self_id, "window": self._live_window})
        return [InstanceId(row["id"]) for row in rows]

    @acts_on("not_live", "instances.deregister")
    async def deregister(self, id: InstanceId) -> None:
        """A frontend stops: its row goes, the tunnels it held are lost from now on."""
        await self._pool.execute(SQL["deregister"], {"id": id})

    async def peer_token_hash(self, id: InstanceId) -> str | None:
        """The hash of that frontend's own secret; None when it has no row."""
        row = await self._pool.fetch_one(SQL["peer_token_hash"], {"id": id})
        return None if row is None else row["peer_token_hash"]

    async def live(self, id: InstanceId) -> Instance | None:
        """That frontend, if it is live."""
        row = await self._pool.fetch_one(SQL["live"], {"id": id, "window": self._live_window})
        return None if row is None else _instance(row, True)

    async def all(self) -> list[Instance]:
        """Every frontend that has a row."""
        rows = await self._pool.fetch(SQL["all"], {"window": self._live_window})
        return [_instance(row, row["is_live"]) for row in rows]


def _published(id: InstanceId, address: str | None, version: str, peer_token_hash: str) -> dict[str, str]:
    return {"id": id, "address": address or "", "version": version[:64], "peer_token_hash": peer_token_hash}


def _instance(row: Mapping[str, Any], live: bool) -> Instance:
    return Instance(InstanceId(row["id"]), row["advertised_addr"] or None, row["version"], row["last_seen"], live)
