"""
Model files by way of an object store: given to it once, fetched by each node itself.

The same progress and the same hold as over the tunnel. A worker that knows no store is sent the file over the tunnel.

Source: LOAD-20; docs/decisions/0006-object-store.md.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar

from localai_dist.ids import NodeId
from localai_dist.objects.bucket import object_key, part_size
from localai_dist.objects.errors import StoreAway, StoreRefused
from localai_dist.objects.store import ObjectStore
from localai_dist.reach import Unreached, VerbNotServed
from localai_dist.staging.errors import NoSpace, StagingError, UploadRefused
from localai_dist.staging.piece import PieceBody
from localai_dist.staging.plan import SourceFile
from localai_dist.staging.progress import Progress
from localai_dist.staging.stager import Stager
from localai_dist.staging.transient import Later
from localai_dist.staging.upload import HoldLike, NodeHttp, Upload
from localai_dist.units import MINUTE
from localai_dist.wire.file_verbs import FILES_ENSURE, EnsureReply, EnsureRequest
from localai_dist.wire.verbs import Verb

T = TypeVar("T")

ASK_TIMEOUT = MINUTE
"""A worker answers within two seconds how far its fetch is; one that is silent for so long is asked again (s)."""


class VerbsLike(Protocol):
    """Control verbs of nodes (``relay.control.VerbClient``)."""

    def call(
        self, node: NodeId, verb: Verb[EnsureRequest, EnsureReply], request: EnsureRequest, *, timeout: float | None
    ) -> Awaitable[EnsureReply]:
        """The worker's answer; raises ``Unreached``."""


class StoreStager(Stager):
    """
    A ``Stager`` whose files go by way of ``store``.

    Args:
        http, models_dir, more: as for ``Stager``.
    """

    def __init__(self, http: NodeHttp, models_dir: Path, *, store: ObjectStore, verbs: VerbsLike, **more: Any) -> None:
        super().__init__(http, models_dir, **more)
        self.store = store
        self.verbs = verbs

    def upload(self, node: NodeId, file: SourceFile, progress: Progress, hold: HoldLike) -> Upload:
        """One file on its way."""
        return _ByStore(self, node, file, progress, hold)


class _ByStore(Upload):
    """One file on its way to one node, by way of the store."""

    _means: StoreStager

    async def _first_look(self) -> int | None:
        return None  # an object is named by its hash

    async def _once(self, start: int | None = None) -> str:
        await self._hash()
        try:
            return await self._by_store()
        except StoreAway as error:
            raise Later(str(error)) from error
        except StoreRefused as error:
            raise UploadRefused(f"staging {self._file.relative}: {error}") from error
        except Unreached as error:
            if isinstance(error.outcome, VerbNotServed):
                return await super()._once()
            raise

    async def _by_store(self) -> str:
        seen = (0, 0)
        self._progress.phase = "sending"
        while True:
            reply = await self._ask()
            if reply.local_path:
                self._hold.observe()
                return reply.local_path
            if reply.absent:
                await self._give()
            elif reply.damaged and not self._restarts:
                self._restarts += 1
                self._note(Later(reply.error))
                await self._give()
            elif reply.error:
                raise self._failure(reply)
            else:
                self._fetching(reply, seen)
                seen = (reply.received, reply.verified)

    def _failure(self, reply: EnsureReply) -> StagingError:
        if reply.passing:
            return Later(reply.error)
        return (NoSpace if reply.full else UploadRefused)(f"{self._where_to()}: {reply.error}")

    def _fetching(self, reply: EnsureReply, seen: tuple[int, int]) -> None:
        """The node's fetch goes on, or began anew and has fewer bytes than before, which is no progress."""
        self._progress.phase = "verifying" if reply.verified > seen[1] else "sending"
        self._progress.in_file = reply.received
        if (reply.received, reply.verified) > seen:
            self._hold.observe()
            self._progress.goes_on()

    async def _ask(self) -> EnsureReply:
        request = EnsureRequest(self._file.key, object_key(self._names.sha256), self._names.sha256, self._file.size)
        return await self._means.verbs.call(self._node, FILES_ENSURE, request, timeout=ASK_TIMEOUT)

    async def _give(self) -> None:
        """The file into the store."""
        key, size = object_key(self._names.sha256), self._file.size
        step = part_size(size)
        if size <= step:
            await self._sent_by(0, size, lambda body: self._means.store.put(key, body))
            return
        upload = await self._means.store.begin(key)
        try:
            tags = [await self._tag(key, upload, start, step) for start in range(0, size, step)]
            await self._means.store.complete(key, upload, tags)
        except BaseException:
            await self._abandon(key, upload)
            raise

    async def _tag(self, key: str, upload: str, start: int, step: int) -> str:
        self._hold.check()
        length = min(step, self._file.size - start)
        number = start // step + 1
        return await self._sent_by(start, length, lambda body: self._means.store.put_part(key, upload, number, body))

    async def _sent_by(self, start: int, length: int, send: Callable[[PieceBody], Awaitable[T]]) -> T:
        body = PieceBody(self._file.path, start, length, in_thread=self._means.in_thread, taken=self._given)
        try:
            result = await send(body)
            body.confirmed()
            return result
        finally:
            body.stopProducing()  # an answer may come before the whole body was taken

    async def _abandon(self, key: str, upload: str) -> None:
        try:
            await self._means.store.abandon(key, upload)
        except (StoreAway, StoreRefused) as error:
            self.log.info("parts of {key} are left in the object store: {error}", key=key, error=error)

    def _given(self, count: int) -> None:
        # Progress of the load, but not yet bytes on the node.
        self._sent += count
        self._progress.moved += count
        self._progress.goes_on()
        self._hold.observe()
