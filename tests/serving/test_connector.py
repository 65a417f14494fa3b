"""A channel over a node's tunnel: a forwarder's endpoint under a gRPC connection."""

from __future__ import annotations

from typing import Any

from twisted.internet.defer import Deferred, fail
from twisted.internet.task import Clock
from twisted.internet.testing import StringTransport
from twisted.trial.unittest import SynchronousTestCase

from localai_dist.ids import NodeId
from localai_dist.mux.classes import TrafficClass
from localai_dist.reach import Reconnecting, Unreached
from localai_dist.relay.forward import GrpcTarget
from localai_dist.serving.connector import BackendConnector

NODE = NodeId("node-a")


class FakeForwarder:
    def __init__(self, failure: Exception | None = None) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.failure = failure
        self.transport = StringTransport()

    def endpoint(self, node: NodeId, target: Any, *, traffic: TrafficClass, deadline: float | None) -> FakeForwarder:
        self.asked.append((node, target, traffic, deadline))
        return self

    def connect(self, factory: Any) -> Any:
        if self.failure is not None:
            return fail(self.failure)
        protocol = factory.buildProtocol(None)
        protocol.makeConnection(self.transport)
        connected: Deferred[Any] = Deferred()
        connected.callback(protocol)
        return connected


class ConnectorTests(SynchronousTestCase):
    def connect(self, forwarder: FakeForwarder) -> Deferred[Any]:
        connector = BackendConnector(forwarder, clock=Clock())  # type: ignore[arg-type]
        return Deferred.fromCoroutine(connector(NODE, "127.0.0.1:20000", "secret", deadline=9.0))

    def test_channel(self) -> None:
        """
        A channel speaks gRPC to the backend's port on the node, as inference, with the caller's deadline.
        """
        forwarder = FakeForwarder()
        channel = self.successResultOf(self.connect(forwarder))
        self.assertEqual(forwarder.asked, [(NODE, GrpcTarget("127.0.0.1:20000"), TrafficClass.INFERENCE, 9.0)])
        self.assertTrue(forwarder.transport.value().startswith(b"PRI * HTTP/2.0"))
        channel.close()

    def test_no_way(self) -> None:
        """
        What kept the stream from the node comes out unchanged.
        """
        outcome = Reconnecting(NODE)
        failure = self.failureResultOf(self.connect(FakeForwarder(Unreached(outcome))), Unreached)
        self.assertEqual(failure.value.outcome, outcome)
