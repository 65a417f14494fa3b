"""
A file of one request, on whichever nodes are to use it; taken back from all of them at the end.

A request may wait for hours for its turn at a backend; until then its file must not look left over.
"""

from __future__ import annotations

import secrets
from pathlib import Path

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.interfaces import IReactorTime
from twisted.internet.task import LoopingCall
from twisted.logger import Logger
from twisted.python.failure import Failure

from localai_dist.errors import LocalAIDistError
from localai_dist.ids import NodeId
from localai_dist.reach import Refused, Unreached
from localai_dist.serving.seams import RequestFilesLike
from localai_dist.staging.errors import NoSpace, UploadRefused
from localai_dist.units import MINUTE

REMIND: float = 20 * MINUTE
"""How often the nodes are asked about the file: one that nobody asks about for an hour is swept (s)."""


class Lent:
    """
    One file's stay on nodes.

    The nodes know it by a random id of its own: a client's request id may come twice, and a released one is refused.

    Args:
        files: stages and releases.
        path: the file on this frontend.
        clock: times the reminders.
        deadline: the client's own, an instant of the clock (s).
    """

    log = Logger()

    def __init__(self, files: RequestFilesLike, path: Path, *, clock: IReactorTime, deadline: float | None) -> None:
        self._files = files
        self._path = path
        self._deadline = deadline
        self._id = secrets.token_hex(16)
        self._nodes: dict[NodeId, None] = {}
        self._at: NodeId | None = None
        self._asking: Deferred[None] | None = None
        self._reminders = LoopingCall(self._remind)
        self._reminders.clock = clock

    async def on(self, node: NodeId) -> str:
        """
        The file's path on ``node``, staged there unless it is there already.

        Raises:
            NoSpace: the node has no room for it.
            Unreached: the node can't be reached, or it refused the file.
        """
        self._nodes[node] = None  # before: a staging that breaks off may leave something
        if not self._reminders.running:
            self._reminders.start(REMIND, now=False)
        try:
            path = await self._files.stage(node, self._id, self._path, deadline=self._deadline)
        except NoSpace:
            raise
        except UploadRefused as error:
            raise Unreached(Refused("staging", str(error))) from error
        self._at = node
        return path

    def take_back(self) -> None:
        """Have it gone from every node it may be on, in the background."""
        if self._reminders.running:
            self._reminders.stop()
        if self._asking is not None:
            self._asking.cancel()
        for node in self._nodes:
            self._files.let_go(node, self._id)
        self._nodes.clear()

    def _remind(self) -> Deferred[None] | None:
        """Ask the node that has the file about it: that tells it that the request goes on."""
        node = self._at
        if node is None:
            return None
        self._asking = Deferred.fromCoroutine(self._ask(node))
        return self._asking.addErrback(self._unasked, node)

    async def _ask(self, node: NodeId) -> None:
        await self._files.stage(node, self._id, self._path, deadline=self._deadline)

    def _unasked(self, failure: Failure, node: NodeId) -> None:
        if failure.check(LocalAIDistError):  # the call itself tells its client what is wrong with the way
            name = self._files.called(node)
            self.log.info("node {node} could not be reminded of a request: {why}", node=name, why=failure.value)
        elif not failure.check(CancelledError):
            self.log.failure("reminding node {node} of a request failed", failure, node=self._files.called(node))
