"""What a frontend forgets when a node departs, over real links and a real database."""

from __future__ import annotations

from localai_dist.relay.forward import GrpcTarget
from localai_dist.testing.memory import Recorder
from tests.db.case import until
from tests.db.frontends import GRACE, FrontendsCase


class DepartureTests(FrontendsCase):
    """Two frontends, two nodes of the second."""

    async def test_a_departed_node_is_forgotten(self) -> None:
        """
        A node that was served by relay loses its tunnel: its idle streams end at every hop; what is believed of its
        owner stays inside the grace and is forgotten when it departs, another node's is not (CLUS-27).
        """
        await self.begin()
        (node, token), (other, others) = await self.approved(self.a), await self.approved(self.a, "gpu-2")
        tunnel = await self.dial(self.b, node, token)
        await self.dial(self.b, other, others)
        for one in (node, other):
            await self.held(self.b, one)
            await self.works(self.a, one)
        idle = await self.a.forwarder.open(node, GrpcTarget("127.0.0.1:20000"))
        recorder = Recorder()
        idle.start(recorder)
        tunnel.abort(Exception("the worker is gone"))
        await until(lambda: recorder.lost, "the idle stream's end")
        (link,) = self.a.peers._links.values()
        await until(lambda: link.session is not None and not link.session.stream_count, "no stream on the link")
        await until(lambda: self.b.held.get(node) is None, "its owner lets go")
        self.assertEqual(self.b.held.sessions()[other].stream_count, 0)
        await until(lambda: self.released(node), "the row says so")
        await self.a.monitor.look()
        self.assertEqual(set(self.a.forwarder._owners), {node, other})
        await self.pool_.execute(
            "update node_connections set disconnected_at = now() - make_interval(secs => %(s)s) where node_id = %(n)s",
            {"s": GRACE + 1, "n": node},
        )
        await self.a.monitor.look()
        self.assertEqual(set(self.a.forwarder._owners), {other})
        await self.works(self.a, other)
