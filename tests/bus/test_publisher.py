"""What is sent."""

from __future__ import annotations

from twisted.internet.defer import Deferred
from twisted.trial.unittest import SynchronousTestCase

from localai_dist.bus.envelope import payload_of
from localai_dist.bus.errors import UnknownSubject, Unpublishable
from localai_dist.bus.publisher import HINTS_UNDER_WAY, Publisher
from localai_dist.store.errors import StoreUnavailable
from tests.bus.doubles import Rows


class PublisherTests(SynchronousTestCase):
    """Messages out."""

    def setUp(self) -> None:
        self.rows = Rows()
        self.publisher = Publisher(self.rows, fresh_id=lambda: "id-1")

    def publish(self, subject: str, value: object) -> Deferred[None]:
        """Begin to publish."""
        return Deferred.fromCoroutine(self.publisher.publish(subject, value))

    def test_small_and_large(self) -> None:
        """What fits is one notification; what does not is a row with the payload alone, and its id (CLUS-14)."""
        self.successResultOf(self.publish("cache.invalidate.models", {"a": "é"}))
        self.assertEqual(
            self.rows.sent,
            [{"channel": "localai_cache", "message": '{"s":"cache.invalidate.models","d":{"a":"é"}}'}],
        )
        large = "x" * 9000
        self.successResultOf(self.publish("cache.invalidate.models", large))
        self.assertEqual(
            self.rows.sent[1],
            {
                "channel": "localai_cache",
                "message": '{"s":"cache.invalidate.models","i":"id-1"}',
                "id": "id-1",
                "subject": "cache.invalidate.models",
                "payload": payload_of(large),
            },
        )
        self.assertEqual((self.publisher.published.inline, self.publisher.published.spilled), (1, 1))

    def test_refused_before_anything_is_sent(self) -> None:
        """An unknown subject and a value that is no JSON are the caller's mistakes, in both verbs."""
        self.failureResultOf(self.publish("jokes.a", 1), UnknownSubject)
        self.failureResultOf(self.publish("jobs.a", object()), Unpublishable)
        self.assertRaises(UnknownSubject, self.publisher.hint, "jokes.a", 1)
        self.assertRaises(Unpublishable, self.publisher.hint, "jobs.a", object())
        self.assertEqual(self.rows.sent, [])

    def test_a_database_that_is_away(self) -> None:
        """Publishing fails as a statement does; a hint is dropped, counted, and troubles nobody."""
        self.rows.down = True
        self.failureResultOf(self.publish("jobs.a", 1), StoreUnavailable)
        self.publisher.hint("jobs.a", 1)
        self.assertEqual(self.publisher.published.dropped, 1)

    def test_hints_are_bounded(self) -> None:
        """A database that hangs has 64 hints waiting, not a thousand; the rest are dropped and counted (CLUS-16)."""
        hanging = self.rows.hanging = Deferred()
        for _ in range(HINTS_UNDER_WAY + 10):
            self.publisher.hint("jobs.a", 1)
        self.assertEqual(self.publisher.published.dropped, 10)
        hanging.callback(None)
        self.assertEqual(self.publisher.published.inline, HINTS_UNDER_WAY)
        self.publisher.hint("jobs.a", 1)
        self.assertEqual(self.publisher.published.inline, HINTS_UNDER_WAY + 1)

    def test_stop_gives_up_what_is_under_way(self) -> None:
        """A frontend that stops waits for no hint."""
        self.rows.hanging = Deferred()
        self.publisher.hint("jobs.a", 1)
        self.publisher.stop()
        self.assertEqual(self.publisher.published.dropped, 1)

    def test_a_fault_of_ours_is_logged(self) -> None:
        """A defect behind a hint is not swallowed."""
        self.rows.fault = ZeroDivisionError("x")
        self.publisher.hint("jobs.a", 1)
        self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), 1)
