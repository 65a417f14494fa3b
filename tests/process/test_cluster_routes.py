"""
Ways to a worker: both paths serve, an owner that dies, a tunnel that is blocked while heartbeats pass.

``LOCALAI_WORKER_RECONNECT_GRACE=1ms pytest`` on this file reddens exactly the test of the killed owner.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from localai_dist.settings.frontend import FrontendSettings
from localai_dist.testing.members import Worker
from localai_dist.testing.waiting import until
from localai_dist.testing.web import ask
from tests.process.fleet import GRACE, HOMED_WITHIN, ROUTE, Fleet, Watch, fleet_of
from tests.process.load import ANSWER, Load, said, whole
from tests.process.scripted import add_model, admin, chat, reported

LIVE_WINDOW = 4.0
TICK = 1.0
ROUTE_WAIT = 1.0
CUTS = 3
RETRYABLE = ("worker_reconnecting", "worker_unavailable", "peer_unreachable")
"""Codes that tell a client to try again."""


@pytest.fixture(scope="module")
def ready() -> Iterator[Fleet]:
    """Two frontends, two workers, quick sweeps, and a model on each worker."""
    env = {
        "LOCALAI_INSTANCE_LIVE_WINDOW": f"{LIVE_WINDOW}s",
        "LOCALAI_HEALTH_INTERVAL": f"{TICK}s",
        "LOCALAI_ROUTE_WAIT": f"{ROUTE_WAIT}s",
        # Not shortened: a worker whose tunnel was cut several times waits up to half a minute for its next try.
        GRACE: f"{round(FrontendSettings().worker_reconnect_grace * 1000)}ms",
    }
    with fleet_of("routes", {"on-0": (0,), "on-1": (1,)}, env) as fleet:
        yield fleet


@pytest.fixture
def fleet(ready: Fleet) -> Fleet:
    """The same, everything running and each tunnel at its own frontend."""
    ready.settle()
    return ready


def test_every_worker_is_served_from_every_frontend(fleet: Fleet) -> None:
    """Cold on the relay path, then both models on both frontends, control listings too (CLUS-17, BR-002)."""
    homes = fleet.spread()
    for worker in (0, 1):
        other = 1 - (homes[worker] or 0)
        assert fleet.asked(other, f"on-{worker}") == (200, ANSWER)  # the first request of all is relayed
    for worker, node in enumerate(fleet.cluster.workers):
        for frontend in (0, 1):
            assert fleet.asked(frontend, f"on-{worker}") == (200, ANSWER)
            listed = admin(fleet.cluster, f"/api/nodes/{node.node_id}/backends", frontend=frontend)
            assert "test-backend" in [entry["name"] for entry in listed]
            held = admin(fleet.cluster, f"/api/nodes/{node.node_id}/models", frontend=frontend)
            assert f"on-{worker}" in [row["model_name"] for row in held]
        for load in reported(fleet.cluster.state.root / f"on-{worker}.events", "load"):
            assert Path(load["file"]).is_relative_to(node.models_dir)
    assert fleet.homes() == homes


def test_many_requests_over_both_paths(fleet: Fleet) -> None:
    """200 requests, alternating over frontends and models, a third streamed: none fails, no tunnel moves (BR-002)."""
    homes = fleet.spread()
    epochs = fleet.rows("select node_id, epoch from node_connections order by 1")
    key = fleet.cluster.secrets.api_key

    def one(number: int) -> str:
        url, model = fleet.cluster.frontends[number % 2].url, f"on-{number // 2 % 2}"
        return (whole if number % 3 else said)(url, key, model)

    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(one, range(200))) == {ANSWER}
    assert fleet.homes() == homes
    assert fleet.rows("select node_id, epoch from node_connections order by 1") == epochs


def test_a_tunnel_that_is_cut_again_and_again(fleet: Fleet) -> None:
    """
    Something on the way ends a tunnel again and again while requests come steadily: those to the other worker never
    fail, its own only with errors that say "try again"; the log has a line for each loss and each return (BR-117).
    """
    cluster = fleet.cluster
    for worker in (0, 1):
        assert fleet.asked(1, f"on-{worker}") == (200, ANSWER)
    worker, ways = cluster.workers[0], [fleet.ways[0, 0], fleet.ways[0, 1]]
    told = len(worker.log.read_text())
    with Load(cluster.frontends[1].url, cluster.secrets.api_key, ["on-0", "on-1"], rate=10) as load:
        for _ in range(CUTS):
            answered, claim = load.answered, fleet.claims()[0]
            until("answers in between", lambda most=answered: load.answered >= most + 15, 30)
            assert sum(way.cut(ROUTE) for way in ways) == 1
            until("its next tunnel", lambda: sum(way.open(ROUTE) for way in ways) == 1, HOMED_WITHIN)
            fleet.homed(0, claim)
    for trouble in load.troubles:
        assert "(on-0)" in trouble and any(code in trouble for code in RETRYABLE), trouble
    assert load.answered + len(load.troubles) == load.asked and 2 * load.answered > load.asked
    # The registry knows of a tunnel before its worker does.
    until("a line for each return", lambda: len(_returns(worker, told)) >= CUTS, HOMED_WITHIN)
    lines = worker.log.read_text()[told:].splitlines()
    assert sum("the tunnel ended after" in line for line in lines) == CUTS
    assert len(_returns(worker, told)) == CUTS
    assert fleet.asked(0, "on-0") == (200, ANSWER)


def _returns(worker: Worker, told: int) -> list[str]:
    """What a worker's log says of tunnels that came back, from that character on."""
    lines = worker.log.read_text()[told:].splitlines()
    return [line for line in lines if "tunnel open again" in line and "s without" in line]


def test_the_owner_is_killed(fleet: Fleet) -> None:
    """
    A worker whose owner is killed is reconnecting: nothing is demoted, reaped or evicted while it can't get a new
    tunnel, however long after the sweep; then it serves through the survivor without being loaded again. The other
    worker serves throughout (CLUS-18).
    """
    cluster = fleet.cluster
    assert fleet.spread() == [0, 1]
    for worker in (0, 1):
        assert fleet.asked(1, f"on-{worker}") == (200, ANSWER)
    loads = reported(cluster.state.root / "on-0.events", "load")
    replicas = fleet.replicas()
    served = Watch(lambda: fleet.asked(1, "on-1"), every=0.1)
    fleet.ways[0, 1].block(ROUTE)  # so that what happens without a tunnel has time to happen
    seen = "update instances set last_seen = now() + make_interval(secs => %s) where id = %s returning 1"
    with Watch(fleet.replicas) as rows, Watch(lambda: fleet.statuses(cluster.frontends[1])) as statuses, served:
        cluster.frontends[0].kill()
        # As long as its last beat is fresh nobody knows that the owner is dead: fresh until the request has its answer.
        assert fleet.rows(seen, 60, cluster.frontends[0].instance_id) == [(1,)]
        assert fleet.asked(1, "on-0") == (503, "peer_unreachable")
        assert fleet.rows(seen, 0, cluster.frontends[0].instance_id) == [(1,)]
        lost = "select 1 from node_connections where disconnected_at < now() - make_interval(secs => %s)"
        until("two looks after the sweep", lambda: fleet.rows(lost, 2 * TICK + 0.5), LIVE_WINDOW + 2 * TICK + 10)
        assert fleet.asked(1, "on-0") == (503, "worker_reconnecting")
        fleet.ways[0, 1].unblock(ROUTE)
        until("the worker's new home", lambda: fleet.home(0) == 1, HOMED_WITHIN)
        assert fleet.asked(1, "on-0") == (200, ANSWER)
    assert rows.seen == [replicas]
    assert statuses.seen == [["healthy", "healthy"]]
    assert served.seen == [(200, ANSWER)] and served.asked >= 10
    assert reported(cluster.state.root / "on-0.events", "load") == loads


def test_both_tunnels_blocked_while_heartbeats_pass(fleet: Fleet) -> None:
    """
    Workers whose dials a gateway refuses while registration and heartbeats pass: every request, of a model that has a
    replica there or not, streamed or not, is refused as no route, at once, and so are an operator's; nothing is demoted
    or reaped; one way opened, exactly that worker serves (CLUS-19, BR-001).
    """
    cluster = fleet.cluster
    loaded = []
    for worker in (0, 1):
        assert fleet.asked(0, f"on-{worker}") == (200, ANSWER)
        [row] = fleet.rows("select address, config_revision from node_models where model_name = %s", f"on-{worker}")
        loaded.append(row)
    for index, worker in enumerate(cluster.workers):
        worker.kill()
        admin(cluster, f"/api/nodes/{worker.node_id}", "DELETE")
        for frontend in (0, 1):
            fleet.ways[index, frontend].block(ROUTE)
        cluster.restart(worker, emptied=True)
    cluster.wait_for("both registered anew", lambda: len(cluster.nodes()) == 2, 30)
    assert all(cluster.workers_registered({}) for _ in "x")
    for worker in (0, 1):
        name = f"anew-{worker}"
        add_model(cluster, name)
        node = cluster.workers[worker].node_id
        admin(cluster, f"/api/nodes/{node}/labels", "PATCH", {f"for-{name}": "yes", f"for-on-{worker}": "yes"})
        selector = {"model_name": name, "node_selector": {f"for-{name}": "yes"}}
        admin(cluster, "/api/nodes/scheduling", "POST", selector)
        # As if it were loaded still: a row that must stay as long as nobody could ask the node about it.
        fleet.rows(
            "insert into node_models (node_id, model_name, backend_token, backend_type, state, address,"
            " config_revision) values (%s, %s, 'x', 'test-backend', 'loaded', %s, %s)",
            node,
            f"on-{worker}",
            *loaded[worker],
        )
    kept = fleet.replicas()
    assert len(kept) == 2
    tried = [fleet.ways[key].heads.get(ROUTE, 0) for key in sorted(fleet.ways)]
    both = Watch(lambda: [fleet.statuses(frontend) for frontend in cluster.frontends])
    with both as statuses, Watch(fleet.replicas) as replicas:
        for frontend in (0, 1):
            for worker in (0, 1):
                _no_route(fleet, frontend, worker)
        until("another dial on each way", lambda: _more(fleet, tried), 40)
        for frontend in cluster.frontends:
            tunnels = [node["tunnel"]["state"] for node in cluster.nodes(frontend).values()]
            assert tunnels == ["never_dialled", "never_dialled"]
        [(now,)] = fleet.rows("select now()")
        beats = "select count(*) from backend_nodes where last_heartbeat > %s"
        until("a heartbeat of both", lambda: fleet.rows(beats, now) == [(2,)], 20)
    assert statuses.seen == [[["healthy", "healthy"], ["healthy", "healthy"]]]
    assert replicas.seen == [kept]
    fleet.ways[0, 0].unblock(ROUTE)
    fleet.homed(0)
    for frontend in (0, 1):
        # Asked at last, the node says that this process is not there: its row goes, and the model is loaded.
        assert fleet.asked(frontend, "on-0") == (200, ANSWER)
        assert fleet.asked(frontend, "anew-0") == (200, ANSWER)
        assert fleet.asked(frontend, "anew-1") == (503, "no_route")
    assert {row for row in kept if row[0] == "on-1"} <= fleet.replicas()


def _no_route(fleet: Fleet, frontend: int, worker: int) -> None:
    """Whatever is asked of a worker without a tunnel is refused with that reason, no later than the route wait."""
    cluster, node = fleet.cluster, fleet.cluster.workers[worker].node_id
    at = cluster.frontends[frontend]
    for model in (f"anew-{worker}", f"on-{worker}"):
        for stream in (False, True):
            began = time.monotonic()
            reply = chat(cluster, at, model, stream=stream)
            assert (reply.status, reply.json()["error"]["code"]) == (503, "no_route"), reply.text
            assert "no route" in reply.text
            assert time.monotonic() - began < ROUTE_WAIT + 1
    listed = ask(f"{at.url}/api/nodes/{node}/backends", key=cluster.secrets.api_key, timeout=30)
    assert (listed.status, listed.json()["error"]["code"]) == (503, "no_route"), listed.text


def _more(fleet: Fleet, than: list[int]) -> bool:
    """Whether each way was tried again."""
    return all(fleet.ways[key].heads.get(ROUTE, 0) > count for key, count in zip(sorted(fleet.ways), than, strict=True))
