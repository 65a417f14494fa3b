"""
Files by way of the object store: the verbs of it. Mounted only on a worker that was told of one.

``files/ensure`` is asked again and again: each answer, within two seconds, says how far the fetch is. The fetch itself
is an upload like any other, into the same resumable file, hashed as the bytes arrive; only the bytes come from the
store. When nobody has asked for a minute it stops, or for a second after the last one who asked went away; what came
stays for the next one. When the model's files are deleted it stops first.

Source: LOAD-20; wire contract §6.
"""

from __future__ import annotations

import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from twisted.internet.defer import CancelledError, Deferred, TimeoutError
from twisted.logger import Logger
from twisted.python.failure import Failure

from localai_dist.errors import LocalAIDistError
from localai_dist.objects.errors import ObjectAbsent, StoreAway
from localai_dist.objects.store import ObjectStore
from localai_dist.staging.piece import PieceBody
from localai_dist.wire import file_verbs as wire
from localai_dist.wire.files import Target, parse_sha256
from localai_dist.wire.keys import parse_key, parse_prefix
from localai_dist.worker.answers import Partial, Staged, Unusable, Verifying, Whole
from localai_dist.worker.containment import Areas
from localai_dist.worker.errors import WorkerError, is_disk_full
from localai_dist.worker.fetch import Fetch, FetchBody, Unasked
from localai_dist.worker.files import files_below
from localai_dist.worker.object_cache import ObjectCache
from localai_dist.worker.offload import Offload
from localai_dist.worker.timing import TooLate, after
from localai_dist.worker.uploads import Uploads

ANSWER_WITHIN = 2.0

_ROUNDS = 3


class Damaged(WorkerError):
    """The object is not what it is called."""


class ObjectFiles:
    """
    Fetches files from the object store.

    Args:
        temp: for temporary files.
    """

    _log = Logger()

    def __init__(
        self,
        store: ObjectStore,
        *,
        areas: Areas,
        uploads: Uploads,
        cache: ObjectCache,
        offload: Offload,
        clock: Any,
        temp: Path,
    ) -> None:
        self._store = store
        self._areas = areas
        self._uploads = uploads
        self._cache = cache
        self._offload = offload
        self._clock = clock
        self._temp = temp
        self._fetches: dict[Path, Fetch] = {}

    def table(self) -> dict[Any, Callable[[Any, Any], Awaitable[Any]]]:
        """Every verb with what serves it."""
        return {
            wire.FILES_ENSURE: self.ensure,
            wire.FILES_STAGE: self.stage,
            wire.FILES_TEMP: self.temporary,
            wire.FILES_LISTDIR: self.listing,
        }

    def start(self) -> None:
        """Nothing to begin: a fetch begins when it is asked for."""

    async def stop(self) -> None:
        """End every fetch; what came stays."""
        for fetch in list(self._fetches.values()):
            fetch.stop()
            await fetch.over()

    async def ensure(self, request: wire.EnsureRequest, _tell: Any) -> wire.EnsureReply:
        """Have a file fetched, and tell how far that is."""
        path = self._areas.path(parse_key(request.key))
        fetch = self._fetches.get(path)
        if fetch is None:
            fetch = self._fetches[path] = Fetch(request, parse_sha256(request.sha256), path)
            Deferred.fromCoroutine(self._run(fetch)).addErrback(self._broken, fetch)
        fetch.asked(self._clock.seconds())
        if not fetch.is_for(request):
            return wire.EnsureReply(error="another file is being fetched under this key", passing=True)
        try:
            await fetch.over().addTimeout(ANSWER_WITHIN, self._clock)
        except TimeoutError:
            return fetch.reply
        except CancelledError:
            fetch.left(self._clock)
            raise
        self._fetches.pop(path, None)
        return fetch.reply

    async def forget(self, folder: Path) -> None:
        """End the fetches into ``folder``, whose files are about to go; nothing is written there after this."""
        for path, fetch in list(self._fetches.items()):
            if path.is_relative_to(folder):
                fetch.stop()
                await fetch.over()
                self._fetches.pop(path, None)

    async def stage(self, request: wire.StageRequest, _tell: Any) -> wire.ErrorReply:
        """Put a file of this worker into the store."""
        path = self._areas.path(parse_key(request.key))
        size = (await self._offload(path.stat)).st_size
        body = PieceBody(path, 0, size, in_thread=self._in_thread, taken=lambda _: None)
        await self._store.put(request.object, body)
        return wire.ErrorReply()

    async def temporary(self, _request: Any, _tell: Any) -> wire.TempReply:
        """A new file, for an output."""

        def make() -> str:
            self._temp.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self._temp, delete=False) as file:
                return file.name

        return wire.TempReply(await self._offload(make))

    async def listing(self, request: wire.ListRequest, _tell: Any) -> wire.FilesReply:
        """The files below a folder."""
        files = await self._offload(files_below, self._areas.path(parse_prefix(request.prefix)))
        return wire.FilesReply(error="there is no such folder") if files is None else wire.FilesReply(files)

    def _in_thread(self, call: Callable[..., Any], *arguments: Any) -> Awaitable[Any]:
        return self._offload(call, *arguments)

    async def _run(self, fetch: Fetch) -> None:
        """The whole fetch; how it ended is in ``fetch.reply``."""
        try:
            await self._fetch(fetch)
            fetch.end(local_path=str(fetch.path))
        except ObjectAbsent:
            fetch.end(absent=True)
        except Damaged as error:
            fetch.end(error=str(error), damaged=True)
        except (StoreAway, TooLate, Unasked) as error:
            fetch.end(error=str(error), passing=True)
        except (LocalAIDistError, OSError) as error:
            fetch.end(error=str(error), full=is_disk_full(error))
        if fetch.reply.error:
            self._log.info("fetching {file}: {error}", file=fetch.path.name, error=fetch.reply.error)

    async def _fetch(self, fetch: Fetch) -> None:
        for _ in range(_ROUNDS):
            offset = await self._stands_at(fetch)
            if offset is None or (not offset and await self._cache.fetch(fetch.sha256, fetch.path)):
                return
            opened = await fetch.unless_stopped(self._store.read(fetch.request.object, offset))
            body = FetchBody(opened, fetch, offset, self._clock)
            try:
                answer = await self._uploads.put(fetch.path, fetch.put_from(offset), body)
            finally:
                body.close()
            match answer:
                case Staged():
                    await self._cache.keep(fetch.sha256, fetch.path)
                    return
                case Unusable(text) if body.whole:
                    raise Damaged(f"{fetch.request.object} in the object store: {text}")
        raise StoreAway("the object store's bytes and those here do not agree")

    async def _stands_at(self, fetch: Fetch) -> int | None:
        """How many bytes are here; None if the file is."""
        size = fetch.request.size
        while isinstance(found := await self._uploads.head(fetch.path), Verifying):
            fetch.verified(found.verified)
            fetch.check(self._clock.seconds())
            await fetch.unless_stopped(after(self._clock, 1.0))
        match found:
            case Whole(there, _, sha256) if (there, sha256) == (size, fetch.sha256):
                return None
            case Partial(there, _, target) if target is not None and target.agrees(Target(fetch.sha256, size)):
                return there if there < size else 0
            case _:
                return 0

    def _broken(self, failure: Failure, fetch: Fetch) -> None:
        self._log.failure("a fetch from the object store failed by a fault of this program", failure)
        fetch.end(error=f"internal error: {type(failure.value).__name__}")
