"""A running answer: replies pulled one by one, so that a reader that stops pulling stops the backend."""

from __future__ import annotations

from collections.abc import AsyncIterator

from localai_dist.grpcclient.status import RpcError
from localai_dist.ids import NodeId
from localai_dist.rpc import backend_pb2 as pb
from localai_dist.serving.failures import failure_of
from localai_dist.serving.lease import Lease
from localai_dist.serving.seams import ReplyStreamLike


class Generation:
    """
    The replies of one streaming call, the first already here.

    ``close()`` it in every case; closing early cancels the call on the backend.
    """

    def __init__(
        self, lease: Lease, stream: ReplyStreamLike, replies: AsyncIterator[pb.Reply], first: pb.Reply | None
    ) -> None:
        self._lease = lease
        self._stream = stream
        self._replies = replies
        self._first = first
        self._ended = first is None

    @property
    def node(self) -> NodeId:
        """The node that answers."""
        return self._lease.node

    def __aiter__(self) -> AsyncIterator[pb.Reply]:
        return self

    async def __anext__(self) -> pb.Reply:
        """
        The next reply; cancelling it cancels the call.

        Raises:
            Unreached, RequestRefused: the call failed after it had begun; it is not repeated.
        """
        if self._first is not None:
            first, self._first = self._first, None
            return first
        if self._ended:
            raise StopAsyncIteration
        try:
            return await self._replies.__anext__()
        except StopAsyncIteration:
            self._ended = True
            raise
        except RpcError as error:
            self._ended = True
            raise failure_of(error) from error

    def close(self) -> None:
        """Cancel the call if it still runs and return the lease; only the first time does anything."""
        if not self._ended:
            self._ended = True
            self._stream.cancel()
        self._lease.release()
