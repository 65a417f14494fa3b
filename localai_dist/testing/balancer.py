"""
A small HTTP balancer in front of frontends: it follows their ``/readyz``, as one in front of a real cluster does.

One request per connection: it asks for ``Connection: close``, so that each request goes to a frontend that is ready
now. Bodies and answers are passed on as they come; a WebSocket's upgrade is left alone.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Coroutine, Sequence
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

_LARGEST_HEAD = 64 * 1024
_PIECE = 64 * 1024
_PROBE_WITHIN = 2.0

_NOBODY = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: text/plain\r\nConnection: close\r\n"
    b"Content-Length: 22\r\n\r\nno frontend is ready\r\n"
)


class Balancer:
    """
    Round robin over the frontends that are ready; runs in a thread of its own::

        with Balancer([frontend.url for frontend in cluster.frontends]) as balancer:
            ask(balancer.url + "/v1/models")

    Attributes:
        url: its own address, known once entered.
    """

    def __init__(self, urls: Sequence[str], *, every: float = 0.1) -> None:
        """``every``: pause between two probes of a frontend (s)."""
        self.url = ""
        self._places = [_place_of(url) for url in urls]
        self._ready: set[tuple[str, int]] = set()
        self._turn = itertools.count()
        self._every = every
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="balancer", daemon=True)

    def __enter__(self) -> Self:
        """Listen, and know who is ready."""
        self._thread.start()
        self._within(self._start())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """End every connection and the thread."""
        self._within(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        self._loop.close()

    def takes(self, url: str) -> bool:
        """Whether the frontend at ``url`` was ready when it was looked at last."""
        return _place_of(url) in self._ready

    def _within(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    async def _start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=_LARGEST_HEAD)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        await asyncio.gather(*(self._probe(place) for place in self._places))
        self._watches = [self._loop.create_task(self._watch(place)) for place in self._places]

    async def _stop(self) -> None:
        self._server.close()
        mine = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in mine:
            task.cancel()
        await asyncio.gather(*mine, return_exceptions=True)

    async def _watch(self, place: tuple[str, int]) -> None:
        while True:
            await asyncio.sleep(self._every)
            await self._probe(place)

    async def _probe(self, place: tuple[str, int]) -> None:
        try:
            good = await asyncio.wait_for(_says_ready(place), _PROBE_WITHIN)
        except (OSError, asyncio.IncompleteReadError, TimeoutError):
            good = False
        (self._ready.add if good else self._ready.discard)(place)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            far = await self._dial()
            if far is None:
                writer.write(_NOBODY)
                await writer.drain()
                return
            far[1].write(one_request(head))
            await _join(reader, writer, *far)
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # one of the two is gone: so is the connection
        finally:
            writer.close()

    async def _dial(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
        """A connection to the next ready frontend; one that refuses is passed over and not ready any more."""
        turn = next(self._turn)
        for step in range(len(self._places)):
            place = self._places[(turn + step) % len(self._places)]
            if place in self._ready:
                try:
                    return await asyncio.open_connection(*place)
                except OSError:
                    self._ready.discard(place)
        return None


def _place_of(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    return parts.hostname or "", parts.port or 80


def one_request(head: bytes) -> bytes:
    """A request's head that asks for the connection's end after the answer; an upgrade stays as it is."""
    first, *lines = head[:-4].split(b"\r\n")
    if any(line.lower().startswith(b"upgrade:") for line in lines):
        return head
    kept = [line for line in lines if not line.lower().startswith(b"connection:")]
    return b"\r\n".join([first, *kept, b"Connection: close", b"", b""])


async def _says_ready(place: tuple[str, int]) -> bool:
    reader, writer = await asyncio.open_connection(*place)
    try:
        writer.write(b"GET /readyz HTTP/1.1\r\nHost: frontend\r\nConnection: close\r\n\r\n")
        return (await reader.readline()).startswith(b"HTTP/1.1 200")
    finally:
        writer.close()


async def _join(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    far_reader: asyncio.StreamReader,
    far_writer: asyncio.StreamWriter,
) -> None:
    """Pass on both directions until the answer ends or the client goes."""
    up = asyncio.ensure_future(_pass_on(reader, far_writer))
    down = asyncio.ensure_future(_pass_on(far_reader, writer))
    try:
        await asyncio.wait([up, down], return_when=asyncio.FIRST_COMPLETED)
    finally:
        for direction in (up, down):
            direction.cancel()
        await asyncio.gather(up, down, return_exceptions=True)
        far_writer.close()


async def _pass_on(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    while piece := await source.read(_PIECE):
        sink.write(piece)
        await sink.drain()
