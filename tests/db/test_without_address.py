"""A frontend that advertises no address, among others, over real PostgreSQL and real sockets."""

from __future__ import annotations

from localai_dist import __version__
from localai_dist.reach import PeerUnreachable, Unreached
from localai_dist.relay.forward import GrpcTarget
from localai_dist.relay.routes import Local, decide
from localai_dist.wire.credentials import digest
from tests.db.case import until
from tests.db.frontends import GRACE, FrontendsCase


class WithoutAddressTests(FrontendsCase):
    """Frontend ``b`` advertises nothing; its doors are open all the same."""

    async def test_it_serves_and_is_never_relayed_to(self) -> None:
        """
        It is registered without an address and serves the worker it holds; no other frontend ever has an address to
        dial for that worker, whose route is a peer out of reach and not a lost one (CLUS-5).
        """
        await self.begin()
        await self.b.instances.arrive(self.b.instance, None, __version__, digest(self.b.secret))
        node, token = await self.approved(self.b)
        await self.dial(self.b, node, token)
        await self.held(self.b, node)
        await until(lambda: self.row(node), "the claim")

        addresses = {known.id: known.address for known in await self.a.instances.all()}
        self.assertEqual(addresses, {self.a.instance: self.a.address, self.b.instance: None})
        live = await self.a.instances.live(self.b.instance)
        assert live is not None
        self.assertIsNone(live.address)

        fact = await self.a.ownership.route(node, grace=GRACE)
        self.assertEqual((fact.owner, fact.address), (self.b.instance, None))
        self.assertEqual(decide(node, fact, this=self.b.instance), Local())
        self.assertIsInstance(decide(node, fact, this=self.a.instance), PeerUnreachable)
        await self.works(self.b, node)
        refused: Unreached = await self.assert_raises(
            Unreached, self.a.forwarder.open(node, GrpcTarget("127.0.0.1:20000"), deadline=None)
        )
        outcome = refused.outcome
        assert isinstance(outcome, PeerUnreachable)
        self.assertIn("advertises no address", outcome.text)
