"""Files onto a node, through every kind of cut and lie."""

import hashlib
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.internet.defer import Deferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from localai_dist.ids import NodeId
from localai_dist.mux.classes import TrafficClass
from localai_dist.reach import NoRoute, PeerUnreachable, Reconnecting, Refused, Unreached
from localai_dist.staging import piece
from localai_dist.staging.digests import Digests
from localai_dist.staging.errors import HoldExpired, SourceChanged, UploadRefused
from localai_dist.staging.hold_timer import HoldTimer
from localai_dist.staging.piece import PieceBody
from localai_dist.staging.plan import SourceFile, StagedFile
from localai_dist.staging.progress import Progress
from localai_dist.staging.stager import Stager
from localai_dist.wire.files import Target
from tests.staging.doubles import Answer, CountingHold, FileServer, Kept, Sink, at_once

NODE = NodeId("node-1")
CONTENT = bytes(range(256)) * 8  # 2048 bytes


class UploadCase(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = Clock()
        self.folder = Path(self.mktemp())
        self.folder.mkdir()
        self.server = FileServer()
        self.progress = Progress()
        self.hold: Any = CountingHold()
        self.stager = Stager(
            self.server, self.folder, clock=self.clock, in_thread=at_once, chance=lambda: 1.0, piece=500
        )

    def source(self, content: bytes = CONTENT, name: str = "m.gguf") -> SourceFile:
        path = self.folder / name
        path.write_bytes(content)
        return SourceFile(path, name, len(content), f"models/tiny/{name}")

    def stage(self, *files: SourceFile) -> Deferred[tuple[StagedFile, ...]]:
        return Deferred.fromCoroutine(self.stager.stage(NODE, files, self.progress, self.hold))

    def staged(self, *files: SourceFile) -> tuple[StagedFile, ...]:
        done = self.stage(*files)
        self.clock.pump([1.0] * 60)
        return self.successResultOf(done)

    def assert_on_node(self, file: SourceFile, content: bytes = CONTENT) -> None:
        kept = self.server.files[file.key]
        self.assertEqual(bytes(kept.data), content)
        self.assertEqual(kept.sha256, hashlib.sha256(content).hexdigest())


class SlowServer(FileServer):
    """
    Takes a write every 4 s.

    Attributes:
        took: how long its last body took (s).
    """

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock
        self.took = 0.0

    async def _take(self, kept: Kept, body: Any) -> None:
        sink, begun = Sink(), self.clock.seconds()
        write = sink.write

        def slowly(data: bytes) -> None:
            write(data)
            body.pauseProducing()
            self.clock.callLater(4.0, body.resumeProducing)

        sink.write = slowly  # type: ignore[method-assign]
        await body.startProducing(sink)
        self.took = self.clock.seconds() - begun
        kept.data += sink.data


class UploadTests(UploadCase):
    def test_a_new_file_arrives_whole_in_pieces(self) -> None:
        """
        A file is sent in pieces, verified by its hash, and named as the worker names it (WALK-10).
        """
        file = self.source()
        staged = self.staged(file)
        self.assertEqual(staged, (StagedFile(file, f"/worker/{file.key}", 2048),))
        self.assert_on_node(file)
        puts = [range_ for method, range_ in self.server.requests if method == "PUT"]
        self.assertEqual(puts[0], "bytes 0-499/2048")
        self.assertEqual(len(puts), 5)
        self.assertEqual(self.server.classes, {TrafficClass.BULK})

    def test_a_second_run_moves_no_byte(self) -> None:
        """
        Loading a model again transfers 0 bytes, and that they are there is progress (WALK-10, LOAD-3).
        """
        file = self.source()
        self.staged(file)
        received, observed = self.server.received, self.hold.observed
        again = self.staged(file)
        self.assertEqual(again[0].sent, 0)
        self.assertGreater(self.hold.observed, observed)
        self.assertEqual(self.server.received, received)
        self.assertEqual(again[0].remote, f"/worker/{file.key}")

    def test_an_empty_file_arrives(self) -> None:
        """
        Empty files of a model are staged too (LOAD-13).
        """
        file = self.source(b"")
        self.staged(file)
        self.assert_on_node(file, b"")

    def test_progress_is_what_the_node_has(self) -> None:
        """
        Bytes, file number and totals are told as they are (LOAD-18).
        """
        self.staged(self.source(), self.source(b"abc", "b.bin"))
        self.assertEqual(self.progress.bytes_sent, 2051)
        self.assertEqual((self.progress.total_bytes, self.progress.total_files), (2051, 2))
        self.assertEqual((self.progress.file_index, self.progress.file_name), (2, "b.bin"))

    def test_a_cut_resumes_where_it_stopped(self) -> None:
        """
        After a cut in the middle only the missing bytes are sent (WALK-10).
        """
        self.server.cuts = [None, 123]
        file = self.source()
        self.staged(file)
        self.assert_on_node(file)
        self.assertEqual(self.server.received, 2048)
        self.assertIn("stream ended", self.progress.trouble)

    def test_a_partial_of_another_upload_is_resumed(self) -> None:
        """
        Another frontend goes on from the bytes that the first one sent (LOAD-6, LOAD-11).
        """
        file = self.source()
        target = Target(hashlib.sha256(CONTENT).hexdigest(), 2048)
        self.server.files[file.key] = Kept(bytearray(CONTENT[:1000]), target)
        self.staged(file)
        self.assert_on_node(file)
        self.assertEqual(self.server.received, 1048)

    def test_a_partial_of_other_content_is_replaced(self) -> None:
        """
        Bytes of another file under the same name are never built upon (LOAD-10).
        """
        file = self.source()
        self.server.files[file.key] = Kept(bytearray(b"z" * 700), Target("f" * 64, 2048))
        self.staged(file)
        self.assert_on_node(file)

    def test_a_flipped_bit_is_sent_again(self) -> None:
        """
        A bit flipped on the way is caught by the hash and the file sent again (LOAD-16).
        """
        self.server.corrupt = 1
        file = self.source()
        self.staged(file)
        self.assert_on_node(file)

    def test_a_way_that_always_flips_bits_ends(self) -> None:
        """
        A file that never arrives right is refused with the worker's words, not sent for ever.
        """
        self.server.corrupt = 100
        done = self.stage(self.source())
        self.clock.pump([1.0] * 60)
        self.assertIn("hash differs", str(self.failureResultOf(done, UploadRefused).value))

    def test_a_conflict_restarts_once(self) -> None:
        """
        The worker's 409 restarts the upload from 0, once (LOAD-10).
        """
        self.server.refusals = [Answer(404), Answer(409, body=b"start again")]
        file = self.source()
        self.staged(file)
        self.assert_on_node(file)

    def test_a_second_conflict_ends_it(self) -> None:
        """
        A worker that throws away again what it was sent anew is told of, in its words, not obeyed for ever (LOAD-10).
        """
        self.server.refusals = [Answer(404), Answer(409, body=b"start again"), Answer(409, body=b"and again")]
        done = self.stage(self.source())
        self.clock.pump([1.0] * 60)
        self.assertIn("409: and again", str(self.failureResultOf(done, UploadRefused).value))

    def test_a_wrong_offset_is_asked_anew(self) -> None:
        """
        When the worker has more than we thought, its own count wins.
        """
        file = self.source()
        target = Target(hashlib.sha256(CONTENT).hexdigest(), 2048)
        self.server.files[file.key] = Kept(bytearray(CONTENT[:700]), target)
        self.server.refusals = [Answer(404)]
        self.staged(file)
        self.assert_on_node(file)
        self.assertEqual(self.server.received, 1348)

    def test_the_workers_hashing_is_waited_for(self) -> None:
        """
        While the worker verifies what it has, nothing is sent, and its count keeps the load alive (LOAD-3).
        """
        file = self.source()
        kept = self.server.files[file.key] = Kept(bytearray(CONTENT), None, hashlib.sha256(CONTENT).hexdigest(), 100)
        done = self.stage(file)
        before = self.hold.observed
        self.assertNoResult(done)
        kept.verified = 200
        self.clock.advance(1.0)
        self.assertGreater(self.hold.observed, before)
        self.assertEqual(self.progress.phase, "verifying")
        kept.verified = None
        self.clock.advance(1.0)
        self.successResultOf(done)
        self.assertEqual(self.server.received, 0)

    def test_conditions_that_pass_are_waited_for(self) -> None:
        """
        A reconnecting worker or an unreachable peer interrupts a transfer, it does not end it (LOAD-11).
        """
        self.server.refusals = [
            Unreached(Reconnecting("node-1")),
            Unreached(PeerUnreachable("fe-2", "refused")),
            Answer(503, body=b"busy"),
        ]
        file = self.source()
        self.staged(file)
        self.assert_on_node(file)

    def test_a_departed_node_ends_it(self) -> None:
        """
        A node whose tunnel outlived the grace is not waited for.
        """
        self.server.refusals = [Unreached(NoRoute("node-1", departed=True))]
        self.failureResultOf(self.stage(self.source()), Unreached)

    def test_a_refusal_ends_it_with_the_workers_words(self) -> None:
        """
        A full disk is one clear failure, not a loop (LOAD-15).
        """
        self.server.refusals = [Answer(404), Answer(507, body=b"no space left on device")]
        error = self.failureResultOf(self.stage(self.source()), UploadRefused).value
        self.assertIn("507: no space left on device", str(error))
        self.assertIn("m.gguf", str(error))

    def test_a_worker_that_refuses_our_request_ends_it(self) -> None:
        """
        A refusal of the stream itself is not repeated.
        """
        self.server.refusals = [Unreached(Refused("bad-request", "no"))]
        self.failureResultOf(self.stage(self.source()), Unreached)

    def test_a_source_that_shrank_is_named(self) -> None:
        """
        A file replaced while it is sent fails the load with its name instead of sending junk.
        """
        file = self.source()
        self.server.cuts = [100]
        done = self.stage(file)
        file.path.write_bytes(CONTENT[:300])
        self.clock.pump([1.0] * 20)
        self.assertIn("m.gguf", str(self.failureResultOf(done, SourceChanged).value))

    def test_answers_that_contradict_each_other_do_not_spin(self) -> None:
        """
        A worker whose answers do not fit together is asked at intervals, not in a busy loop.
        """
        self.server.refusals = [Answer(404), Answer(416)] * 50
        self.stage(self.source())
        self.assertEqual(len(self.server.requests), 2)
        self.clock.advance(1.0)
        self.assertEqual(len(self.server.requests), 4)

    def test_silence_ends_it(self) -> None:
        """
        A worker that stays away ends the load by silence, and the error says so (LOAD-1, LOAD-4).
        """
        self.hold = HoldTimer(self.clock, base=100.0, stall=30.0)
        self.server.cuts = [None, 10]
        work = self.stager.stage(NODE, [self.source()], self.progress, self.hold)
        self.server.refusals = []
        done = Deferred.fromCoroutine(self.hold.run(work))
        self.server.refusals = [Unreached(Reconnecting("node-1")) for _ in range(100)]
        self.clock.pump([1.0] * 40)
        self.failureResultOf(done, HoldExpired)
        self.assertIn("of 2.0 KiB done", self.progress.summary(40.0))
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_one_file_may_take_longer_than_the_base(self) -> None:
        """
        One slow file whose bytes move outlives the load's base; each byte that is taken counts, not each file (LOAD-3).
        """
        self.patch(piece, "READ", 100)
        self.stager.piece = 4096
        self.hold = HoldTimer(self.clock, base=20.0, stall=10.0)
        slow = SlowServer(self.clock)
        self.stager.http = slow
        file = self.source()
        done = Deferred.fromCoroutine(self.hold.run(self.stager.stage(NODE, [file], self.progress, self.hold)))
        self.clock.pump([1.0] * 100)
        self.successResultOf(done)
        self.assertEqual(bytes(slow.files[file.key].data), CONTENT)
        self.assertGreater(slow.took, 60)

    @settings(max_examples=60)
    @given(cuts=st.lists(st.integers(0, 500), max_size=12))
    def test_cut_anywhere_any_number_of_times(self, cuts: list[int]) -> None:
        """
        Cut at any bytes, the file arrives whole and no byte is sent twice (LOAD-11).
        """
        self.server = self.stager.http = FileServer()
        self.server.cuts = list(cuts)
        file = self.source()
        self.staged(file)
        self.assert_on_node(file)
        self.assertEqual(self.server.received, 2048)


class Hashing:
    """``InThread`` whose hashing goes on only when it is told to."""

    def __init__(self) -> None:
        self.held: list[tuple[Deferred[None], Any, tuple[Any, ...]]] = []

    def __call__(self, call: Any, *arguments: Any) -> Deferred[Any]:
        if call.__name__ != "_feed":
            return at_once(call, *arguments)
        turn: Deferred[None] = Deferred()
        self.held.append((turn, call, arguments))
        return turn.addCallback(lambda _: call(*arguments))

    def go_on(self) -> None:
        """Until it is over."""
        while self.held:
            self.held.pop(0)[0].callback(None)


class UnhashedTests(UploadCase):
    """A file nobody has hashed yet."""

    SHA256 = hashlib.sha256(CONTENT).hexdigest()

    def setUp(self) -> None:
        super().setUp()
        self.hashing = Hashing()
        self.stager.in_thread = self.hashing
        self.stager.digests = Digests(self.hashing)

    def test_pieces_go_while_it_is_hashed(self) -> None:
        """
        A large file is sent while it is hashed; the last piece waits for the hash, and that decides (LOAD-10, LOAD-16).
        """
        file = self.source()
        done = self.stage(file)
        mark = self.server.names[0][0]
        self.assertEqual(self.server.names, [(mark, "")] * 4)
        self.assertNotEqual(mark, self.SHA256)
        self.assertNoResult(done)
        self.hashing.go_on()
        self.assertEqual(self.successResultOf(done)[0].sent, 2048)
        self.assertEqual(self.server.names[4:], [(self.SHA256, mark)])
        self.assert_on_node(file)

    def test_a_hash_found_meanwhile_is_told_with_the_next_piece(self) -> None:
        """
        From the first piece after it is found the worker has the hash, so that it can verify by itself after a crash.
        """
        self.stager.in_thread, self.stager.digests = at_once, Digests(at_once)
        self.staged(self.source())
        self.assertEqual({sha256 for sha256, _ in self.server.names}, {self.SHA256})
        self.assertNotIn("", {mark for _, mark in self.server.names})

    def test_hashing_beside_is_no_progress(self) -> None:
        """
        While pieces are sent only what the node takes keeps the load alive, not how far the hashing is (LOAD-3).
        """
        self.server.cuts = [None, 100]  # the way breaks, and is broken for a while
        done = self.stage(self.source())
        observed = self.hold.observed
        self.hashing.go_on()
        self.assertEqual(self.hold.observed, observed)
        self.clock.advance(60)
        self.successResultOf(done)

    def test_another_frontend_goes_on(self) -> None:
        """
        What one frontend began before it had the hash another one goes on from (LOAD-6, LOAD-11).
        """
        file = self.source()
        self.server.cuts = [None, None, 123]
        first = self.stage(file)
        received = self.server.received
        self.assertEqual(received, 1123)
        other = Stager(self.server, self.folder, clock=self.clock, in_thread=at_once, chance=lambda: 1.0, piece=500)
        done = Deferred.fromCoroutine(other.stage(NODE, [file], Progress(), CountingHold()))
        self.assertEqual(self.successResultOf(done)[0].sent, 2048 - received)
        self.assert_on_node(file)
        self.hashing.go_on()
        self.clock.advance(1.0)
        self.successResultOf(first)  # which finds it there

    def test_what_is_there_is_not_sent(self) -> None:
        """
        A file that is there already moves no byte though its hash has to be found first.
        """
        file = self.source()
        self.server.files[file.key] = Kept(bytearray(CONTENT), None, self.SHA256)
        done = self.stage(file)
        self.hashing.go_on()
        self.assertEqual(self.successResultOf(done)[0].sent, 0)

    def test_a_worker_of_before(self) -> None:
        """
        A worker that does not know how is sent nothing before the hash is found.
        """
        self.server.old = True
        file = self.source()
        done = self.stage(file)
        self.assertEqual(self.server.names, [])
        self.hashing.go_on()
        self.successResultOf(done)
        self.assertEqual(self.server.names, [(self.SHA256, "")] * 5)

    def test_a_source_that_can_no_longer_be_hashed(self) -> None:
        """
        A file that changes while it is hashed and sent ends the load with its name.
        """
        file = self.source()
        done = self.stage(file)
        file.path.write_bytes(CONTENT + b"more")
        self.hashing.go_on()
        self.assertIn("m.gguf", str(self.failureResultOf(done, SourceChanged).value))

    def test_content_of_the_same_fingerprint(self) -> None:
        """
        Bytes of another file that looks like ours by its fingerprint are found out by the hash and sent anew (LOAD-16).
        """
        self.server.corrupt = 1
        file = self.source()
        done = self.stage(file)
        self.hashing.go_on()
        self.successResultOf(done)
        self.assert_on_node(file)


class PieceTests(UploadCase):
    def piece(self, taken: list[int]) -> PieceBody:
        return PieceBody(self.source(b"a" * 600_000).path, 0, 600_000, in_thread=at_once, taken=taken.append)

    def test_reads_that_outrun_the_transport_are_no_progress(self) -> None:
        """
        Bytes count once the transport has room again, not when they were read (LOAD-3).
        """
        taken: list[int] = []
        body = self.piece(taken)
        sink = Sink()
        sink_write = sink.write

        def write_and_fill(data: bytes) -> None:
            sink_write(data)
            body.pauseProducing()

        sink.write = write_and_fill  # type: ignore[method-assign]
        done = body.startProducing(sink)
        self.assertEqual(taken, [])
        self.assertEqual(len(sink.data), 262_144)
        body.resumeProducing()
        self.assertEqual(taken, [262_144])
        body.resumeProducing()
        body.resumeProducing()
        self.successResultOf(done)
        self.assertEqual(sum(taken), 600_000)

    def test_a_stopped_body_never_fires(self) -> None:
        """
        A request that ended early is not told that its body is whole.
        """
        body = self.piece([])
        sink = Sink()
        body.pauseProducing()
        done = body.startProducing(sink)
        body.stopProducing()
        self.assertNoResult(done)
        self.assertEqual(len(sink.data), 0)
