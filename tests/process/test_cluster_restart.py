"""Frontends that come back: with nothing on their disk, after a freeze, all at once, under the same id."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from localai_dist.testing.waiting import until
from localai_dist.testing.web import ask
from tests.process.fleet import HOMED_WITHIN, Fleet, Watch, asking, fleet_of
from tests.process.load import ANSWER
from tests.process.scripted import reported

LIVE_WINDOW = 4.0
BEAT = LIVE_WINDOW / 6


@pytest.fixture(scope="module")
def ready() -> Iterator[Fleet]:
    """Two frontends, two workers, quick sweeps, and a model on each worker, loaded."""
    # A heartbeat to a frozen frontend takes twenty seconds to go to the next one: a node may be silent that long.
    env = {"LOCALAI_INSTANCE_LIVE_WINDOW": f"{LIVE_WINDOW}s", "LOCALAI_NODE_STALE_AFTER": "60s"}
    with fleet_of("restart", {"on-0": (0,), "on-1": (1,)}, env) as fleet:
        yield fleet


@pytest.fixture
def fleet(ready: Fleet) -> Fleet:
    """The same, everything running, each tunnel at its own frontend, both models loaded."""
    ready.settle()
    for worker in (0, 1):
        assert ready.asked(worker, f"on-{worker}") == (200, ANSWER)
    return ready


def everything_answers(fleet: Fleet) -> None:
    """Both models through both frontends."""
    for frontend in (0, 1):
        for worker in (0, 1):
            assert fleet.asked(frontend, f"on-{worker}") == (200, ANSWER)


def test_all_frontends_restarted_at_once(fleet: Fleet) -> None:
    """
    Killed together and started again: the workers find them without a restart, loaded models answer without being
    loaded again, no node is there twice (BR-082).
    """
    cluster = fleet.cluster
    nodes = fleet.rows("select id, name from backend_nodes order by 1")
    replicas = fleet.replicas()
    loads = [len(reported(cluster.state.root / f"on-{worker}.events", "load")) for worker in (0, 1)]
    pids, claims = [worker.pid for worker in cluster.workers], fleet.claims()
    for frontend in cluster.frontends:
        frontend.kill()
    for frontend in cluster.frontends:
        frontend.start()
    for frontend in cluster.frontends:
        until(f"{frontend.name} ready", frontend.is_ready, 40)
    for worker, claim in enumerate(claims):
        fleet.homed(worker, claim)
    everything_answers(fleet)
    assert fleet.replicas() == replicas
    assert [len(reported(cluster.state.root / f"on-{worker}.events", "load")) for worker in (0, 1)] == loads
    assert fleet.rows("select id, name from backend_nodes order by 1") == nodes
    assert [worker.pid for worker in cluster.workers if worker.is_alive()] == pids


def test_a_frontend_with_an_emptied_data_folder(fleet: Fleet) -> None:
    """Nothing is listed without a key; wiped, on the same port, it knows every node and takes heartbeats (CLUS-21)."""
    cluster = fleet.cluster
    for frontend in cluster.frontends:
        refused = ask(frontend.url + "/api/nodes")
        assert (refused.status, refused.json()["error"]["code"]) == (401, "invalid_api_key")
    before = {name: (node["id"], node["approved"]) for name, node in cluster.nodes(cluster.frontends[0]).items()}
    cluster.restart(cluster.frontends[0], emptied=True)
    until("the wiped frontend ready", cluster.frontends[0].is_ready, 40)
    after = {name: (node["id"], node["approved"]) for name, node in cluster.nodes(cluster.frontends[0]).items()}
    assert after == before and len(before) == 2
    cluster.frontends[1].kill()  # now every heartbeat and every tunnel must come here
    beats = "select count(*) from backend_nodes where last_heartbeat > %s"
    [(now,)] = fleet.rows("select now()")
    until("a heartbeat of both", lambda: fleet.rows(beats, now) == [(2,)], HOMED_WITHIN)
    until("both tunnels", lambda: fleet.homes() == [0, 0], HOMED_WITHIN)
    for worker in (0, 1):
        assert fleet.asked(0, f"on-{worker}") == (200, ANSWER)
    assert ask(cluster.frontends[0].url + "/api/nodes").status == 401


@pytest.mark.parametrize("silent", [False, True], ids=["frozen", "frozen-behind-a-dead-way"])
def test_a_frontend_frozen_longer_than_its_live_window(fleet: Fleet, silent: bool) -> None:
    """
    Frozen until it is swept, its worker moves and serves elsewhere; thawed it takes nothing back, whether or not it
    learned of the end of its old tunnel; nothing is reaped, and it serves by relay (CLUS-21).
    """
    cluster = fleet.cluster
    assert fleet.spread() == [0, 1]
    frozen, other = cluster.frontends
    replicas = fleet.replicas()
    if silent:
        fleet.ways[0, 0].swallow()
    frozen.freeze()
    instances = "select id from instances order by id"
    with Watch(fleet.replicas) as rows:
        until("its sweep", lambda: fleet.rows(instances) == [(other.instance_id,)], LIVE_WINDOW + 2 * BEAT + 5)
        until("its worker elsewhere", lambda: fleet.home(0) == 1, HOMED_WITHIN)
        assert fleet.asked(1, "on-0") == (200, ANSWER)
        owned = fleet.rows("select node_id, owner_instance_id, epoch from node_connections order by 1")
        with (
            asking(cluster.database.url) as database,
            Watch(
                lambda: database("select node_id, owner_instance_id, epoch from node_connections order by 1"),
                every=0.01,
            ) as owners,
        ):
            frozen.thaw()
            until("its return", lambda: len(fleet.rows(instances)) == 2, 20)
            # Four beats with the old tunnel at hand, in which it could take the worker away from its new owner.
            since = "select 1 from instances where id = %s and last_seen > %s::timestamptz + make_interval(secs => %s)"
            [(now,)] = fleet.rows("select now()")
            until("four more beats", lambda: fleet.rows(since, frozen.instance_id, now, 4 * BEAT), 20)
            everything_answers(fleet)
        assert owners.seen == [owned]
    assert rows.seen == [replicas]
    assert fleet.homes() == [1, 1]


def test_a_worker_restarted_under_its_name(fleet: Fleet) -> None:
    """The same node again, at once; what it had loaded is not believed but loaded anew (BR-082)."""
    cluster = fleet.cluster
    nodes = fleet.rows("select id, name from backend_nodes order by 1")
    loads, claim = reported(cluster.state.root / "on-0.events", "load"), fleet.claims()[0]
    cluster.restart(cluster.workers[0])
    fleet.homed(0, claim)
    everything_answers(fleet)
    again = reported(cluster.state.root / "on-0.events", "load")
    assert len(again) == len(loads) + 1 and again[-1]["pid"] != loads[-1]["pid"]
    assert fleet.rows("select id, name from backend_nodes order by 1") == nodes


def test_owner_and_worker_die_in_the_same_interval(fleet: Fleet) -> None:
    """
    The owner is back under its id before anybody swept it: the worker that died with it does not read connected, and
    is served again once it is back (CLUS-3, BR-082).
    """
    cluster = fleet.cluster
    assert fleet.spread() == [0, 1]
    cluster.frontends[0].freeze()  # so that it has no time to learn of its worker's end
    cluster.workers[0].kill()
    cluster.frontends[0].kill()
    cluster.frontends[0].start()
    until("the owner ready", cluster.frontends[0].is_ready, 40)
    for frontend in cluster.frontends:
        assert cluster.nodes(frontend)["worker-0"]["tunnel"]["state"] == "reconnecting"
    claim = fleet.claims()[0]
    cluster.workers[0].start()
    fleet.homed(0, claim)
    everything_answers(fleet)
