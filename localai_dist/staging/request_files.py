"""
Files of one request (an image, a recording) onto the node that serves it, and off it again.

Source: internals §4a, wire contract §6, LOAD-23.
"""

from __future__ import annotations

from collections.abc import Awaitable
from pathlib import Path
from typing import Protocol

from localai_dist.ids import NodeId
from localai_dist.staging.errors import SourceMissing, StagingError
from localai_dist.staging.plan import SourceFile
from localai_dist.staging.progress import Progress
from localai_dist.staging.upload import HoldLike, Stager
from localai_dist.wire.file_verbs import FILES_RELEASE, ErrorReply, ReleaseRequest
from localai_dist.wire.keys import ephemeral_key
from localai_dist.wire.verbs import Verb


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
        stager: sends them; hashed, resumed and verified like a model's.
        verbs: for the release.
    """

    def __init__(self, stager: Stager, verbs: VerbsLike) -> None:
        self._stager = stager
        self._verbs = verbs

    async def stage(self, node: NodeId, request: str, path: Path, hold: HoldLike) -> str:
        """
        The file's path on the node.

        Args:
            request: the request's id; one path part.
            hold: the request's own deadline.

        Raises:
            StagingError: it can't be read, or the worker refused it: no room, or the request is released already.
            Unreached: the node can't be reached.
            InvalidKey: the id or the file's name can't be in a key.
        """
        key = ephemeral_key(request, path.name)
        try:
            size = (await self._stager.in_thread(path.stat)).st_size
        except OSError as error:
            raise SourceMissing(f"{path} can't be read: {error.strerror}") from error
        (staged,) = await self._stager.stage(node, [SourceFile(path, path.name, size, key)], Progress(), hold)
        return staged.remote

    async def release(self, node: NodeId, request: str) -> None:
        """
        The request is over: its files on the node are removed, late ones refused.

        Raises:
            StagingError: the worker could not; it sweeps them itself after an hour.
            Unreached: the node can't be reached; likewise.
        """
        reply = await self._verbs.call(node, FILES_RELEASE, ReleaseRequest(request))
        if reply.error:
            raise StagingError(f"the files of request {request} on node {node}: {reply.error}")
