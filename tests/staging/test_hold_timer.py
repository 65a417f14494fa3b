"""A hold on a clock."""

from collections.abc import Coroutine
from typing import Any

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from localai_dist.staging.errors import HoldExpired
from localai_dist.staging.hold_timer import HoldTimer


class HoldTimerTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = Clock()
        self.timer = HoldTimer(self.clock, base=100.0, stall=10.0, cap=1000.0)
        self.addCleanup(lambda: self.assertEqual(self.clock.getDelayedCalls(), []))

    def run_work(self, work: Coroutine[Any, Any, Any]) -> Deferred[Any]:
        return Deferred.fromCoroutine(self.timer.run(work))

    async def wait_for(self, waiting: Deferred[Any]) -> Any:
        return await waiting

    def test_the_result_comes_through(self) -> None:
        """
        Work that ends in time gives its result, and no timer is left.
        """
        waiting: Deferred[str] = Deferred()
        done = self.run_work(self.wait_for(waiting))
        self.clock.advance(50.0)
        waiting.callback("loaded")
        self.assertEqual(self.successResultOf(done), "loaded")

    def test_silence_reads_deadline_exceeded(self) -> None:
        """
        An expired hold says "deadline exceeded" and why (LOAD-2).
        """
        done = self.run_work(self.wait_for(Deferred()))
        self.timer.observe()
        self.clock.advance(10.0)
        self.assertIn("deadline exceeded: no progress for 10s", str(self.failureResultOf(done, HoldExpired).value))

    def test_the_first_byte_brings_the_timer_forward(self) -> None:
        """
        The stall window counts from the first byte although the timer was set for the base.
        """
        done = self.run_work(self.wait_for(Deferred()))
        self.clock.advance(20.0)
        self.timer.observe()
        self.clock.advance(9.9)
        self.assertNoResult(done)
        self.clock.advance(0.1)
        self.failureResultOf(done, HoldExpired)

    def test_progress_keeps_it_alive(self) -> None:
        """
        A transfer that observes its bytes outlives the base (LOAD-1).
        """
        waiting: Deferred[None] = Deferred()
        done = self.run_work(self.wait_for(waiting))
        for _ in range(50):
            self.clock.advance(5.0)
            self.timer.observe()
        self.assertNoResult(done)
        waiting.callback(None)
        self.successResultOf(done)

    def test_a_cancel_reads_cancelled(self) -> None:
        """
        The caller's cancel is never mistaken for an expired hold (LOAD-2).
        """
        done = self.run_work(self.wait_for(Deferred()))
        done.cancel()
        self.failureResultOf(done, CancelledError)
        self.assertRaises(CancelledError, self.timer.check)

    def test_a_network_error_caused_by_the_expiry_is_the_expiry(self) -> None:
        """
        Whatever the cancelled work makes of its end, the caller is told about the hold.
        """

        async def stubborn() -> None:
            try:
                await Deferred()
            except CancelledError:
                raise ConnectionError("stream aborted") from None

        done = self.run_work(stubborn())
        self.clock.advance(100.0)
        self.failureResultOf(done, HoldExpired)

    def test_an_expired_hold_never_succeeds(self) -> None:
        """
        Work that swallows its cancel does not turn an expired hold into a success.
        """

        async def deaf() -> str:
            try:
                await Deferred()
            except CancelledError:
                pass
            return "done anyway"

        done = self.run_work(deaf())
        self.clock.advance(100.0)
        self.failureResultOf(done, HoldExpired)

    def test_the_works_own_error_comes_through(self) -> None:
        """
        An error of the work is not dressed up as anything else.
        """
        waiting: Deferred[None] = Deferred()
        done = self.run_work(self.wait_for(waiting))
        waiting.errback(ValueError("junk"))
        self.failureResultOf(done, ValueError)
