"""Recordings and pictures from a client to the backend, over tunnel and relay; what stays of recordings: nothing."""

from __future__ import annotations

import base64
import hashlib
import http.client
import os
import shutil
import socket
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest

from localai_dist.testing.cluster import Cluster
from localai_dist.testing.members import Frontend, Worker
from localai_dist.testing.waiting import until
from tests.process.faults import FragileCluster, carried, cut_together
from tests.process.kit import open_folder, quick_plan, rows, run_to_the_end, running
from tests.process.scripted import add_model, admin, client, galleries, owners, pin, reported

SIZE = 30_000_000
ROOM = "48MiB"
"""What a worker lets requests' files have: one of ``SIZE``, not two."""
RESENT = 8 * 2**20
"""Bytes that one cut may cost."""
BOUND = 60.0
"""For a fact that follows within a moment on an idle machine (s)."""
HOUR = 3600.0


@pytest.fixture(scope="module")
def studio() -> Iterator[Cluster]:
    """Two frontends that take 40 MiB, two workers with room for one such recording each."""
    with open_folder("transcriptions") as folder:
        plan = quick_plan(
            folder / "state",
            frontend_env={**galleries(folder), "LOCALAI_UPLOAD_LIMIT": "40MiB"},
            worker_env={"LOCALAI_REQUEST_FILES_LIMIT": ROOM, "LOCALAI_REQUEST_FILES_FREE": "0"},
        )
        with running(plan) as cluster:
            yield cluster


@pytest.fixture(scope="module")
def recording() -> bytes:
    """30 MB that nothing compresses and no two runs share."""
    return os.urandom(SIZE)


def owner_and_other(cluster: Cluster, worker: int) -> tuple[Frontend, Frontend]:
    """The frontend that holds a worker's tunnel, and the one that relays to it."""
    name = owners(cluster)[cluster.workers[worker].name]
    owner, other = sorted(cluster.frontends, key=lambda it: it.name != name)
    return owner, other


def on_node(worker: Worker) -> list[str]:
    """Files of requests on a node, and the requests' folders."""
    return [*files_below(ephemeral(worker)), *map(str, ephemeral(worker).glob("*"))]


def ephemeral(worker: Worker) -> Path:
    """The folder of requests' files of a worker."""
    return worker.data_dir / "files" / "staging" / "ephemeral"


def on_frontend(frontend: Frontend) -> list[str]:
    """Files of requests on a frontend."""
    return files_below(frontend.data_dir / "received")


def files_below(folder: Path) -> list[str]:
    """Every file; folders may vanish meanwhile."""
    return [os.path.join(parent, name) for parent, _, names in os.walk(folder) for name in names]


def connected(cluster: Cluster) -> bool:
    """Whether some frontend holds each worker's tunnel, and the worker says so, too."""
    cluster.workers_spread()  # has a look
    return all(worker.home is not None and worker.is_ready() for worker in cluster.workers)


def assert_nothing_stays(cluster: Cluster) -> None:
    """Every file of every request goes, on both sides, without anybody asking again."""
    for worker in cluster.workers:
        until(f"no file of a request on {worker.name}", lambda it=worker: not on_node(it), BOUND)
    for frontend in cluster.frontends:
        until(f"no file of a request on {frontend.name}", lambda it=frontend: not on_frontend(it), BOUND)
    running = "select 1 from node_models where in_flight > 0"
    until("nothing in flight", lambda: not rows(cluster.database.url, running), BOUND)


def heard(content: bytes) -> str:
    """What the scriptable backend says it heard when it read exactly ``content``."""
    return f"{len(content)} bytes sha256 {hashlib.sha256(content).hexdigest()}"


def transcribe(cluster: Cluster, frontend: Frontend, model: str, content: bytes, **more: Any) -> Any:
    """The answer to one question of the official client."""
    told = client(cluster, frontend).audio.transcriptions
    return told.create(model=model, file=("talk.wav", content), **more)


@contextmanager
def asking(cluster: Cluster, frontend: Frontend, model: str, content: bytes) -> Iterator[Future[Any]]:
    """The same while the test goes on; its answer is waited for at the end."""
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(transcribe, cluster, frontend, model, content)


def started(events: Path, count: int = 1) -> dict[str, object]:
    """The backend's report that it works on a recording."""
    told = until("the backend at work", lambda: reported(events, "start")[count - 1 :], BOUND)
    return told[0]


@contextmanager
def form_on_its_way(
    cluster: Cluster, frontend: Frontend, model: str, content: bytes, *, sent: int
) -> Iterator[socket.socket]:
    """A client that has sent only ``sent`` bytes of its form."""
    url = urlsplit(frontend.url)
    head = f'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\n{model}\r\n'
    head += '--b\r\nContent-Disposition: form-data; name="file"; filename="talk.wav"\r\n\r\n'
    body = head.encode() + content + b"\r\n--b--\r\n"
    lines = (
        "POST /v1/audio/transcriptions HTTP/1.1",
        f"Host: {url.netloc}",
        f"Authorization: Bearer {cluster.secrets.api_key}",
        "Content-Type: multipart/form-data; boundary=b",
        f"Content-Length: {len(body)}",
    )
    with socket.create_connection((url.hostname or "", url.port or 0), timeout=60) as connection:
        connection.sendall("\r\n".join(lines).encode() + b"\r\n\r\n" + body[:sent])
        yield connection


def put_late(cluster: Cluster, worker: Worker, key: str) -> int:
    """The status of a file that somebody still brings under a key."""
    url = urlsplit(worker.probe_url)
    connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=10)
    bearer = {"Authorization": f"Bearer {cluster.secrets.registration_token}"}
    try:
        connection.request("PUT", f"/v1/files/{key}", body=b"late", headers=bearer)
        return connection.getresponse().status
    finally:
        connection.close()


def test_a_picture_is_seen(studio: Cluster) -> None:
    """
    A picture in a chat of the official client is what the backend gets, through either frontend; an address is not
    fetched, and the backend in the box, which sees nothing, says so (WALK-17).
    """
    events = add_model(studio, "eyes", "test:answer=a cat")
    picture = base64.b64encode(b"\x89PNG" + os.urandom(100_000)).decode()

    def look(frontend: Frontend, model: str, url: str) -> str | None:
        parts: Any = [{"type": "text", "text": "What is it?"}, {"type": "image_url", "image_url": {"url": url}}]
        asked = client(studio, frontend).chat.completions
        return asked.create(model=model, messages=[{"role": "user", "content": parts}]).choices[0].message.content

    for count, frontend in enumerate(studio.frontends, 1):
        assert look(frontend, "eyes", f"data:image/png;base64,{picture}") == "a cat"
        assert started(events, count)["images"] == [picture]
    for model, url, said in (
        ("eyes", studio.frontends[0].url + "/healthz", "fetches no pictures"),
        ("tiny-facts", f"data:image/png;base64,{picture}", "text only"),
    ):
        with pytest.raises(openai.BadRequestError, match=said):
            look(studio.frontends[0], model, url)
    assert len(reported(events, "start")) == 2


def test_a_cold_model_hears_it_over_relay_and_tunnel(studio: Cluster, recording: bytes) -> None:
    """
    The official client's 30 MB arrive byte by byte, first through the frontend that relays and loads the model, then
    through the one with the tunnel; afterwards no file is left on either side (LOAD-23).
    """
    events = add_model(studio, "ears")
    pin(studio, "ears", 1)
    owner, other = owner_and_other(studio, 1)
    for frontend in (other, owner):
        assert transcribe(studio, frontend, "ears", recording).text == heard(recording)
        assert_nothing_stays(studio)
    assert len(reported(events, "load")) == 1
    used = [Path(str(event["file"])) for event in reported(events, "start")]
    assert [path.is_relative_to(ephemeral(studio.workers[1])) for path in used] == [True, True]
    assert used[0].parent != used[1].parent
    assert {path.suffix for path in used} == {".wav"}


def test_every_form_of_the_answer(studio: Cluster) -> None:
    """
    What the client asks of the backend is what it is told, and each response_format is an answer of its kind (LOAD-23).
    """
    events = add_model(studio, "forms")
    frontend, small = studio.frontends[0], b"RIFF" * 1000
    asked = {"language": "de", "prompt": "Grüße", "temperature": 0.5}
    verbose = transcribe(studio, frontend, "forms", small, response_format="verbose_json", **asked)
    size, digest = f"{len(small)} bytes", f"sha256 {hashlib.sha256(small).hexdigest()}"
    assert (verbose.language, float(verbose.duration)) == ("de", 2.0)
    assert [(s.start, s.end, s.text) for s in verbose.segments] == [(0, 1, size), (1, 2, digest)]
    told = started(events)
    assert {name: told[name] for name in asked} == asked
    lines = transcribe(studio, frontend, "forms", small, response_format="srt")
    assert str(lines).startswith(f"1\n00:00:00,000 --> 00:00:01,000\n{size}\n\n2\n")
    assert str(transcribe(studio, frontend, "forms", small, response_format="vtt")).startswith("WEBVTT\n\n00:00:00.000")
    assert str(transcribe(studio, frontend, "forms", small, response_format="text")) == heard(small) + "\n"
    assert_nothing_stays(studio)


def test_too_big_is_told_before_it_is_read(studio: Cluster) -> None:
    """
    Over the limit the client has its 413 although it sent nothing of its recording yet (LOAD-23).
    """
    content = bytes(41 * 2**20)
    with form_on_its_way(studio, studio.frontends[0], "ears", content, sent=0) as connection:
        assert connection.recv(4096).startswith(b"HTTP/1.1 413")
    with pytest.raises(openai.APIStatusError) as refused:
        transcribe(studio, studio.frontends[0], "ears", content)
    assert refused.value.status_code == 413
    assert_nothing_stays(studio)


@pytest.mark.parametrize("relayed", [False, True])
def test_a_client_that_leaves(studio: Cluster, recording: bytes, relayed: bool) -> None:
    """
    A client that leaves in the middle of its recording, or while the backend works on it, leaves nothing on either
    side; what comes late for the request is refused (LOAD-23).
    """
    name = f"leaving-{int(relayed)}"
    events = add_model(studio, name, "test:delay=600")
    pin(studio, name, 0)
    worker, frontend = studio.workers[0], owner_and_other(studio, 0)[relayed]
    with form_on_its_way(studio, frontend, name, recording, sent=SIZE // 2):
        until("half a recording on the frontend", lambda: on_frontend(frontend), BOUND)
    assert_nothing_stays(studio)
    with form_on_its_way(studio, frontend, name, recording, sent=2 * SIZE):
        path = Path(str(started(events)["file"]))
        assert path.stat().st_size == SIZE
    until("the backend's cancellation", lambda: reported(events, "cancelled"), BOUND)
    assert_nothing_stays(studio)
    key = path.relative_to(ephemeral(worker).parent)
    assert put_late(studio, worker, str(key)) == 410
    assert put_late(studio, worker, "ephemeral/another-request/inputs/a.wav") == 200
    shutil.rmtree(ephemeral(worker) / "another-request")


def test_a_deadline(studio: Cluster) -> None:
    """
    Past the client's own deadline it is 504, the backend is told to stop, and nothing stays (LOAD-23).
    """
    events = add_model(studio, "slow", "test:delay=600")
    admin(studio, "/backend/load", "POST", {"model": "slow"})
    transcribing = client(studio, studio.frontends[0]).with_options(default_headers={"X-LocalAI-Timeout": "5s"})
    with pytest.raises(openai.APIStatusError) as late:
        transcribing.audio.transcriptions.create(model="slow", file=("a.wav", b"RIFF"))
    assert (late.value.status_code, late.value.code) == (504, "deadline_exceeded")
    until("the backend's cancellation", lambda: reported(events, "cancelled"), BOUND)
    assert_nothing_stays(studio)


@pytest.mark.parametrize(
    ("script", "status", "said"),
    [
        (("test:error_at=1", "test:error=out of ears"), 500, "out of ears"),
        (("test:transcribe=no",), 400, "can't do that"),
    ],
)
def test_a_backend_that_fails(studio: Cluster, script: tuple[str, ...], status: int, said: str) -> None:
    """
    A backend's failure is told in its words, one that can't hear at all is a wrong choice; nothing stays (LOAD-23).
    """
    name = f"failing-{status}"
    add_model(studio, name, *script)
    with pytest.raises(openai.APIStatusError) as failed:
        transcribe(studio, studio.frontends[0], name, b"RIFF")
    assert failed.value.status_code == status
    assert said in failed.value.message
    assert_nothing_stays(studio)


def test_a_node_without_room(studio: Cluster, recording: bytes) -> None:
    """
    While another request's file takes the node's room, the client is told so with the numbers and may come back; once
    that is over there is room again (LOAD-23).
    """
    events = add_model(studio, "crowded", "test:delay=600")
    pin(studio, "crowded", 0)
    other = add_model(studio, "quick")
    pin(studio, "quick", 0)
    owner, relaying = owner_and_other(studio, 0)
    with form_on_its_way(studio, owner, "crowded", recording, sent=2 * SIZE):
        started(events)
        for frontend in (owner, relaying):
            with pytest.raises(openai.APIStatusError) as full:
                transcribe(studio, frontend, "quick", recording)
            assert (full.value.status_code, full.value.code) == (503, "capacity")
            assert "48.0 MiB" in full.value.message and "28.6 MiB" in full.value.message
            assert full.value.response.headers["retry-after"]
        assert reported(other, "start") == []
    assert_nothing_stays(studio)
    assert until("room again", lambda: unless_full(studio, owner, "quick", recording), BOUND) == heard(recording)
    assert_nothing_stays(studio)


def unless_full(cluster: Cluster, frontend: Frontend, model: str, content: bytes) -> str:
    """The text, or nothing from a client that was told to come back: a moment after the files goes what they had."""
    try:
        return str(transcribe(cluster, frontend, model, content).text)
    except openai.APIStatusError as full:
        assert full.code == "capacity", full
        return ""


def test_a_tunnel_that_breaks(studio: Cluster, recording: bytes) -> None:
    """
    A worker that dies with a request's file on its disk sweeps it once it is an hour old, what is younger stays, and
    what a link leads to does, too; the client is told that the worker is away (LOAD-23).
    """
    events = add_model(studio, "dying", "test:delay=600")
    pin(studio, "dying", 0)
    worker, (frontend, _) = studio.workers[0], owner_and_other(studio, 0)
    outside = studio.state.root / "outside"
    outside.mkdir()
    (outside / "precious").write_text("kept")
    with asking(studio, frontend, "dying", recording) as answer:
        path = Path(str(started(events)["file"]))
        worker.kill()
        with pytest.raises(openai.APIStatusError) as away:
            answer.result(timeout=60)
    assert away.value.status_code in (500, 503)
    assert path.exists()
    fresh = ephemeral(worker) / "fresh" / "inputs" / "a.wav"
    fresh.parent.mkdir(parents=True)
    fresh.write_bytes(b"RIFF")
    (path.parent / "link").symlink_to(outside)
    (ephemeral(worker) / "linked").symlink_to(outside)
    age(path.parent.parent, 2 * HOUR)
    os.utime(outside, (0, 0))
    studio.restart(worker)
    until("the old request's files swept", lambda: not path.parent.parent.exists(), BOUND)
    assert fresh.exists()
    assert (outside / "precious").read_text() == "kept"
    (ephemeral(worker) / "linked").unlink()
    until("every tunnel again", lambda: connected(studio), 90)
    shutil.rmtree(fresh.parent.parent)
    assert_nothing_stays(studio)


def test_a_way_that_is_cut(recording: bytes) -> None:
    """
    The tunnel is cut in the middle of a recording: it goes on where it was, over the next one, and the client notices
    nothing but time; nothing stays (LOAD-23).
    """
    with open_folder("cut") as folder:
        env = {**galleries(folder), "LOCALAI_UPLOAD_LIMIT": "40MiB", "LOCALAI_ROUTE_WAIT": "60s"}
        with run_to_the_end(
            FragileCluster(quick_plan(folder / "state", workers=1, frontends=1, frontend_env=env))
        ) as cluster:
            add_model(cluster, "steady")
            frontend = cluster.frontends[0]
            assert transcribe(cluster, frontend, "steady", b"RIFF").text == heard(b"RIFF")
            before = carried(cluster.tunnels)
            cut_together(cluster.tunnels, [SIZE // 2])
            assert transcribe(cluster, frontend, "steady", recording).text == heard(recording)
            assert cluster.tunnels[0].cut == 1
            assert carried(cluster.tunnels) - before < SIZE + RESENT
            assert_nothing_stays(cluster)


def test_a_frontend_that_dies(studio: Cluster, recording: bytes) -> None:
    """
    A frontend that was killed with half a recording on its disk begins its next life without it (LOAD-23).
    """
    add_model(studio, "again")
    frontend = studio.frontends[1]
    with form_on_its_way(studio, frontend, "again", recording, sent=SIZE // 2):
        until("half a recording on the frontend", lambda: on_frontend(frontend), BOUND)
        frontend.kill()
    assert on_frontend(frontend)
    studio.restart(frontend)
    until("the frontend ready", frontend.is_ready, 60)
    assert on_frontend(frontend) == []
    until("every tunnel again", lambda: connected(studio), 90)
    assert transcribe(studio, frontend, "again", recording).text == heard(recording)
    assert_nothing_stays(studio)


def age(folder: Path, seconds: float) -> None:
    """Make ``folder`` and all in it as old as that."""
    then = time.time() - seconds
    for path in [*folder.rglob("*"), folder]:
        os.utime(path, (then, then), follow_symlinks=False)
