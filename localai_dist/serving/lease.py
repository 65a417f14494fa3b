"""The right to use one replica: counted in the registry, with an open channel, each returned exactly once."""

from __future__ import annotations

from twisted.internet.defer import Deferred
from twisted.logger import Logger
from twisted.python.failure import Failure

from localai_dist.errors import LocalAIDistError
from localai_dist.ids import NodeId
from localai_dist.serving.seams import ChannelLike, ConnectBackend, ReplicaLike, ReplicasLike
from localai_dist.store.errors import StoreError

log = Logger()


class ReplicaVanished(LocalAIDistError):
    """The replica's row went between the choice and the call: nothing was asked, so nothing is known of its node."""


class Flight:
    """
    One call counted on a replica: +1 when made, -1 when finished, whatever happened between.

    A caller that is cancelled while the +1 is on its way gives up waiting; the -1 still follows the +1.
    """

    def __init__(self, replicas: ReplicasLike, replica: ReplicaLike) -> None:
        self._replicas = replicas
        self._replica = replica
        self._finished = False
        self._begun: Deferred[bool] = Deferred.fromCoroutine(
            replicas.begin(replica.node_id, replica.model_name, replica.replica_index, address=replica.address)
        )

    async def counted(self) -> bool:
        """Whether the call is counted; False when the replica's row is gone."""
        told: Deferred[bool] = Deferred()

        def tell(result: bool | Failure) -> bool | Failure:
            if not told.called:
                told.callback(result)  # a Failure passed to callback() becomes the errback
            return result

        self._begun.addBoth(tell)
        return await told

    def finish(self) -> None:
        """Count the call as over; only the first time."""
        if not self._finished:
            self._finished = True
            self._begun.addCallbacks(self._end_if, lambda _told_already: None)

    def _end_if(self, counted: bool) -> Deferred[None] | None:
        return Deferred.fromCoroutine(self._end()) if counted else None

    async def _end(self) -> None:
        replica = self._replica
        try:
            await self._replicas.end(
                replica.node_id, replica.model_name, replica.replica_index, address=replica.address
            )
        except StoreError as error:
            # The answer was given; a count that stays one too high is corrected when the replica's row is renewed.
            log.warn(
                "could not count the end of a call on {model} at node {node}: {error}",
                model=replica.model_name,
                node=replica.node_called,
                error=error,
            )


class Lease:
    """A counted call on ``replica`` with its open ``channel``."""

    def __init__(self, replica: ReplicaLike, flight: Flight, channel: ChannelLike) -> None:
        self.replica = replica
        self.channel = channel
        self._flight = flight
        self._released = False

    @property
    def node(self) -> NodeId:
        """The node that answers."""
        return self.replica.node_id

    def release(self) -> None:
        """Close the channel and count the call as over; only the first time."""
        if not self._released:
            self._released = True
            self.channel.close()
            self._flight.finish()


async def take_lease(
    replicas: ReplicasLike, connect: ConnectBackend, replica: ReplicaLike, *, deadline: float | None
) -> Lease:
    """
    Count a call on ``replica`` and connect to its backend, both at once: neither waits for the other's round trip.

    Nothing is called before the call is counted. Cancelling it returns what it took.

    Raises:
        ReplicaVanished: the row vanished meanwhile.
        Unreached: the node can't be reached.
        StoreError: the registry did not answer.
    """

    async def connected() -> ChannelLike:
        return await connect(replica.node_id, replica.address, replica.backend_token, deadline=deadline)

    connecting: Deferred[ChannelLike] = Deferred.fromCoroutine(connected())
    flight = Flight(replicas, replica)
    try:
        if not await flight.counted():
            raise ReplicaVanished("its replica was removed just now")
        channel = await connecting
    except BaseException:
        flight.finish()
        connecting.addCallbacks(_close, lambda _: None)
        connecting.cancel()
        raise
    return Lease(replica, flight, channel)


def _close(channel: ChannelLike | None) -> None:
    if channel is not None:  # None: why it was not connected has been raised already
        channel.close()
