"""Who is let in as a peer, releases that don't fit, clients that leave, a worker killed within the grace."""

from __future__ import annotations

import json
import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime
from urllib.parse import urlsplit

import pytest

from localai_dist import __version__
from localai_dist.testing.child import Child
from localai_dist.testing.members import Frontend
from localai_dist.testing.waiting import until
from localai_dist.wire.credentials import PEER_TOKEN, VERSION, digest
from tests.process.fleet import GATED, HOMED_WITHIN, ROUTE, Fleet, Watch, fleet_of
from tests.process.load import ANSWER, said
from tests.process.outside import knock
from tests.process.scripted import reported

PEER = "/api/cluster/peer"
STALE = 6.0
TICK = 1.0
LATER = "99.0.0"
SKEW = """
import datetime, time

real, real_ns = time.time, time.time_ns
time.time = lambda: real() + {seconds}
time.time_ns = lambda: real_ns() + int({seconds} * 1e9)

class Skewed(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return super().now(tz) + datetime.timedelta(seconds={seconds})

datetime.datetime = Skewed
"""


@pytest.fixture(scope="module")
def ready() -> Iterator[Fleet]:
    """Two frontends, two workers, staleness shorter than the grace as it is by default, quick and slow models."""
    env = {
        "LOCALAI_NODE_STALE_AFTER": f"{STALE}s",
        "LOCALAI_HEALTH_INTERVAL": f"{TICK}s",
        "LOCALAI_INSTANCE_LIVE_WINDOW": "4s",
        "LOCALAI_WORKER_RECONNECT_GRACE": "60s",
        "LOCALAI_ROUTE_WAIT": "500ms",
    }
    models = {
        "on-0": (0,),
        "on-1": (1,),
        "relayed": (0, "test:tokens=40", GATED),
        "endless": (0, "test:tokens=1000", "test:delay=0.1"),
    }
    with fleet_of("peers", models, env) as fleet:
        yield fleet


@pytest.fixture
def fleet(ready: Fleet) -> Fleet:
    """The same, everything running and each tunnel at its own frontend."""
    ready.settle()
    return ready


def everything_answers(fleet: Fleet) -> None:
    """Both models through both frontends."""
    for frontend in (0, 1):
        for worker in (0, 1):
            assert fleet.asked(frontend, f"on-{worker}") == (200, ANSWER)


@contextmanager
def registered(fleet: Fleet, instance: str, secret: str) -> Iterator[None]:
    """Another replica in the table, as if it lived."""
    fresh = "now() + interval '1 h'"  # no sweep takes it, however long the test needs
    statement = f"insert into instances (id, advertised_addr, peer_token_hash, last_seen) values (%s, '', %s, {fresh})"
    fleet.rows(statement, instance, digest(secret))
    try:
        yield
    finally:
        fleet.rows("delete from instances where id = %s", instance)


def dial_as(
    fleet: Fleet, instance: str, secret: str | None, bearer: str | None = None, release: str = ""
) -> tuple[int, str]:
    """Status and text of a peer's dial at the first frontend."""
    token = fleet.cluster.secrets.registration_token if bearer is None else bearer
    headers = [("Authorization", f"Bearer {token}")]
    headers += [(PEER_TOKEN, secret)] if secret is not None else []
    headers += [(VERSION, release)] if release else []
    answer = knock(fleet.cluster.frontends[0].url, f"{PEER}?id={instance}", headers)
    return answer.status, answer.text


def test_a_peer_proves_who_it_is(fleet: Fleet) -> None:
    """
    The shared token alone, another replica's id with the own secret, empty secrets: refused with a text on identity and
    the upgrade order, the real link not displaced; both right: let in (CLUS-7, BR-119).
    """
    real = fleet.cluster.frontends[1].instance_id
    everything_answers(fleet)
    assert fleet.asked(1, "relayed", max_tokens=1)[0] == 200
    replicas = fleet.replicas()
    begun, key = threading.Semaphore(0), fleet.cluster.secrets.api_key
    with (
        registered(fleet, "another", "its own secret"),
        ThreadPoolExecutor(1) as pool,
        fleet.standing("relayed") as let_end,
    ):
        relayed = pool.submit(said, fleet.cluster.frontends[1].url, key, "relayed", begun)
        assert begun.acquire(timeout=20)
        for secret in (None, "", "its own secret", digest("its own secret")):
            status, text = dial_as(fleet, real, secret)
            assert status == 401 and "identity" in text and "upgrade all frontends first" in text
        assert dial_as(fleet, "another", "its own secret", bearer="")[0] == 401
        assert dial_as(fleet, "another", "its own secret", bearer="wrong")[0] == 401
        assert dial_as(fleet, "nobody-knows", "its own secret")[0] == 401
        assert dial_as(fleet, "another", "its own secret") == (101, "")
        let_end()
        assert relayed.result(30).endswith("token39")
    assert fleet.replicas() == replicas
    everything_answers(fleet)


def test_peers_dial_the_advertised_address(fleet: Fleet) -> None:
    """A link goes to the address a frontend advertises, never to the one clients and workers use (BR-119)."""
    cluster = fleet.cluster
    one = cluster.frontends[0]
    inside = fleet.faults.proxy(one.url)
    name = "LOCALAI_DISTRIBUTED_ADVERTISE_ADDR"
    kept = one.env[name]
    try:
        one.env[name] = urlsplit(inside.url).netloc
        cluster.restart(one)
        fleet.settle()
        everything_answers(fleet)
        assert inside.heads.get(PEER, 0) >= 1
        assert set(inside.heads) == {PEER}
    finally:
        one.env[name] = kept
        cluster.restart(one)
        fleet.settle()


def test_doors_refuse_another_release(fleet: Fleet) -> None:
    """Older, newer and garbage: 426 naming both releases and the upgrade order, at both doors (CLUS-28, BR-041)."""
    worker = fleet.cluster.workers[1]
    identity = json.loads((worker.data_dir / "node.json").read_text())
    epochs = fleet.rows("select node_id, epoch from node_connections order by 1")
    with registered(fleet, "another", "its own secret"):
        for release in ("0.0.1", LATER, "garbage"):
            peer = dial_as(fleet, "another", "its own secret", None, release)
            headers = [("Authorization", f"Bearer {identity['node_token']}"), (VERSION, release)]
            answer = knock(fleet.cluster.frontends[0].url, f"{ROUTE}?id={identity['node_id']}", headers)
            for status, text in ((answer.status, answer.text), peer):
                assert status == 426
                assert __version__ in text and release in text and "upgrade all frontends first" in text
        assert dial_as(fleet, "another", "its own secret", None, __version__)[0] == 101
    assert fleet.rows("select node_id, epoch from node_connections order by 1") == epochs
    everything_answers(fleet)


@contextmanager
def of_release(fleet: Fleet, child: Child, release: str) -> Iterator[None]:
    """Let a daemon say that it is of another release; it is restarted before and after."""
    with altered(fleet, child, f"import localai_dist\nlocalai_dist.__version__ = {release!r}\n"):
        yield


def off_by(fleet: Fleet, child: Child, seconds: float) -> AbstractContextManager[None]:
    """Let the wall clock of a daemon be wrong by so much; it is restarted before and after."""
    return altered(fleet, child, SKEW.format(seconds=seconds))


@contextmanager
def altered(fleet: Fleet, child: Child, text: str) -> Iterator[None]:
    """Let a daemon run ``text`` when its Python starts; it is restarted before and after."""
    folder = fleet.cluster.state.root / f"altered-{child.name}"
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(text)
    kept = child.env["PYTHONPATH"]
    child.env["PYTHONPATH"] = os.pathsep.join([str(folder), kept])
    try:
        fleet.cluster.restart(child)
        yield
    finally:
        child.env["PYTHONPATH"] = kept
        fleet.cluster.restart(child)


def test_a_worker_of_another_release(fleet: Fleet) -> None:
    """
    A worker that was upgraded before its frontends registers, beats and keeps dialling; it has no tunnel, its models
    say so, nothing is reaped; with the right release it serves again (CLUS-28, BR-041).
    """
    cluster = fleet.cluster
    worker = cluster.workers[0]
    assert fleet.asked(0, "on-0") == (200, ANSWER)
    nodes = fleet.rows("select id, name from backend_nodes order by 1")
    tried = [fleet.ways[0, frontend].heads.get(ROUTE, 0) for frontend in (0, 1)]
    claim = fleet.claims()[0]
    with of_release(fleet, worker, LATER):
        for frontend, before in enumerate(tried):
            way = fleet.ways[0, frontend]
            until("two more dials", lambda it=way, most=before + 1: it.heads.get(ROUTE, 0) > most, HOMED_WITHIN)
        assert worker.is_alive()
        said_so = worker.log.read_text()
        assert LATER in said_so and __version__ in said_so and "upgrade all frontends first" in said_so
        for frontend in cluster.frontends:
            until("a healthy node without a tunnel", lambda it=frontend: _without_tunnel(fleet, it), HOMED_WITHIN)
        assert fleet.asked(1, "on-0") == (503, "worker_reconnecting")
        assert fleet.rows("select id, name from backend_nodes order by 1") == nodes
    fleet.homed(0, claim)
    everything_answers(fleet)


def _without_tunnel(fleet: Fleet, frontend: Frontend) -> bool:
    """Whether a frontend says that worker 0 beats and that its tunnel is awaited."""
    node = fleet.cluster.nodes(frontend).get("worker-0", {})
    return (node.get("status"), node.get("tunnel", {}).get("state")) == ("healthy", "reconnecting")


def test_frontends_of_another_release(fleet: Fleet) -> None:
    """
    Both frontends upgraded past their workers: those keep trying and are told so, their models are `reconnecting`,
    nothing is reaped; with the right release again everything answers without being loaded anew (CLUS-28, BR-041).
    """
    cluster = fleet.cluster
    everything_answers(fleet)
    loads = [len(reported(cluster.state.root / f"on-{worker}.events", "load")) for worker in (0, 1)]
    replicas, claims = fleet.replicas(), fleet.claims()
    with Watch(fleet.replicas) as seen:
        with of_release(fleet, cluster.frontends[0], LATER), of_release(fleet, cluster.frontends[1], LATER):
            for frontend in cluster.frontends:
                until("the other release ready", frontend.is_ready, 40)
            tried = {way: proxy.heads.get(ROUTE, 0) for way, proxy in fleet.ways.items()}
            for way, before in tried.items():
                until(
                    "another dial", lambda it=way, most=before: fleet.ways[it].heads.get(ROUTE, 0) > most, HOMED_WITHIN
                )
            for number, frontend in enumerate(cluster.frontends):
                # Both were away at once, for longer than a worker may be silent.
                until("heartbeats", lambda it=frontend: fleet.statuses(it) == ["healthy", "healthy"], 20)
                assert fleet.asked(number, "on-0") == (503, "worker_reconnecting")
        for frontend in cluster.frontends:
            until("the frontend ready", frontend.is_ready, 40)
        for number, claim in enumerate(claims):
            fleet.homed(number, claim)
        everything_answers(fleet)
    assert seen.seen == [replicas]
    assert [len(reported(cluster.state.root / f"on-{worker}.events", "load")) for worker in (0, 1)] == loads


def test_a_frontend_of_another_release(fleet: Fleet) -> None:
    """Two frontends of releases that don't fit serve their own workers; the other's are `peer_unreachable` (BR-041)."""
    cluster = fleet.cluster
    everything_answers(fleet)
    replicas = {row for row in fleet.replicas() if row[0] == "on-1"}
    with of_release(fleet, cluster.frontends[0], LATER):
        until("the other release ready", cluster.frontends[0].is_ready, 40)
        until("both tunnels at the older one", lambda: fleet.homes() == [1, 1], HOMED_WITHIN)
        assert fleet.asked(1, "on-1") == (200, ANSWER)
        assert fleet.asked(0, "on-1") == (503, "peer_unreachable")
        assert replicas <= fleet.replicas()
    until("the frontend ready", cluster.frontends[0].is_ready, 40)
    everything_answers(fleet)


@pytest.mark.parametrize("pipelined", [False, True], ids=["one", "two-pipelined"])
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("frontend", [0, 1], ids=["owner", "relay"])
def test_a_client_that_leaves_frees_everything(fleet: Fleet, frontend: int, stream: bool, pipelined: bool) -> None:
    """
    A client that hangs up after three tokens or a second, a second request behind the first or not: the backend sees
    the cancellation within 2 s, nothing is in flight, the next request is answered (BR-003).
    """
    events = fleet.cluster.state.root / "endless.events"
    assert fleet.asked(frontend, "endless", max_tokens=1)[0] == 200
    started, cancelled = len(reported(events, "start")), len(reported(events, "cancelled"))
    with _asked(fleet, frontend, stream, 2 if pipelined else 1) as connection:
        until("its start", lambda: len(reported(events, "start")) == started + 1, 10)
        if stream:
            received = b""
            while received.count(b'"content":"') < 3:
                more = connection.recv(65536)
                assert more, received[-300:]
                received += more
        else:
            connection.settimeout(1.0)
            with pytest.raises(TimeoutError):
                connection.recv(1)
    left = time.monotonic()
    until("the cancellation", lambda: len(reported(events, "cancelled")) > cancelled, 2)
    assert time.monotonic() - left <= 2
    in_flight = "select sum(in_flight) from node_models where model_name = 'endless'"
    until("nothing in flight", lambda: fleet.rows(in_flight) == [(0,)], 2)
    assert fleet.asked(frontend, "endless", max_tokens=2) == (200, "token0 token1")
    ended = len(reported(events, "cancelled")) + len(reported(events, "done"))
    assert ended == len(reported(events, "start"))


@contextmanager
def _asked(fleet: Fleet, frontend: int, stream: bool, times: int) -> Iterator[socket.socket]:
    """A connection on which the same chat was asked for, once or more."""
    url = urlsplit(fleet.cluster.frontends[frontend].url)
    body = json.dumps({"model": "endless", "stream": stream, "messages": [{"role": "user", "content": "go"}]}).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {url.netloc}\r\nContent-Type: application/json\r\n"
        f"Authorization: Bearer {fleet.cluster.secrets.api_key}\r\nContent-Length: {len(body)}\r\n\r\n"
    ).encode()
    with socket.create_connection((url.hostname or "", url.port or 0), timeout=60) as connection:
        connection.sendall((head + body) * times)
        yield connection


def test_a_killed_worker_within_the_grace(fleet: Fleet) -> None:
    """
    With a grace longer than the staleness, as by default: straight from healthy to offline on both frontends, in time;
    its replicas stay, and back it is healthy. All of that with one frontend's clock five minutes ahead and the worker's
    five minutes behind, which changes nothing (CLUS-26, CLUS-4, BR-048).
    """
    cluster = fleet.cluster
    with off_by(fleet, cluster.frontends[0], 300), off_by(fleet, cluster.workers[1], -300):
        fleet.settle()
        assert ahead(cluster.frontends[0]) > 240 and ahead(cluster.workers[1]) < -240
        killed_within_the_grace(fleet)


def ahead(child: Child) -> float:
    """By how much the clock by which a daemon dates its newest log line is ahead of ours (s)."""
    dated = re.findall(r"^(\d{4}-\d\d-\d\dT\S+) ", child.log.read_text(), re.MULTILINE)
    return (datetime.fromisoformat(dated[-1]) - datetime.now(UTC)).total_seconds()


def killed_within_the_grace(fleet: Fleet) -> None:
    """Worker 1 is killed and comes back."""
    cluster = fleet.cluster
    everything_answers(fleet)
    replicas, claim = fleet.replicas(), fleet.claims()[1]

    def statuses(frontend: int) -> list[str]:
        return fleet.statuses(cluster.frontends[frontend])

    silent = "select extract(epoch from now() - last_heartbeat) >= %s from backend_nodes where name = 'worker-1'"
    with Watch(lambda: statuses(0)) as one, Watch(lambda: statuses(1)) as two:
        cluster.workers[1].kill()
        for frontend in (0, 1):
            until("offline", lambda at=frontend: statuses(at)[1] == "offline", STALE + TICK + 5)
            assert fleet.rows(silent, STALE) == [(True,)], "offline too early"
        assert fleet.replicas() == replicas
    assert one.seen == two.seen == [["healthy", "healthy"], ["healthy", "offline"]]
    cluster.workers[1].start()
    for frontend in (0, 1):
        until("healthy again", lambda at=frontend: statuses(at) == ["healthy", "healthy"], HOMED_WITHIN)
    fleet.homed(1, claim)  # it is healthy as soon as it has registered, and dials then
    everything_answers(fleet)
