"""A lease that is not had: what was begun for it is given back, and nothing is logged as unhandled."""

from __future__ import annotations

import gc
from typing import Any

from twisted.internet.defer import CancelledError, Deferred
from twisted.trial.unittest import SynchronousTestCase

from localai_dist.reach import Reconnecting, Unreached
from localai_dist.serving.lease import take_lease
from tests.serving.doubles import FakeReplica, FakeReplicas
from tests.serving.test_inference import A


class LeaseTests(SynchronousTestCase):
    """One replica, whose row and whose connection answer when the test lets them."""

    def setUp(self) -> None:
        self.channel: Deferred[Any] = Deferred()
        self.replicas = FakeReplicas([FakeReplica(A)])

        async def connect(*_arguments: Any, **_more: Any) -> Any:
            return await self.channel

        [replica] = self.replicas.rows
        self.taking = Deferred.fromCoroutine(take_lease(self.replicas, connect, replica, deadline=None))

    def tearDown(self) -> None:
        gc.collect()
        self.assertEqual(self.flushLoggedErrors(), [])

    def test_the_node_cannot_be_reached(self) -> None:
        """The failure is told once, to the request; the log has nothing of it."""
        self.channel.errback(Unreached(Reconnecting(A)))
        self.failureResultOf(self.taking, Unreached)

    def test_its_row_cannot_be_counted(self) -> None:
        """A connection that was made meanwhile is closed."""
        closed = []

        class Channel:
            def close(self) -> None:
                closed.append(self)

        async def connect(*_arguments: Any, **_more: Any) -> Any:
            return Channel()

        replicas = FakeReplicas([FakeReplica(A)], hold_begin=Deferred())
        taking = Deferred.fromCoroutine(take_lease(replicas, connect, replicas.rows[0], deadline=None))
        taking.cancel()
        self.failureResultOf(taking, CancelledError)
        self.assertEqual(len(closed), 1)
        self.channel.errback(Unreached(Reconnecting(A)))
        self.failureResultOf(self.taking, Unreached)
