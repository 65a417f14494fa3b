"""The doubles of these tests and the real things offer what the API asks for."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from localai_dist.httpapi import seams
from localai_dist.loads.service import Loads
from localai_dist.registry.nodes import Nodes
from localai_dist.registry.ownership import Ownership
from localai_dist.registry.replicas import Replicas
from localai_dist.registry.scheduling import Scheduling
from localai_dist.relay.control import VerbClient
from localai_dist.serving.watch import CatalogWatch
from tests.httpapi import doubles
from tests.support.signatures import Triple, misfits

TRIPLES: list[Triple] = [
    (seams.CatalogLike, CatalogWatch, doubles.FakeCatalog),
    (seams.NodesLike, Nodes, doubles.FakeNodes),
    (seams.ReplicaTable, Replicas, doubles.FakeReplicaTable),
    (seams.SchedulingLike, Scheduling, doubles.FakeScheduling),
    (seams.PresenceOf, Ownership, doubles.FakePresence),
    (seams.LoadsLike, Loads, doubles.FakeLoads),
    (seams.VerbsLike, VerbClient, doubles.FakeVerbs),
]


class ContractTests(SynchronousTestCase):
    def test_real_and_double_fit(self) -> None:
        """
        What the tests put in place of the registry, the loads and the workers has the real ones' signatures.
        """
        self.assertEqual(misfits(TRIPLES), [])
