"""The doubles of these tests and the real things offer what serving asks for."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from localai_dist.grpcclient.channel import BackendChannel, ReplyStream
from localai_dist.ids import NodeId
from localai_dist.loads.service import Loads
from localai_dist.registry.ownership import Ownership
from localai_dist.registry.presence import PresenceState
from localai_dist.registry.records import Replica
from localai_dist.registry.replicas import Replicas
from localai_dist.serving import seams
from localai_dist.serving.connector import BackendConnector
from localai_dist.staging.request_files import RequestFiles
from tests.serving import doubles
from tests.support.signatures import Triple, differences, misfits

TRIPLES: list[Triple] = [
    (seams.ReplicasLike, Replicas, doubles.FakeReplicas),
    (seams.OwnershipLike, Ownership, doubles.FakeOwnership),
    (seams.LoadsLike, Loads, doubles.FakeLoads),
    (seams.ChannelLike, BackendChannel, doubles.FakeChannel),
    (seams.ReplyStreamLike, ReplyStream, doubles.FakeStream),
    (seams.RequestFilesLike, RequestFiles, doubles.FakeRequestFiles),
    (seams.ConnectBackend, BackendConnector, doubles.FakeConnect),
]


class ContractTests(SynchronousTestCase):
    def test_real_and_double_fit(self) -> None:
        """
        What the tests put in place of the registry, the loads and the backends has the real ones' signatures.
        """
        self.assertEqual(misfits(TRIPLES), [])

    def test_replica_has_what_is_read(self) -> None:
        """
        The registry's replica has every field that choosing and calling one read.
        """
        fields = {name for name, member in vars(seams.ReplicaLike).items() if isinstance(member, property)}
        self.assertLessEqual(fields, set(dir(Replica(NodeId("n"), "tiny"))))

    def test_presence_word(self) -> None:
        """
        The word by which a connected node is known is the registry's.
        """
        self.assertEqual(PresenceState.CONNECTED.value, doubles.State.CONNECTED.value)

    def test_a_difference_is_seen(self) -> None:
        """
        The comparison itself notices a missing method, parameter, default and coroutine.
        """

        class Wanted:
            async def one(self, a: int, *, b: int = 0) -> None: ...
            async def two(self) -> None: ...

        class Offered:
            def one(self, a: int, c: int, *, b: int) -> None: ...

        self.assertEqual(
            differences(Wanted, Offered),
            [
                "Offered.one: demands c",
                "Offered.one: b has no default",
                "Offered.one: no coroutine",
                "Offered.two: missing",
            ],
        )
