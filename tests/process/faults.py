"""A wire that breaks on command: a TCP proxy that counts bytes, cuts, stands still, falls silent, and turns bits."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from localai_dist.testing.cluster import Cluster
from localai_dist.testing.members import Frontend, Worker

READ = 256 * 1024

BULK = 4 * 1024
"""A read of fewer bytes is none of a transfer: somebody's heartbeat, or an answer."""


class Wire:
    """
    A proxy in front of one address; its threads end with the process.

    Attributes:
        port: where it listens on 127.0.0.1.
        carried: bytes that came in, from both sides together.
        due: asked with each read of a transfer whether the connection it came by shall be reset now.
        flip_in: bytes of which one bit is turned where they pass next; empty: none.
        passing: cleared as long as nothing that was read is passed on.
        cut: how many cuts there were.
    """

    def __init__(self, port: int) -> None:
        self._target = ("127.0.0.1", port)
        self._listening = socket.create_server(("127.0.0.1", 0), backlog=50)
        self.port: int = self._listening.getsockname()[1]
        self.carried = 0
        self.due: Callable[[], bool] = lambda: False
        self.flip_in = b""
        self.passing = threading.Event()
        self.passing.set()
        self.cut = 0
        self._lock = threading.Lock()
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._dead: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        """As a frontend's address."""
        return f"http://127.0.0.1:{self.port}"

    def reset(self) -> None:
        """Cut every connection: both ends see a reset."""
        with self._lock:
            self._reset()

    def fall_silent_behind(self) -> None:
        """Cut the near ends only: those who dialled see it at once, behind the proxy nothing is heard any more."""
        with self._lock:
            pairs, self._pairs = self._pairs, []
        for near, far in pairs:
            self._dead.append(far)
            _abort(near)

    def close(self) -> None:
        """No more connections."""
        self._listening.close()
        self.passing.set()
        self.reset()
        for silent in self._dead:
            silent.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listening.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(self._target, timeout=5)
            except OSError:
                _abort(near)
                continue
            far.settimeout(None)
            with self._lock:
                self._pairs.append((near, far))
            for source, sink in ((near, far), (far, near)):
                source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                threading.Thread(target=self._pump, args=(source, sink), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(READ):
                passed = self._seen(data)
                self.passing.wait()
                sink.sendall(passed)
            if sink not in self._dead:
                sink.shutdown(socket.SHUT_WR)
        except OSError:
            with self._lock:
                for pair in self._pairs:
                    if source in pair:
                        self._pairs.remove(pair)
                        for end in pair:
                            _abort(end)
                        break

    def _seen(self, data: bytes) -> bytes:
        with self._lock:
            self.carried += len(data)
            place = data.find(self.flip_in) if self.flip_in else -1
            if place >= 0:
                data = data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]
                self.flip_in = b""
            if len(data) >= BULK and self.due():
                self.cut += 1
                raise ConnectionResetError
        return data

    def _reset(self) -> None:
        pairs, self._pairs = self._pairs, []
        for pair in pairs:
            for end in pair:
                _abort(end)


def _abort(end: socket.socket) -> None:
    """Close with a reset; a thread that waits for it wakes."""
    try:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        end.shutdown(socket.SHUT_RD)
    except OSError:
        pass  # the other side was faster
    end.close()


class FragileCluster(Cluster):
    """
    A cluster whose workers and whose frontends reach a frontend by a wire each.

    Attributes:
        tunnels: the workers' wires, one for each frontend.
        links: the peers' wires, one for each frontend.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.tunnels: list[Wire] = []
        self.links: list[Wire] = []

    def _frontend(self, index: int, port: int) -> Frontend:
        made = super()._frontend(index, port)
        self.tunnels.append(Wire(port))
        self.links.append(Wire(port))
        for wire in (self.tunnels[-1], self.links[-1]):
            self._ends.callback(wire.close)
        made.env["LOCALAI_DISTRIBUTED_ADVERTISE_ADDR"] = f"127.0.0.1:{self.links[-1].port}"
        return made

    def _worker(self, index: int) -> Worker:
        made = super()._worker(index)
        by_port = {frontend.url: wire.url for frontend, wire in zip(self.frontends, self.tunnels, strict=True)}
        urls = [by_port[url] for url in made.env["LOCALAI_REGISTER_TO"].split(",")]
        made.env["LOCALAI_REGISTER_TO"] = ",".join(urls)
        return made


def cut_together(wires: list[Wire], points: list[int]) -> None:
    """Cut whichever of ``wires`` carries the byte, at each of ``points`` counted over all of them from now on."""
    left, begun, lock = sorted(points), carried(wires), threading.Lock()

    def due() -> bool:
        with lock:
            if not left or carried(wires) - begun <= left[0]:
                return False
            del left[0]
            return True

    for wire in wires:
        wire.due = due


@contextmanager
def standing_still(wires: list[Wire], count: int) -> Iterator[Callable[[], bool]]:
    """
    Let ``wires`` carry ``count`` bytes more and then nothing until the block ends, so that a transfer stays in its
    middle; yields whether it is so far.
    """
    begun = carried(wires)

    def due() -> bool:
        if carried(wires) - begun > count:
            for wire in wires:
                wire.passing.clear()
        return False

    for wire in wires:
        wire.due = due
    try:
        yield lambda: not all(wire.passing.is_set() for wire in wires)
    finally:
        for wire in wires:
            wire.due = lambda: False
            wire.passing.set()


def carried(wires: list[Wire]) -> int:
    """Bytes all of them carried."""
    return sum(wire.carried for wire in wires)


class SilentSocket:
    """
    A way to a PostgreSQL on a unix socket that can fall silent: nothing passes, nobody is told, new dials included.

    Attributes:
        url: of the same database, by this way.
    """

    def __init__(self, url: str, folder: Path) -> None:
        start, _, place = url.partition("?host=")
        self._target = str(Path(unquote(place), ".s.PGSQL.5432"))
        self.url = f"{start}?host={quote(str(folder), safe='')}"
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(str(folder / ".s.PGSQL.5432"))
        self._listening.listen(50)
        self._passing = threading.Event()
        self._passing.set()
        threading.Thread(target=self._accept, daemon=True).start()

    def swallow(self) -> None:
        """From now on what is sent stays where it is."""
        self._passing.clear()

    def heal(self) -> None:
        """Everything passes again, also what was held back."""
        self._passing.set()

    def close(self) -> None:
        """No more connections; those that are there end with their two ends."""
        self.heal()
        self._listening.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listening.accept()
            except OSError:
                return
            far = socket.socket(socket.AF_UNIX)
            far.connect(self._target)
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self._pump, args=(source, sink), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(READ):
                self._passing.wait()
                sink.sendall(data)
            self._passing.wait()
            sink.shutdown(socket.SHUT_WR)
