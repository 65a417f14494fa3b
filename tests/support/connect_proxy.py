"""A small HTTP proxy that only knows ``CONNECT``, in a thread of its own: the way out of a closed network."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import threading
from collections.abc import Mapping
from types import TracebackType
from typing import Self


class ConnectProxy:
    """
    Leads to the addresses it was told of and to no other.

    Args:
        leads: ``host:port`` as it is asked for, and the port on this machine that is meant.
        credentials: ``user:password`` it wants; empty: none.

    Attributes:
        asked: what it was asked for, in order.
        refused: how many asked without the credentials.
        carried: how many connections it leads now.
    """

    def __init__(self, leads: Mapping[str, int], credentials: str = "") -> None:
        self.asked: list[str] = []
        self.refused = 0
        self.carried = 0
        self._leads = leads
        self._wanted = "Basic " + base64.b64encode(credentials.encode()).decode() if credentials else ""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._tasks: set[asyncio.Task[None]] = set()

    def __enter__(self) -> Self:
        """Listen."""
        self._thread.start()
        self._server = asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(10)
        self.port: int = self._server.sockets[0].getsockname()[1]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """End every connection, and listen no more."""
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        self._loop.close()

    async def _listen(self) -> asyncio.Server:
        return await asyncio.start_server(self._accepted, "127.0.0.1", 0)

    async def _stop(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = self._loop.create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            method, target, _ = head[0].split(" ")
            given = next((line.partition(": ")[2] for line in head if line.startswith("Proxy-Authorization: ")), "")
            self.asked.append(target)
            if self._wanted and given != self._wanted:
                self.refused += 1
                writer.write(b"HTTP/1.1 407 Proxy Authentication Required\r\nProxy-Authenticate: Basic\r\n\r\n")
            elif method != "CONNECT" or target not in self._leads:
                writer.write(b"HTTP/1.1 403 Forbidden\r\n\r\n")
            else:
                await self._lead(reader, writer, self._leads[target])
        except (OSError, asyncio.IncompleteReadError, ValueError):
            return  # whoever asked sees it closed
        finally:
            writer.close()

    async def _lead(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int) -> None:
        there, thither = await asyncio.open_connection("127.0.0.1", port)
        self.carried += 1
        try:
            writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
            await asyncio.gather(_pump(reader, thither), _pump(there, writer))
        finally:
            self.carried -= 1
            thither.close()


async def _pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while piece := await source.read(64 * 1024):
            sink.write(piece)
            await sink.drain()
    sink.close()
