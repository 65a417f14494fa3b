"""Staging when the way breaks: cut anywhere, a frontend killed, bits turned; and what it costs in memory."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from localai_dist.staging.piece import READ
from localai_dist.testing.child import Child, checkout
from localai_dist.testing.cluster import Cluster
from localai_dist.testing.members import Frontend, Worker
from localai_dist.testing.waiting import until
from localai_dist.units import GiB, KiB, MiB
from tests.process.depot import (
    QUESTION,
    add,
    answered,
    ask_it,
    asking,
    fragile,
    fresh,
    holder,
    other,
    remote,
    resent,
    salt,
    serve,
    sha256,
    told,
    unload,
)
from tests.process.faults import FragileCluster, Wire, carried, cut_together, standing_still
from tests.process.kit import rows
from tests.process.outside import links_of
from tests.process.scripted import (
    SERVED_WITHIN,
    chat,
    pin,
    reported,
    serves,
)

RESENT = 8 * MiB
"""Bytes one cut may cost; the acceptance's number."""
SEED = 20
WORKERS = 3


@pytest.fixture(scope="module")
def depot() -> Iterator[FragileCluster]:
    """Two frontends, three workers."""
    with fragile(workers=WORKERS) as cluster:
        yield cluster


# -- cuts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("index", range(WORKERS))
def test_a_tunnel_cut_at_random_bytes(depot: FragileCluster, index: int) -> None:
    """The tunnel cut 10 times in all: each goes on, re-sends at most 8 MiB, and the hash is right (LOAD-11)."""
    cuts, size = (4, 3, 3)[index], 96 * MiB
    name, worker = fresh("tunnel"), depot.workers[index]
    digest = add(depot, name, size)
    pin(depot, name, index)
    owner = holder(depot, worker)
    broken_at(depot.tunnels, cuts, size, seed=SEED + index)
    before, done = carried(depot.tunnels), sum(wire.cut for wire in depot.tunnels)
    answered(ask_it(depot, owner, name, 120))
    assert sum(wire.cut for wire in depot.tunnels) - done == cuts
    assert sha256(remote(worker, name)) == digest
    # Seen from the wire: the file once, and at most so much for each cut (the rest is heads, heartbeats, answers).
    assert size < carried(depot.tunnels) - before < size + cuts * RESENT + size // 50
    costs = [cost for frontend in depot.frontends for cost in resent(frontend, name)]
    assert len(costs) >= cuts and all(-READ <= cost <= RESENT for cost in costs), costs


def test_a_peer_link_cut_at_ten_random_bytes(depot: FragileCluster) -> None:
    """The link between the frontends cut 10 times in one staging: the same, and the worker's tunnel lives (LOAD-11)."""
    cuts, size = 10, 160 * MiB
    name, worker = fresh("link"), depot.workers[0]
    digest = add(depot, name, size)
    pin(depot, name, 0)
    owner = holder(depot, worker)
    broken_at(depot.links, cuts, size, seed=SEED)
    before = carried(depot.links)
    answered(ask_it(depot, other(depot, owner), name, 120))
    assert sum(wire.cut for wire in depot.links) == cuts
    assert sha256(remote(worker, name)) == digest
    assert size < carried(depot.links) - before < size + cuts * RESENT + size // 50
    costs = resent(other(depot, owner), name)
    assert len(costs) >= cuts and all(cost <= RESENT for cost in costs), costs
    assert holder(depot, worker) is owner


def broken_at(wires: list[Wire], cuts: int, size: int, *, seed: int) -> None:
    """
    Let ``wires`` cut at random bytes of a transfer of ``size`` bytes, in ``cuts`` equal parts of it one cut each.

    Which wire carries it may change with each cut, so they are counted together.
    """
    chance = random.Random(seed)
    cut_together(wires, [int((part + chance.random()) * size / cuts) for part in range(cuts)])


@pytest.mark.parametrize("victim", ["loader", "owner", "worker"])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 5))])
def test_a_daemon_killed_at_random_bytes(depot: FragileCluster, seed: int, victim: str) -> None:
    """SIGKILL of the frontend that loads, of the one that holds the tunnel, or of the worker: it goes on by itself from
    the bytes that are there, a killed worker's partial file included (LOAD-11, LOAD-16)."""
    size, chance = 256 * MiB, random.Random(SEED + seed)
    name, worker = fresh(victim), depot.workers[1]
    digest = add(depot, name, size)
    pin(depot, name, 1)
    owner = holder(depot, worker)
    loader = other(depot, owner)
    killed: Frontend | Worker = {"loader": loader, "owner": owner, "worker": worker}[victim]
    left = owner if killed is not owner else loader
    there = remote(worker, name)
    before = carried(depot.tunnels)
    with asking(depot, loader, name) as first, asking(depot, left, name) as second:
        with standing_still(depot.tunnels, int(chance.uniform(0.2, 0.8) * size)) as stands:
            until("the point of the kill", stands, 60, every=0.002)
            killed.kill()
        if killed is worker:
            killed.start()
        first_reply, second_reply = first.result(), second.result()
    assert (first_reply if killed is not loader else second_reply).status == 200, second_reply.text
    answered(second_reply)
    assert sha256(there) == digest
    assert size < carried(depot.tunnels) - before < size + RESENT + size // 50
    assert rows(depot.database.url, "select count(*) from node_models where model_name = %s", name) == [(1,)]
    if killed is not worker:
        killed.start()
    until(f"{killed.name} ready", killed.is_ready, 60)
    until("every tunnel", lambda: all(it.is_ready() for it in depot.workers), 60)


def test_a_newer_tunnel_is_used_at_once() -> None:
    """The worker has a new tunnel while the old one is only silent: staging goes on there, long before that is
    noticed; in all within seconds, a small part of a stall window (LOAD-11, BR-056)."""
    with fragile(workers=1, frontends=1, frontend_env={"LOCALAI_TUNNEL_KEEPALIVE": "60s"}) as cluster:
        [worker], [frontend], [wire] = cluster.workers, cluster.frontends, cluster.tunnels
        name = fresh("silent")
        digest = add(cluster, name, 128 * MiB)
        there = remote(worker, name)
        with asking(cluster, frontend, name) as reply:
            with standing_still([wire], 40 * MiB) as stands:
                until("the middle", stands, 60, every=0.002)
                wire.fall_silent_behind()
            began = time.monotonic()
            answered(reply.result())
        assert time.monotonic() - began < 60  # the frontend would have taken three minutes to find out by itself
        assert sha256(there) == digest
        [cost] = resent(frontend, name)
        assert cost <= RESENT


# -- bits ------------------------------------------------------------------------------------------------------------


def test_a_bit_turned_on_the_way_is_sent_again(depot: FragileCluster) -> None:
    """A bit turned under way: the worker's hash says no, the file is sent again, and only then loaded (LOAD-16)."""
    size = 48 * MiB
    name, worker = fresh("flip"), depot.workers[2]
    digest = add(depot, name, size)
    pin(depot, name, 2)
    owner = holder(depot, worker)
    wire = depot.tunnels[depot.frontends.index(owner)]
    wire.flip_in = salt(f"{name}.gguf", size // MiB // 2) * 2  # in the body, whatever else passes
    before = wire.carried
    answered(ask_it(depot, owner, name, 120))
    assert wire.flip_in == b""
    assert sha256(remote(worker, name)) == digest
    assert wire.carried - before > 2 * size - 2 * MiB  # positive control: all of it went twice
    assert "the worker threw away what it had (400)" in owner.log.read_text()


def test_a_bit_turned_on_the_disk_is_found(depot: FragileCluster) -> None:
    """A staged file that was changed on the worker's disk is not loaded: it is found and sent again (LOAD-16)."""
    name, worker = fresh("rot"), depot.workers[2]
    digest = add(depot, name, 24 * MiB)
    pin(depot, name, 2)
    answered(chat(depot, depot.frontends[0], name, QUESTION))
    unload(depot, name)
    there = remote(worker, name)
    with there.open("r+b") as file:
        file.seek(12 * MiB)
        byte = file.read(1)[0]
        file.seek(12 * MiB)
        file.write(bytes([byte ^ 1]))
    assert sha256(there) != digest
    answered(chat(depot, depot.frontends[1], name, QUESTION))
    assert sha256(there) == digest


# -- what is staged --------------------------------------------------------------------------------------------------


def test_a_whole_tree_is_staged_and_not_again(depot: FragileCluster) -> None:
    """A folder with nested, empty, oddly named files and companions arrives as it is, once; what is missing is left
    out with a warning, hash files stay behind (LOAD-13)."""
    name, worker = fresh("tree"), depot.workers[0]
    models = depot.state.models
    tree = {"repo/a b/ü ß.bin": b"x" * 2 * MiB, "repo/empty": b"", "repo/x/y/z/deep.json": b"{}", "repo/v.onnx": b"o"}
    tree |= {"repo/v.onnx.json": b"{}", "proj.gguf": b"p", "tok/t.json": b"t", "lora one.gguf": b"l", "vae/v.bin": b"v"}
    for relative, content in tree.items():
        path = models / name / relative
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    for sidecar in ("repo/empty.sha256", "repo/v.onnx.sha256.target"):
        (models / name / sidecar).write_bytes(b"0" * 64)
    events = depot.state.root / f"{name}.events"
    (models / f"{name}.yaml").write_text(
        f"name: {name}\nbackend: test-backend\nparameters:\n  model: {name}/repo\nmmproj: {name}/proj.gguf\n"
        f"tokenizer: {name}/tok\ndraft_model: {name}/none.gguf\n"
        f"lora_adapters: ['{name}/lora one.gguf', '{name}/no.gguf']\n"
        f"options: ['test:events={events}', 'vae_path:vae/v.bin', 'vae_dir:{name}/vae', 'size:12']\n"
    )
    for frontend in depot.frontends:
        until(f"{name} served", lambda it=frontend: serves(depot, it, name), SERVED_WITHIN)
    pin(depot, name, 0)
    asked = other(depot, holder(depot, worker))
    assert chat(depot, asked, name).status == 200
    root = worker.models_dir / name / name
    arrived = {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}
    kept = {key: value for key, value in arrived.items() if not key.endswith(".sha256")}
    assert kept == tree
    [load] = reported(events, "load")
    assert (load["file"], load["path"]) == (str(root / "repo"), str(root.parent))
    logs = "\n".join(child.log.read_text() for child in depot.frontends)
    warned = [line for line in logs.splitlines() if f"{name} is loaded without" in line]
    assert len(warned) == 1 and f"{name}/none.gguf, {name}/no.gguf" in warned[0]
    stamps = {path: path.stat().st_mtime_ns for path in root.rglob("*")}
    for frontend in depot.frontends:
        unload(depot, name)
        before = carried(depot.tunnels) + carried(depot.links)
        assert chat(depot, frontend, name).status == 200
        # Heads and answers only, and who beats meanwhile: two dozen files of which one alone is 2 MiB.
        assert carried(depot.tunnels) + carried(depot.links) - before < MiB
    assert {path: path.stat().st_mtime_ns for path in root.rglob("*")} == stamps


def test_a_sharded_model_answers_and_one_without_a_shard_does_not(depot: FragileCluster) -> None:
    """Seven shards are staged over the relay and answer; with one missing the load fails in the backend's own words
    (LOAD-13, LOAD-19)."""
    worker = depot.workers[0]
    shards = sorted((checkout() / "tests" / "data" / "tiny-facts-shards").glob("*.gguf"))
    assert len(shards) == 7
    whole, broken = fresh("shards"), fresh("shards")
    for name, lost in ((whole, None), (broken, shards[3])):
        folder = depot.state.models / name
        folder.mkdir()
        for shard in shards:
            if shard != lost:
                shutil.copyfile(shard, folder / shard.name)
        serve(depot, name, f"{name}/{shards[0].name}")
        pin(depot, name, 0)
    asked = other(depot, holder(depot, worker))
    answered(chat(depot, asked, whole, QUESTION))
    arrived = sorted((worker.models_dir / whole / whole).glob("*.gguf"))
    assert [(it.name, sha256(it)) for it in arrived] == [(it.name, sha256(it)) for it in shards]
    reply = chat(depot, asked, broken, QUESTION)
    assert reply.status in (500, 502), reply.text
    assert shards[3].name in reply.text, reply.text


# -- memory ----------------------------------------------------------------------------------------------------------


BIG = [("relay", 1 * GiB), ("owner", 512 * MiB)]
BIGGER = [pytest.param(path, 4 * GiB, marks=pytest.mark.slow) for path in ("relay", "owner")]


@pytest.mark.parametrize(("path", "size"), [*BIG, *BIGGER])
def test_memory_stays_flat_and_a_big_model_answers(depot: FragileCluster, path: str, size: int) -> None:
    """A padded model of a gigabyte over either path, 4 GiB in ``make test-slow``: it answers, every daemon stays within
    64 MB of its baseline, and no body lies in a temporary file or anywhere but at its place (LOAD-12, LOAD-19)."""
    name, worker = fresh("big"), depot.workers[1]
    digest = add(depot, name, size)
    pin(depot, name, 1)
    owner = holder(depot, worker)
    asked = owner if path == "owner" else other(depot, owner)
    small = fresh("small")
    add(depot, small, 8 * MiB)
    pin(depot, small, 1)
    answered(chat(depot, asked, small, QUESTION))  # what a first load costs once is no part of this
    daemons = [*depot.frontends, worker]
    baseline = {child.name: memory(child, "VmRSS") for child in daemons}
    for child in daemons:
        Path(f"/proc/{child.pid}/clear_refs").write_text("5")  # the peak counts from here
    there, relayed = remote(worker, name), carried(depot.links)
    with asking(depot, asked, name) as reply:
        until("the first bytes", lambda: there.exists() and there.stat().st_size > 0, 60, every=0.01)
        for share in (0.25, 0.5, 0.75):
            until(f"{share:.0%}", lambda at=share: there.stat().st_size > at * size, 180, every=0.02)
            spooled = [link for child in daemons for link in links_of(child.pid) if "(deleted)" in link]
            assert spooled == []
            assert spilled(depot) < 64 * MiB
        answered(reply.result())
    assert (carried(depot.links) - relayed > size) == (path == "relay")
    assert spilled(depot) < 64 * MiB
    peaks = {child.name: memory(child, "VmHWM") - baseline[child.name] for child in daemons}
    print(f"{path} {size / GiB} GiB: peaks over the baseline {peaks}")
    assert all(peak <= 64 * MiB for peak in peaks.values()), peaks
    assert sha256(there) == digest
    assert told(asked, name) == []
    unload(depot, name)


def spilled(cluster: Cluster) -> int:
    """Bytes in the daemons' temporary folder and data folders; staged models lie elsewhere."""
    folders = [Path(cluster.plan.frontend_env["TMPDIR"])]
    folders += [child.data_dir for child in (*cluster.frontends, *cluster.workers)]
    total = 0
    for path in (path for folder in folders for path in folder.rglob("*")):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:  # gone since it was listed
            continue
    return total


def memory(child: Child, row: str) -> int:
    """A row of the kernel's memory account of a process (bytes)."""
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{child.pid}/status").read_text().splitlines())
    return int(lines[row].split()[0]) * KiB
