"""A file of one request, on whichever nodes are asked about it; taken back from all of them at the end."""

from __future__ import annotations

import secrets
from pathlib import Path

from localai_dist.ids import NodeId
from localai_dist.reach import Refused, Unreached
from localai_dist.serving.seams import RequestFilesLike
from localai_dist.staging.errors import NoSpace, UploadRefused


class Lent:
    """
    One file's stay on nodes.

    The nodes know it by a random id of its own: a client's request id may come twice, and a released one is refused.

    Args:
        files: stages and releases.
        path: the file on this frontend.
        deadline: the client's own, an instant of the clock (s).
    """

    def __init__(self, files: RequestFilesLike, path: Path, *, deadline: float | None) -> None:
        self._files = files
        self._path = path
        self._deadline = deadline
        self._id = secrets.token_hex(16)
        self._nodes: dict[NodeId, None] = {}

    async def on(self, node: NodeId) -> str:
        """
        The file's path on ``node``, staged there unless it is there already.

        Raises:
            NoSpace: the node has no room for it.
            Unreached: the node can't be reached, or it refused the file.
        """
        self._nodes[node] = None  # before: a staging that breaks off may leave something
        try:
            return await self._files.stage(node, self._id, self._path, deadline=self._deadline)
        except NoSpace:
            raise
        except UploadRefused as error:
            raise Unreached(Refused("staging", str(error))) from error

    def take_back(self) -> None:
        """Have it gone from every node it may be on, in the background."""
        for node in self._nodes:
            self._files.let_go(node, self._id)
        self._nodes.clear()
