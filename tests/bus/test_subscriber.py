"""What arrives, in which order, and what one subscriber's trouble does to another: nothing."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

from twisted.internet.defer import CancelledError, Deferred
from twisted.trial.unittest import SynchronousTestCase

from localai_dist.bus import resolver, subscription
from localai_dist.bus.envelope import Message, payload_of
from localai_dist.bus.errors import UnknownSubject
from localai_dist.bus.subscriber import Subscriber
from localai_dist.bus.subscription import Subscription
from localai_dist.store.errors import StoreUnavailable
from tests.bus.doubles import MemoryListener, Rows


class Ear:
    """A subscriber that writes down what it hears; it takes as long as the test wants."""

    def __init__(self) -> None:
        self.heard: list[Any] = []
        self.stuck: Deferred[None] | None = None

    def __call__(self, message: Message) -> Awaitable[None] | None:
        self.heard.append(message.value())
        return self.stuck

    def missed(self) -> None:
        """As told."""
        self.heard.append("missed")


class SubscriberCase(SynchronousTestCase):
    """A subscriber over a listener and rows in memory."""

    def setUp(self) -> None:
        self.listener, self.rows = MemoryListener(), Rows()
        self.subscriber = Subscriber(self.listener, self.rows)
        self.subscriber.begin()

    def begin(self, filter: str, on_message: Any, on_missed: Any = None) -> Deferred[Subscription]:
        """Begin to subscribe."""
        return Deferred.fromCoroutine(self.subscriber.subscribe(filter, on_message, on_missed))

    def ear(self, filter: str = "jobs.*") -> tuple[Ear, Subscription]:
        """An ear that is subscribed."""
        ear = Ear()
        return ear, self.successResultOf(self.begin(filter, ear, ear.missed))


class SubscribeTests(SubscriberCase):
    """Who listens to what."""

    def test_only_the_first_subscriber_of_a_channel_listens(self) -> None:
        """One LISTEN for each channel, however many subscribe, at once or later; none twice."""
        gate = self.listener.acknowledging = Deferred()
        early = [self.begin("jobs.*", Ear()) for _ in range(5)]
        for each in early:
            self.assertNoResult(each)
        gate.callback(None)
        for each in early:
            self.successResultOf(each)
        self.ear("jobs.*.progress")
        self.ear("state.x.delta")
        self.assertEqual(self.listener.listening, ["localai_jobs", "localai_state"])

    def test_subscribed_only_when_acknowledged(self) -> None:
        """Without an acknowledged LISTEN nothing is subscribed, and the next one tries again."""
        self.listener.down = True
        ear = Ear()
        self.failureResultOf(self.begin("jobs.*", ear), StoreUnavailable)
        self.listener.down = False
        second, _ = self.ear()
        self.listener.say("jobs.a", 1)
        self.assertEqual((ear.heard, second.heard), ([], [1]))

    def test_one_who_gives_up_subscribing(self) -> None:
        """A caller that leaves while LISTEN is under way hears nothing and keeps nobody from subscribing."""
        gate = self.listener.acknowledging = Deferred()
        ear = Ear()
        leaving = self.begin("jobs.*", ear)
        leaving.cancel()
        self.failureResultOf(leaving, CancelledError)
        self.assertTrue(gate.called)
        self.listener.acknowledging = None
        second, _ = self.ear()
        self.listener.say("jobs.a", 1)
        self.assertEqual((ear.heard, second.heard), ([], [1]))

    def test_unknown_roots_are_refused(self) -> None:
        """A filter of an unknown root is refused, and nothing is listened to."""
        self.failureResultOf(self.begin("jokes.*", Ear()), UnknownSubject)
        self.assertEqual(self.listener.listening, [])

    def test_by_filter(self) -> None:
        """Each hears what its filter lets through, and what is none of ours is counted and ignored."""
        every, _ = self.ear("jobs.*.progress")
        one, _ = self.ear("jobs.1.progress")
        self.listener.say("jobs.1.progress", "a")
        self.listener.say("jobs.2.progress", "b")
        self.listener.say("jobs.2.result", "c")
        self.listener.notify("localai_jobs", "hello")
        self.listener.notify("localai_jobs", "")
        self.assertEqual((every.heard, one.heard), (["a", "b"], ["a"]))
        self.assertEqual(self.subscriber.resolver.foreign, 2)

    def test_a_cancelled_subscription(self) -> None:
        """Who cancelled hears no more, not even what waited; what it awaited is cancelled; a second time is nothing."""
        ear, subscription = self.ear()
        ear.stuck = Deferred()
        self.listener.say("jobs.a", 1)
        self.listener.say("jobs.a", 2)
        subscription.cancel()
        subscription.cancel()
        self.assertTrue(ear.stuck.called)
        self.listener.say("jobs.a", 3)
        self.assertEqual((ear.heard, subscription.waiting), ([1], 0))

    def test_cancelled_from_inside(self) -> None:
        """A subscriber may leave while it is called."""
        heard: list[int] = []
        mine: list[Subscription] = []

        def once(message: Message) -> None:
            heard.append(message.value())
            mine[0].cancel()

        mine.append(self.successResultOf(self.begin("jobs.*", once)))
        self.listener.say("jobs.a", 1)
        self.listener.say("jobs.a", 2)
        self.assertEqual(heard, [1])

    def test_stop(self) -> None:
        """After the stop nobody is called, and no read goes on."""
        ear, _ = self.ear()
        self.rows.held = True
        self.listener.say_spilled("jobs.a", "1")
        self.subscriber.stop()
        self.listener.say("jobs.a", 1)
        self.assertTrue(self.rows.reads[0][1].called)
        self.assertEqual(ear.heard, [])


class IsolationTests(SubscriberCase):
    """Trouble stays where it is."""

    def test_one_that_raises(self) -> None:
        """What a subscriber raises, at once or later, is logged; it and the others hear the next message (CLUS-16)."""

        def raises(message: Message) -> None:
            raise ZeroDivisionError("at once")

        async def raises_later(message: Message) -> None:
            raise LookupError("later")

        self.successResultOf(self.begin("jobs.*", raises))
        self.successResultOf(self.begin("jobs.*", raises_later))
        ear, _ = self.ear()
        self.listener.say("jobs.a", 1)
        self.listener.say("jobs.a", 2)
        self.assertEqual(ear.heard, [1, 2])
        self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), 2)
        self.assertEqual(len(self.flushLoggedErrors(LookupError)), 2)

    def test_one_that_never_ends(self) -> None:
        """
        A subscriber that blocks keeps 256 messages, drops and counts the rest, and is told of the gap where it is; the
        others hear everything meanwhile (CLUS-16).
        """
        slow, slows = self.ear()
        fast, _ = self.ear()
        gate = slow.stuck = Deferred()
        for number in range(1 + subscription.QUEUE + 50):
            self.listener.say("jobs.a", number)
        self.assertEqual((len(fast.heard), slow.heard), (1 + subscription.QUEUE + 50, [0]))
        self.assertEqual((slows.dropped, self.subscriber.dropped), (50, 50))
        self.assertEqual(slows.waiting, subscription.QUEUE + 1)
        slow.stuck = None
        gate.callback(None)
        self.assertEqual(slow.heard, [*range(1 + subscription.QUEUE), "missed"])
        self.listener.say("jobs.a", "next")
        self.assertEqual(slow.heard[-1], "next")

    def test_gaps_are_told_where_they_are(self) -> None:
        """Each gap is told once, between the messages it lies between; without anybody to tell it is only counted."""
        slow, slows = self.ear()
        gate = slow.stuck = Deferred()
        self.listener.say("jobs.a", 0)
        self.subscriber.missed()
        self.subscriber.missed()
        self.listener.say("jobs.a", 1)
        self.subscriber.missed()
        slow.stuck = None
        gate.callback(None)
        self.assertEqual(slow.heard, [0, "missed", 1, "missed"])
        self.assertEqual(slows.dropped, 0)
        self.successResultOf(self.begin("jobs.*", lambda message: None))
        self.subscriber.missed()

    def test_payload_bytes_are_bounded_too(self) -> None:
        """Large messages fill a subscriber's queue before 256 of them wait; one at least always fits."""
        self.patch(subscription, "QUEUE_BYTES", 1000)
        slow, slows = self.ear()
        gate = slow.stuck = Deferred()
        for _ in range(4):
            self.listener.say("jobs.a", "x" * 400)
        self.assertEqual((slows.dropped, slows.waiting), (1, 3))
        slow.stuck = None
        gate.callback(None)
        self.listener.say("jobs.a", "x" * 5000)
        self.assertEqual(len(slow.heard[-1]), 5000)

    def test_cancelled_by_somebody_else(self) -> None:
        """A subscriber whose own wait is cancelled fails like any other, and hears the next message."""
        slow, _ = self.ear()
        slow.stuck = Deferred()
        self.listener.say("jobs.a", 1)
        stuck, slow.stuck = slow.stuck, None
        stuck.cancel()
        self.listener.say("jobs.a", 2)
        self.assertEqual(slow.heard, [1, 2])
        self.assertEqual(len(self.flushLoggedErrors(CancelledError)), 1)


class ResolverTests(SubscriberCase):
    """Payloads out of the table."""

    def setUp(self) -> None:
        super().setUp()
        self.rows.payloads = {str(number): payload_of(f"spilled {number}") for number in range(10)}

    def answer(self, id: str) -> None:
        """Let the read of that row end."""
        next(waiting for known, waiting in self.rows.reads if known == id and not waiting.called).callback(None)

    def test_order_of_arrival(self) -> None:
        """Payloads that are read faster, or need no read, do not overtake; two are read at once (CLUS-14)."""
        ear, _ = self.ear()
        self.rows.held = True
        self.listener.say("jobs.a", "first")
        for id in ("1", "2", "3"):
            self.listener.say_spilled("jobs.a", id)
        self.listener.say("jobs.a", "last")
        self.assertEqual([id for id, _ in self.rows.reads], ["1", "2"])
        self.answer("2")
        self.assertEqual((ear.heard, len(self.rows.reads)), (["first"], 2))
        self.answer("1")
        self.answer("3")
        self.assertEqual(ear.heard, ["first", "spilled 1", "spilled 2", "spilled 3", "last"])

    def test_a_lost_row(self) -> None:
        """A payload that is gone, or can't be read, is told as missed in its place, and the bus goes on (CLUS-16)."""
        ear, _ = self.ear()
        other, _ = self.ear("jobs.b")
        self.listener.say_spilled("jobs.a", "nowhere")
        self.rows.down = True
        self.listener.say_spilled("jobs.a", "1")
        self.rows.down = False
        self.listener.say("jobs.a", "on")
        self.assertEqual((ear.heard, other.heard), (["missed", "missed", "on"], []))
        self.assertEqual(self.subscriber.resolver.unresolved, 2)

    def test_a_fault_of_ours_holds_nobody_up(self) -> None:
        """A defect while reading is logged, counted, and told as missed."""
        ear, _ = self.ear()
        self.rows.fault = ZeroDivisionError("x")
        self.listener.say_spilled("jobs.a", "1")
        self.listener.say("jobs.a", "on")
        self.assertEqual(ear.heard, ["missed", "on"])
        self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), 1)

    def test_nobody_reads_what_nobody_wants(self) -> None:
        """A spilled payload without a subscriber is not fetched."""
        self.ear("jobs.b")
        self.rows.held = True
        self.listener.say_spilled("jobs.a", "1")
        self.assertEqual(self.rows.reads, [])

    def test_the_queue_is_bounded(self) -> None:
        """Behind a read that hangs 1024 notifications wait; the rest are dropped, counted and told (CLUS-16)."""
        ear, _ = self.ear()
        self.rows.held = True
        self.listener.say_spilled("jobs.a", "1")
        for number in range(resolver.QUEUE + 9):
            self.listener.say("jobs.a", number)
        self.assertEqual(self.subscriber.resolver.dropped, 10)
        self.assertEqual(ear.heard, [])
        self.answer("1")
        self.listener.say("jobs.a", "on")
        self.assertEqual(ear.heard, ["spilled 1", *range(resolver.QUEUE - 1), "missed", "on"])

    def test_reconnected(self) -> None:
        """After a reconnection everybody is told to look again, each behind what it has waiting (CLUS-15)."""
        ear, _ = self.ear()
        slow, _ = self.ear()
        gate = slow.stuck = Deferred()
        self.listener.say("jobs.a", 1)
        self.listener.say("jobs.a", 2)
        for callback in self.listener.reconnected:
            callback()
        self.assertEqual((ear.heard, slow.heard), ([1, 2, "missed"], [1]))
        slow.stuck = None
        gate.callback(None)
        self.assertEqual(slow.heard, [1, 2, "missed"])
