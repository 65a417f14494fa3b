"""A worker whose models folder lies on a small file system of its own, which is filled while a model is staged."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from localai_dist.testing.cluster import Cluster
from localai_dist.testing.faults import Faults
from localai_dist.testing.waiting import until
from localai_dist.testing.web import Reply, ask
from localai_dist.units import GiB, MiB
from tests.process.kit import open_folder, rows, run_to_the_end
from tests.process.loading import SlowableCluster
from tests.process.scripted import add_model, admin, chat, galleries, pin

SIZE = 300 * MiB
"""Of the model that does not fit (bytes)."""
ROOM = 3 * GiB
"""What the file system offers when the node is chosen: the model and the gigabyte that is asked for beside it."""
LEFT = 8 * MiB
"""What is left free of it in the middle of the transfer."""


def mounts_missing() -> str | None:
    """Why no file system can be mounted here, or None."""
    if os.geteuid() != 0:
        return "a full disk was not tried: mounting a small file system takes root"
    with open_folder("mount") as folder:
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True, text=True
        )
        if done.returncode:
            return f"a full disk was not tried: no file system can be mounted here ({done.stderr.strip()})"
        subprocess.run(["umount", folder], check=True)
    return None


class SmallDisk:
    """A file system whose size can be changed while it is used; one of memory, so that ``ROOM`` costs nothing."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={ROOM}", "tmpfs", folder], check=True)

    def resize(self, size: int) -> None:
        """Another size; not less than is used."""
        subprocess.run(["mount", "-o", f"remount,size={size}", self.folder], check=True)

    @property
    def used(self) -> int:
        """Bytes."""
        found = os.statvfs(self.folder)
        return (found.f_blocks - found.f_bfree) * found.f_frsize

    def unmount(self) -> None:
        """Gone, also while somebody still has a file of it open."""
        subprocess.run(["umount", "--lazy", self.folder], check=True)


@contextmanager
def on_small_disk() -> Iterator[tuple[SlowableCluster, SmallDisk]]:
    """Two frontends and one worker, whose models folder is a file system of its own."""
    with open_folder("disk") as folder:
        state = folder / "state"
        disk = SmallDisk(state / "worker-0" / "models")
        try:
            plan: dict[str, Any] = {"frontend_env": galleries(folder), "workers": 1, "models": ("tiny-facts",)}
            with Faults() as faults, run_to_the_end(SlowableCluster(state, faults, **plan)) as cluster:
                yield cluster, disk
        finally:
            disk.unmount()


@pytest.fixture(scope="module")
def small() -> Iterator[tuple[SlowableCluster, SmallDisk]]:
    """The same, for all tests here; skipped in words where nothing can be mounted."""
    missing = mounts_missing()
    if missing:
        pytest.skip(missing)
    with on_small_disk() as made:
        yield made


def fill_during(cluster: Cluster, disk: SmallDisk, name: str) -> None:
    """Take the room away in the middle of a slow transfer. The worker stands still meanwhile."""
    there = disk.folder / name / f"{name}.bin"
    until("the first bytes", lambda: there.exists() and there.stat().st_size > 20 * MiB, 60, every=0.002)
    worker = cluster.workers[0]
    worker.freeze()
    assert disk.used < SIZE - 2 * LEFT, "the whole file was there before the disk could be filled"
    disk.resize(disk.used + LEFT)
    worker.thaw()


def test_a_disk_that_fills_up_fails_one_load_once(small: tuple[SlowableCluster, SmallDisk]) -> None:
    """The disk fills up in a transfer: one failure with need and free for everybody who waits, told in the operations
    and the load's status, nothing left of the file, other models answer, no second try by itself; with room again the
    next request loads it (LOAD-15, BR-111)."""
    cluster, disk = small
    name = "too-big"
    add_model(cluster, "beside", "test:answer=still here")
    add_model(cluster, name, "test:answer=in the end")
    os.truncate(cluster.state.models / f"{name}.bin", SIZE)
    pin(cluster, "beside", 0)
    assert chat(cluster, cluster.frontends[0], "beside").status == 200
    before = disk.used
    with ThreadPoolExecutor(4) as pool:
        with cluster.slowed():
            waiting = [pool.submit(chat, cluster, cluster.frontends[n % 2], name) for n in range(4)]
            fill_during(cluster, disk, name)
        replies = [one.result() for one in waiting]
    assert {reply.status for reply in replies} == {500}, [reply.text for reply in replies]
    [message] = {said(reply) for reply in replies}
    for words in ("the disk of node worker-0 is full", "needs 300", "0 B were free", "No space left on device"):
        assert words in message, message
    told_everywhere(cluster, name, message)
    until("what came removed", lambda: disk.used <= before + MiB, 10)
    for frontend in cluster.frontends:
        assert "still here" in chat(cluster, frontend, "beside").text
    until("the row of the failure gone", lambda: not jobs(cluster), 60)  # nobody began it again meanwhile
    assert begun(cluster, name) == 1
    until("the node's word of its disk", lambda: free_told(cluster) < SIZE, 20)
    refused = chat(cluster, cluster.frontends[0], name)  # the node has told of its disk: it is not even chosen
    assert refused.status == 503 and "worker-0 needs" in said(refused) and "free of" in said(refused), refused.text
    disk.resize(ROOM)  # positive control
    until("an answer", lambda: "in the end" in chat(cluster, cluster.frontends[1], name).text, 60)
    assert begun(cluster, name) == 2
    assert disk.used >= SIZE


def told_everywhere(cluster: Cluster, name: str, message: str) -> None:
    """Both frontends tell of the failure in the list of operations and in the load's status."""
    for number, frontend in enumerate(cluster.frontends):
        operations = admin(cluster, "/api/operations", frontend=number)["operations"]
        [shown] = [one for one in operations if one["id"] == f"staging:{name}"]
        assert (shown["state"], shown["error"], shown["cancellable"]) == ("failed", message, False)
        status = ask(f"{frontend.url}/api/models/{name}/load-status", key=cluster.secrets.api_key).json()
        assert (status["state"], status["error"]) == ("failed", message)


def free_told(cluster: Cluster) -> int:
    """What the registry has of the free room of the worker's disk (bytes)."""
    return int(rows(cluster.database.url, "select available_disk from backend_nodes")[0][0])


def begun(cluster: Cluster, name: str) -> int:
    """How often a frontend began to load a model on a node."""
    return sum(child.log.read_text().count(f"loading {name} on node") for child in cluster.frontends)


def jobs(cluster: Cluster) -> list[tuple[object, ...]]:
    """The rows of loads."""
    return rows(cluster.database.url, "select tracking_key, state from model_load_jobs")


def said(reply: Reply) -> str:
    """The message of an error."""
    return str((reply.json() or {}).get("error", {}).get("message"))
