"""The three daemons as twistd starts them, without a cluster around them."""

import os
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from localai_dist.settings import accepted
from localai_dist.testing.child import Child, checkout, child_environment, twistd
from localai_dist.testing.cluster import Cluster
from localai_dist.testing.ports import Ports
from localai_dist.testing.postgres import PostgresServer
from localai_dist.testing.waiting import until
from localai_dist.testing.web import ask
from tests.process import kit
from tests.test_packaging import installed

TOKEN = "walk-token-1f5c"


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    """A private PostgreSQL."""
    with kit.open_folder("daemons") as folder:
        started = PostgresServer(folder / "postgres", durable=False)
        started.start()
        yield started
        started.stop()


@pytest.fixture
def database(server: PostgresServer, request: pytest.FixtureRequest) -> str:
    """The URL of an empty database of this test."""
    name = f"t{abs(hash(request.node.nodeid)):x}"
    server.run(f"create database {name}")
    return server.url(name)


def environment(database: str, port: int, folder: Path, **more: str) -> dict[str, str]:
    """A frontend's environment."""
    return child_environment(
        {
            "LOCALAI_ADDRESS": f"127.0.0.1:{port}",
            "LOCALAI_DISTRIBUTED_ADVERTISE_ADDR": f"127.0.0.1:{port}",
            "LOCALAI_AUTH_DATABASE_URL": database,
            "LOCALAI_REGISTRATION_TOKEN": TOKEN,
            "LOCALAI_DATA_PATH": str(folder / "data"),
            "LOCALAI_MODELS_PATH": str(folder / "models"),
            **more,
        }
    )


def run(env: Mapping[str, str], cwd: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """twistd with ``words``, to its end."""
    argv = twistd("x")[:-3]
    return subprocess.run([*argv, *words], env=env, cwd=cwd, capture_output=True, text=True, timeout=60)


def test_help_lists_options_from_a_checkout(tmp_path: Path) -> None:
    """A checkout on PYTHONPATH is enough: all three list their options, none of a broker (WALK-13, WALK-20)."""
    for program, variable in (
        ("localai-frontend", "LOCALAI_AUTH_DATABASE_URL"),
        ("localai-worker", "LOCALAI_REGISTER_TO"),
        ("localai-agent-worker", "LOCALAI_REGISTER_TO"),
    ):
        done = run({**child_environment({}), "PYTHONPATH": str(checkout())}, tmp_path, program, "--help")
        assert done.returncode == 0 and variable in done.stdout
        assert "--nats" not in done.stdout and "NATS_URL" not in done.stdout


@pytest.mark.parametrize("form", ["foreground", "daemon"])
@pytest.mark.parametrize("url", ["unreachable", "no such database", "no address"])
def test_bad_database_is_one_line(server: PostgresServer, tmp_path: Path, form: str, url: str) -> None:
    """A wrong or unreachable database: one line without the password, exit 1, also daemonised (WALK-14, WALK-23)."""
    dead = Ports().one()
    address = {
        "unreachable": f"postgresql://u:hunter2@127.0.0.1:{dead}/x",
        "no such database": f"postgresql://postgres:hunter2@/nope?host={server.socket_folder}",
        "no address": "hunter2",
    }[url]
    forms = {"foreground": ["-n", "--pidfile="], "daemon": [f"--pidfile={tmp_path}/p", f"--logfile={tmp_path}/log"]}
    done = run(environment(address, Ports().one(), tmp_path), tmp_path, *forms[form], "localai-frontend")
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1 and done.stderr.startswith("localai-frontend: "), done.stderr
    assert "hunter2" not in done.stderr + done.stdout
    assert not (tmp_path / "p").exists()


def test_taken_port_is_one_line(database: str, tmp_path: Path) -> None:
    """A port somebody else listens on: one line that names it, exit 1."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        done = run(environment(database, port, tmp_path), tmp_path, "-n", "--pidfile=", "localai-frontend")
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1 and f"127.0.0.1:{port}" in done.stderr


def test_a_worker_refused_for_good_says_so_in_its_log(tmp_path: Path) -> None:
    """A daemonised worker with a wrong registration token ends and leaves the one clear line in its logfile."""

    class Refusing(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            body = b'{"error": {"message": "invalid registration token"}}'
            self.send_response(401)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    with HTTPServer(("127.0.0.1", 0), Refusing) as frontend:
        threading.Thread(target=frontend.serve_forever, daemon=True).start()
        env = {
            "LOCALAI_REGISTER_TO": f"http://127.0.0.1:{frontend.server_port}",
            "LOCALAI_REGISTRATION_TOKEN": "hunter2",
            "LOCALAI_HTTP_ADDR": ":0",
            "LOCALAI_NODE_NAME": "gpu-1",
        }
        forms = [f"--pidfile={tmp_path}/p", f"--logfile={tmp_path}/log"]
        done = run(child_environment(env), tmp_path, *forms, "localai-worker")
        assert done.returncode == 0, done.stderr
        until("the worker ended", lambda: "Server Shut Down" in (tmp_path / "log").read_text(), 20)
        frontend.shutdown()
    log = (tmp_path / "log").read_text()
    assert "localai-worker can't go on: " in log and "invalid registration token" in log
    assert "set LOCALAI_REGISTRATION_TOKEN to the cluster's" in log and "hunter2" not in log


def test_two_frontends_on_an_empty_database(database: str, tmp_path: Path) -> None:
    """Two frontends that start at the same moment on an empty database both serve (WALK-14)."""
    ports = Ports()
    pair = []
    for name in ("a", "b"):
        folder = tmp_path / name
        folder.mkdir()
        port = ports.one()
        argv = twistd("localai-frontend")
        pair.append((Child(name, argv, environment(database, port, folder), folder, folder / "log"), port))
    try:
        for child, _ in pair:
            child.start()
        for child, port in pair:
            url = f"http://127.0.0.1:{port}/readyz"
            until(f"{child.name} ready", lambda: ask(url).status == 200 or not child.is_alive(), 30)  # noqa: B023
            assert child.is_alive(), child.tail()
    finally:
        for child, _ in pair:
            child.kill()


def test_newer_database_is_refused(database: str, tmp_path: Path) -> None:
    """A database written by a newer version is refused, naming both versions, exit 1 (WALK-14)."""
    from localai_dist.store.schema import SCHEMA_VERSION, migrate_sync

    migrate_sync(database)
    kit.rows(database, "insert into schema_versions values (%s, 'later', '9.8.7')", SCHEMA_VERSION + 1)
    done = run(environment(database, Ports().one(), tmp_path), tmp_path, "-n", "--pidfile=", "localai-frontend")
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert f"schema version {SCHEMA_VERSION + 1}, written by localai-dist 9.8.7" in done.stderr
    assert f"knows schema version {SCHEMA_VERSION}:" in done.stderr


def test_daemonised_frontend_serves(database: str, tmp_path: Path) -> None:
    """``twistd --pidfile --logfile`` goes to the background, serves, and ends by its pid file (WALK-13)."""
    port = Ports().one()
    pidfile = tmp_path / "pid"
    words = [f"--pidfile={pidfile}", f"--logfile={tmp_path}/log", "localai-frontend"]
    done = run(environment(database, port, tmp_path, LOCALAI_LAME_DUCK="100ms"), tmp_path, *words)
    assert done.returncode == 0, done.stderr
    until("its pid file", lambda: pidfile.exists() and pidfile.read_text().strip(), 10)
    pid = int(pidfile.read_text())
    try:
        until("its readiness", lambda: ask(f"http://127.0.0.1:{port}/readyz").status == 200, 30)
        assert TOKEN not in (tmp_path / "log").read_text()
        os.kill(pid, signal.SIGTERM)
        until("its end", lambda: not kit.living({pid}), 15)
        assert not pidfile.exists()
    finally:
        if kit.living({pid}):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("form", ["foreground", "daemon"])
def test_the_wheel_serves(database: str, tmp_path: Path, form: str) -> None:
    """The wheel in an empty venv serves a request, in the foreground and daemonised (WALK-13)."""
    wheel, port, pidfile = installed(), Ports().one(), tmp_path / "pid"
    env = environment(database, port, tmp_path, LOCALAI_LAME_DUCK="100ms", LOCALAI_API_KEY="sk-wheel")
    del env["PYTHONPATH"]  # what runs is the wheel's code, not this checkout's
    forms = {"foreground": ["-n"], "daemon": [f"--logfile={tmp_path}/log"]}
    argv = [str(wheel.python), *twistd("x")[1:-3], *forms[form], f"--pidfile={pidfile}", "localai-frontend"]
    with (tmp_path / "out").open("wb") as out:
        started = subprocess.Popen(argv, env=env, cwd=tmp_path, stdout=out, stderr=out)
    pid = started.pid
    try:
        if form == "daemon":
            assert started.wait(60) == 0, (tmp_path / "out").read_text()
        written = until("its pid file", lambda: _content(pidfile) or started.poll(), 60)
        assert isinstance(written, str), (tmp_path / "out").read_text()
        pid = int(written)
        assert (pid == started.pid) == (form == "foreground")
        url = f"http://127.0.0.1:{port}"
        until("its readiness", lambda: ask(url + "/readyz").status == 200, 60)
        assert ask(url + "/v1/models").status == 401
        listed = ask(url + "/v1/models", key="sk-wheel")
        assert (listed.status, listed.json()["data"]) == (200, [])
        os.kill(pid, signal.SIGTERM)
        until("its end", lambda: started.poll() is not None and not kit.living({pid}), 30)
        assert not pidfile.exists()
    finally:
        for one in kit.living({pid, started.pid}):
            os.kill(one, signal.SIGKILL)
        started.wait()


def _content(file: Path) -> str:
    return file.read_text() if file.exists() else ""


def broker(flags: bool, dead: int, *, without: str = "") -> Any:
    """Every old broker option, pointing at a dead address and at files that don't exist; as flags or as variables."""
    given = [it for it in accepted.BROKER if it.env != without]
    value = {it: f"nats://127.0.0.1:{dead}" if it.flag == "nats-url" else "/no/such/file" for it in given}
    if flags:
        return [f"--{it.flag}={value[it]}" if it.takes_value else f"--{it.flag}" for it in given]
    return {it.env: value[it] if it.takes_value else "true" for it in given}


def test_old_broker_options(cluster: Cluster) -> None:
    """Every old broker flag and variable given: all three daemons start, nothing ever connects there (WALK-20)."""
    with socket.create_server(("127.0.0.1", 0)) as broker_socket:
        broker_socket.setblocking(False)
        port, ports = broker_socket.getsockname()[1], Ports()
        first = cluster.frontends[0]
        probes = []
        for name, program, env in (
            ("old-frontend", "localai-frontend", {**first.env, "LOCALAI_INSTANCE_ID": "old-frontend"}),
            ("old-worker", "localai-worker", {**cluster.workers[0].env, "LOCALAI_NODE_NAME": "old-worker"}),
            ("old-agent", "localai-agent-worker", {**cluster.workers[0].env, "LOCALAI_NODE_NAME": "old-agent"}),
        ):
            probe = f"127.0.0.1:{ports.one()}"
            folder = cluster.state.folder(name, inside=["data", "models", "backends"])
            own = {key: value for key, value in env.items() if key.startswith("LOCALAI_")}
            own |= {"LOCALAI_ADDRESS": probe, "LOCALAI_DISTRIBUTED_ADVERTISE_ADDR": probe, "LOCALAI_HTTP_ADDR": probe}
            own |= {"LOCALAI_DATA_PATH": str(folder / "data"), "LOCALAI_BACKENDS_PATH": str(folder / "backends")}
            if program != "localai-frontend":
                own["LOCALAI_MODELS_PATH"] = str(folder / "models")
                own["LOCALAI_SERVE_ADDR"] = f"127.0.0.1:{ports.backends()}"
                own.pop("LOCALAI_GRPC_MAX_PORT")
            child = cluster.another(name, program, {**own, **broker(False, port)})
            child.argv += broker(True, port)
            child.start()
            probes.append((child, f"http://{probe}/readyz"))
        for child, url in probes:
            until(f"{child.name} ready", lambda: ask(url).status == 200 or not child.is_alive(), 40)  # noqa: B023
            assert child.is_alive(), child.tail()
            assert not [line for line in child.tail(200) if "nats" in line.lower()]
        # Positive control: this socket does see a connection that is made.
        with pytest.raises(BlockingIOError):
            broker_socket.accept()
        with socket.create_connection(("127.0.0.1", port)):
            broker_socket.setblocking(True)
            broker_socket.accept()[0].close()
        for child, _ in probes:
            child.kill()
