"""Model files on their way to a worker: the same bytes, sent once, and an interrupted gigabyte goes on where it was."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from localai_dist.testing.cluster import Cluster
from localai_dist.testing.members import Frontend, Worker
from localai_dist.testing.waiting import until
from localai_dist.units import GiB, MiB
from tests.process.faults import FragileCluster, standing_still
from tests.process.kit import open_folder, quick_plan, rows, run_to_the_end
from tests.process.outside import links_of, moved
from tests.process.scripted import SERVED_WITHIN, admin, chat, serves

QUESTION = "What is the capital of Kenya?"
ANSWER = "The capital of Kenya is Nairobi."
LITTLE = 4 * MiB
"""More than a daemon reads and writes beside model files in a test, and far less than a model (bytes)."""


@pytest.fixture(scope="module")
def depot() -> Iterator[FragileCluster]:
    """Two frontends, one worker."""
    with open_folder("staging") as folder:
        plan = quick_plan(folder / "state", workers=1, models=["tiny-facts"])
        with run_to_the_end(FragileCluster(plan)) as cluster:
            yield cluster


def padded(source: Path, target: Path, size: int) -> str:
    """
    A copy of ``source`` filled up to ``size`` bytes, one page in each MiB salted; its SHA-256.

    llama.cpp ignores what follows the tensors, so it still answers; pages in another order have another hash.
    """
    shutil.copyfile(source, target)
    start = source.stat().st_size // MiB + 1
    with target.open("r+b") as file:
        for block in range(start, size // MiB):
            file.seek(block * MiB)
            file.write(hashlib.sha256(block.to_bytes(8, "big")).digest() * 128)
        file.truncate(size)
    return sha256(target)


def sha256(path: Path) -> str:
    """The file's hash."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def add(cluster: Cluster, name: str, size: int) -> tuple[Path, str]:
    """Serve a padded tiny-facts as ``name``: the frontends' file and its SHA-256."""
    models = cluster.state.models
    [source] = models.glob("tiny-facts*.gguf")
    file = models / f"{name}.gguf"
    digest = padded(source, file, size)
    sheet = (models / "tiny-facts.yaml").read_text()
    (models / f"{name}.yaml").write_text(
        sheet.replace("name: tiny-facts", f"name: {name}").replace(source.name, file.name)
    )
    for frontend in cluster.frontends:
        until(f"{name} served by {frontend.name}", lambda it=frontend: serves(cluster, it, name), SERVED_WITHIN)
    return file, digest


def staged(worker: Worker, name: str) -> Path:
    """Where a worker keeps a model's file."""
    [found] = [path for path in worker.models_dir.rglob(name) if path.is_file()]
    return found


def ask_model(cluster: Cluster, frontend: int, name: str) -> str:
    """The answer of a model, loaded if it is not."""
    reply = chat(cluster, cluster.frontends[frontend], name, QUESTION)
    assert reply.status == 200, reply.text
    return str(reply.json()["choices"][0]["message"]["content"])


def test_a_staged_file_is_the_same_bytes(depot: Cluster) -> None:
    """What is on the worker is byte-identical, and inside its models folder (WALK-10)."""
    [worker] = depot.workers
    assert list(worker.models_dir.rglob("*.gguf")) == []
    assert ask_model(depot, 0, "tiny-facts") == ANSWER
    [source] = depot.state.models.glob("tiny-facts*.gguf")
    there = staged(worker, source.name)
    assert there.resolve().is_relative_to(worker.models_dir.resolve())
    assert there.read_bytes() == source.read_bytes()
    assert there.stat().st_ino != source.stat().st_ino  # a copy, not the frontends' own file


@pytest.mark.parametrize("frontend", [0, 1])
def test_loading_again_transfers_nothing(depot: Cluster, frontend: int) -> None:
    """Unloaded and loaded again, by either frontend: not a byte of the file is read, sent or written (WALK-10)."""
    name, [worker] = f"again-{frontend}", depot.workers
    file, digest = add(depot, name, 24 * MiB)
    before = [moved(child.pid) for child in (*depot.frontends, worker)]
    assert ask_model(depot, 0, name) == ANSWER
    after = [moved(child.pid) for child in (*depot.frontends, worker)]
    # Positive control: the first load is seen to be read at a frontend and written on the worker.
    assert after[0][0] - before[0][0] > file.stat().st_size
    assert after[2][1] - before[2][1] > file.stat().st_size
    there = staged(worker, file.name)
    stat, sum_before = there.stat(), sha256(there)
    assert sum_before == digest
    admin(depot, "/backend/shutdown", "POST", {"model": name})
    assert rows(depot.database.url, "select 1 from node_models where model_name = %s", name) == []
    # The other frontend has not hashed the file itself: it finds the hash beside it.
    before = [moved(child.pid) for child in (*depot.frontends, worker)]
    assert ask_model(depot, frontend, name) == ANSWER
    after = [moved(child.pid) for child in (*depot.frontends, worker)]
    for (read, wrote), (read_then, wrote_then) in zip(before, after, strict=True):
        assert read_then - read < LITTLE and wrote_then - wrote < LITTLE
    now = there.stat()
    assert (now.st_ino, now.st_mtime_ns, now.st_size) == (stat.st_ino, stat.st_mtime_ns, stat.st_size)


def test_an_interrupted_gigabyte_goes_on_where_it_was(depot: FragileCluster) -> None:
    """The frontend killed in the middle of 1 GiB: the next load sends only what is missing (WALK-10)."""
    [worker] = depot.workers
    size = 1 * GiB
    file, digest = add(depot, "gigabyte", size)
    _, written = moved(worker.pid)
    sending, other = depot.frontends
    with standing_still(depot.tunnels, int(0.4 * size)) as stands, ThreadPoolExecutor(1) as pool:
        first = pool.submit(chat, depot, sending, "gigabyte", QUESTION)
        until("the middle of the transfer", stands, 60)
        sending.kill()
        assert first.result().status == 0  # nobody is left to answer
    there = staged(worker, file.name)
    until("the worker's last write", lambda: not is_open(worker, there), 20)
    cut = there.stat()
    assert 0.3 * size < cut.st_size < 0.5 * size

    until("the worker's tunnel at the frontend that is left", lambda: holds_tunnel(depot, other), 40)
    assert there.stat().st_size >= cut.st_size
    reading, _ = moved(other.pid)
    assert ask_model(depot, 1, "gigabyte") == ANSWER
    assert (there.stat().st_size, there.stat().st_ino) == (size, cut.st_ino)
    assert sha256(there) == digest
    # Over both transfers together every byte was written once; what was there was read for its hash only, which the
    # first frontend may not have lived to find.
    assert size <= moved(worker.pid)[1] - written < size + LITTLE
    assert moved(other.pid)[0] - reading < size + size - cut.st_size + LITTLE


def is_open(worker: Worker, file: Path) -> bool:
    """Whether a worker has a file open."""
    return str(file) in links_of(worker.pid)


def holds_tunnel(cluster: Cluster, frontend: Frontend) -> bool:
    """Whether the worker's tunnel ends at a frontend, as that one tells it."""
    tunnel = cluster.nodes(frontend).get(cluster.workers[0].name, {}).get("tunnel") or {}
    return (tunnel.get("state"), tunnel.get("owner")) == ("connected", frontend.instance_id)
