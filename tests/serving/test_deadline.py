"""A coroutine that ends at an instant."""

from __future__ import annotations

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from localai_dist.reach import DeadlineExceeded, Reconnecting, Unreached
from localai_dist.serving.deadline import pause, within


class WithinTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = Clock()

    async def forever(self) -> None:
        await Deferred()

    async def stubborn(self) -> None:
        try:
            await Deferred()
        except CancelledError as error:
            raise Unreached(Reconnecting("n")) from error

    async def quick(self) -> int:
        return 7

    def test_work_that_ends_in_time(self) -> None:
        """
        Work that ends in time leaves no timer; without a deadline there is none to begin with.
        """
        self.assertEqual(self.successResultOf(within(self.clock, 5.0, self.quick())), 7)
        self.assertEqual(self.successResultOf(within(self.clock, None, self.quick())), 7)
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_the_deadline_is_the_error_whatever_else_is_true(self) -> None:
        """
        At the deadline the deadline is the error, also when the work has something else to say on its way out.
        """
        for work in (self.forever(), self.stubborn()):
            running = within(self.clock, self.clock.seconds() + 5.0, work)
            self.clock.advance(4.9)
            self.assertNoResult(running)
            self.clock.advance(0.1)
            failure = self.failureResultOf(running, Unreached)
            self.assertIsInstance(failure.value.outcome, DeadlineExceeded)
            self.assertIn("5s", str(failure.value))

    def test_deadline_in_the_past(self) -> None:
        """
        A deadline that is over already ends the work at the next turn.
        """
        running = within(self.clock, -1.0, self.forever())
        self.clock.advance(0)
        self.failureResultOf(running, Unreached)

    def test_cancel(self) -> None:
        """
        Cancelling is not a deadline.
        """
        running = within(self.clock, 5.0, self.forever())
        running.cancel()
        self.failureResultOf(running, CancelledError)
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_pause(self) -> None:
        """
        A pause ends by the clock, or at once when it is cancelled.
        """
        waiting = Deferred.fromCoroutine(pause(self.clock, 1.0))
        self.clock.advance(1.0)
        self.successResultOf(waiting)
        waiting = Deferred.fromCoroutine(pause(self.clock, 1.0))
        waiting.cancel()
        self.failureResultOf(waiting, CancelledError)
        self.assertEqual(self.clock.getDelayedCalls(), [])
