"""What users reported of uploads and streams that break in the middle, with real daemons."""

from __future__ import annotations

import hashlib
import http.client
import json
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import openai
import pytest

from localai_dist.testing.cluster import Cluster
from localai_dist.testing.members import Frontend, Worker
from localai_dist.testing.waiting import until
from localai_dist.units import KiB, MiB
from tests.process.faults import FragileCluster, carried, cut_together
from tests.process.kit import open_folder, quick_plan, run_to_the_end
from tests.process.outside import links_of
from tests.process.scripted import add_model, chat, client, galleries, owners, pin

SIZE = 192 * MiB
CUT_AT = 112 * MiB
"""Where the upload is cut; as with 1 GiB cut at 600 MiB."""
LOST = 8 * MiB
"""What a cut may cost (bytes)."""
GROWS_BY = 64 * MiB
"""A worker that takes an upload stays below what it had before and this (bytes). Source: LOAD-12."""
TOLD_WITHIN = 30.0
"""A client is told of the loss within this (s); the kernel of this machine tells a reset at once."""


@pytest.fixture(scope="module")
def fleet() -> Iterator[FragileCluster]:
    """Two frontends and one worker, on wires that break."""
    with open_folder("reports") as folder:
        plan = quick_plan(
            folder / "state",
            workers=1,
            models=[],
            frontend_env={**galleries(folder), "LOCALAI_MODEL_LOAD_WAIT": "0"},
        )
        with run_to_the_end(FragileCluster(plan)) as cluster:
            yield cluster


def holder(cluster: Cluster) -> Frontend:
    """The frontend that holds the worker's tunnel."""
    names = {frontend.name: frontend for frontend in cluster.frontends}
    return until("an owner", lambda: names.get(owners(cluster).get(cluster.workers[0].name, "")), 40)


def other(cluster: Cluster, frontend: Frontend) -> Frontend:
    """The other frontend."""
    return next(one for one in cluster.frontends if one is not frontend)


def test_an_upload_cut_in_the_middle_is_not_lost(fleet: FragileCluster) -> None:
    """
    An upload cut past its half: the worker has nearly all of that, the rest alone is sent, the hash is right; the
    worker's memory stays flat and its disk holds the file once, with no spool file beside it (BR-017).
    """
    [worker] = fleet.workers
    add_model(fleet, "cut")
    source = fleet.state.models / "cut.bin"
    with source.open("wb") as file:
        for number in range(SIZE // MiB):
            file.write(hashlib.sha256(number.to_bytes(4, "big")).digest() * (MiB // 32))
    there = worker.models_dir / "cut" / "cut.bin"
    before, cuts = carried(fleet.tunnels), sum(wire.cut for wire in fleet.tunnels)
    Path(f"/proc/{worker.pid}/clear_refs").write_text("5")
    resident = peak(worker.pid)
    owner = holder(fleet)
    cut_together(fleet.tunnels, [CUT_AT])
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(chat, fleet, owner, "cut")
        until("the cut", lambda: sum(wire.cut for wire in fleet.tunnels) > cuts, 60, every=0.002)
        assert [link for link in links_of(worker.pid) if "(deleted)" in link] == []
        assert used(worker.models_dir) <= SIZE + MiB
        assert reply.result().status == 200, reply.result().text
    told = re.findall(r"staging cut\.bin on node \S+ goes on at (\d+) of", owner.log.read_text())
    assert told and int(told[0]) >= CUT_AT - 10 * MiB
    assert SIZE < carried(fleet.tunnels) - before < SIZE + LOST + SIZE // 50
    assert hashlib.sha256(there.read_bytes()).digest() == hashlib.sha256(source.read_bytes()).digest()
    assert peak(worker.pid) < resident + GROWS_BY
    assert used(worker.models_dir) <= SIZE + MiB


def used(folder: Path) -> int:
    """Bytes of all files in a folder."""
    total = 0
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):  # renamed since it was listed
            total += path.stat().st_size if path.is_file() else 0
    return total


def peak(pid: int | None) -> int:
    """The most memory a process had since its peak was reset (bytes)."""
    rows = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(rows["VmHWM"].split()[0]) * KiB


@pytest.mark.parametrize("victim", ["worker", "owner"])
def test_a_stream_that_breaks_says_so(fleet: FragileCluster, victim: str) -> None:
    """
    The worker, or the frontend that holds its tunnel, is killed after five tokens: the client reads one error frame
    with its code, no finish reason, no ``[DONE]``; the official client raises, and the frontend logs it (BR-019).
    """
    name = f"breaks-{victim}"
    add_model(fleet, name, "test:delay=0.1", "test:tokens=300")
    pin(fleet, name, 0)
    owner = holder(fleet)
    asked = other(fleet, owner)  # the answer comes over the relay: both can die under it
    assert chat(fleet, asked, name, max_tokens=1).status == 200
    fifth = threading.Barrier(3, timeout=60)
    logged = len(asked.log.read_text())
    with ThreadPoolExecutor(2) as pool:
        raw = pool.submit(raw_stream, fleet, asked, name, fifth)
        official = pool.submit(official_stream, fleet, asked, name, fifth)
        fifth.wait()
        (fleet.workers[0] if victim == "worker" else owner).kill()
        began = time.monotonic()
        frames, error = raw.result(TOLD_WITHIN), official.result(TOLD_WITHIN)
        assert time.monotonic() - began < TOLD_WITHIN
    last = frames[-1]
    assert set(last) == {"error"}, last
    assert last["error"]["message"] and last["error"]["type"] and last["error"]["code"]
    assert [frame for frame in frames[:-1] if "error" in frame] == []
    assert [choice for frame in frames[:-1] for choice in frame["choices"] if choice["finish_reason"]] == []
    assert isinstance(error, openai.APIError) and last["error"]["message"][:20] in str(error)
    broken = [line for line in asked.log.read_text()[logged:].splitlines() if "broke off after its answer" in line]
    assert len(broken) == 2 and all(last["error"]["code"] in line for line in broken), broken
    members: list[Frontend | Worker] = [*fleet.frontends, *fleet.workers]
    for member in members:
        if not member.is_alive():
            member.start()
    until("all ready again", lambda: all(member.is_ready() for member in members), 40)


def raw_stream(cluster: Cluster, frontend: Frontend, model: str, fifth: threading.Barrier) -> list[dict]:  # type: ignore[type-arg]
    """Every frame of a streamed chat up to the end of the connection; meets the others at the fifth token."""
    where = urlsplit(frontend.url)
    connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=60)
    body = json.dumps({"model": model, "stream": True, "messages": [{"role": "user", "content": "go"}]})
    headers = {"Authorization": f"Bearer {cluster.secrets.api_key}", "Content-Type": "application/json"}
    connection.request("POST", "/v1/chat/completions", body, headers)
    frames, tokens = [], 0
    for line in connection.getresponse():
        if not line.startswith(b"data: "):
            continue
        assert b"[DONE]" not in line
        frames.append(json.loads(line[6:]))
        said = [choice["delta"].get("content") for choice in frames[-1].get("choices", [])]
        tokens += len([one for one in said if one])
        if tokens == 5 and said and said[0]:
            fifth.wait()
    connection.close()
    return frames


def official_stream(cluster: Cluster, frontend: Frontend, model: str, fifth: threading.Barrier) -> Exception | None:
    """What the official client raises in the middle of a streamed chat."""
    tokens = 0
    try:
        for chunk in client(cluster, frontend).chat.completions.create(
            model=model, messages=[{"role": "user", "content": "go"}], stream=True
        ):
            tokens += 1 if chunk.choices[0].delta.content else 0
            if tokens == 5 and chunk.choices[0].delta.content:
                fifth.wait()
    except openai.APIError as error:
        return error
    return None
