"""How long a worker is gone when the frontend that holds its tunnel dies, at the default knobs (CLUS-24)."""

from __future__ import annotations

import sys
import time

from bench.rows import Row, at_most, quantile
from localai_dist.testing.cluster import Cluster
from localai_dist.testing.waiting import until
from localai_dist.testing.web import ask
from localai_dist.tunnel.link import SETTLED
from tests.process.fleet import Fleet, fleet_of
from tests.process.kit import rows
from tests.process.load import Load, Trouble, whole

ROUNDS = 20
RATE = 10.0
BACK_WITHIN = 60.0


def run() -> list[Row]:
    """The rows of CLUS-24."""
    with fleet_of("bench", {"on-0": (0,), "on-1": (1,)}, quick=False) as fleet:
        for frontend in fleet.cluster.frontends:
            for model in ("on-0", "on-1"):
                whole(frontend.url, fleet.cluster.secrets.api_key, model)
        noticed = _black_hole(fleet)
        gaps = [_round(fleet, number) for number in range(ROUNDS)]
    served = f"owner killed under load, served again by the survivor, of {ROUNDS} rounds the"
    silent = "a tunnel that swallows everything, noticed by its"
    return [
        at_most("CLUS-24", f"{served} p50", quantile(gaps, 0.5), "s", 1.0),
        at_most("CLUS-24", f"{served} p99", quantile(gaps, 0.99), "s", 2.5),
        at_most("CLUS-24", f"{silent} worker", noticed[0], "s", 15.0),
        at_most("CLUS-24", f"{silent} owner", noticed[1], "s", 15.0),
    ]


def _round(fleet: Fleet, number: int) -> float:
    """Kill the owner of worker 0 under load; the time until the survivor answers for that worker (s)."""
    cluster = fleet.cluster
    owner = _settled_home(fleet)
    survivor = cluster.frontends[1 - owner]
    load = Load(survivor.url, cluster.secrets.api_key, ["on-0", "on-1"], rate=RATE)
    with load:
        until("the load", lambda: load.answered >= 2 * RATE, 30)
        cluster.frontends[owner].kill()
        gap = _first_answer(survivor.url, cluster.secrets.api_key)
    sys.stdout.write(f"  round {number + 1}: {gap:.2f} s\n")
    sys.stdout.flush()
    cluster.frontends[owner].start()
    until("the killed one ready", cluster.frontends[owner].is_ready, BACK_WITHIN)
    return gap


def _first_answer(url: str, key: str) -> float:
    began = time.monotonic()
    while time.monotonic() - began < BACK_WITHIN:
        try:
            whole(url, key, "on-0")
            return time.monotonic() - began
        except Trouble:
            continue
    return BACK_WITHIN


def _settled_home(fleet: Fleet) -> int:
    """Where worker 0 is at home once its tunnel is old enough for the next redial to be a first one."""
    statement = (
        "select 1 from node_connections where node_id = %s and owner_instance_id <> ''"
        " and connected_at < now() - make_interval(secs => %s)"
    )
    node = fleet.cluster.workers[0].node_id
    until("a settled tunnel", lambda: fleet.rows(statement, node, SETTLED + 1), SETTLED + BACK_WITHIN)
    home = fleet.home(0)
    assert home is not None
    return home


def _black_hole(fleet: Fleet) -> tuple[float, float]:
    """How long the worker and its owner believe in a tunnel that swallows everything (s)."""
    cluster: Cluster = fleet.cluster
    owner, worker = _settled_home(fleet), cluster.workers[0]
    told = f"({worker.node_id}) lost its tunnel"
    log = cluster.frontends[owner].log
    before = log.read_text().count(told)
    fleet.ways[0, owner].swallow()
    began = time.monotonic()
    found: dict[str, float] = {}

    def both() -> bool:
        if "worker" not in found and ask(worker.probe_url + "/readyz").status == 503:
            found["worker"] = time.monotonic() - began
        if "owner" not in found and log.read_text().count(told) > before:
            found["owner"] = time.monotonic() - began
        return len(found) == 2

    until("both ends' notice", both, BACK_WITHIN, every=0.01)
    fleet.ways[0, owner].heal()
    node = "select 1 from node_connections where node_id = %s and owner_instance_id <> ''"
    until("a new tunnel", lambda: rows(cluster.database.url, node, worker.node_id), BACK_WITHIN)
    return found["worker"], found["owner"]
