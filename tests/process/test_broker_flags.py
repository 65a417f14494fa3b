"""The broker of old setups: every option of it is taken, none does anything; and the agent worker as it is for now."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from localai_dist.settings import accepted
from localai_dist.testing.child import Child, checkout, child_environment, twistd
from localai_dist.testing.cluster import Cluster
from localai_dist.testing.ports import Ports
from localai_dist.testing.waiting import until
from localai_dist.testing.web import ask
from localai_dist.wire.verbs import VERBS
from tests.process.kit import localai_dist, open_folder, quick_plan, rows, running
from tests.process.outside import sockets_of

# What surface §2 lists, in so many words: the table of the code is held against it.
FRONTEND_NAMES = {
    "LOCALAI_NATS_URL",
    "LOCALAI_NATS_ACCOUNT_SEED",
    "LOCALAI_NATS_SERVICE_JWT",
    "LOCALAI_NATS_SERVICE_SEED",
    "LOCALAI_NATS_WORKER_JWT_TTL",
    "LOCALAI_NATS_REQUIRE_AUTH",
    "LOCALAI_NATS_TLS_CA",
    "LOCALAI_NATS_TLS_CERT",
    "LOCALAI_NATS_TLS_KEY",
}
NODE_NAMES = {"LOCALAI_AGENT_SUBJECT", "LOCALAI_AGENT_QUEUE"}
PROGRAMS = ("localai-frontend", "localai-worker", "localai-agent-worker")
MISSING = "/no/such/folder/tls.pem"
PORTS = Ports()
"""One for all: daemons that are made together, before any of them listens, get different ones."""
WAITS = "waits for approval: localai-dist nodes approve waiting"


@pytest.fixture(scope="module")
def gated() -> Iterator[Cluster]:
    """One frontend that admits nobody by itself, and no worker."""
    with open_folder("options") as folder:
        env = {"LOCALAI_HEALTH_INTERVAL": "60s", "LOCALAI_NODE_STALE_AFTER": "60s"}
        plan = quick_plan(folder / "state", frontends=1, workers=0, auto_approve=False, frontend_env=env)
        with running(plan) as cluster:
            yield cluster


@pytest.fixture(scope="module")
def broker() -> Iterator[socket.socket]:
    """What ``LOCALAI_NATS_URL`` points to: somebody who would notice a connection, and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setblocking(False)
        yield listening


def variables(port: int) -> dict[str, str]:
    """Every old broker variable with a value: a server nobody may ask, files that don't exist."""
    values = {}
    for one in accepted.BROKER:
        tls = "-tls-" in one.flag
        text = f"nats://127.0.0.1:{port}" if one.flag == "nats-url" else MISSING if tls else "old-value"
        values[one.env] = text if one.takes_value else "true"
    return values


def flags(port: int) -> list[str]:
    """The same as flags."""
    values = variables(port)
    return [f"--{one.flag}={values[one.env]}" if one.takes_value else f"--{one.flag}" for one in accepted.BROKER]


@dataclass(frozen=True, slots=True)
class Daemon:
    """One daemon of a test, and its own address."""

    child: Child
    url: str

    def is_ready(self) -> bool:
        """Whether its ``/readyz`` says yes."""
        return ask(self.url + "/readyz").status == 200


def daemon(cluster: Cluster, name: str, program: str, *words: str, **more: str) -> Daemon:
    """A daemon beside the cluster, made of the frontend's environment, not started."""
    frontend = cluster.frontends[0]
    here = f"127.0.0.1:{PORTS.one()}"
    folder = cluster.state.folder(name, inside=["data", "models", "backends"])
    env = {name: value for name, value in frontend.env.items() if name in ("LOCALAI_REGISTRATION_TOKEN",)}
    env |= {"LOCALAI_DATA_PATH": str(folder / "data"), "LOCALAI_HEARTBEAT_INTERVAL": "300ms"}
    match program:
        case "localai-frontend":
            env = {**frontend.env, **env, "LOCALAI_ADDRESS": here, "LOCALAI_DISTRIBUTED_ADVERTISE_ADDR": here}
            env |= {"LOCALAI_INSTANCE_ID": name}
        case "localai-worker":
            env |= {
                "LOCALAI_SERVE_ADDR": f"127.0.0.1:{PORTS.backends()}",
                "LOCALAI_MODELS_PATH": str(folder / "models"),
            }
            env |= {"LOCALAI_BACKENDS_PATH": str(folder / "backends")}
    if program != "localai-frontend":
        env |= {"LOCALAI_REGISTER_TO": frontend.url, "LOCALAI_NODE_NAME": name, "LOCALAI_HTTP_ADDR": here}
    child = cluster.another(name, program, {**env, **more})
    child.argv += words
    return Daemon(child, f"http://{here}")


def approve(cluster: Cluster, name: str) -> None:
    """As an operator does."""
    env = {"LOCALAI_SERVER": cluster.frontends[0].url, "LOCALAI_CLI_API_KEY": cluster.secrets.api_key}
    command = localai_dist("nodes", "approve", name, env=env)
    assert command.communicate() == (f"{name} approved\n", "")


@contextmanager
def untouched(broker: socket.socket) -> Iterator[None]:
    """Nothing connects to the broker meanwhile; at the end a connection that is made is seen."""
    yield
    with pytest.raises(BlockingIOError):
        broker.accept()
    with socket.create_connection(broker.getsockname()):
        until("the positive control", lambda: _accepted(broker), 5)


def _accepted(broker: socket.socket) -> bool:
    try:
        broker.accept()[0].close()
    except BlockingIOError:
        return False
    return True


def test_every_name_of_the_old_setup_is_known() -> None:
    """The options taken and ignored are those of the original, each as flag and as variable (WALK-20)."""
    known = {one.env for one in accepted.BROKER}
    assert known >= FRONTEND_NAMES | NODE_NAMES
    assert all(one.flag for one in accepted.BROKER)


@pytest.mark.parametrize("program", PROGRAMS)
def test_none_is_shown_in_help(program: str, tmp_path: Path) -> None:
    """No broker flag or variable is in ``--help``, also when all of them are set (WALK-20)."""
    argv = [*twistd(program)[:-3], program, "--help"]
    done = subprocess.run(argv, env=child_environment(variables(1)), cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "LOCALAI_REGISTRATION_TOKEN" in done.stdout
    shown = done.stdout.split()
    for one in accepted.BROKER:
        assert f"--{one.flag}" not in shown and f"--{one.flag}=" not in shown
        assert one.env not in done.stdout
    # The three budgets keep their old names, and are no broker's.
    rest = done.stdout.lower().replace("localai_nats_backend_install_timeout", "")
    rest = rest.replace("localai_nats_backend_upgrade_timeout", "").replace("localai_nats_model_load_timeout", "")
    assert "nats" not in rest and "broker" not in rest


@pytest.mark.parametrize("form", ["flags", "variables"])
def test_all_three_start_and_nothing_connects(gated: Cluster, broker: socket.socket, form: str) -> None:
    """All given, a broker at an address nobody may ask, TLS files that don't exist: all three run (WALK-20)."""
    port = broker.getsockname()[1]
    words, env = (flags(port), {}) if form == "flags" else ([], variables(port))
    assert not Path(MISSING).exists()
    with untouched(broker):
        started = [daemon(gated, f"{program}-{form}", program, *words, **env) for program in PROGRAMS]
        for one in started:
            one.child.start()
        until("the second frontend", started[0].is_ready, 40)
        for one in started[1:]:
            until(f"{one.child.name} registered", lambda it=one: it.child.name in gated.nodes(), 40)
            approve(gated, one.child.name)
        for one in started:
            gated.wait_for(f"{one.child.name} ready", one.is_ready, 40)
            log = one.child.log.read_text().lower()
            assert "nats" not in log and "broker" not in log and MISSING not in log
            assert port not in {it.remote_port for it in sockets_of(one.child.pid)}
        for one in started:
            one.child.kill()


@pytest.fixture(scope="module")
def agent(gated: Cluster) -> Daemon:
    """An agent worker that was registered, approved, and has its tunnel."""
    made = daemon(gated, "agent", "localai-agent-worker")
    made.child.start()
    gated.wait_for("its registration", lambda: "agent" in gated.nodes(), 40)
    node = gated.nodes()["agent"]
    assert (node["node_type"], node["status"]) == ("agent", "pending")
    approve(gated, "agent")
    gated.wait_for("its tunnel", lambda: made.is_ready() and connected(gated, "agent"), 40)
    return made


def connected(cluster: Cluster, name: str) -> bool:
    """Whether the frontend has claimed a node's tunnel, which it does a moment after the node has it."""
    return bool(cluster.nodes()[name]["tunnel"]["state"] == "connected")


def test_an_agent_worker_registers_beats_and_dials(gated: Cluster, agent: Daemon) -> None:
    """An agent worker is a node of its own kind: it registers, beats, and opens its tunnel once approved (WALK-20)."""
    node = gated.nodes()["agent"]
    assert (node["status"], node["tunnel"]["state"]) == ("healthy", "connected")
    heard = node["last_heartbeat"]
    gated.wait_for("the next beat", lambda: gated.nodes()["agent"]["last_heartbeat"] > heard, 10)
    assert ask(agent.url + "/healthz").status == 200
    assert {it.address for it in sockets_of(agent.child.pid)} == {"127.0.0.1"}


def test_an_agent_worker_answers_every_verb_404(gated: Cluster, agent: Daemon) -> None:
    """Every verb is answered 404, 401 without the token; a frontend that asks is told by 501 (WALK-20)."""
    url, token = agent.url, gated.secrets.registration_token
    assert len(VERBS) >= 10
    for path in VERBS:
        assert ask(url + path, key=token, method="POST", body={}).status == 404, path
        assert ask(url + path, method="POST", body={}).status == 401, path
    # Through the tunnel: a row that says a model is there makes the frontend ask this node.
    node = gated.nodes()["agent"]["id"]
    columns, values = "node_id, model_name, replica_index, address, state", "%s, 'm', 0, 'x:1', 'loaded'"
    rows(gated.database.url, f"insert into node_models ({columns}) values ({values})", node)
    frontend = gated.frontends[0].url
    body = {"model_name": "m"}
    reply = ask(
        f"{frontend}/api/nodes/{node}/models/unload", key=gated.secrets.api_key, method="POST", body=body, timeout=20
    )
    assert (reply.status, reply.json()["error"]["code"]) == (501, "verb_not_served")
    assert ask(f"{frontend}/api/nodes/{node}/backends", key=gated.secrets.api_key).json() == []
    assert rows(gated.database.url, "select count(*) from node_models where node_id = %s", node) == [(1,)]


def test_only_distributed_require_auth_makes_an_agent_worker_wait(gated: Cluster) -> None:
    """`--nats-require-auth` gates nothing, the agent dials; with `--distributed-require-auth` it waits (WALK-20)."""
    dialling = daemon(
        gated, "dialling", "localai-agent-worker", "--nats-require-auth", LOCALAI_NATS_REQUIRE_AUTH="true"
    )
    waiting = daemon(gated, "waiting", "localai-agent-worker", "--distributed-require-auth")
    for one in (waiting, dialling):
        one.child.start()
    gated.wait_for("both registrations", lambda: {"dialling", "waiting"} <= set(gated.nodes()), 40)
    ids = {name: gated.nodes()[name]["id"] for name in ("dialling", "waiting")}
    assert {gated.nodes()[name]["status"] for name in ids} == {"pending"}
    gated.wait_for("the dial that is refused", lambda: _refusals(gated, ids["dialling"]) >= 2, 20)
    assert _refusals(gated, ids["waiting"]) == 0
    gated.wait_for("the reason in its log", lambda: WAITS in waiting.child.log.read_text(), 20)
    told = ask(waiting.url + "/readyz")
    assert told.status == 503 and WAITS in told.text
    for one in (waiting, dialling):
        approve(gated, one.child.name)
        gated.wait_for(f"the tunnel of {one.child.name}", one.is_ready, 40)
    assert _refusals(gated, ids["waiting"]) == 0


def _refusals(cluster: Cluster, node: str) -> int:
    """How often the frontend refused a node's dial."""
    return cluster.frontends[0].log.read_text().count(f"tunnel of node '{node}' refused: 403")


def test_without_a_token_it_does_not_start(tmp_path: Path) -> None:
    """`--distributed-require-auth` without a registration token: one line, exit 1 (WALK-20)."""
    argv = [*twistd("localai-agent-worker"), "--distributed-require-auth"]
    env = child_environment({"LOCALAI_REGISTER_TO": "http://127.0.0.1:1", "LOCALAI_DATA_PATH": str(tmp_path)})
    done = subprocess.run(argv, env=env, cwd=checkout(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1 and "LOCALAI_REGISTRATION_TOKEN" in done.stderr
