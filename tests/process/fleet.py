"""A cluster whose every way from a worker to a frontend can be broken, and what is watched meanwhile."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg2

from localai_dist.testing.cluster import Cluster, Plan
from localai_dist.testing.faults import FaultProxy, Faults
from localai_dist.testing.waiting import until
from tests.process.kit import open_folder, quick_plan, rows, running
from tests.process.scripted import chat, galleries, pin, write_model

ROUTE = "/api/cluster/connect"
GRACE = "LOCALAI_WORKER_RECONNECT_GRACE"
GATED = "test:end_gate"
"""Option of a model whose answers can be kept from ending, see ``Fleet.standing``."""
HOMED_WITHIN = 40.0
"""A worker has a tunnel again within this (s): its longest wait between two rounds is 30."""


class Fleet:
    """
    A running cluster and the ways of its workers.

    Attributes:
        cluster: the daemons.
        ways: by the numbers of worker and frontend.
        faults: makes more of them.
    """

    def __init__(self, cluster: Cluster, ways: dict[tuple[int, int], FaultProxy], faults: Faults) -> None:
        self.cluster = cluster
        self.ways = ways
        self.faults = faults

    def home(self, worker: int) -> int | None:
        """The frontend whose instance the ownership row of a worker names."""
        return self.homes()[worker]

    def homes(self) -> list[int | None]:
        """The same of every worker."""
        names = [frontend.instance_id for frontend in self.cluster.frontends]
        statement = (
            "select n.name, c.owner_instance_id from backend_nodes n join node_connections c on c.node_id = n.id"
        )
        owners = dict(rows(self.cluster.database.url, statement))
        found = [owners.get(worker.name) for worker in self.cluster.workers]
        return [names.index(owner) if owner in names else None for owner in found]

    def claims(self) -> list[int]:
        """The number of the last claim of every worker's tunnel: a later claim has a greater one; 0 for none yet."""
        statement = "select n.name, c.epoch from backend_nodes n join node_connections c on c.node_id = n.id"
        epochs = dict(rows(self.cluster.database.url, statement))
        return [int(epochs.get(worker.name, 0)) for worker in self.cluster.workers]

    def homed(self, worker: int, since: int = 0) -> None:
        """
        Wait until a worker has its tunnel, the registry knows it, and every frontend places models there.

        A worker that says it is ready was admitted; the frontend's claim comes after that, and until then a request
        finds no way to it. One that had departed may be found so once more before the claim, and is unhealthy then
        until the next look.

        Args:
            since: the claim that was there before; 0 when there was no tunnel, or none that counted any more.
        """
        child = self.cluster.workers[worker]
        self.cluster.wait_for(f"{child.name} ready", child.is_ready, HOMED_WITHIN)
        self.cluster.wait_for(
            f"a claim of the tunnel of {child.name}",
            lambda: self.home(worker) is not None and self.claims()[worker] > since,
            HOMED_WITHIN,
        )
        for frontend in [one for one in self.cluster.frontends if one.is_alive()]:
            self.cluster.wait_for(
                f"{child.name} healthy at {frontend.name}",
                lambda it=frontend: self.statuses(it)[worker] == "healthy",
                HOMED_WITHIN,
            )

    @contextmanager
    def standing(self, *models: str) -> Iterator[Callable[[], None]]:
        """
        Inside, answers of these ``GATED`` models are said and don't end; until the function is called that this gives.
        """
        gates = [_gate(self.cluster.plan.state, model) for model in models]

        def let_end() -> None:
            for gate in gates:
                gate.touch()

        for gate in gates:
            gate.unlink()
        try:
            yield let_end
        finally:
            let_end()

    def spread(self) -> list[int | None]:
        """Every worker's home, which must not all be the same: the guard of what needs owner path and relay path."""
        homes = self.homes()
        assert None not in homes and len(set(homes)) == len(self.cluster.frontends), f"tunnels end at {homes}"
        return homes

    def settle(self) -> None:
        """Everything runs, no way is broken, worker k has its tunnel at frontend k: where every test begins."""
        for way in self.ways.values():
            way.heal()
        for child in [*self.cluster.frontends, *self.cluster.workers]:
            child.thaw()
            if not child.is_alive():
                child.start()
        for frontend in self.cluster.frontends:
            self.cluster.wait_for(f"{frontend.name} ready", frontend.is_ready, 40)
        since = [0] * len(self.cluster.workers)
        for index, worker in enumerate(self.cluster.workers):
            if self.home(index) != self._own(index) or not worker.is_ready():
                since[index] = self.claims()[index]
                self.cluster.restart(worker)  # it dials its own frontend first, and has no failure to wait out
        for index, claim in enumerate(since):
            self.homed(index, claim)
        homes = self.homes()
        assert homes == [self._own(index) for index in range(len(homes))], f"tunnels end at {homes}"
        for frontend in self.cluster.frontends:
            self.cluster.wait_for(
                f"healthy nodes at {frontend.name}", lambda it=frontend: set(self.statuses(it)) == {"healthy"}, 30
            )

    def _own(self, worker: int) -> int:
        """The frontend that a worker is told first."""
        return worker % len(self.cluster.frontends)

    def statuses(self, frontend: Any) -> list[str]:
        """What a frontend says of the workers."""
        nodes = self.cluster.nodes(frontend)
        return [str(nodes.get(worker.name, {}).get("status")) for worker in self.cluster.workers]

    def asked(self, frontend: int, model: str, **more: Any) -> tuple[int, str]:
        """Status of one chat, and its text or the error's code."""
        reply = chat(self.cluster, self.cluster.frontends[frontend], model, **more)
        body = reply.json() or {}
        if reply.status == 200:
            return 200, body["choices"][0]["message"]["content"]
        return reply.status, body.get("error", {}).get("code", reply.text)

    def rows(self, statement: str, *parameters: Any) -> list[tuple[Any, ...]]:
        """The rows of one statement."""
        return rows(self.cluster.database.url, statement, *parameters)

    def replicas(self) -> set[tuple[str, str, str]]:
        """What counts as loaded: model, node, address."""
        return {tuple(row) for row in self.rows("select model_name, node_id, address from node_models")}  # type: ignore[misc]


@contextmanager
def fleet_of(
    name: str,
    models: Mapping[str, tuple[Any, ...]],
    frontend_env: Mapping[str, str] | None = None,
    *,
    quick: bool = True,
    **plan: Any,
) -> Iterator[Fleet]:
    """
    A running fleet with the scriptable backend and ``quick`` knobs, or the defaults; ``frontend_env`` goes over them.

    ``LOCALAI_WORKER_RECONNECT_GRACE`` of this process goes over everything, so that a suite can be attacked by it.

    Args:
        name: of its folder.
        models: name -> the one worker it is placed on, and the backend's options.
    """
    ways: dict[tuple[int, int], FaultProxy] = {}
    with open_folder(name) as folder, Faults() as faults:

        def way(worker: int, frontend: int, url: str) -> str:
            proxy = ways[worker, frontend] = faults.proxy(url)
            return proxy.url

        env = {**galleries(folder), **(frontend_env or {})}
        if GRACE in os.environ:
            env[GRACE] = os.environ[GRACE]
        made: dict[str, Any] = {"models": [], "way": way, "durable": False, **plan, "frontend_env": env}
        state = folder / "state"
        (state / "models").mkdir(parents=True)
        for model, (_, *options) in models.items():
            _gate(state, model).touch()
            gated = f"{GATED}={_gate(state, model)}"
            write_model(state, model, *(gated if option == GATED else option for option in options))
        with running(quick_plan(state, **made) if quick else Plan(state=state, **made)) as cluster:
            for model, (worker, *_) in models.items():
                pin(cluster, model, worker)
            yield Fleet(cluster, ways, faults)


def _gate(state: Path, model: str) -> Path:
    """The file whose presence lets answers of a model end."""
    return state / f"{model}.end-gate"


class Watch:
    """
    Notes every distinct value of a fact, in order, until told to stop; asked in a thread of its own.

    Use it around what must not happen, then look at ``seen``.
    """

    def __init__(self, fact: Callable[[], Any], every: float = 0.05) -> None:
        self.seen: list[Any] = []
        self.asked = 0
        self._fact = fact
        self._every = every
        self._over = threading.Event()
        self._pool = ThreadPoolExecutor(1)

    def __enter__(self) -> Watch:
        """Begin; returns once the fact was asked for the first time."""
        self._running = self._pool.submit(self._run)
        until("a first look", lambda: self.asked or self._running.done(), 10)
        return self

    def __exit__(self, kind: object, error: object, at: object) -> None:
        """Stop after one more look, at how things are by now; what went wrong while asking is raised here."""
        self._over.set()
        self._pool.shutdown()
        if error is None:
            self._running.result()

    def _run(self) -> None:
        self._look()
        while not self._over.wait(self._every):
            self._look()
        self._look()

    def _look(self) -> None:
        value = self._fact()
        if not self.seen or self.seen[-1] != value:
            self.seen.append(value)
        self.asked += 1


@contextmanager
def asking(database_url: str) -> Iterator[Callable[..., list[tuple[Any, ...]]]]:
    """Many questions on one connection: a function from a statement and its parameters to rows."""
    connection = psycopg2.connect(database_url)
    connection.autocommit = True

    def ask(statement: str, *parameters: Any) -> list[tuple[Any, ...]]:
        with connection.cursor() as cursor:
            cursor.execute(statement, parameters)
            return cursor.fetchall()

    try:
        yield ask
    finally:
        connection.close()
