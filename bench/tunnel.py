"""
The tunnel beside plain TCP and other people's forwards: rate, processor time, delay, memory (MUX-19, 20, 21).

Every round takes each way once, so that whatever else the machine does falls on all of them; a row is the median of the
rounds, and the best one where it says so. Processor time is that of all processes on the way.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from statistics import median
from typing import Any

from twisted.internet.defer import Deferred, gatherResults

from bench import forwards, web
from bench.near import Asking, Child, Memory, Transfer, Way, cpu_time, dialled, pause, plain_way, reactor, tunnel_way
from bench.rows import Row, at_most, quantile
from localai_dist.mux.classes import TrafficClass
from localai_dist.units import GiB, KiB, MiB

ROUNDS = 5
SIZE = 128 * MiB
DIRECTIONS = ("up", "down")
NOT_RUN = "GPUStack's websocket_proxy: not installed"
PEERS: tuple[tuple[str, Callable[[], str], Callable[[int], Any]], ...] = (
    ("ours", lambda: "", forwards.ours),
    ("Go yamux over WebSocket", forwards.go_missing, forwards.go_pair),
    ("ssh -R", forwards.ssh_missing, forwards.ssh_reverse),
)


def run() -> list[Row]:
    """All rows."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
    rows: list[Row] = []
    failures: list[Any] = []

    async def all_parts() -> None:
        for part in (_bulk, _forwarded, _requests, _beside_bulk, _stalled, _many_streams, _idle_tunnels, _links):
            sys.stdout.write(f"  {part.__name__.strip('_').replace('_', ' ')}\n")
            sys.stdout.flush()
            rows.extend(await part())

    def begin() -> None:
        Deferred.fromCoroutine(all_parts()).addErrback(failures.append).addBoth(lambda _: reactor.stop())

    reactor.callWhenRunning(begin)
    reactor.run()
    for failure in failures:
        failure.raiseException()
    return rows


def at_least(id: str, what: str, value: float, unit: str, bound: float, peer: str = "") -> Row:
    """A row whose number shall not be smaller than ``bound``."""
    return Row(id, what, round(value, 3), unit, f"≥ {bound:g}", value >= bound, peer)


# -- MUX-19 ------------------------------------------------------------------------------------------------------------


async def _bulk() -> list[Row]:
    """Stream to stream, memory to counter: plain TCP, the owner's tunnel, and through a relay."""
    with Child("far") as far, Child("relay") as relay, Child("far", relay.tunnel_url) as worker:
        await pause(0.2)
        ways = [
            plain_way("TCP", far.plain_port, [far.pid]),
            tunnel_way("tunnel", await dialled(far.tunnel_url), [far.pid]),
            tunnel_way("relay", await dialled(relay.tunnel_url), [relay.pid, worker.pid], relayed=True),
        ]
        found = await _rounds(ways)
    rows = []
    for direction in DIRECTIONS:
        plain, tunnel, relayed = (found[name, direction] for name in ("TCP", "tunnel", "relay"))
        beside = f"plain Twisted TCP {_cpu(plain):.2f} CPU-s/GiB at {_rate(plain):.0f} MB/s"
        where = f"stream to stream, {direction}"
        rows += [
            _with_peer(at_most("MUX-19", f"{where}, both ends", _cpu(tunnel), "CPU-s/GiB", 1.6), beside),
            Row("MUX-19", f"{where}, the best of {ROUNDS} rounds", round(_least(tunnel), 2), "CPU-s/GiB"),
            at_least("MUX-19", f"{where}, of TCP's rate", _ratio(tunnel, plain), "", 0.6, f"{_rate(tunnel):.0f} MB/s"),
            at_most("MUX-19", f"relay hop, {direction}", _cpu(relayed) - _cpu(tunnel), "CPU-s/GiB more", 1.5),
            Row("MUX-19", f"of it the relay's own process, {direction}", round(_own(relayed), 2), "CPU-s/GiB"),
        ]
    return rows


async def _forwarded() -> list[Row]:
    """As a port forward, by two processes between the same two ends: curl and nginx, and two plain Twisted ones."""
    absent = web.missing()
    if absent:
        rows = [Row("MUX-19", f"port forward with curl and nginx at the ends, {absent}", 0, "not measured")]
    else:
        with web.nginx([SIZE, SIZE // 8]) as server, _forwards(server.port) as forwards_:
            found = await _rounds([web.WebWay(name, port, server, pids) for name, port, pids in forwards_])
        rows = _forward_rows(found, "with curl and nginx at the ends", 2.5)
    with Child("far") as far, _forwards(far.plain_port) as forwards_:
        await pause(0.2)
        found = await _rounds([plain_way(name, port, [far.pid, *pids]) for name, port, pids in forwards_])
    return rows + _forward_rows(found, "with two plain Twisted ends", None)


@contextmanager
def _forwards(target: int) -> Iterator[list[tuple[str, int, list[int]]]]:
    """Name, port and processes of each forward to ``target`` that can run here."""
    with ExitStack() as stack:
        started = []
        for name, absent, start in PEERS:
            if not absent():
                forward = stack.enter_context(start(target))
                started.append((name, forward.port, forward.pids))
        yield started


def _forward_rows(found: dict[tuple[str, str], list[Transfer]], ends: str, bound: float | None) -> list[Row]:
    """The forward's own processes; those at its ends cost the same whatever stands between them."""
    absent = "".join(f"; {name}: {why()}" for name, why, _ in PEERS if why()) + f"; {NOT_RUN}"
    rows = []
    for direction in DIRECTIONS:
        told = {name: _forward_text(moved) for (name, way), moved in found.items() if way == direction}
        beside = "; ".join([told.pop("ours"), *(f"{name} {text}" for name, text in told.items())]) + absent
        what = f"port forward, {direction}, {ends}"
        value = _between(found["ours", direction])
        target = ("", None) if bound is None else (f"≤ {bound:g}", value <= bound)
        rows.append(Row("MUX-19", what, round(value, 3), "CPU-s/GiB", *target, beside))
    return rows


def _forward_text(moved: list[Transfer]) -> str:
    return f"{_between(moved):.2f} (with the ends {_cpu(moved):.2f}) at {_rate(moved):.0f} MB/s"


def _between(moved: list[Transfer]) -> float:
    """Without the two ends, which come first."""
    return median(sum(one.cpu[2:]) / one.size * GiB for one in moved)


async def _rounds(ways: Sequence[Any]) -> dict[tuple[str, str], list[Transfer]]:
    found: dict[tuple[str, str], list[Transfer]] = {}
    for number in range(ROUNDS + 1):
        for way in ways:
            for direction in DIRECTIONS:
                one = await getattr(way, direction)(SIZE if number else SIZE // 8)
                if number:  # the first round warms up
                    found.setdefault((way.name, direction), []).append(one)
    return found


def _cpu(transfers: list[Transfer]) -> float:
    return median(one.cpu_per_gib for one in transfers)


def _least(transfers: list[Transfer]) -> float:
    return min(one.cpu_per_gib for one in transfers)


def _own(transfers: list[Transfer]) -> float:
    """Of the first far process alone."""
    return median(one.cpu[1] / one.size * GiB for one in transfers)


def _rate(transfers: list[Transfer]) -> float:
    return median(one.rate for one in transfers)


def _ratio(ours: list[Transfer], plain: list[Transfer]) -> float:
    """The median of the rounds' own ratios."""
    return median(one.rate / other.rate for one, other in zip(ours, plain, strict=True))


def _with_peer(row: Row, peer: str) -> Row:
    return Row(row.id, row.what, row.value, row.unit, row.target, row.met, peer)


# -- MUX-20 ------------------------------------------------------------------------------------------------------------


async def _requests() -> list[Row]:
    """1 KiB there and back, one after the other, each on a stream of its own."""
    with Child("far") as far:
        way = tunnel_way("tunnel", await dialled(far.tunnel_url), [far.pid])
        plain = plain_way("TCP", far.plain_port, [far.pid])
        ours, theirs = [], []
        for _ in range(4):
            ours.append(await _asked(way, 250))
            theirs.append(await _asked(plain, 250))
    p50 = quantile([one for times, _ in ours for one in times], 0.5) * 1e3
    beside = quantile([one for times, _ in theirs for one in times], 0.5) * 1e3
    cpu, plain_cpu = median(cpu for _, cpu in ours), median(cpu for _, cpu in theirs)
    return [
        _with_peer(at_most("MUX-20", "1 KiB request, p50", p50, "ms", 0.45), f"a new TCP connection {beside:.2f} ms"),
        _with_peer(
            at_most("MUX-20", "1 KiB request, both ends", cpu * 1e6, "µs CPU", 250),
            f"a new TCP connection {plain_cpu * 1e6:.0f} µs",
        ),
    ]


async def _asked(way: Way, count: int, think: float = 0.0) -> tuple[list[float], float]:
    """The times of so many requests, and the processor time of one (s)."""
    before = time.process_time() + sum(map(cpu_time, way.pids))
    times = []
    for _ in range(count):
        times.append(await way.request())
        if think:
            await pause(think)
    used = time.process_time() + sum(map(cpu_time, way.pids)) - before
    return times, used / count


async def _beside_bulk() -> list[Row]:
    """Requests while a transfer runs on the same tunnel, and what the transfer keeps of its rate."""
    kept, times, idle = [], [], []
    with Child("far") as far:
        way = tunnel_way("tunnel", await dialled(far.tunnel_url), [far.pid])
        for number in range(ROUNDS):
            direction = DIRECTIONS[number % 2]
            idle += (await _asked(way, 100, 0.002))[0]
            alone = await getattr(way, direction)(SIZE)
            found, beside = await _while_moving(way, direction)
            kept.append(beside.rate / alone.rate)
            times += found
    return [
        _with_peer(
            at_most("MUX-20", "1 KiB request beside a transfer, p99", quantile(times, 0.99) * 1e3, "ms", 5),
            f"p50 {quantile(times, 0.5) * 1e3:.2f} ms; idle p99 {quantile(idle, 0.99) * 1e3:.2f} ms",
        ),
        at_least("MUX-20", "the transfer's rate beside requests, of its own", median(kept), "", 0.9),
    ]


async def _while_moving(way: Way, direction: str, size: int = SIZE) -> tuple[list[float], Transfer]:
    moving = Deferred.fromCoroutine(getattr(way, direction)(size))
    times = []
    await pause(0.05)
    while not moving.called:
        times.append(await way.request())
        await pause(0.002)
    return times, await moving


async def _stalled() -> list[Row]:
    """Others' requests while one stream's reader has stopped for ever."""
    with Child("far") as far:
        way = tunnel_way("tunnel", await dialled(far.tunnel_url), [far.pid])
        idle, _ = await _asked(way, 400, 0.001)
        stream = await way.open(TrafficClass.BULK, Asking())
        stream.write(b"stall\n")
        Memory(stream, 64 * MiB).begin()
        await pause(0.3)
        beside, _ = await _asked(way, 400, 0.001)
        stream.abortConnection()
    ratio = quantile(beside, 0.99) / quantile(idle, 0.99)
    return [at_most("MUX-20", "p99 beside a stalled reader, of idle p99", ratio, "", 2.0)]


# -- MUX-21 ------------------------------------------------------------------------------------------------------------


async def _many_streams() -> list[Row]:
    """Opens a second, and what an open stream costs in memory (MUX-21)."""
    with Child("far") as far:
        session = await dialled(far.tunnel_url)
        way = tunnel_way("tunnel", session, [far.pid])
        await way.request()
        near_before, far_before = _resident(), far.resident()
        for _ in range(1000):
            stream = await session.open()
            stream.start(Asking())
            stream.write(b"hold\n")
        await way.request()
        grown = max(_resident() - near_before, far.resident() - far_before) / 1000 / KiB
        began = time.perf_counter()
        await gatherResults([Deferred.fromCoroutine(_asked(way, 100)) for _ in range(20)])
        opens = 2000 / (time.perf_counter() - began)
    return [
        at_least("MUX-21", "streams opened, used for a 1 KiB request and closed", opens, "/s", 1000),
        at_most("MUX-21", "memory for each of 1000 open streams, at the end where it is more", grown, "KiB", 30),
    ]


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4 * KiB


async def _idle_tunnels() -> list[Row]:
    """A frontend with 1000 idle tunnels (MUX-21)."""
    with Child("far") as far:
        before = far.resident() / MiB
        sessions = [await dialled(far.tunnel_url) for _ in range(1000)]
        await pause(0.5)
        resident = far.resident() / MiB
        for session in sessions:
            session.abort(RuntimeError("measured"))
    row = at_most("MUX-21", "resident with 1000 idle tunnels", resident, "MiB", 300)
    return [_with_peer(row, f"without any {before:.0f} MiB")]


async def _links() -> list[Row]:
    """A long link and a slow one, made in user space (MUX-21)."""
    return [*await _long_link(), *await _slow_link()]


async def _long_link() -> list[Row]:
    with Child("far") as far, _link(far, 1000, 25) as url:
        way = tunnel_way("tunnel", await dialled(url), [far.pid])
        await pause(0.5)
        times, moved = await _while_moving(way, "down", 3 * SIZE)
    return [
        at_least("MUX-21", "one transfer over 1 Gbit/s, 50 ms", moved.rate, "MB/s", 40),
        at_most("MUX-21", "requests beside it, p95", quantile(times, 0.95) * 1e3, "ms", 300),
    ]


async def _slow_link() -> list[Row]:
    with Child("far") as far, _link(far, 100, 10) as url:
        way = tunnel_way("tunnel", await dialled(url), [far.pid])
        await pause(0.5)
        idle, _ = await _asked(way, 50, 0.005)
        alone = await way.down(48 * MiB)
        times, moved = await _while_moving(way, "down", 64 * MiB)
    more = (quantile(times, 0.99) - quantile(idle, 0.99)) * 1e3
    p50, p99, idle_p50 = (one * 1e3 for one in (quantile(times, 0.5), quantile(times, 0.99), quantile(idle, 0.5)))
    beside = f"p50 {p50:.1f}, p99 {p99:.1f}; idle p50 {idle_p50:.1f} ms"
    return [
        _with_peer(at_most("MUX-21", "100 Mbit/s, 20 ms, behind a proxy: p99 above idle p99", more, "ms", 12), beside),
        at_least(
            "MUX-21", "the transfer's part of that link", moved.rate / 12.5, "", 0.9, f"alone {alone.rate / 12.5:.2f}"
        ),
    ]


@contextmanager
def _link(far: Child, mbits: float, delay_ms: float) -> Iterator[str]:
    port = far.tunnel_url.rsplit(":", 1)[1].strip("/")
    command = [sys.executable, "-m", "bench.link", port, str(mbits), str(delay_ms)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as link:
        assert link.stdout is not None
        try:
            yield f"ws://127.0.0.1:{int(link.stdout.readline())}/"
        finally:
            link.kill()
