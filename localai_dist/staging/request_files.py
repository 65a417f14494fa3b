"""
Files of one request (an image, a recording) onto the node that serves it, and off it again.

Source: internals §4a, wire contract §6, LOAD-23.
"""

from __future__ import annotations

from collections.abc import Awaitable
from pathlib import Path
from typing import Protocol

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger

from localai_dist.ids import NodeId
from localai_dist.reach import DeadlineExceeded, NotServed, Unreached
from localai_dist.staging.errors import HoldExpired, SourceMissing, StagingError
from localai_dist.staging.hold_timer import HoldTimer
from localai_dist.staging.plan import SourceFile
from localai_dist.staging.progress import Progress
from localai_dist.staging.stager import Stager
from localai_dist.staging.transient import WAY_FAILURES
from localai_dist.staging.upload import HoldLike, Upload
from localai_dist.units import HOUR, MINUTE
from localai_dist.wire.file_verbs import FILES_RELEASE, ErrorReply, ReleaseRequest
from localai_dist.wire.keys import ephemeral_key
from localai_dist.wire.verbs import Verb

STALL: float = 1 * MINUTE
"""Silence that ends one attempt at a request's file (s)."""

LONGEST: float = 1 * HOUR
"""No attempt takes longer (s): what is on the worker is swept after as long."""


class VerbsLike(Protocol):
    """Control verbs of nodes (``relay.control.VerbClient``)."""

    def call(
        self, node: NodeId, verb: Verb[ReleaseRequest, ErrorReply], request: ReleaseRequest
    ) -> Awaitable[ErrorReply]:
        """The worker's answer; raises ``Unreached``."""


class RequestFiles:
    """
    Stages files of requests and releases them.

    Args:
        stager: sends them; hashed, resumed and verified like a model's. One of its own: what it remembers of files that
            live for a second must not push out what is known of models.
        verbs: for the release.
        clock: times an attempt.
    """

    log = Logger()

    def __init__(self, stager: Stager, verbs: VerbsLike, *, clock: IReactorTime) -> None:
        self._stager = stager
        self._verbs = verbs
        self._clock = clock
        self._releasing: set[Deferred[None]] = set()

    @property
    def releasing(self) -> int:
        """Releases that are under way."""
        return len(self._releasing)

    def called(self, node: NodeId) -> str:
        """What people call ``node``."""
        return self._stager.called(node)

    async def stage(self, node: NodeId, request: str, path: Path, *, deadline: float | None = None) -> str:
        """
        The file's path on the node, after one attempt; whoever asks decides whether there is a next one, which goes
        on from what is there. Cancelling it drops the stream.

        Args:
            request: the request's id; one path part.
            deadline: the client's own, an instant on the clock (s).

        Raises:
            NoSpace: the node has no room for it.
            StagingError: it can't be read, or the worker refused it otherwise: the request is released already.
            Unreached: the node can't be reached, or the way broke.
            InvalidKey: the id or the file's name can't be in a key.
        """
        file = await self._source(path, ephemeral_key(request, path.name))
        now = self._clock.seconds()
        cap = LONGEST if deadline is None else min(LONGEST, max(0.0, deadline - now))
        hold = HoldTimer(self._clock, base=min(STALL, cap), stall=STALL, cap=cap)
        try:
            return await hold.run(self._once(node, file, hold))
        except HoldExpired as error:
            text = f"staging a request's file on node {self.called(node)}: {error}"
            raise Unreached(self._late(deadline, text)) from error
        except CancelledError as error:
            hold.check()  # the caller went away: that is told as it is
            raise Unreached(NotServed("the stream ended before the file was there")) from error

    async def _once(self, node: NodeId, file: SourceFile, hold: HoldLike) -> str:
        upload: Upload = self._stager.upload(node, file, Progress(), hold)
        try:
            return (await upload.once()).remote
        except CancelledError:
            raise
        except Unreached as error:
            if isinstance(error.outcome, DeadlineExceeded):
                hold.check()
                raise Unreached(NotServed("the worker did not answer about the file")) from error
            raise
        except WAY_FAILURES as error:
            raise Unreached(NotServed(str(error) or type(error).__name__)) from error

    def _late(self, deadline: float | None, text: str) -> DeadlineExceeded | NotServed:
        """The client's own deadline is nobody's fault; silence is the way's."""
        passed = deadline is not None and self._clock.seconds() >= deadline
        return DeadlineExceeded() if passed else NotServed(text)

    async def _source(self, path: Path, key: str) -> SourceFile:
        try:
            size = (await self._stager.in_thread(path.stat)).st_size
        except OSError as error:
            raise SourceMissing(f"{path} can't be read: {error.strerror}") from error
        return SourceFile(path, path.name, size, key)

    async def release(self, node: NodeId, request: str) -> None:
        """
        The request is over: its files on the node are removed, late ones refused.

        Raises:
            StagingError: the worker could not; it sweeps them itself after an hour.
            Unreached: the node can't be reached; likewise.
        """
        reply = await self._verbs.call(node, FILES_RELEASE, ReleaseRequest(request))
        if reply.error:
            raise StagingError(f"the files of request {request} on node {self.called(node)}: {reply.error}")

    def let_go(self, node: NodeId, request: str) -> None:
        """``release`` in the background, for a caller that may be gone itself; what can't be done is logged."""
        releasing = Deferred.fromCoroutine(self._let_go(node, request))
        self._releasing.add(releasing)
        releasing.addErrback(lambda failure: self.log.failure("releasing a request's files failed", failure))
        releasing.addBoth(lambda _: self._releasing.discard(releasing))

    async def _let_go(self, node: NodeId, request: str) -> None:
        try:
            await self.release(node, request)
        except (StagingError, Unreached) as error:
            self.log.info(
                "the files of request {request} stay on node {node} until it sweeps them itself: {why}",
                request=request,
                node=self.called(node),
                why=error,
            )
