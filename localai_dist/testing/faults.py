"""
Faults on the way between two daemons, made in user space: cut, swallow, throttle, delay, block a path.

A ``FaultProxy`` stands in front of one HTTP server. It reads each connection's first head, so that one path can be
refused while all others pass; after that it passes bytes on, WebSockets included. Used from a test's thread; the work
is done in one thread of its own::

    with Faults() as faults:
        proxy = faults.proxy(frontend.url)
        proxy.block("/api/cluster/connect")      # 403; registration and heartbeats pass
        proxy.cut()                              # every connection reset
        proxy.swallow()                          # they stay open, and nothing arrives any more
        proxy.heal()
"""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Self, TypeVar
from urllib.parse import urlsplit

from localai_dist.testing.balancer import one_request

T = TypeVar("T")

_LARGEST_HEAD = 64 * 1024
_PIECE = 64 * 1024
_ABORT = struct.pack("ii", 1, 0)  # SO_LINGER, zero seconds: close sends a reset


class Faults:
    """The thread that runs the proxies; every connection ends with it."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="faults", daemon=True)
        self._proxies: list[FaultProxy] = []

    def __enter__(self) -> Self:
        """Start the thread."""
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """End every proxy and the thread."""
        self.within(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        self._loop.close()

    def proxy(self, url: str) -> FaultProxy:
        """A proxy in front of the server at ``url``, listening on a free loopback port."""
        proxy = FaultProxy(self, url)
        self.within(proxy.listen())
        self._proxies.append(proxy)
        return proxy

    def within(self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work`` in the thread and wait for it."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    async def _stop(self) -> None:
        for proxy in self._proxies:
            proxy.close()
        mine = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in mine:
            task.cancel()
        await asyncio.gather(*mine, return_exceptions=True)


class FaultProxy:
    """
    One way that can be broken; see ``Faults``.

    Attributes:
        url: its own address.
        heads: how many requests came, by path without the query; a refused one counts.
    """

    def __init__(self, faults: Faults, url: str) -> None:
        parts = urlsplit(url)
        self.url = ""
        self.heads: dict[str, int] = {}
        self._faults = faults
        self._place = (parts.hostname or "", parts.port or 80)
        self._blocked: dict[str, int] = {}
        self._joints: set[_Joint] = set()
        self._swallowing = False
        self._delay = 0.0
        self._rate = 0.0

    async def listen(self) -> None:
        """Start to listen; called by ``Faults``."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=_LARGEST_HEAD)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def close(self) -> None:
        """Stop listening and reset every connection; called by ``Faults``."""
        self._server.close()
        self._reset()

    def cut(self, path: str = "") -> int:
        """
        Reset every connection, or those that asked for a path that begins with ``path``; how many.

        They are not ``open`` any more when this returns; their ends may learn of it a moment later.
        """
        return self._do(lambda: self._reset(path))

    def block(self, path: str, status: int = 403) -> None:
        """Answer requests for a path that begins with ``path`` with ``status``; open connections stay."""
        self._do(lambda: self._blocked.__setitem__(path, status))

    def unblock(self, path: str) -> None:
        """Let requests for ``path`` pass again."""
        self._do(lambda: self._blocked.pop(path, None))

    def swallow(self) -> None:
        """
        From now on nothing that is sent arrives, in either direction, and no end is told; new connections too.

        ``heal`` ends it for new connections only: those that lost bytes stay silent until somebody closes them.
        """

        def swallow() -> None:
            self._swallowing = True
            for joint in self._joints:
                joint.silent = True

        self._do(swallow)

    def delay(self, seconds: float) -> None:
        """Each piece (64 KiB at most) of each direction is held for so long (s)."""
        self._do(lambda: setattr(self, "_delay", seconds))

    def throttle(self, rate: float) -> None:
        """At most so many bytes a second, for each direction of each connection; 0: no limit."""
        self._do(lambda: setattr(self, "_rate", rate))

    def heal(self) -> None:
        """No fault any more; connections that lost bytes are reset."""

        def heal() -> None:
            self._blocked.clear()
            self._swallowing, self._delay, self._rate = False, 0.0, 0.0
            self._reset_all([joint for joint in self._joints if joint.silent])

        self._do(heal)

    def open(self, path: str = "") -> int:
        """How many connections that asked for a path beginning with ``path`` are joined now."""
        return self._do(lambda: sum(joint.far is not None and joint.path.startswith(path) for joint in self._joints))

    def _do(self, work: Callable[[], T]) -> T:
        async def done() -> T:
            return work()

        return self._faults.within(done())

    def _reset(self, path: str = "") -> int:
        return self._reset_all([joint for joint in self._joints if joint.path.startswith(path)])

    def _reset_all(self, joints: list[_Joint]) -> int:
        for joint in joints:
            self._joints.discard(joint)  # now: who asks what is open may ask before its two ways have ended
            joint.reset()
        return len(joints)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        near = _End(reader, writer)
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            path = head.split(b" ", 2)[1].decode("latin-1").partition("?")[0]
            self.heads[path] = self.heads.get(path, 0) + 1
            refusal = next((status for start, status in self._blocked.items() if path.startswith(start)), None)
            if refusal is not None:
                await _refuse(writer, refusal)
                return
            await self._pass(_Joint(path, near, self._swallowing), head)
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # one of the two is gone: so is the connection
        finally:
            near.writer.close()

    async def _pass(self, joint: _Joint, head: bytes) -> None:
        """Connect ``joint`` and pass its head on; what breaks the way meanwhile breaks it for this one too."""
        self._joints.add(joint)
        try:
            far = _End(*await asyncio.open_connection(*self._place))
            if joint not in self._joints:
                far.reset()
                return
            joint.far = far
            if not joint.silent:
                far.writer.write(one_request(head))
            await self._join(joint, joint.near, far)
        finally:
            self._joints.discard(joint)

    async def _join(self, joint: _Joint, near: _End, far: _End) -> None:
        """Pass on both directions until one ends; a swallowed connection's ends learn nothing of each other."""
        ways = [
            asyncio.ensure_future(self._pass_on(joint, near, far)),
            asyncio.ensure_future(self._pass_on(joint, far, near)),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            if joint.silent:
                await asyncio.wait(ways)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            far.writer.close()

    async def _pass_on(self, joint: _Joint, source: _End, sink: _End) -> None:
        while piece := await source.reader.read(_PIECE):
            if self._delay:
                await asyncio.sleep(self._delay)
            if self._rate:
                await asyncio.sleep(len(piece) / self._rate)
            if not joint.silent:
                sink.writer.write(piece)
                await sink.writer.drain()


class _End:
    """One of the two sockets of a connection that passes through."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def reset(self) -> None:
        """Close it so that the other side sees a reset."""
        raw: socket.socket | None = self.writer.get_extra_info("socket")
        if raw is not None and raw.fileno() >= 0:  # it may be closed already
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _ABORT)
        self.writer.transport.abort()


class _Joint:
    """A connection that passes through: its path and its two ends, the far one once it is connected."""

    def __init__(self, path: str, near: _End, silent: bool) -> None:
        self.path = path
        self.near = near
        self.far: _End | None = None
        self.silent = silent

    def reset(self) -> None:
        """Both ends see a reset."""
        self.near.reset()
        if self.far is not None:
            self.far.reset()


async def _refuse(writer: asyncio.StreamWriter, status: int) -> None:
    body = b"a gateway on the way refused this path\n"
    writer.write(
        f"HTTP/1.1 {status} Refused\r\nContent-Type: text/plain\r\nConnection: close\r\n"
        f"Content-Length: {len(body)}\r\n\r\n".encode()
        + body
    )
    await writer.drain()
