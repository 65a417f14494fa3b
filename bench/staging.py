"""
How fast a model gets onto a worker, what it costs, and what a running stream notices of it (LOAD-21).

Real daemons at their default knobs: one frontend, two workers. The first worker is dialled straight, for rates; the
second one through a proxy that can hold a rate, for the gaps between tokens. ``python -m bench.staging raw BYTES`` and
``... gaps URL MODEL SECONDS`` are the parts that have a process of their own.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlsplit

from bench.rows import Row, at_most, quantile
from localai_dist.testing.cluster import Cluster, Plan
from localai_dist.testing.faults import FaultProxy, Faults
from localai_dist.testing.waiting import until
from localai_dist.testing.web import ask
from localai_dist.units import GiB, MiB
from tests.process.fleet import asking
from tests.process.kit import open_folder, running
from tests.process.scripted import galleries, pin, write_model

BIG = 4 * GiB
"""The model whose staging is timed (bytes)."""
RAW = 2 * GiB
"""What is sent over a bare tunnel for comparison (bytes)."""
BALLAST = 1 * GiB
"""What is staged beside a running stream (bytes); at the held rate it takes longer than the stream is watched."""
WARM_ROUNDS = 3
HELD_RATE = 50e6
"""Bytes a second at which a model is staged beside a running stream."""
TOKEN_EVERY = 0.02
WATCHED = 15.0
"""How long the gaps between tokens are watched (s)."""
LONG = 900.0
KEY = "BENCH_API_KEY"


@dataclass(frozen=True, slots=True)
class Staged:
    """
    One load.

    Attributes:
        seconds: how long its staging took, hashing included.
        whole: from the request to its answer (s).
        cpu: processor time of frontend and worker while it was staged (s).
    """

    seconds: float
    whole: float
    cpu: tuple[float, float]

    @property
    def rate(self) -> float:
        """Million bytes a second."""
        return BIG / self.seconds / 1e6


def run() -> list[Row]:
    """The rows of LOAD-21."""
    with _daemons() as (cluster, proxy):
        return [*_rates(cluster), *_gaps(cluster, proxy)]


@contextmanager
def _daemons() -> Iterator[tuple[Cluster, FaultProxy]]:
    proxies: list[FaultProxy] = []
    with open_folder("bench") as folder, Faults() as faults:

        def way(worker: int, frontend: int, url: str) -> str:
            if worker == 0:
                return url
            proxies.append(faults.proxy(url))
            return proxies[-1].url

        state = folder / "state"
        (state / "models").mkdir(parents=True)
        files = {"big": (0, BIG), "ballast": (1, BALLAST), "ballast-fast": (1, BALLAST)}
        for name, (_, size) in files.items():
            write_model(state, name)
            os.truncate(state / "models" / f"{name}.bin", size)
        write_model(state, "talker", f"test:delay={TOKEN_EVERY}", "test:tokens=100000")
        env = {**galleries(folder), "LOCALAI_MODEL_LOAD_WAIT": "0"}
        plan = Plan(state=state, frontends=1, workers=2, models=[], way=way, frontend_env=env, durable=False)
        with running(plan) as cluster:
            for name, (worker, _) in {**files, "talker": (1, 0)}.items():
                pin(cluster, name, worker)
            yield cluster, proxies[0]


# -- rates -------------------------------------------------------------------------------------------------------------


def _rates(cluster: Cluster) -> list[Row]:
    worker = cluster.workers[0]
    raw = [_raw()]
    disk = _disk(worker.models_dir)
    _read_once(cluster.state.models / "big.bin")
    cold = _load(cluster, "big")
    _unload(cluster, "big")
    skipped = _load(cluster, "big")
    warm = []
    for _ in range(WARM_ROUNDS):
        _unload(cluster, "big")
        shutil.rmtree(worker.models_dir / "big")
        warm.append(_load(cluster, "big"))
        raw.append(_raw())
    rate, bare = median(one.rate for one in warm), median(one for one, _ in raw)
    peer = f"a bare tunnel of the same run carries {bare:.0f} MB/s"
    near, far = (median(one.cpu[end] for one in warm) / BIG * GiB for end in (0, 1))
    bare_cpu = median(cpu for _, cpu in raw)
    ends = f"a bare tunnel costs both ends together {bare_cpu:.2f} s/GiB, writing and flushing alone {disk[1]:.2f}"
    return [
        _at_least("staging of 4 GiB, hash of the source known, share of the bare tunnel's rate", rate, bare, 80),
        _at_least("staging of 4 GiB, nothing known, share of the bare tunnel's rate", cold.rate, bare, 55),
        Row("LOAD-21", "the same, hash known", round(rate, 1), "MB/s", peer=peer),
        Row("LOAD-21", "the same, nothing known", round(cold.rate, 1), "MB/s", peer=peer),
        Row("LOAD-21", "processor time of the frontend, hash known", round(near, 2), "s/GiB"),
        Row(
            "LOAD-21",
            "processor time of the worker, which hashes and writes",
            round(far, 2),
            "s/GiB",
            peer=ends,
        ),
        Row("LOAD-21", "writing and flushing 4 GiB to the worker's disk, nothing else", round(disk[0], 1), "MB/s"),
        at_most("LOAD-21", "loading a model whose 4 GiB are there already, the whole request", skipped.whole, "s", 4.0),
    ]


def _at_least(what: str, rate: float, bare: float, bound: float) -> Row:
    share = 100 * rate / bare
    peer = f"{rate:.0f} of {bare:.0f} MB/s"
    return Row("LOAD-21", what, round(share, 1), "%", f"≥ {bound:g}", share >= bound, peer)


def _raw() -> tuple[float, float]:
    """Rate of a bare tunnel (million bytes a second) and what it costs both ends (s/GiB)."""
    said = subprocess.run(
        [sys.executable, "-m", "bench.staging", "raw", str(RAW)], stdout=subprocess.PIPE, check=True, timeout=LONG
    )
    rate, cost = json.loads(said.stdout)
    return rate, cost


def _disk(folder: Path) -> tuple[float, float]:
    """Rate at which 4 GiB are written below ``folder`` and flushed (million bytes a second), and its s/GiB."""
    folder.mkdir(parents=True, exist_ok=True)
    block = os.urandom(MiB)
    before, began = time.process_time(), time.perf_counter()
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        for _ in range(BIG // MiB):
            file.write(block)
        os.fsync(file.fileno())
        seconds, cost = time.perf_counter() - began, time.process_time() - before
    return BIG / seconds / 1e6, cost / BIG * GiB


def _read_once(file: Path) -> None:
    """Have ``file`` in memory, as one that was just downloaded is: a disk is not what is measured."""
    with file.open("rb", buffering=0) as opened:
        while opened.read(MiB):
            pass


def _load(cluster: Cluster, model: str) -> Staged:
    """Load a model and take the times of its staging, by its row."""
    pids = [cluster.frontends[0].pid, cluster.workers[0].pid]
    states: list[tuple[str, float, list[float]]] = []
    statement = "select state from model_load_jobs where tracking_key = %s"
    with ThreadPoolExecutor(1) as pool, asking(cluster.database.url) as question:
        began = time.perf_counter()
        request = pool.submit(_post, cluster, "/backend/load", {"model": model})
        while not request.done():
            state = dict(enumerate(question(statement, model))).get(0, ("",))[0]
            if not states or states[-1][0] != state:
                states.append((state, time.perf_counter(), [_cpu_time(pid or 0) for pid in pids]))
            time.sleep(0.005)
        request.result()
        whole = time.perf_counter() - began
    at = {state: index for index, (state, _, _) in enumerate(states)}
    if "staging" not in at or at["staging"] + 1 == len(states):
        return Staged(whole, whole, (0.0, 0.0))  # too short to be seen
    (_, since, before), (_, until_, after) = states[at["staging"]], states[at["staging"] + 1]
    near, far = (late - early for early, late in zip(before, after, strict=True))
    return Staged(until_ - since, whole, (near, far))


def _unload(cluster: Cluster, model: str) -> None:
    _post(cluster, "/backend/shutdown", {"model": model})


def _post(cluster: Cluster, path: str, body: Any) -> None:
    url = cluster.frontends[0].url + path
    reply = ask(url, key=cluster.secrets.api_key, method="POST", body=body, timeout=LONG)
    if reply.status != 200:
        raise RuntimeError(f"{path}: {reply.status} {reply.text}")


def _cpu_time(pid: int) -> float:
    """Processor time ``pid`` has used (s); Linux gives every process a clock."""
    return time.clock_gettime((~pid << 3) | 2)


# -- gaps --------------------------------------------------------------------------------------------------------------


def _gaps(cluster: Cluster, proxy: FaultProxy) -> list[Row]:
    _post(cluster, "/backend/load", {"model": "talker"})
    proxy.throttle(HELD_RATE)
    idle = _watched(cluster)
    held = _beside(cluster, "ballast")
    proxy.throttle(0)
    free = _beside(cluster, "ballast-fast")
    what = "gap between tokens, 50 a second, p99"
    bound = 2 * idle
    peer = f"{idle:.1f} ms while nothing is staged"
    ratio = held / idle
    return [
        Row("LOAD-21", f"{what}, nothing staged", round(idle, 1), "ms"),
        Row(
            "LOAD-21",
            f"{what}, a model staged to the same worker at 50 MB/s",
            round(held, 1),
            "ms",
            f"≤ 2 × idle = {bound:.1f}",
            ratio <= 2,
            peer,
        ),
        Row("LOAD-21", f"{what}, a model staged to it without limit", round(free, 1), "ms", peer=peer),
    ]


def _beside(cluster: Cluster, model: str) -> float:
    """The p99 gap while ``model`` is staged (ms)."""
    statement = "select 1 from model_load_jobs where tracking_key = %s and state = 'staging' and bytes_sent > 0"
    with ThreadPoolExecutor(1) as pool, asking(cluster.database.url) as question:
        request = pool.submit(_post, cluster, "/backend/load", {"model": model})
        until(f"{model} on its way", lambda: request.done() or question(statement, model), 120)
        gap = _watched(cluster, lambda: bool(question(statement, model)))
        request.result()
    return gap


def _watched(cluster: Cluster, going: Callable[[], bool] = lambda: True) -> float:
    """The p99 gap between tokens of a fresh stream, as long as ``going`` and not longer than ``WATCHED`` (ms)."""
    command = [sys.executable, "-m", "bench.staging", "gaps", cluster.frontends[0].url, "talker", str(WATCHED)]
    client = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, KEY: cluster.secrets.api_key}
    )
    end = time.monotonic() + WATCHED
    while time.monotonic() < end and going():
        time.sleep(0.1)
    client.terminate()
    output, _ = client.communicate(timeout=30)
    gaps = [float(line) for line in output.split()]
    if len(gaps) < 50:
        raise RuntimeError(f"only {len(gaps)} tokens came")
    return 1000 * quantile(gaps, 0.99)


# -- processes of their own --------------------------------------------------------------------------------------------


def _say_gaps(url: str, model: str, seconds: float) -> None:
    """Print the gaps between the tokens of one stream (s), one a line, until told to end."""
    where = urlsplit(url)
    connection = HTTPConnection(where.hostname or "", where.port, timeout=60)
    body = json.dumps({"model": model, "stream": True, "messages": [{"role": "user", "content": "go"}]})
    headers = {"Authorization": f"Bearer {os.environ[KEY]}", "Content-Type": "application/json"}
    connection.request("POST", "/v1/chat/completions", body, headers)
    last, end = 0.0, time.monotonic() + 2 * seconds
    for line in connection.getresponse():
        if line.startswith(b"data: "):
            now = time.perf_counter()
            if last:
                sys.stdout.write(f"{now - last:.6f}\n")
                sys.stdout.flush()
            last = now
        if time.monotonic() > end:
            return


def _say_raw(size: int) -> None:
    """Print rate and cost of one bare tunnel, in the direction of staging: from who accepts it to who dialled it."""
    from twisted.internet.defer import Deferred
    from twisted.internet.task import react

    from bench.near import Child, dialled, tunnel_way

    async def measured() -> None:
        with Child("far") as child:
            moved = await tunnel_way("tunnel", await dialled(child.tunnel_url), [child.pid]).down(size)
        sys.stdout.write(json.dumps([moved.rate, moved.cpu_per_gib]))

    react(lambda _: Deferred.fromCoroutine(measured()))


if __name__ == "__main__":
    if sys.argv[1] == "raw":
        _say_raw(int(sys.argv[2]))
    else:
        _say_gaps(sys.argv[2], sys.argv[3], float(sys.argv[4]))
