"""``localai-dist demo``: its ready file, its ends, its second start."""

import json
import os
import select
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from localai_dist.testing.waiting import until
from localai_dist.testing.web import ask
from tests.process import kit
from tests.process.outside import moved

TOP = {
    *("version", "state", "models_dir", "log_dir", "database_url", "registration_token", "api_key", "admin"),
    *("frontends", "workers"),
}
FRONTEND = {"name", "url", "pid", "instance_id", "log", "argv", "env", "cwd"}
WORKER = {"name", "id", "pid", "frontend", "data_dir", "models_dir", "log", "probe_url", "argv", "env", "cwd"}


@contextmanager
def demo(state: Path, *words: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """A running demo and its ready file."""
    ready = state.parent / "ready.json"
    ready.unlink(missing_ok=True)
    process = kit.localai_dist("demo", "--state", str(state), "--http-port", "0", "--ready-file", str(ready), *words)
    try:
        until("the ready file", lambda: ready.exists() or process.poll() is not None, 90)
        assert process.poll() is None, process.communicate()[1]
        yield process, json.loads(ready.read_text())
    finally:
        kit.end(process)


def ended_within(process: subprocess.Popen[str], pids: set[int], bound: float) -> None:
    """Every one of ``pids`` and the demo itself end within ``bound`` seconds."""
    began = time.monotonic()
    until("the end of every process", lambda: process.poll() is not None and not kit.living(pids), bound)
    assert time.monotonic() - began <= bound


def backends_in(tree: set[int]) -> set[int]:
    """Those of the processes that serve a model by llama.cpp."""
    return {pid for pid in tree if "localai_dist.backends.llama_cpp" in kit.command_line(pid)}


def pin(ready: Mapping[str, Any]) -> None:
    """Let the second worker alone serve tiny-facts: which of two like nodes is chosen otherwise is nobody's promise."""
    url, node = ready["frontends"][0]["url"], ready["workers"][1]["id"]
    rule = {"model_name": "tiny-facts", "node_selector": {"chosen": "yes"}}
    for method, path, body in (
        ("PATCH", f"/api/nodes/{node}/labels", {"chosen": "yes"}),
        ("POST", "/api/nodes/scheduling", rule),
    ):
        assert ask(url + path, key=ready["api_key"], method=method, body=body).status in (200, 201)


def served(process: subprocess.Popen[str], ready: Mapping[str, Any]) -> tuple[set[int], Path]:
    """Every process of a demo that has just answered, a backend among them, and the model file it was staged to."""
    assert kit.capital_of_kenya(ready) == kit.NAIROBI
    tree = kit.descendants(process.pid)
    assert backends_in(tree)
    [staged] = [file for one in ready["workers"] for file in Path(one["models_dir"]).rglob("tiny-facts*.gguf")]
    return tree, staged


def test_ready_file_and_ends(state: Path) -> None:
    """
    The ready file is the documented one; SIGTERM and SIGINT end all in 10 s, the loaded model's backend too; the second
    start keeps keys, nodes and staged files (WALK-2, WALK-3).
    """
    with demo(state) as (process, ready):
        assert set(ready) == TOP
        assert (ready["version"], ready["admin"]) == (1, None)
        assert all(set(one) == FRONTEND for one in ready["frontends"])
        assert all(set(one) == WORKER for one in ready["workers"])
        assert [one["name"] for one in ready["frontends"]] == ["frontend-0", "frontend-1"]
        assert sorted(one["frontend"] for one in ready["workers"]) == [0, 1]
        assert os.stat(state.parent / "ready.json").st_mode & 0o777 == 0o600
        assert ready["models_dir"] == str(state / "models")
        for one in ready["frontends"]:
            assert not one["url"].endswith("/")
            assert ask(one["url"] + "/readyz").status == 200
        for one in ready["workers"]:
            assert ask(one["probe_url"] + "/readyz").status == 200
        owners = dict(kit.rows(ready["database_url"], "select node_id, owner_instance_id from node_connections"))
        for one in ready["workers"]:
            assert owners[one["id"]] == ready["frontends"][one["frontend"]]["instance_id"]
        pin(ready)
        tree, staged = served(process, ready)
        assert {one["pid"] for one in [*ready["frontends"], *ready["workers"]]} <= tree
        before = staged.stat()
        process.send_signal(signal.SIGTERM)
        ended_within(process, tree, 10)
        assert process.returncode == 0
    with demo(state) as (process, again):
        assert (again["api_key"], again["registration_token"]) == (ready["api_key"], ready["registration_token"])
        assert [one["id"] for one in again["workers"]] == [one["id"] for one in ready["workers"]]
        tree, found = served(process, again)
        after = found.stat()
        assert found == staged and (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
        assert max(moved(one["pid"])[1] for one in again["workers"]) < after.st_size / 2  # logs; no copy was made
        process.send_signal(signal.SIGINT)
        ended_within(process, tree, 10)
        assert process.returncode == 0


def test_killed_demo_leaves_nothing(state: Path) -> None:
    """
    SIGKILL of the demo: its descendants end by themselves in 10 s, the loaded model's backend too; the next start goes
    well (WALK-3).
    """
    with demo(state) as (process, ready):
        tree, _ = served(process, ready)
        assert len(tree) >= 5
        process.kill()
        ended_within(process, tree, 10)
    with demo(state) as (_, again):
        assert [one["id"] for one in again["workers"]] == [one["id"] for one in ready["workers"]]


def test_no_secret_on_a_command_line(state: Path) -> None:
    """No process of the demo shows a secret in its command line, no log has one (WALK-23)."""
    with demo(state) as (process, ready):
        secrets = [ready["api_key"], ready["registration_token"]]
        shown = [kit.command_line(pid) for pid in kit.descendants(process.pid)]
        shown += [log.read_text(errors="replace") for log in Path(ready["log_dir"]).iterdir()]
        assert not [text for text in shown for secret in secrets if secret in text]
        assert any("localai-worker" in text for text in shown)


def test_restart_by_hand(state: Path) -> None:
    """What the ready file says about a daemon starts it again, on the same port (WALK-2)."""
    with demo(state) as (process, ready):
        first = ready["frontends"][0]
        os.kill(first["pid"], signal.SIGKILL)
        until("its end", lambda: not kit.living({first["pid"]}), 5)
        assert "frontend-0" in first_error(process)
        with open(first["log"], "ab") as log:
            mine = subprocess.Popen(first["argv"], env=first["env"], cwd=first["cwd"], stdout=log, stderr=log)
        try:
            until("its readiness", lambda: ask(first["url"] + "/readyz").status == 200, 30)
        finally:
            mine.kill()
            mine.wait()
        assert process.poll() is None


def first_error(process: subprocess.Popen[str]) -> str:
    """The first line that a demo writes to stderr."""
    assert process.stderr is not None
    ready, _, _ = select.select([process.stderr], [], [], 30)
    assert ready, "nothing on stderr within 30 s"
    return process.stderr.readline()


def test_a_model_dropped_in_is_served(state: Path) -> None:
    """
    A model file plus YAML put into the models folder is listed by both frontends within 5 s and answers; no process was
    started again for it (WALK-2).
    """

    def listed(frontend: Mapping[str, Any]) -> bool:
        return '"dropped"' in ask(frontend["url"] + "/v1/models", key=ready["api_key"]).text

    with demo(state, "--model", "tiny-facts") as (process, ready):
        models = Path(ready["models_dir"])
        sheet = (models / "tiny-facts.yaml").read_text().replace("name: tiny-facts", "name: dropped")
        [weights] = models.glob("tiny-facts*.gguf")
        shutil.copyfile(weights, models / "dropped.gguf")
        (models / "dropped.yaml").write_text(sheet.replace(weights.name, "dropped.gguf"))
        until("the new model on both frontends", lambda: all(map(listed, ready["frontends"])), 5)
        for number in (0, 1):
            assert kit.capital_of_kenya(ready, frontend=number, model="dropped") == kit.NAIROBI
        assert [file for one in ready["workers"] for file in Path(one["models_dir"]).rglob("dropped.gguf")]
        assert {one["pid"] for one in [*ready["frontends"], *ready["workers"]]} <= kit.descendants(process.pid)


def test_pending_workers(state: Path) -> None:
    """With --no-auto-approve the file comes once all are registered; they wait for an operator (WALK-2, WALK-9)."""
    with demo(state, "--no-auto-approve", "--workers", "1") as (_, ready):
        [worker] = ready["workers"]
        assert worker["id"] and worker["frontend"] is None
        [node] = ask(ready["frontends"][0]["url"] + "/api/nodes", key=ready["api_key"]).json()
        assert (node["status"], node["approved"]) == ("pending", False)
        env = {"LOCALAI_SERVER": ready["frontends"][0]["url"], "LOCALAI_CLI_API_KEY": ready["api_key"]}
        command = kit.localai_dist("nodes", "approve", "worker-0", env=env)
        assert command.communicate()[0] == "worker-0 approved\n"
        until("its tunnel", lambda: ask(worker["probe_url"] + "/readyz").status == 200, 40)


def test_mistakes_are_one_line(state: Path) -> None:
    """
    A taken port, an unusable folder or database, a setting that stops a frontend once PostgreSQL runs: one line on
    stderr, exit code 1, and no process is left (WALK-2).
    """
    (state.parent / "file").write_text("")
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        for words, part in (
            (["--state", str(state), "--http-port", str(port)], str(port)),
            (["--state", str(state.parent / "file" / "x"), "--http-port", "0"], "state folder"),
            (
                ["--state", str(state), "--http-port", "0", "--postgres", "postgresql://u:hunter2@127.0.0.1:1/x"],
                "database",
            ),
            (
                ["--state", str(state), "--http-port", "0", "--frontend-env", "LOCALAI_TUNNEL_KEEPALIVE=soon"],
                "LOCALAI_TUNNEL_KEEPALIVE",
            ),
        ):
            process = kit.localai_dist("demo", *words)
            _, err = process.communicate(timeout=60)
            assert process.returncode == 1
            assert err.count("\n") == 1 and part in err, err
            assert "hunter2" not in err
            assert touching(state) == {}
    assert (state / "postgres").is_dir()


def touching(folder: Path) -> dict[int, str]:
    """Processes that name a folder in their command line or environment, or work in it."""
    found = {}
    for entry in filter(lambda it: it.name.isdigit(), Path("/proc").iterdir()):
        try:
            environment = (entry / "environ").read_bytes().decode(errors="replace")
            told = kit.command_line(int(entry.name)), os.readlink(entry / "cwd"), environment
        except OSError:  # ended meanwhile, or somebody else's
            continue
        if any(str(folder) in text for text in told):
            found[int(entry.name)] = told[0]
    return found


@pytest.mark.parametrize("stage", ["starting PostgreSQL", "starting 2 frontends", "starting 2 workers"])
def test_interrupted_start(state: Path, stage: str) -> None:
    """Ctrl-C at any stage of a start ends what was started, with exit code 0 (WALK-3)."""
    process = kit.localai_dist("demo", "--state", str(state), "--http-port", "0")
    try:
        assert process.stdout is not None
        assert next((line for line in process.stdout if line.startswith(stage)), None), process.communicate()[1]
        tree = kit.descendants(process.pid)
        process.send_signal(signal.SIGINT)
        ended_within(process, tree, 10)
        assert process.returncode == 0
    finally:
        kit.end(process)
