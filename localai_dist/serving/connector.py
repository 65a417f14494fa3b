"""A channel to a backend on whatever node, over its tunnel: the one place where a way and a protocol meet."""

from __future__ import annotations

from twisted.internet.interfaces import IReactorTime

from localai_dist.grpcclient.channel import BackendChannel, connect
from localai_dist.ids import NodeId
from localai_dist.mux.classes import TrafficClass
from localai_dist.relay.forward import Forwarder, GrpcTarget


class BackendConnector:
    """
    Opens channels to backends.

    Args:
        forwarder: reaches nodes.
        clock: for the calls' own deadlines.
    """

    def __init__(self, forwarder: Forwarder, *, clock: IReactorTime) -> None:
        self._forwarder = forwarder
        self._clock = clock

    async def __call__(
        self, node: NodeId, address: str, token: str, *, deadline: float | None = None
    ) -> BackendChannel:
        """
        A channel to the backend at ``address`` on ``node``.

        Args:
            token: the backend process's own.
            deadline: the caller's, an instant of the clock (s).

        Raises:
            Unreached: see ``Forwarder.open``.
        """
        endpoint = self._forwarder.endpoint(
            node, GrpcTarget(address), traffic=TrafficClass.INFERENCE, deadline=deadline
        )
        return await connect(endpoint, token=token, clock=self._clock)
