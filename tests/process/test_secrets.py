"""Where secrets may not be: logs, errors, help, command lines, environments of backends, files that others can read."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from localai_dist.testing.child import child_environment, twistd
from localai_dist.testing.cluster import Cluster
from localai_dist.testing.members import Worker
from localai_dist.testing.postgres import PostgresServer
from localai_dist.testing.waiting import until
from localai_dist.testing.web import Reply, ask
from localai_dist.wire.credentials import digest
from localai_dist.worker.environment import GRPC_TOKEN
from tests.process.kit import command_line, localai_dist, open_folder, quick_plan, rows, running
from tests.process.outside import backends_of, environment_of, knock
from tests.process.scripted import add_model, chat, galleries, pin

PASSWORD = "pa55-of-the-database"
OTHER_KEY = "sk-another-key-of-an-operator"


@dataclass(frozen=True, slots=True)
class Lived:
    """A cluster that has been through a lot, and every answer it gave to somebody who was wrong."""

    cluster: Cluster
    server: PostgresServer
    answers: list[str]

    def shared(self) -> dict[str, str]:
        """The secrets somebody configured, by what they are."""
        secrets = self.cluster.secrets
        return {
            "registration token": secrets.registration_token,
            "API key": secrets.api_key,
            "another API key": OTHER_KEY,
            "database password": PASSWORD,
        }

    def minted(self) -> dict[str, str]:
        """The secrets that were made up by the daemons, by what they are."""
        kept = {
            f"node token of {worker.name}": json.loads((worker.data_dir / "node.json").read_text())["node_token"]
            for worker in self.cluster.workers
        }
        tokens = rows(self.cluster.database.url, "select model_name, backend_token from node_models")
        return kept | {f"backend token of {model}": token for model, token in tokens}

    def found_in(self, text: str, secrets: dict[str, str] | None = None) -> list[str]:
        """Which secrets are in ``text``."""
        asked = self.shared() | self.minted() if secrets is None else secrets
        return [what for what, secret in asked.items() if secret in text]


@pytest.fixture(scope="module")
def lived() -> Iterator[Lived]:
    """Two frontends and two workers on a database with a password, after good and bad times."""
    with open_folder("secrets") as folder:
        server = PostgresServer(folder / "server", durable=False)
        server.start()
        try:
            server.run("create database localai")
            url = server.url("localai").replace("postgres@", f"postgres:{PASSWORD}@")
            env = {**galleries(folder), "LOCALAI_ROUTE_WAIT": "1s"}
            with running(quick_plan(folder / "state", postgres=url, frontend_env=env)) as cluster:
                for frontend in cluster.frontends:
                    frontend.env["LOCALAI_API_KEY"] += f",{OTHER_KEY}"
                yield Lived(cluster, server, _good_and_bad_times(cluster, server))
        finally:
            server.stop()


def _good_and_bad_times(cluster: Cluster, server: PostgresServer) -> list[str]:
    """Load, fail, refuse, crash, restart; every answer that came back."""
    first, second = cluster.frontends
    cluster.restart(first)
    cluster.wait_for("the first frontend", first.is_ready, 40)
    _await_nodes(cluster)
    with ThreadPoolExecutor(3) as pool:
        models = [("scripted",), ("broken", "test:load=fail"), ("mortal", "test:die_at=3")]
        list(pool.map(lambda words: add_model(cluster, *words), models))
    pin(cluster, "mortal", 0)  # on the worker that is stopped below: the row of its dead process goes with it
    said = [chat(cluster, frontend, model) for frontend in cluster.frontends for model in ("tiny-facts", "scripted")]
    assert [reply.status for reply in said] == [200] * 4, said
    said += [chat(cluster, second, model) for model in ("broken", "mortal", "nobody's")]
    said += _wrong_credentials(cluster)
    server.stop()
    until("readiness gone", lambda: not second.is_ready(), 10)
    said += [chat(cluster, second, "scripted"), ask(second.url + "/readyz")]
    said += [_admin(cluster, "/api/nodes"), ask(second.url + "/api/node/register", method="POST", body={})]
    server.start()
    for frontend in cluster.frontends:
        cluster.wait_for(f"{frontend.name} again", frontend.is_ready, 40)
    worker = cluster.workers[0]
    os.kill(worker.pid, signal.SIGTERM)
    worker.wait_ended(20)
    worker.start()
    _await_nodes(cluster)
    said += [chat(cluster, second, model) for model in ("tiny-facts", "scripted")]
    assert said[-1].status == said[-2].status == 200
    said += [_admin(cluster, path) for path in ("/api/nodes", "/api/nodes/models", "/api/operations", "/readyz")]
    return [reply.text for reply in said]


def _await_nodes(cluster: Cluster) -> None:
    """Every worker has its tunnel, and both frontends would place a model on it."""

    def at_work() -> bool:
        told = [node for frontend in cluster.frontends for node in cluster.nodes(frontend).values()]
        fit = [node for node in told if (node["status"], node["tunnel"]["state"]) == ("healthy", "connected")]
        return len(fit) == len(told) == 4 and all(worker.is_ready() for worker in cluster.workers)

    cluster.wait_for("every node at work", at_work, 40)


def _admin(cluster: Cluster, path: str) -> Reply:
    return ask(cluster.frontends[1].url + path, key=cluster.secrets.api_key)


def _wrong_credentials(cluster: Cluster) -> list[Reply]:
    """Each secret at a door that it does not open."""
    url, secrets = cluster.frontends[1].url, cluster.secrets
    node, token = _identity(cluster.workers[0])
    wrong = [
        ask(url + "/v1/models", key=secrets.registration_token),
        ask(url + "/api/nodes", key=secrets.registration_token),
        ask(url + f"/api/nodes?key={secrets.api_key}", key=token),
        ask(url + "/api/node/register", key=secrets.api_key, method="POST", body={"name": "x", "token": token}),
        ask(url + f"/api/node/{node}/heartbeat", key=token, method="POST", body={"token": token}),
        ask(cluster.workers[0].probe_url + "/v1/control/models/running", key=token, method="POST", body={}),
        ask(url + "/v1/chat/completions", key=secrets.api_key, method="POST", body={"model": 7, "key": token}),
    ]
    knock(url, f"/api/cluster/connect?id={node}", [("Authorization", f"Bearer {secrets.registration_token}")])
    knock(url, f"/api/cluster/connect?id=nobody&token={token}", [("Authorization", f"Bearer {token}")])
    assert [reply.status for reply in wrong] == [401] * 6 + [400], wrong
    return wrong


def _identity(worker: Worker) -> tuple[str, str]:
    kept = json.loads((worker.data_dir / "node.json").read_text())
    return kept["node_id"], kept["node_token"]


def test_the_secrets_are_what_this_file_looks_for(lived: Lived) -> None:
    """Each secret is there, long and its own, and works: it is worth looking for (WALK-23)."""
    found = lived.shared() | lived.minted()
    assert len([what for what in found if what.startswith("backend token")]) >= 2
    assert len(set(found.values())) == len(found) and min(map(len, found.values())) >= 20
    assert ask(lived.cluster.frontends[0].url + "/api/nodes", key=OTHER_KEY).status == 200


def test_no_secret_in_a_log(lived: Lived) -> None:
    """No daemon's log, nor PostgreSQL's own, has any secret, after failures and refusals of all kinds (WALK-23)."""
    logs = {log.name: log.read_text(errors="replace") for log in lived.cluster.state.logs.iterdir()}
    assert len(logs) == 4 and all(logs.values())
    assert "refused: 401" in logs["frontend-1.log"] and "is unavailable" in logs["frontend-1.log"]
    for name, text in logs.items():
        assert lived.found_in(text) == [], name
    assert lived.found_in(lived.server.log.read_text(errors="replace")) == []


def test_no_peer_token_in_a_log_or_an_answer(lived: Lived) -> None:
    """Nothing written or answered is a token whose hash the database has: peers' own, never seen by us (WALK-23)."""
    hashes = {
        value
        for (row,) in rows(lived.cluster.database.url, "select to_jsonb(i)::text from instances i")
        for name, value in json.loads(row).items()
        if "hash" in name
    }
    hashes |= {row[0] for row in rows(lived.cluster.database.url, "select node_token_hash from backend_nodes")}
    assert len(hashes) >= 3
    written = "".join(log.read_text(errors="replace") for log in lived.cluster.state.logs.iterdir())
    words = set(re.findall(r"[A-Za-z0-9_-]{16,}", written + "".join(lived.answers)))
    assert words and not {word for word in words if digest(word) in hashes}
    assert digest(_identity(lived.cluster.workers[0])[1]) in hashes  # the positive control: they would be known


def test_no_secret_in_an_answer(lived: Lived) -> None:
    """No answer to anybody, right or wrong, repeats a secret, and not the database's password (WALK-23)."""
    assert len(lived.answers) > 15
    for text in lived.answers:
        assert lived.found_in(text) == [], text


def test_no_secret_on_a_command_line(lived: Lived) -> None:
    """No process on this machine shows a secret in its command line (WALK-23)."""
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    shown = {}
    for pid in pids:
        try:
            shown[pid] = command_line(pid)
        except OSError:
            continue  # it ended meanwhile
    assert {child.pid for child in lived.cluster.children} <= set(shown)
    assert backends_of(lived.cluster.workers[0]) <= set(shown)
    for text in shown.values():
        assert lived.found_in(text) == [], text


def test_backends_see_their_own_token_alone(lived: Lived) -> None:
    """A backend's environment has the token of its own process, no other secret, and no variable of ours (WALK-23)."""
    tokens = dict(rows(lived.cluster.database.url, "select address, backend_token from node_models"))
    seen = set()
    for worker in lived.cluster.workers:
        for pid in backends_of(worker):
            environment = environment_of(pid)
            own = {what: secret for what, secret in lived.minted().items() if secret != environment[GRPC_TOKEN]}
            text = "\n".join(environment.values())
            assert lived.found_in(text, lived.shared() | own) == []
            assert {name for name in environment if name.startswith("LOCALAI")} == {
                GRPC_TOKEN,
                "LOCALAI_BACKEND_PYTHON",
            }
            seen.add(environment[GRPC_TOKEN])
    assert set(tokens.values()) <= seen


@pytest.mark.parametrize("program", ["localai-frontend", "localai-worker", "localai-agent-worker"])
def test_help_shows_no_secret(lived: Lived, program: str, tmp_path: Path) -> None:
    """``--help`` with every secret set shows none of them (WALK-23)."""
    member = lived.cluster.frontends[0] if program == "localai-frontend" else lived.cluster.workers[0]
    env = child_environment({name: value for name, value in member.env.items() if name.startswith("LOCALAI_")})
    argv = [*twistd(program)[:-3], program, "--help"]
    done = subprocess.run(argv, env=env, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "LOCALAI_REGISTRATION_TOKEN" in done.stdout
    assert lived.found_in(done.stdout + done.stderr) == []


@pytest.mark.parametrize("program", ["localai-frontend", "localai-worker", "localai-agent-worker"])
def test_a_mistake_shows_no_secret(lived: Lived, program: str, tmp_path: Path) -> None:
    """A start that fails by a mistake, with every secret set, shows none of them (WALK-23)."""
    member = lived.cluster.frontends[0] if program == "localai-frontend" else lived.cluster.workers[0]
    env = {name: value for name, value in member.env.items() if name.startswith("LOCALAI_")}
    given = child_environment({**env, "LOCALAI_DATA_PATH": str(tmp_path)})
    config, note = tmp_path / "config.yaml", tmp_path / "note"
    config.write_text(f"registration_tokn: {env['LOCALAI_REGISTRATION_TOKEN']}\n")
    note.write_text(env["LOCALAI_REGISTRATION_TOKEN"])
    mistakes: list[tuple[list[str], dict[str, str]]] = [
        (["--tunnel-keepalive=soon"], {}),
        ([f"--config={config}"], {}),
        ([], {"LOCALAI_REGISTRATION_TOKEN_FILE": str(note)}),
    ]
    started = [
        subprocess.Popen(
            [*twistd(program), *words],
            env={**given, **more},
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for words, more in mistakes
    ]
    for process in started:
        out, _ = process.communicate(timeout=60)
        assert process.returncode != 0
        assert out and lived.found_in(out) == [], out


def test_the_operators_command_shows_no_secret(lived: Lived) -> None:
    """What the operator's command says, right or wrong, has no secret in it (WALK-23)."""
    url = lived.cluster.frontends[1].url
    for key in (lived.cluster.secrets.api_key, lived.cluster.secrets.registration_token):
        env = {
            "LOCALAI_SERVER": url,
            "LOCALAI_CLI_API_KEY": key,
            "LOCALAI_AUTH_DATABASE_URL": lived.cluster.database.url,
        }
        for words in (["nodes", "ls"], ["-o", "json", "nodes", "ls"], ["models", "ls"], ["doctor"], ["--help"]):
            command = localai_dist(*words, env=env)
            out, err = command.communicate(timeout=30)
            assert lived.found_in(out + err) == [], words


def test_files_with_secrets_are_private(lived: Lived) -> None:
    """Every file of the cluster with a secret in it is readable by its owner alone (WALK-23)."""
    secrets = [secret.encode() for secret in (lived.shared() | lived.minted()).values()]
    holding = {}
    for folder, _, names in os.walk(lived.cluster.state.root):
        for path in (Path(folder, name) for name in names):
            if path.is_file() and path.stat().st_size < 1_000_000:
                content = path.read_bytes()
                if any(secret in content for secret in secrets):
                    holding[path.name] = path.stat().st_mode & 0o777
    assert set(holding) == {"node.json", "ready.json", "secrets.json"}
    assert set(holding.values()) == {0o600}
    for log in lived.cluster.state.logs.iterdir():
        assert log.stat().st_mode & 0o777 == 0o600
