"""
``check_stream``: what every stream transport of ours must do, as a trial mixin.

A maker gives two connected transports and a way to move bytes; the mux stream, plain TCP, the memory pair and a spliced
pair all pass the same suite.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol

from twisted.internet.error import ConnectionDone
from twisted.internet.interfaces import IHalfCloseableProtocol, IPushProducer
from zope.interface import implementer

from localai_dist.testing.memory import Recorder
from localai_dist.units import KiB, MiB

_ROUNDS: Final = 500
"""How often bytes are moved before a fact counts as never coming: on plain TCP ten seconds or more."""


@dataclass
class Connected:
    """
    Two ends of one connection.

    Attributes:
        near, far: the transports.
        attach: ties a protocol to a transport.
        settle: moves bytes until nothing happens any more.
        close: ends everything the maker made.
        half_closes: one direction may end and the other go on; a splice ends both at the first.
    """

    near: Any
    far: Any
    attach: Callable[[Any, Any], None]
    settle: Callable[[], None]
    close: Callable[[], None]
    half_closes: bool = True

    def until(self, what: str, fact: Callable[[], bool]) -> None:
        """
        Move bytes until ``fact`` holds: a kernel is sometimes late with what it carries, nobody else ever is.

        Raises:
            AssertionError: it never did; the text says ``what``.
        """
        for _ in range(_ROUNDS):
            self.settle()
            if fact():
                return
        raise AssertionError(f"never came true: {what}")


@implementer(IHalfCloseableProtocol)
class HalfRecorder(Recorder):
    """A recorder that wants to hear of half-closes."""

    read_lost = write_lost = False

    def readConnectionLost(self) -> None:
        """The far side sends no more."""
        self.read_lost = True

    def writeConnectionLost(self) -> None:
        """Our end was sent."""
        self.write_lost = True


class _Case(Protocol):
    """What the suite needs of the test case it is mixed into."""

    def make(self) -> Connected: ...
    def assertEqual(self, first: Any, second: Any, msg: Any = None) -> Any: ...
    def assertTrue(self, value: Any, msg: Any = None) -> Any: ...
    def assertIsNone(self, value: Any, msg: Any = None) -> Any: ...
    def assertLess(self, first: Any, second: Any, msg: Any = None) -> Any: ...
    def assertRaises(self, *args: Any, **kwargs: Any) -> Any: ...


@implementer(IPushProducer)
class Source:
    """
    A push producer with ``total`` bytes that writes until paused, then waits to be resumed; each write is new memory.

    Attributes:
        left: bytes not yet written.
        pauses: how often it was paused.
        stopped: the consumer is gone.
    """

    def __init__(self, consumer: Any, total: int, piece: int = 16 * KiB, *, closing: bool = False) -> None:
        self.left = total
        self.pauses = 0
        self.stopped = False
        self._consumer = consumer
        self._piece = memoryview(bytes(range(256)) * (piece // 256))
        self._paused = False
        self._closing = closing

    def begin(self) -> None:
        """Register and write."""
        self._consumer.registerProducer(self, True)
        if self._closing:
            self._consumer.loseConnection()
        self.resumeProducing()

    def resumeProducing(self) -> None:
        """Write until paused or done."""
        self._paused = False
        while self.left and not self._paused and not self.stopped:
            size = min(self.left, len(self._piece))
            self.left -= size
            self._consumer.write(bytes(self._piece[:size]))
        if not self.left and not self.stopped:
            self.stopped = True
            self._consumer.unregisterProducer()

    def pauseProducing(self) -> None:
        """Stop for now."""
        self._paused = True
        self.pauses += 1

    def stopProducing(self) -> None:
        """Stop for good."""
        self.stopped = True


class StreamSuite:
    """Mix into a ``SynchronousTestCase`` that has ``make() -> Connected``."""

    def connected(self: _Case) -> tuple[Connected, Recorder, Recorder]:
        """A connection with a recorder at each end."""
        made = self.make()
        near, far = Recorder(), Recorder()
        made.attach(made.near, near)
        made.attach(made.far, far)
        made.settle()
        return made, near, far

    def test_order(self: Any) -> None:
        """Bytes arrive once and in order, both ways, however they are written."""
        made, near, far = self.connected()
        for number in range(300):
            made.near.write(b"%d," % number)
            made.far.writeSequence([b"<%d" % number, b">"])
            if number % 7 == 0:
                made.settle()
        down, up = b"".join(b"%d," % n for n in range(300)), b"".join(b"<%d>" % n for n in range(300))
        made.until("all of both", lambda: len(far.data) >= len(down) and len(near.data) >= len(up))
        self.assertEqual((bytes(far.data), bytes(near.data)), (down, up))
        made.close()

    def test_stopped_reader_stops_writer(self: Any) -> None:
        """A reader that stops has its writer paused after a bounded amount; resumed, everything arrives."""
        made, _, far = self.connected()
        made.far.pauseProducing()
        source = Source(made.near, 64 * MiB)
        source.begin()
        made.settle()
        self.assertTrue(source.pauses)
        self.assertLess(64 * MiB - source.left, 24 * MiB)
        made.settle()
        self.assertLess(64 * MiB - source.left, 24 * MiB)
        self.assertLess(len(far.data), 1 * MiB)
        made.far.resumeProducing()
        made.until("the rest", lambda: len(far.data) >= 64 * MiB)
        self.assertEqual(len(far.data), 64 * MiB)
        made.close()

    def test_clean_close_flushes(self: Any) -> None:
        """What was written before a close arrives, and both ends are told of a clean end."""
        made, near, far = self.connected()
        made.near.write(b"x" * MiB)
        made.near.loseConnection()
        made.until("the end of both", lambda: near.lost is not None and far.lost is not None)
        self.assertEqual(len(far.data), MiB)
        self.assertTrue(far.lost.check(ConnectionDone))
        self.assertTrue(near.lost.check(ConnectionDone))
        made.close()

    def test_close_waits_for_producer(self: Any) -> None:
        """A close while a producer is registered lets it finish first."""
        made, _, far = self.connected()
        Source(made.near, 3 * MiB, closing=True).begin()
        made.until("the end", lambda: far.lost is not None)
        self.assertEqual(len(far.data), 3 * MiB)
        self.assertTrue(far.lost.check(ConnectionDone))
        made.close()

    def test_half_close(self: Any) -> None:
        """After one end's half-close the other direction goes on, a megabyte each way."""
        made = self.make()
        near, far = HalfRecorder(), HalfRecorder()
        made.attach(made.near, near)
        made.attach(made.far, far)
        made.near.write(b"q" * MiB)
        made.near.loseWriteConnection()
        made.until("the half-close", lambda: far.read_lost or not made.half_closes)
        made.until("what was written before it", lambda: len(far.data) >= MiB)
        self.assertEqual(len(far.data), MiB)
        if made.half_closes:
            self.assertTrue(near.lost is None and far.lost is None)
            made.far.write(b"a" * MiB)
            made.far.loseConnection()
            made.until("the answer", lambda: len(near.data) >= MiB)
            self.assertEqual(len(near.data), MiB)
            made.near.loseConnection()
        else:
            made.far.loseConnection()
        made.until("the end of both", lambda: near.lost is not None and far.lost is not None)
        for recorder in (near, far):
            assert recorder.lost is not None
            self.assertTrue(recorder.lost.check(ConnectionDone))
        made.close()

    def test_abort_is_no_clean_end(self: Any) -> None:
        """An abort ends both sides at once, and the far one does not take it for a clean end."""
        made, near, far = self.connected()
        made.near.write(b"hello")
        made.settle()
        made.near.abortConnection()
        made.until("the end of both", lambda: near.lost is not None and far.lost is not None)
        assert far.lost is not None
        self.assertIsNone(far.lost.check(ConnectionDone))
        made.close()

    def test_abort_stops_producer(self: Any) -> None:
        """A producer is stopped when its connection ends under it."""
        made, _, _ = self.connected()
        made.far.pauseProducing()
        source = Source(made.near, 64 * MiB)
        source.begin()
        made.settle()
        made.near.abortConnection()
        made.until("the producer's end", lambda: source.stopped)
        made.close()

    def test_write_after_close_is_ignored(self: Any) -> None:
        """Bytes written after a close or an abort go nowhere and raise nothing."""
        made, near, far = self.connected()
        made.near.loseConnection()
        made.until("the end of both", lambda: near.lost is not None and far.lost is not None)
        made.near.write(b"late")
        made.near.loseConnection()
        made.near.abortConnection()
        made.settle()
        self.assertEqual(bytes(far.data), b"")
        made.close()

    def test_second_producer_is_refused(self: Any) -> None:
        """Two producers at once are a mistake that is named."""
        made, _, _ = self.connected()
        made.near.registerProducer(Source(made.near, 0), True)
        self.assertRaises(RuntimeError, made.near.registerProducer, Source(made.near, 0), True)
        made.near.unregisterProducer()
        made.close()
