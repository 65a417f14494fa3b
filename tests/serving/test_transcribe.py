"""A recording's way to the backend that hears it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from twisted.internet.defer import CancelledError, Deferred
from twisted.trial.unittest import SynchronousTestCase

from localai_dist.grpcclient.status import Origin, RpcError, StatusCode
from localai_dist.reach import Answer, Answered, NotServed, Refused, Unreached
from localai_dist.rpc import backend_pb2 as pb
from localai_dist.serving.errors import RequestRefused
from localai_dist.serving.lent import REMIND
from localai_dist.staging.errors import NoSpace, UploadRefused
from tests.serving.doubles import FakeChannel, FakeReplica
from tests.serving.test_inference import LOST, A, B, World, run


class TranscribeTests(SynchronousTestCase):
    """A recording's way to the node that answers, and off it again."""

    def setUp(self) -> None:
        folder = Path(self.mktemp())
        folder.mkdir()
        self.recording = folder / "talk.wav"
        self.recording.write_bytes(b"RIFF")

    def world(self, *ways: FakeChannel | Unreached, **more: Any) -> World:
        return World(list(ways), **more)

    def transcribe(self, world: World, deadline: float | None = None) -> Deferred[pb.TranscriptResult]:
        wish = pb.TranscriptRequest(language="de")
        return run(world.inference.transcribe(world.model, wish, self.recording, deadline=deadline))

    def assert_nothing_left(self, world: World) -> None:
        """No call counted, no timer, and no node that still has the file."""
        self.assertEqual((world.replicas.running, world.clock.getDelayedCalls()), (0, []))
        self.assertEqual(world.files.here, set())

    def test_warm(self) -> None:
        """
        The backend is told the path on its own machine; the file is gone from there afterwards (LOAD-23).
        """
        channel = FakeChannel()
        world = self.world(channel)
        self.assertEqual(self.successResultOf(self.transcribe(world, 99.0)).text, "hello")
        ((node, request, content),) = world.files.staged
        self.assertEqual((node, content, world.files.deadlines), (A, b"RIFF", [99.0]))
        (told,) = channel.heard
        self.assertEqual((told.dst, told.language), (f"/there/{request}/talk.wav", "de"))
        self.assertEqual(channel.closed, 1)
        self.assert_nothing_left(world)

    def test_each_request_has_an_id_of_its_own(self) -> None:
        """
        The same client asking twice is not refused for what it released before (LOAD-23).
        """
        world = self.world(FakeChannel())
        for _ in range(2):
            self.successResultOf(self.transcribe(world))
        self.assertEqual(len({request for _, request, _ in world.files.staged}), 2)

    def test_cold(self) -> None:
        """
        A model nobody has loaded is loaded first, then the recording goes to where it is (LOAD-23).
        """
        world = self.world(FakeChannel(), rows=[])
        self.successResultOf(self.transcribe(world))
        self.assertEqual([node for node, *_ in world.files.staged], [B])
        self.assert_nothing_left(world)

    def test_a_lost_connection_is_tried_again_with_the_same_file(self) -> None:
        """
        A call whose connection is lost is made once more; what was staged serves again, and is released once (LOAD-23).
        """
        world = self.world(FakeChannel(transcript=LOST), FakeChannel())
        self.successResultOf(self.transcribe(world))
        (first, again) = world.files.staged
        self.assertEqual(first, again)
        self.assert_nothing_left(world)

    def test_another_node_gets_it_too(self) -> None:
        """
        A staging that breaks off goes on elsewhere; both nodes are told that it is over (LOAD-23).
        """
        world = self.world(FakeChannel(), rows=[FakeReplica(A), FakeReplica(B)])
        world.files.troubles = [Unreached(NotServed("the stream ended"))]
        self.successResultOf(self.transcribe(world))
        self.assertEqual([node for node, *_ in world.files.staged], [B])
        self.assertEqual({node for node, _ in world.files.over}, {A, B})
        self.assert_nothing_left(world)

    def test_a_full_node(self) -> None:
        """
        A node without room passes the request on to another one; when all are full the client is told (LOAD-23).
        """
        full = NoSpace("no room there")
        world = self.world(FakeChannel(), rows=[FakeReplica(A), FakeReplica(B)])
        world.files.troubles = [full]
        self.successResultOf(self.transcribe(world))
        self.assertEqual([node for node, *_ in world.files.staged], [B])
        world.files.troubles = [full, full]
        self.assertIs(self.failureResultOf(self.transcribe(world), NoSpace).value, full)
        self.assertEqual(world.files.troubles, [])
        self.assert_nothing_left(world)

    def test_a_refused_file(self) -> None:
        """
        A worker that refuses the file for another reason is told as that, and not asked again (LOAD-23).
        """
        world = self.world(FakeChannel())
        world.files.troubles = [UploadRefused("400: bad hash")]
        outcome = self.failureResultOf(self.transcribe(world), Unreached).value.outcome
        assert isinstance(outcome, Refused)
        self.assertIn("bad hash", outcome.text)
        self.assert_nothing_left(world)

    def test_a_long_wait(self) -> None:
        """
        While the backend takes hours the node is told now and then that the request goes on, and then no more; a way
        that is broken just then is no failure (LOAD-23).
        """
        channel = FakeChannel(hold=Deferred())
        world = self.world(channel)
        asked = self.transcribe(world)
        world.clock.pump([REMIND / 2] * 4)
        self.assertEqual(len({staged[:2] for staged in world.files.staged}), 1)
        self.assertEqual(len(world.files.staged), 3)
        world.files.troubles = [Unreached(NotServed("the stream ended"))]
        world.clock.advance(REMIND)
        world.files.hold = Deferred()
        world.clock.advance(REMIND)
        assert channel.hold is not None
        channel.hold.callback(None)
        self.assertEqual(self.successResultOf(asked).text, "hello")
        self.assert_nothing_left(world)

    def test_the_client_leaves(self) -> None:
        """
        A client that leaves while the file is on its way, or while the backend works, leaves nothing (LOAD-23).
        """
        world = self.world(FakeChannel())
        world.files.hold = Deferred()
        asked = self.transcribe(world)
        self.assertEqual(len(world.files.here), 1)
        asked.cancel()
        self.failureResultOf(asked, CancelledError)
        self.assert_nothing_left(world)
        channel = FakeChannel(hold=Deferred())
        world = self.world(channel)
        asked = self.transcribe(world)
        self.assertEqual(len(channel.heard), 1)
        asked.cancel()
        self.failureResultOf(asked, CancelledError)
        self.assertTrue(channel.cancelled)
        self.assert_nothing_left(world)

    def test_a_backend_that_fails(self) -> None:
        """
        What the backend says of it is what the client gets; one that can't transcribe is the client's choice (LOAD-23).
        """
        broken = RpcError(StatusCode.INTERNAL, "no more memory", Origin.BACKEND)
        world = self.world(FakeChannel(transcript=broken))
        error = self.failureResultOf(self.transcribe(world), Unreached).value
        self.assertEqual(error.outcome, Answered(Answer.ERROR, str(broken)))
        self.assert_nothing_left(world)
        other = RpcError(StatusCode.UNIMPLEMENTED, "Method not implemented!", Origin.BACKEND)
        world = self.world(FakeChannel(transcript=other))
        self.assertIn("can't do that", str(self.failureResultOf(self.transcribe(world), RequestRefused).value))
        self.assert_nothing_left(world)
