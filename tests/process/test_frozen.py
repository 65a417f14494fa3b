"""
A worker stopped in the middle of a big transfer: nobody in between fills up, and it goes on where it was.

The knobs are the real ones (keepalive 5 s and 15 s), with one file on the owner's path and one over the relay at the
same time: 512 MiB each in ``make test``, the 2 GiB that MUX-14 names in ``make test-slow``.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType

import pytest

from localai_dist.testing.cluster import Cluster, Plan
from localai_dist.testing.members import Worker
from localai_dist.testing.waiting import until
from localai_dist.testing.web import Reply, ask
from localai_dist.units import GiB, MiB
from tests.process.fleet import Watch
from tests.process.kit import open_folder, quick_plan, rows, running
from tests.process.outside import memory_of, moved
from tests.process.scripted import owners, pin
from tests.process.test_staging import add, sha256, staged

SIZES = [512 * MiB, pytest.param(2 * GiB, marks=pytest.mark.slow)]
WITHIN = 64 * MiB
"""What a process in between may grow by while a worker stands still (bytes). Source: MUX-14."""

QUESTION = "What is the capital of Kenya?"
ANSWER = "The capital of Kenya is Nairobi."
BOUND = 300.0


@dataclass(frozen=True)
class Transfer:
    """
    One model on its way.

    Attributes:
        worker: where it goes.
        file: its name there.
        digest: its SHA-256.
        size: its length (bytes).
        reply: the answer of the request that wants it.
    """

    worker: Worker
    file: str
    digest: str
    size: int
    reply: Future[Reply]

    @property
    def there(self) -> int:
        """How many bytes the worker has."""
        found = [path for path in self.worker.models_dir.rglob(self.file) if path.is_file()]
        return found[0].stat().st_size if found else 0


@pytest.fixture(scope="module")
def yard() -> Iterator[Cluster]:
    """Two frontends, each holding the tunnel of one of two workers; no knob is shortened."""
    with open_folder("frozen") as folder:
        plan = Plan(
            state=folder / "state",
            models=["tiny-facts"],
            durable=False,
            frontend_env={"LOCALAI_MODEL_LOAD_WAIT": f"{BOUND}s"},
        )
        with running(plan) as cluster:
            yield cluster


def wanted(cluster: Cluster, name: str) -> Reply:
    """A chat with a model at the first frontend, which has it loaded first."""
    body = {"model": name, "messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "max_tokens": 32}
    url = cluster.frontends[0].url + "/v1/chat/completions"
    return ask(url, key=cluster.secrets.api_key, method="POST", body=body, timeout=BOUND)


@contextmanager
def transfers(cluster: Cluster, names: list[str], size: int) -> Iterator[list[Transfer]]:
    """One file to each worker at the same time; each worker is stopped in the middle of its own when this goes on."""
    told = []
    for number, name in enumerate(names):
        file, digest = add(cluster, name, size)
        pin(cluster, name, number)
        told.append((cluster.workers[number], file.name, digest, name))
    with ThreadPoolExecutor(len(names)) as pool:
        under_way = [
            Transfer(worker, file, digest, size, pool.submit(wanted, cluster, name))
            for worker, file, digest, name in told
        ]
        going = list(under_way)

        def all_stopped() -> bool:
            for transfer in [one for one in going if one.there > size // 20]:
                transfer.worker.freeze()  # at once: the rest of a file may take a second, the other's beginning too
                going.remove(transfer)
            return not going

        try:
            until("both workers stopped in the middle", all_stopped, 60, every=0.01)
            assert all(transfer.there < size for transfer in under_way)
            yield under_way
        finally:
            for transfer in under_way:
                transfer.worker.thaw()


class Growth:
    """
    By how much each frontend's memory grew at most over what it was before; use it around what must not fill it.

    Attributes:
        most: by frontend (bytes).
    """

    def __init__(self, cluster: Cluster) -> None:
        self.most = {frontend.name: 0 for frontend in cluster.frontends}
        self._frontends = cluster.frontends
        self._before = {frontend.name: memory_of(frontend) for frontend in cluster.frontends}
        self._watch = Watch(self._look, every=0.1)

    def __enter__(self) -> Growth:
        self._watch.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._watch.__exit__(kind, error, at)
        if error is None:
            told = {name: f"{grown / MiB:.0f} MiB" for name, grown in self.most.items()}
            assert max(self.most.values()) < WITHIN, f"grew by {told}"

    def _look(self) -> None:
        for frontend in self._frontends:
            grown = memory_of(frontend) - self._before[frontend.name]
            self.most[frontend.name] = max(self.most[frontend.name], grown)


def stand_still(seconds: float) -> None:
    """Both workers, which are stopped, stay so for so long."""
    end = time.monotonic() + seconds
    until("the end of the standstill", lambda: time.monotonic() >= end, seconds + 10, every=0.1)


def finished(transfer: Transfer) -> None:
    """The transfer completed: the model answers, and every byte is right."""
    reply = transfer.reply.result(BOUND)
    assert reply.status == 200, reply.text
    assert reply.json()["choices"][0]["message"]["content"] == ANSWER
    assert transfer.there == transfer.size
    assert sha256(staged(transfer.worker, transfer.file)) == transfer.digest


def on_both_paths(cluster: Cluster) -> None:
    """
    The first frontend reaches one worker over its own tunnel and the other over its peer.

    Where a thawed worker dials first depends on what it sees first, the silence or the end of its tunnel: one that
    has moved is started again, and dials its own frontend.
    """
    for worker, frontend in zip(cluster.workers, cluster.frontends, strict=True):
        if owners(cluster)[worker.name] != frontend.name:
            cluster.restart(worker)
    for worker in cluster.workers:
        cluster.wait_for(f"{worker.name} ready", worker.is_ready, 40)
    expected = {w.name: f.name for w, f in zip(cluster.workers, cluster.frontends, strict=True)}
    # A worker is ready once it was admitted; the frontend's claim comes after that.
    cluster.wait_for("each tunnel at its own frontend", lambda: owners(cluster) == expected, 40)


@pytest.mark.parametrize("size", SIZES)
def test_eight_seconds_of_standstill(yard: Cluster, size: int) -> None:
    """Both workers stopped for 8 s mid-transfer: memory stays put to the end, both files complete (MUX-14, BR-009)."""
    on_both_paths(yard)
    sessions = [line for worker in yard.workers for line in tunnel_lines(worker)]
    read = moved(yard.frontends[0].pid)[0]
    with Growth(yard), transfers(yard, [f"still-{size}-{number}" for number in (0, 1)], size) as under_way:
        stand_still(8.0)
        for worker in yard.workers:
            worker.thaw()
        for transfer in under_way:
            finished(transfer)
    # Each file was read once to be hashed (which goes on meanwhile) and once to be sent: nothing was read and dropped.
    assert moved(yard.frontends[0].pid)[0] - read < 2 * 2 * size + WITHIN
    # The tunnels were never lost.
    assert [line for worker in yard.workers for line in tunnel_lines(worker)] == sessions


@pytest.mark.parametrize("size", SIZES)
def test_thirty_seconds_are_a_death(yard: Cluster, size: int) -> None:
    """Stopped for 30 s: both ends call the tunnel dead, the worker redials, staging resumes (MUX-14, BR-010)."""
    on_both_paths(yard)
    written = [moved(worker.pid)[1] for worker in yard.workers]
    said = [tunnel_lines(worker) for worker in yard.workers]
    with Growth(yard), transfers(yard, [f"dead-{size}-{number}" for number in (0, 1)], size) as under_way:
        began = time.monotonic()
        lost = "select count(*) from node_connections where owner_instance_id is null or disconnected_at is not null"
        yard.wait_for("both tunnels given up", lambda: rows(yard.database.url, lost) == [(2,)], 20)
        # Three keepalive intervals of silence and a second; the stop itself and the last byte may lie 5 s apart, and
        # the first stop and the second one.
        assert 9 < time.monotonic() - began < 17
        stand_still(30 - (time.monotonic() - began))
        for worker in yard.workers:
            worker.thaw()
        for transfer in under_way:
            finished(transfer)
    for worker, earlier in zip(yard.workers, said, strict=True):
        ended, *_, opened = tunnel_lines(worker)[len(earlier) :]
        # By its own clock, or by what the frontend did when its own had run out: whichever it sees first.
        assert "the tunnel ended" in ended, ended
        assert "open again" in opened, opened
    # Resumed, not repeated: over both sessions each worker wrote its file once.
    for worker, before in zip(yard.workers, written, strict=True):
        assert moved(worker.pid)[1] - before < size + WITHIN


def tunnel_lines(worker: Worker) -> list[str]:
    """What a worker's log says of its tunnel coming and going."""
    return [line for line in worker.log.read_text(errors="replace").splitlines() if "tunnel" in line]


@pytest.mark.parametrize("stopping", ["frontend", "worker"])
def test_shutdown_beside_a_frozen_peer(stopping: str) -> None:
    """A daemon told to stop while its peer stands still with full buffers ends within its bound (BR-101)."""
    with (
        open_folder("frozen-stop") as folder,
        running(quick_plan(folder / "state", frontends=1, workers=1, models=["tiny-facts"])) as cluster,
    ):
        [frontend], [worker] = cluster.frontends, cluster.workers
        file, _ = add(cluster, "halfway", 512 * MiB)
        still, ending = (worker, frontend) if stopping == "frontend" else (frontend, worker)
        with ThreadPoolExecutor(1) as pool:
            reply = pool.submit(wanted, cluster, "halfway")
            until("its first bytes", lambda: any(p.stat().st_size for p in worker.models_dir.rglob(file.name)), 60)
            still.freeze()
            ending.terminate()
            # All of a drain takes 6 s at these knobs, then the process is gone.
            ending.wait_ended(9.0)
            still.thaw()
            if stopping == "worker":
                frontend.kill()
            assert reply.result(30).status in (0, 500, 503)
