"""What ends a transfer, and what the error says: the field report of a healthy copy killed at 25 minutes, scaled."""

from collections.abc import Callable, Coroutine
from typing import Any

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.task import Clock, deferLater
from twisted.trial.unittest import SynchronousTestCase

from localai_dist.reach import Reconnecting, Unreached
from localai_dist.staging import upload
from localai_dist.staging.errors import HoldExpired
from localai_dist.staging.hold_timer import HoldTimer
from localai_dist.units import HOUR
from tests.staging.doubles import Kept
from tests.staging.test_upload import CONTENT, NODE, UploadCase


class ScaledTests(SynchronousTestCase):
    """Base 2 s, stall 1 s, cap 20 s (BR-005)."""

    def setUp(self) -> None:
        self.clock = Clock()
        self.hold = HoldTimer(self.clock, base=2.0, stall=1.0, cap=20.0)

    def run_transfer(self, every: float, until: float) -> Deferred[float]:
        """Bytes every ``every`` seconds up to ``until``, then silence for ever; the time when it ended."""

        async def transfer() -> None:
            while self.clock.seconds() < until:
                await deferLater(self.clock, every)
                self.hold.observe()
            if until < 10.0:
                await Deferred()

        return Deferred.fromCoroutine(self.hold.run(transfer()))

    def ended_at(self, done: Deferred[Any]) -> float:
        while not done.called and self.clock.seconds() < 100:
            self.clock.advance(0.05)
        return self.clock.seconds()

    def test_steady_bytes(self) -> None:
        """
        Ten seconds of steady bytes outlive a base of two (LOAD-1, BR-005 a).
        """
        done = self.run_transfer(0.2, 10.0)
        self.ended_at(done)
        self.successResultOf(done)

    def test_bytes_that_stop(self) -> None:
        """
        Bytes that stop at 3 s: ended between 4 and 5 s, and the error says stalled (LOAD-1, BR-005 b).
        """
        done = self.run_transfer(0.2, 3.0)
        self.assertTrue(4.0 <= self.ended_at(done) <= 5.0)
        self.assertIn("no progress for 1s", str(self.failureResultOf(done, HoldExpired).value))

    def test_a_trickle(self) -> None:
        """
        A byte every half second for ever is ended by the cap, which the error names (LOAD-1, BR-005 c).
        """
        done = self.run_transfer(0.5, 1000.0)
        self.assertAlmostEqual(self.ended_at(done), 20.0, delta=0.1)
        self.assertIn("the cap of 20s", str(self.failureResultOf(done, HoldExpired).value))

    def test_a_base_below_the_stall_window(self) -> None:
        """
        An operator's base shorter than the stall window shrinks the window with it (LOAD-1, BR-005 e).
        """
        self.hold = HoldTimer(self.clock, base=0.5, stall=1.0, cap=20.0)
        done = self.run_transfer(0.2, 3.0)
        self.assertTrue(3.4 <= self.ended_at(done) <= 4.0)
        self.failureResultOf(done, HoldExpired)

    def test_children_get_the_cap(self) -> None:
        """
        What the load hands down as a deadline is the cap, however late it asks (LOAD-2, BR-005 f).
        """
        self.run_transfer(0.2, 1000.0).addErrback(lambda _: None)
        self.clock.pump([0.1] * 150)
        self.assertEqual(self.hold.deadline, 20.0)
        self.clock.pump([0.1] * 60)

    def test_nothing_at_all(self) -> None:
        """
        Without a first byte the base counts, and the error names it (LOAD-1, LOAD-4).
        """
        done = self.run_transfer(1000.0, 5.0)
        self.assertAlmostEqual(self.ended_at(done), 2.0, delta=0.1)
        self.assertIn("no progress within 2s", str(self.failureResultOf(done, HoldExpired).value))


class BudgetTests(UploadCase):
    """The uploader's retries."""

    def start(self, hold: HoldTimer | None) -> Deferred[Any]:
        work: Coroutine[Any, Any, Any] = self.stager.stage(NODE, [self.source()], self.progress, hold)
        return Deferred.fromCoroutine(work if hold is None else hold.run(work))

    def always(self, answer: Callable[[], Exception]) -> None:
        self.server.refusals = [answer() for _ in range(5000)]

    def test_verification_on_the_worker_is_progress(self) -> None:
        """
        A worker that verifies for longer than a stall window, its count moving, is no stall (LOAD-3, BR-005 d).
        """
        hold = HoldTimer(self.clock, base=2.0, stall=2.0, cap=20.0)
        file = self.source()
        kept = self.server.files[file.key] = Kept(bytearray(CONTENT), verified=1)
        done = self.start(hold)
        for second in range(5):
            kept.verified = second + 2
            self.clock.advance(1.0)
        self.assertNoResult(done)
        self.clock.pump([1.0] * 3)  # and a count that stands still is one
        self.assertIn("no progress for 2s", str(self.failureResultOf(done, HoldExpired).value))

    def test_the_callers_deadline_is_the_budget(self) -> None:
        """
        Interruptions are outlived as long as the caller's own deadline lasts, and its error is told (LOAD-4).
        """
        self.always(lambda: Unreached(Reconnecting("node-1")))
        done = self.start(HoldTimer(self.clock, base=90.0, stall=90.0))
        self.clock.pump([1.0] * 89)
        self.assertNoResult(done)
        self.clock.pump([1.0] * 2)
        self.assertIn("no progress for 1m30s", str(self.failureResultOf(done, HoldExpired).value))

    def test_without_a_deadline_it_is_an_hour(self) -> None:
        """
        A caller without a deadline gets an hour; the error names it, the bytes, the rate and what stopped it (LOAD-4).
        """
        self.server.cuts = [None, None, 100]
        done = self.start(None)
        self.always(lambda: Unreached(Reconnecting("node-1")))
        self.clock.pump([5.0] * round(HOUR / 5 - 1))
        self.assertNoResult(done)
        self.clock.pump([5.0] * 2)
        text = str(self.failureResultOf(done, HoldExpired).value)
        self.assertIn("deadline exceeded: the load reached the cap of 1h", text)
        self.assertRegex(text, r"1\.\d KiB of 2\.0 KiB done, 0 B/s; last trouble: ")
        self.assertIn("node-1", text)
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_a_cancel_is_not_retried(self) -> None:
        """
        The caller's cancel ends the retries at once and reads "cancelled", not "deadline exceeded" (LOAD-2).
        """
        hold = HoldTimer(self.clock, base=100.0)
        self.always(lambda: Unreached(Reconnecting("node-1")))
        done = self.start(hold)
        self.clock.advance(3.0)
        asked = len(self.server.requests)
        done.cancel()
        self.failureResultOf(done, CancelledError)
        self.clock.advance(60.0)
        self.assertEqual(len(self.server.requests), asked)

    def test_a_request_cut_by_its_own_cancel_is_retried(self) -> None:
        """
        One request that ends as "cancelled" while nobody cancelled the load is an interruption like others (LOAD-2).
        """
        self.server.refusals = [CancelledError()]
        self.staged(self.source())

    def test_requests_get_the_cap_as_their_deadline(self) -> None:
        """
        A piece of a file is sent under the cap, not under the few seconds the hold has left just then (LOAD-2).
        """
        deadlines = []
        request = self.server.request

        async def spy(*words: Any, deadline: float | None, **more: Any) -> Any:
            deadlines.append(deadline)
            return await request(*words, deadline=deadline, **more)

        self.server.request = spy  # type: ignore[method-assign]
        self.successResultOf(self.start(HoldTimer(self.clock, base=7.0, stall=7.0, cap=5000.0)))
        self.assertEqual(set(deadlines), {upload.PROBE_TIMEOUT, 5000.0})
