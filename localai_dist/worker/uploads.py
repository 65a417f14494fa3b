"""
Staged files: one writer per key, resumable, hashed as the bytes arrive.

After a restart (or for a file somebody put there by hand) there is no running hash; then the file is read once more in
a thread, in steps, while HEAD tells how far that is.

Source: surface §5.6, internals §4b; design §5 item 17.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, assert_never

from twisted.internet.defer import Deferred, DeferredList
from twisted.logger import Logger

from localai_dist.wire.files import (
    AlreadyWhole,
    BadPut,
    PutRequest,
    StartOver,
    Stored,
    Target,
    WritePiece,
    WriteWhole,
    WrongOffset,
    decide_put,
)
from localai_dist.worker import sums
from localai_dist.worker.answers import (
    Absent,
    Conflict,
    HeadAnswer,
    Incomplete,
    Partial,
    PutAnswer,
    Staged,
    Unusable,
    Verifying,
    Whole,
)
from localai_dist.worker.blocks import Blocks, Body, gather
from localai_dist.worker.entry import Entry
from localai_dist.worker.offload import Offload
from localai_dist.worker.sums import DRAFT_SUFFIX
from localai_dist.worker.timing import after, quiet

HEAD_PATIENCE = 0.5
"""Seconds a HEAD waits for a hash that is nearly there."""
ENTRIES_KEPT = 256
"""Running hashes remembered; one that is forgotten costs a second read of its file."""


class Uploads:
    """
    The staged files of this worker.

    Args:
        offload: for work on the disk.
        clock: for the waits.
    """

    _log = Logger()

    def __init__(self, *, offload: Offload, clock: Any) -> None:
        self._offload = offload
        self._clock = clock
        self._entries: dict[Path, Entry] = {}

    async def head(self, path: Path) -> HeadAnswer:
        """
        What is at ``path``; a file of unknown hash starts being hashed, and that is waited for a moment.

        Raises:
            OSError: the disk said no, now or in the hashing that a HEAD before this one started.
        """
        stored = await self._offload(sums.look, path)
        answer = self._judge(path, stored)
        if isinstance(answer, Verifying):
            await self._settled(self._entry(path), HEAD_PATIENCE)
            stored = await self._offload(sums.look, path)
            answer = self._judge(path, stored)
        return answer

    async def put(self, path: Path, request: PutRequest, body: Body) -> PutAnswer:
        """
        Take one upload, or one piece of it; pieces for one path are taken one after the other.

        One that is silent gives way to the next soon: its sender may be gone without a word, and be the next one.
        Not to be cancelled: it ends when ``body`` does.

        Raises:
            OSError: the disk said no; what was written stays, for a resume.
            Exception: what ``body.gather`` raised, after what it had given was written.
        """
        entry = self._entry(path)

        def turn() -> Deferred[PutAnswer]:
            entry.waiting -= 1
            return Deferred.fromCoroutine(self._put(entry, request, body))

        entry.waiting += 1
        return await entry.lock.run(turn)

    async def drop_unfinished(self, path: Path, before: float) -> bool:
        """
        Remove what is unfinished at ``path`` and was not touched since ``before`` (wall clock, s); whether it was.

        A whole file stays, and so does one that somebody writes or reads right now.
        """
        entry = self._entry(path)
        if not entry.idle:
            return False
        return await entry.lock.run(lambda: Deferred.fromCoroutine(self._drop(entry, before)))

    async def _drop(self, entry: Entry, before: float) -> bool:
        dropped = await self._offload(sums.drop_unfinished, entry.path, before)
        if dropped:
            await entry.restart()
        return dropped

    # -- HEAD ------------------------------------------------------------------------------------------------------

    def _judge(self, path: Path, stored: Stored) -> HeadAnswer:
        if not stored.exists:
            return Absent()
        if stored.sha256 is not None:
            return Whole(stored.size, path, stored.sha256)
        entry = self._entry(path)
        if entry.failure is not None:
            failure, entry.failure = entry.failure, None
            raise failure
        target = stored.target
        unfinished = target is not None and (target.total is None or stored.size < target.total)
        if unfinished and not entry.catching_up:
            return Partial(stored.size, path, target)
        if not unfinished and not entry.lock.locked:
            verifying = entry.lock.run(lambda: Deferred.fromCoroutine(self._verify(entry)))
            verifying.addErrback(self._not_verified, entry)
        return Verifying(stored.size, path, entry.verified, target)

    async def _verify(self, entry: Entry) -> None:
        """A whole file whose hash nobody knows: find it."""
        stored = await self._offload(sums.look, entry.path)
        entry.seen(stored)
        found = await entry.sha256()
        if stored.target is not None and stored.target.sha256 != found:
            self._log.warn("{file} is not what it was to become: removed", file=entry.path.name)
            await self._wipe(entry)
            return
        await self._finish(entry, found)

    def _not_verified(self, failure: Any, entry: Entry) -> None:
        failure.trap(OSError)
        entry.failure = failure.value

    async def _settled(self, entry: Entry, patience: float) -> None:
        done: Deferred[Any] = entry.lock.acquire()
        late: Deferred[Any] = after(self._clock, patience)
        await DeferredList([done, late], fireOnOneCallback=True)
        if done.called:
            entry.lock.release()
        for one in (done, late):
            if not one.called:
                one.addErrback(quiet)
                one.cancel()

    # -- PUT -------------------------------------------------------------------------------------------------------

    async def _put(self, entry: Entry, request: PutRequest, body: Body) -> PutAnswer:
        # The first bytes are awaited before anything is decided: a request that waited for the lock and whose client
        # is gone by now must not throw away what another one wrote.
        first = await gather(body, 1, self._clock, lambda: entry.wanted)
        stored = await self._offload(sums.look, entry.path)
        entry.seen(stored)
        decision = decide_put(stored, request)
        match decision:
            case WriteWhole():
                return await self._whole(entry, decision, first, body)
            case WritePiece():
                return await self._piece(entry, decision, first, body)
            case AlreadyWhole():
                return Staged(entry.path)
            case WrongOffset(size):
                return Incomplete(size, wrong_offset=True)
            case StartOver(wipe):
                if wipe:
                    await self._wipe(entry)
                return Conflict("what is here is not the beginning of this file: start again from 0")
            case BadPut(text):
                return Unusable(text)
            case _:
                assert_never(decision)

    async def _piece(self, entry: Entry, piece: WritePiece, first: list[bytes], body: Body) -> PutAnswer:
        if piece.fresh:
            await entry.restart()
            await self._offload(sums.begin, entry.path, piece.target)
        elif piece.renamed:
            await self._offload(sums.record, entry.path, piece.target)
        entry.catch_up()
        wanted = piece.range.length
        received = await self._write(entry, first, body, wanted, lambda: entry.wanted)
        if received < wanted:
            return Unusable(f"the body ended after {received} of {wanted} bytes")
        if not piece.range.finishes:
            return Incomplete(entry.size)
        return await self._settle(entry, piece.target)

    async def _settle(self, entry: Entry, target: Target) -> PutAnswer:
        """Every byte is there: compare the hash, and write it down or throw the file away."""
        found = await entry.sha256()
        if found != target.sha256:
            await self._wipe(entry)
            return Unusable(f"the file's SHA-256 is {found}, not {target.sha256}: start again from 0")
        await self._finish(entry, found)
        return Staged(entry.path)

    async def _whole(self, entry: Entry, whole: WriteWhole, first: list[bytes], body: Body) -> PutAnswer:
        """Into a draft beside the file, which replaces it when it is right."""
        draft = Entry(entry.path.with_name(entry.path.name + DRAFT_SUFFIX), self._offload)
        await self._offload(sums.create, draft.path)
        try:
            received = await self._write(draft, first, body, whole.length, lambda: entry.wanted)
            if whole.length is not None and received < whole.length:
                return Unusable(f"the body ended after {received} of {whole.length} bytes")
            found = await draft.sha256()
            if whole.sha256 not in (None, found):
                return Unusable(f"the body's SHA-256 is {found}, not {whole.sha256}")
            await entry.restart()
            await self._offload(sums.replace, draft.path, entry.path, found)
        finally:
            await self._offload(draft.path.unlink, missing_ok=True)
        return Staged(entry.path)

    async def _write(
        self, entry: Entry, first: list[bytes], body: Body, limit: int | None, wanted: Callable[[], bool]
    ) -> int:
        """Write the body at the end of the file: how many bytes, at most ``limit``. One block is read ahead."""
        descriptor = await self._offload(os.open, entry.path, os.O_WRONLY | os.O_CLOEXEC)
        received = 0
        writing: Deferred[None] | None = None
        try:
            blocks = Blocks(first, body, limit, self._clock, wanted)
            while block := await blocks.next():
                if writing is not None:
                    before, writing = writing, None  # its failure is told once
                    await before
                writing = Deferred.fromCoroutine(entry.append(descriptor, block))
                received += sum(map(len, block))
        finally:
            try:
                if writing is not None:
                    await writing
            finally:
                await self._offload(os.close, descriptor)
        return received

    async def _finish(self, entry: Entry, sha256: str) -> None:
        await self._offload(sums.finish, entry.path, sha256)
        await entry.restart()

    async def _wipe(self, entry: Entry) -> None:
        await entry.restart()
        await self._offload(sums.wipe, entry.path)

    def _entry(self, path: Path) -> Entry:
        entry = self._entries.pop(path, None) or Entry(path, self._offload)
        self._entries[path] = entry
        for old in list(self._entries.values())[: max(0, len(self._entries) - ENTRIES_KEPT)]:
            if old.idle:
                del self._entries[old.path]
        return entry
