"""Doors: what a worker opens (nothing but loopback), and who is let in by a frontend (nobody unknown)."""

from __future__ import annotations

import http.server
import importlib.metadata
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest

from localai_dist.testing.cluster import Cluster
from localai_dist.testing.members import Worker
from localai_dist.testing.waiting import until
from localai_dist.testing.web import ask
from localai_dist.wire.credentials import NODE_TOKEN, digest
from tests.process.kit import localai_dist, open_folder, quick_plan, rows, running
from tests.process.outside import Bound, backends_of, environment_of, knock, sockets_of
from tests.process.scripted import chat, pin

BROKERS = re.compile(r"nats|amqp|rabbit|kafka|mqtt|stomp|redis|zmq|pulsar|kombu|celery|pika", re.IGNORECASE)


@pytest.fixture(scope="module")
def guarded() -> Iterator[Cluster]:
    """Two frontends that admit nobody by themselves, and one worker that waits."""
    with open_folder("doors") as folder:
        plan = quick_plan(
            folder / "state",
            workers=1,
            auto_approve=False,
            # A worker that is stopped and started again is neither silent nor away for so long.
            frontend_env={"LOCALAI_NODE_STALE_AFTER": "60s", "LOCALAI_WORKER_RECONNECT_GRACE": "90s"},
            worker_env={"LOCALAI_HEARTBEAT_INTERVAL": "500ms"},
        )
        with running(plan) as cluster:
            yield cluster


@pytest.fixture
def admitted(guarded: Cluster) -> Cluster:
    """The same once the worker is in, whichever test was first."""
    [worker] = guarded.workers
    if node_object(guarded, worker.name)["status"] == "pending":
        approve(guarded)
    guarded.wait_for("the worker's tunnel", lambda: _holds_a_tunnel(guarded, worker), 40)
    return guarded


def approve(cluster: Cluster) -> str:
    """Admit the worker, as an operator does; what the command said beyond that it was done."""
    env = {"LOCALAI_SERVER": cluster.frontends[0].url, "LOCALAI_CLI_API_KEY": cluster.secrets.api_key}
    command = localai_dist("nodes", "approve", "worker-0", env=env)
    out, errors = command.communicate()
    done, _, more = out.partition("\n")
    assert (done, errors, command.returncode) == ("worker-0 approved", "", 0)
    return more


def identity(worker: Worker) -> tuple[str, str]:
    """A worker's id and its own token, as it keeps them; the registry may know it a moment before its disk does."""
    kept_in = worker.data_dir / "node.json"
    until("the identity on the worker's disk", kept_in.exists, 10)
    kept = json.loads(kept_in.read_text())
    return kept["node_id"], kept["node_token"]


def dial(cluster: Cluster, node: str, token: str | None, frontend: int = 0) -> tuple[int, str]:
    """Status and code of the answer to a tunnel's dial."""
    headers = [] if token is None else [("Authorization", f"Bearer {token}")]
    answer = knock(cluster.frontends[frontend].url, f"/api/cluster/connect?id={node}", headers)
    return answer.status, answer.code


def node_object(cluster: Cluster, name: str) -> dict[str, Any]:
    """A node as ``GET /api/nodes`` tells it."""
    return cluster.nodes()[name]


def test_a_worker_waits_outside_until_it_is_approved(guarded: Cluster) -> None:
    """A registered worker is pending and its dial answered 403, no upgrade; approved, the same token opens (WALK-9)."""
    [worker] = guarded.workers
    node, token = identity(worker)
    told = node_object(guarded, "worker-0")
    assert (told["status"], told["approved"], told["tunnel"]["state"]) == ("pending", False, "never_dialled")
    for frontend in (0, 1):
        assert dial(guarded, node, token, frontend) == (403, "node_pending")
    assert ask(worker.probe_url + "/readyz").status == 503
    assert rows(guarded.database.url, "select 1 from node_connections") == []

    approve(guarded)
    guarded.wait_for("the worker's tunnel", lambda: _holds_a_tunnel(guarded, worker), 40)
    assert identity(worker) == (node, token)
    told = node_object(guarded, "worker-0")
    assert (told["status"], told["approved"], told["tunnel"]["state"]) == ("healthy", True, "connected")
    # The positive control of every refusal in this file, at the frontend that holds the worker's own tunnel.
    home = next(index for index, it in enumerate(guarded.frontends) if it.instance_id == told["tunnel"]["owner"])
    assert dial(guarded, node, token, home)[0] == 101
    guarded.wait_for("the worker's own tunnel again", lambda: _holds_a_tunnel(guarded, worker), 40)


def _holds_a_tunnel(cluster: Cluster, worker: Worker) -> bool:
    """Whether both ends say so: the worker has its tunnel a moment before a frontend has claimed it."""
    return worker.is_ready() and node_object(cluster, worker.name)["tunnel"]["state"] == "connected"


def test_a_wrong_or_missing_token_is_401(guarded: Cluster) -> None:
    """No token, another one, the registration token, another node's id: 401 before any upgrade (WALK-9)."""
    node, token = identity(guarded.workers[0])
    registration = guarded.secrets.registration_token
    for frontend in (0, 1):
        for claimed, shown in [
            (node, None),
            (node, "not-the-token"),
            (node, token[:-1]),
            (node, digest(token)),
            (node, registration),
            ("00000000-0000-4000-8000-000000000000", token),
            ("no-id-at-all", token),
        ]:
            assert dial(guarded, claimed, shown, frontend) == (401, "invalid_node_token"), (claimed, shown)
    # What guards the worker guards the doors beside it too.
    url = guarded.frontends[0].url
    for key in ("", "wrong", token):
        assert ask(url + "/api/node/register", key=key, method="POST", body={"name": "x"}).status == 401
    assert ask(url + f"/api/node/{node}/heartbeat", key=registration, method="POST", body={}).status == 401
    peer = f"/api/cluster/peer?id={guarded.frontends[1].instance_id}"
    assert knock(url, peer, [("Authorization", f"Bearer {registration}")]).status == 401


def test_a_newcomer_under_a_known_name_waits(admitted: Cluster) -> None:
    """Registering a known name without its token: pending, a dial answered 403, and nothing changes (WALK-9)."""
    [worker] = admitted.workers
    known = "select status, node_token_hash, boot_id from backend_nodes where name = 'worker-0'"
    before = rows(admitted.database.url, known)
    url, key = admitted.frontends[1].url, admitted.secrets.registration_token
    reply = ask(url + "/api/node/register", key=key, method="POST", body={"name": "worker-0", "token": key})
    assert reply.status == 201
    newcomer = reply.json()
    assert newcomer["status"] == "pending" and newcomer["tunnel_token"] != identity(worker)[1]
    assert dial(admitted, newcomer["id"], newcomer["tunnel_token"]) == (403, "node_pending")
    assert rows(admitted.database.url, known) == before
    # Our own dial in the first test may still cost the worker its tunnel for a moment.
    admitted.wait_for("the worker's tunnel", worker.is_ready, 40)


def test_a_worker_that_lost_its_identity_comes_back(admitted: Cluster) -> None:
    """Stopped in order, started without its node.json and approved, a worker is healthy, also after more beats."""
    guarded, [worker] = admitted, admitted.workers
    lost = identity(worker)
    worker.terminate()
    worker.wait_ended(20)
    guarded.wait_for("the good-bye", lambda: node_object(guarded, "worker-0")["status"] == "offline", 20)
    (worker.data_dir / "node.json").unlink()
    worker.start()
    waits = "waits for approval: localai-dist nodes approve worker-0"
    guarded.wait_for("the sentence", lambda: _tunnel_check(worker).startswith(waits), 20)
    told = worker.log.read_text()
    assert "the name worker-0 is taken" in told and "'localai-dist nodes approve worker-0' replaces it" in told
    assert "replaces the node of that name (offline, registered from 127.0.0.1" in approve(guarded)
    assert node_object(guarded, "worker-0")["status"] == "healthy"
    guarded.wait_for("the worker's tunnel", lambda: _holds_a_tunnel(guarded, worker), 40)
    boots = "select boot_id, left_at, parked_token_hash from backend_nodes where name = 'worker-0'"
    [(before, _, _)] = rows(guarded.database.url, boots)
    assert identity(worker) != lost
    guarded.restart(worker)
    guarded.wait_for("the worker again", lambda: _holds_a_tunnel(guarded, worker), 40)
    [(boot, left, parked)] = rows(guarded.database.url, boots)
    assert (boot != before, left, parked) == (True, None, "")
    assert node_object(guarded, "worker-0")["status"] == "healthy"


def _tunnel_check(worker: Worker) -> str:
    """Why the worker has no tunnel, as its /readyz says; empty while it does not listen."""
    told = ask(worker.probe_url + "/readyz", timeout=2).json() or {"checks": {"tunnel": {"reason": ""}}}
    return str(told["checks"]["tunnel"]["reason"])


def test_only_hashes_of_tokens_are_stored(guarded: Cluster) -> None:
    """No table of the database holds a node's token or the registration token, only their hashes (WALK-9)."""
    node, token = identity(guarded.workers[0])
    [(stored,)] = rows(guarded.database.url, "select node_token_hash from backend_nodes where id = %s", node)
    assert stored == digest(token)
    tables = rows(guarded.database.url, "select tablename from pg_tables where schemaname = current_schema()")
    assert len(tables) > 5
    dump = "".join(str(rows(guarded.database.url, f"select t::text from {table} t")) for (table,) in tables)
    assert stored in dump
    for secret in (token, guarded.secrets.registration_token, guarded.secrets.api_key):
        assert secret not in dump


def test_auto_approval_lets_a_new_worker_in(guarded: Cluster) -> None:
    """A frontend told to approve by itself admits a new node at once; nobody has to ask (WALK-9)."""
    second = guarded.frontends[1]
    second.env["LOCALAI_AUTO_APPROVE_NODES"] = "true"
    guarded.restart(second)
    guarded.wait_for("the second frontend", second.is_ready, 40)
    key = guarded.secrets.registration_token
    made = {}
    for frontend, name in ((guarded.frontends[0], "unasked"), (second, "asked")):
        body = {"name": name, "token": key}
        reply = ask(frontend.url + "/api/node/register", key=key, method="POST", body=body)
        assert reply.status == 201
        made[name] = reply.json()
    assert {name: told["status"] for name, told in made.items()} == {"unasked": "pending", "asked": "healthy"}
    assert dial(guarded, made["asked"]["id"], made["asked"]["tunnel_token"])[0] == 101
    assert dial(guarded, made["unasked"]["id"], made["unasked"]["tunnel_token"]) == (403, "node_pending")


@pytest.fixture
def serving(admitted: Cluster) -> Cluster:
    """The same once the worker has a backend."""
    pin(admitted, "tiny-facts", 0)
    reply = chat(admitted, admitted.frontends[0], "tiny-facts", "What is the capital of Kenya?")
    assert reply.status == 200, reply.text
    return admitted


def test_a_worker_and_its_backends_listen_on_loopback_alone(serving: Cluster) -> None:
    """No socket of a worker or a backend is bound to anything but loopback, and none is UDP (WALK-8)."""
    [worker] = serving.workers
    processes = {worker.pid, *backends_of(worker)}
    found = {pid: sockets_of(pid) for pid in processes}
    opened = [bound for bounds in found.values() for bound in bounds]
    assert [bound for bound in opened if not bound.loopback or bound.kind.startswith("udp")] == []
    first = int(worker.env["LOCALAI_SERVE_ADDR"].rpartition(":")[2])
    listening = {bound.port for bound in opened if bound.listening}
    assert urlsplit(worker.probe_url).port in listening and first in listening
    # It dials out, and this is how it is seen: connections to the frontends, from loopback.
    frontends = {urlsplit(frontend.url).port for frontend in serving.frontends}
    assert frontends & {bound.remote_port for bound in found[worker.pid] if not bound.listening}
    # Positive control: a frontend asked to listen everywhere is seen to.
    assert not Bound("tcp", "0.0.0.0", 1, 0, True).loopback and not Bound("tcp6", "::", 1, 0, True).loopback


def test_no_broker_in_any_environment(serving: Cluster) -> None:
    """Neither a worker's environment nor a backend's has a broker's address in it (WALK-8)."""
    [worker] = serving.workers
    backends = backends_of(worker)
    assert backends
    for pid in (worker.pid, *backends):
        environment = environment_of(pid)
        assert environment
        assert [name for name in environment if BROKERS.search(name)] == []
        assert [name for name, value in environment.items() if re.match(r"(nats|amqps?|redis|mqtt)://", value)] == []


def test_the_distribution_needs_no_broker_client() -> None:
    """Nothing that the installed distribution depends on, at any depth, is a broker's client (WALK-8)."""
    names, found = ["localai-dist"], set[str]()
    while names:
        name = re.split(r"[ ;<>=!~\[(]", names.pop())[0].lower().replace("_", "-")
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # an extra nobody asked for, or another platform's
        if name not in found:
            found.add(name)
            names += distribution.requires or []
    assert {"twisted", "psycopg2-binary", "autobahn"} <= found
    direct = importlib.metadata.distribution("localai-dist").requires or []
    assert [line for line in direct if BROKERS.search(line)] == []
    optional = {"pyzmq"}  # what extras of others name, installed or not, is not ours to choose
    assert [name for name in found if BROKERS.search(name) and name not in optional] == []


class _Recorder(http.server.BaseHTTPRequestHandler):
    """A frontend that writes down what it is sent and has no time for it."""

    def do_POST(self) -> None:
        """Record, and answer 503."""
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.seen.append((self.path, dict(self.headers), json.loads(body)))  # type: ignore[attr-defined]
        self.send_response(503)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *arguments: Any) -> None:
        """Say nothing."""


@contextmanager
def recorder() -> Iterator[tuple[str, list[tuple[str, dict[str, str], dict[str, Any]]]]]:
    """The address of a recording frontend, and what it was sent."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Recorder)
    server.seen = []  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", server.seen  # type: ignore[attr-defined]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_registration_carries_no_address(guarded: Cluster) -> None:
    """What a worker sends to register names no address and no port of its own; no column gets one (WALK-8)."""
    [worker] = guarded.workers
    folder = guarded.state.folder("told", inside=["data"])
    with recorder() as (url, seen):
        env = {name: value for name, value in worker.env.items() if name.startswith("LOCALAI_")}
        env |= {"LOCALAI_REGISTER_TO": url, "LOCALAI_NODE_NAME": "told", "LOCALAI_DATA_PATH": str(folder / "data")}
        env |= {"LOCALAI_HTTP_ADDR": "127.0.0.1:0", "LOCALAI_ADVERTISE_ADDR": "10.9.8.7:6543"}
        child = guarded.another("told", "localai-worker", env)
        child.start()
        until("a registration", lambda: seen or not child.is_alive(), 30)
        child.kill()
    path, headers, body = seen[0]
    assert path == "/api/node/register" and body["name"] == "told"
    port = env["LOCALAI_SERVE_ADDR"].rpartition(":")[2]
    assert [name for name in body if "addr" in name or "host" in name or "port" in name or "url" in name] == []
    sent = json.dumps(body) + json.dumps({name: headers[name] for name in headers if name != "Host"})
    for trace in ("127.0.0.1", "10.9.8.7", "6543", port):
        # Whole, not somewhere in a random id or in a number of bytes.
        assert re.search(rf"(?<![\w-]){re.escape(trace)}(?![\w-])", sent) is None, trace
    assert NODE_TOKEN not in headers  # it has none yet
    assert rows(guarded.database.url, "select distinct address || http_address from backend_nodes") == [("",)]
