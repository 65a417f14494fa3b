"""A load that is not waited for long; frontends with models folders of their own, and who loads what is where."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from localai_dist.testing.cluster import Cluster
from localai_dist.testing.members import Frontend
from localai_dist.testing.waiting import until
from localai_dist.testing.web import Reply, ask
from tests.process.kit import open_folder, quick_plan, rows, running
from tests.process.loading import again, job, models_of, replicas, said
from tests.process.scripted import SERVED_WITHIN, chat, galleries, gate_of, reported, serves


@pytest.fixture(scope="module")
def apart() -> Iterator[Cluster]:
    """Two frontends with model folders of their own, which wait a second for a load; one worker."""
    with open_folder("apart") as folder:
        env = {**galleries(folder), "LOCALAI_MODEL_LOAD_WAIT": "1s"}
        plan = quick_plan(folder / "state", frontend_env=env, models=("tiny-facts",), workers=1)
        with running(plan) as cluster:
            second = cluster.frontends[1]
            own = cluster.state.folder("own-models")
            second.env["LOCALAI_MODELS_PATH"] = str(own)
            again(cluster, second)
            yield cluster


def test_a_long_load_is_told_instead_of_waited_for(apart: Cluster) -> None:
    """After the load wait: 503 ``model_loading``, Retry-After, the ``loading`` object, alike everywhere (LOAD-7)."""
    first = apart.frontends[0]
    add_here(apart, first, "patience", f"test:load_gate={gate_of(apart, 'patience')}")
    url = first.url + "/v1/chat/completions"
    body = {"model": "patience", "messages": [{"role": "user", "content": "go"}]}
    began = time.monotonic()
    status, headers, answer = raw(url, apart.secrets.api_key, body)
    assert (status, answer["error"]["code"], answer["error"]["type"]) == (503, "model_loading", "model_loading")
    assert time.monotonic() - began >= 1  # and it came while nothing but this test could end the load
    assert 5 <= int(headers["retry-after"]) <= 60
    assert set(answer["loading"]) >= {
        "model", "state", "node", "progress", "bytes_sent", "total_bytes", "file_index", "total_files"
    }  # fmt: skip
    until("loading", lambda: (job(apart, "patience") or {}).get("state") == "loading", 20)
    told = until("the same at both", lambda: _told_alike(apart, "patience"), 20)
    assert (told["state"], told["node"], told["progress"]) == ("loading", "worker-0", 100.0)
    gate_of(apart, "patience").touch()
    until("the replica", lambda: replicas(apart, "patience"), 20)
    assert ask(f"{first.url}/api/models/patience/load-status", key=apart.secrets.api_key).status == 404
    assert chat(apart, first, "patience").status == 200


def _told_alike(cluster: Cluster, model: str) -> dict[str, Any] | None:
    """What both frontends say of a load, once a heartbeat has told its bytes and none fell between the questions."""
    paths = [f"{one.url}/api/models/{model}/load-status" for one in cluster.frontends]
    first, second = (ask(path, key=cluster.secrets.api_key).json() for path in paths)
    return first if first == second and first["progress"] == 100.0 else None


def test_the_load_runs_where_the_files_are(apart: Cluster) -> None:
    """A request at a frontend without the files is served by a load at the one that has them (LOAD-22)."""
    first, second = apart.frontends
    add_here(apart, first, "elsewhere")
    text = (models_of(apart, first) / "elsewhere.yaml").read_text()
    (models_of(apart, second) / "elsewhere.yaml").write_text(text)
    until("the model on both", lambda: serves(apart, second, "elsewhere"), SERVED_WITHIN)
    until("an answer", lambda: chat(apart, second, "elsewhere").status == 200, 30)
    assert len(replicas(apart, "elsewhere")) == 1


def test_missing_files_are_named(apart: Cluster) -> None:
    """No frontend has the files: the error says which file is missing where (LOAD-22)."""
    for frontend in apart.frontends:
        folder = models_of(apart, frontend)
        (folder / "lost.yaml").write_text("name: lost\nbackend: test-backend\nparameters:\n  model: lost.bin\n")
        until("the model", lambda it=frontend: serves(apart, it, "lost"), SERVED_WITHIN)
    reply = until("the failure", lambda: _failed(chat(apart, apart.frontends[1], "lost")), 40)
    for frontend in apart.frontends:
        assert frontend.instance_id in said(reply)
        assert str(models_of(apart, frontend)) not in said(reply), "a client is told a folder"
    assert said(reply).count("lost.bin") == 2


def _failed(reply: Reply) -> Reply | None:
    return reply if reply.status == 500 else None


def test_a_changed_model_file_retires_the_old_replica(apart: Cluster) -> None:
    """A changed YAML: new requests get the new configuration, the old process is stopped and its row goes (LOAD-22)."""
    first = apart.frontends[0]
    events = add_here(apart, first, "revised", "test:answer=old words")
    until("the old answer", lambda: "old words" in chat(apart, first, "revised").text, 30)
    file = models_of(apart, first) / "revised.yaml"
    file.write_text(file.read_text().replace("old words", "new words"))
    until("the new answer", lambda: "new words" in chat(apart, first, "revised").text, 30)
    assert len(rows(apart.database.url, "select 1 from node_models where model_name = 'revised'")) == 1
    old, new = reported(events, "load")
    assert old["pid"] != new["pid"]
    until("the old process stopped", lambda: [one["pid"] for one in reported(events, "sigterm")] == [old["pid"]], 10)
    assert "old words" not in chat(apart, first, "revised").text


def add_here(cluster: Cluster, frontend: Frontend, name: str, *options: str) -> Path:
    """Serve a model by the scriptable backend from one frontend's folder; the file its processes report to."""
    events = cluster.state.root / f"{name}.events"
    folder = models_of(cluster, frontend)
    (folder / f"{name}.bin").write_bytes(name.encode() * 100)
    lines = "\n".join(f"  - {option}" for option in [*options, f"test:events={events}"])
    text = f"name: {name}\nbackend: test-backend\nparameters:\n  model: {name}.bin\noptions:\n{lines}\n"
    (folder / f"{name}.yaml").write_text(text)
    until(f"{name} served", lambda: serves(cluster, frontend, name), SERVED_WITHIN)
    return events


def raw(url: str, key: str, body: Any) -> tuple[int, Mapping[str, str], Any]:
    """Status, headers and body of one request."""
    import http.client

    where = urlsplit(url)
    connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=60)
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    connection.request("POST", where.path, json.dumps(body), headers)
    response = connection.getresponse()
    answer = json.loads(response.read())
    connection.close()
    return response.status, {name.lower(): value for name, value in response.getheaders()}, answer
