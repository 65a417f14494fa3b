"""Two sessions fed into each other under a random schedule."""

from __future__ import annotations

from collections import Counter
from typing import Any, ClassVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from twisted.trial.unittest import SynchronousTestCase

from localai_dist.mux import errors, events
from localai_dist.mux.classes import TrafficClass
from localai_dist.mux.limits import Limits
from localai_dist.mux.sender import BATCH_MAX
from localai_dist.mux.session import Session
from localai_dist.mux.stream import Stream
from localai_dist.units import KiB, MiB

LIMITS = Limits(max_streams=12, backlog=4, pool=1 * MiB)
STREAMS_BOTH = 24


class End:
    """One session with what its application wrote, read and saw."""

    def __init__(self, client: bool) -> None:
        self.core = Session(client=client, limits=LIMITS)
        self.wire = bytearray()
        self.wrote: dict[int, bytearray] = {}
        self.read: dict[int, bytearray] = {}
        self.unread: dict[int, bytearray] = {}
        self.clean: set[int] = set()
        self.cut: set[int] = set()
        self.live: dict[int, Stream] = {}

    def adopt(self, stream: Stream) -> None:
        self.live[stream.id] = stream
        self.wrote[stream.id], self.read[stream.id], self.unread[stream.id] = bytearray(), bytearray(), bytearray()

    def take(self, received: list[events.Event], now: float) -> None:
        for event in received:
            match event:
                case events.StreamOpened(stream):
                    self.adopt(stream)
                case events.DataReceived(stream, data):
                    if stream.id in self.cut:
                        self.core.consumed(stream, len(data), now)
                    else:
                        self.unread[stream.id] += data
                case events.StreamFinished(stream):
                    self.clean.add(stream.id)
                case events.StreamCut(stream):
                    self.drop(stream, now)
                case events.SessionFailed(error):
                    raise AssertionError(f"an honest peer was accused: {error}")

    def drop(self, stream: Stream, now: float) -> None:
        self.cut.add(stream.id)
        count = len(self.unread[stream.id])
        self.unread[stream.id].clear()
        self.core.consumed(stream, count, now)


class TwoSessions(RuleBasedStateMachine):
    """
    Two sessions and the wires between them.

    Attributes:
        happened: what all schedules did before their teardown, so that the test knows that they did it.
    """

    happened: ClassVar[Counter[str]] = Counter()

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.ends = (End(True), End(False))
        self.count = 0

    def pick(self, data: Any, end: End) -> Stream | None:
        live = [stream for stream in end.live.values() if not stream.over]
        return data.draw(st.sampled_from(live)) if live else None

    @initialize(counts=st.tuples(st.integers(1, 4), st.integers(1, 4)))
    def begin(self, counts: tuple[int, int]) -> None:
        """A few streams of each side that both ends have, each with bytes to read, for the other rules to use."""
        for end, count in zip(self.ends, counts, strict=True):
            for _ in range(count):
                end.adopt(end.core.open())
        self.exchange()
        for end in self.ends:
            for stream in end.live.values():
                end.core.accept(stream)
                self.put(end, stream, 40_000)
        self.exchange()

    @rule()
    def exchange(self) -> None:
        """What both may send arrives."""
        for side in (0, 1):
            self.send(side, 0)
            self.deliver(side, 1 << 30)

    @rule(side=st.integers(0, 1), traffic=st.sampled_from(TrafficClass))
    def open(self, side: int, traffic: TrafficClass) -> None:
        end = self.ends[side]
        try:
            end.adopt(end.core.open(traffic))
        except errors.LocalProtocolError:
            assert end.core.closing or end.core.backlog_full or end.core.opened_here == LIMITS.max_streams

    @rule(side=st.integers(0, 1), data=st.data(), size=st.sampled_from([1, 12, 1000, 70_000, 400_000]))
    def write(self, side: int, data: Any, size: int) -> None:
        end = self.ends[side]
        stream = self.pick(data, end)
        if stream is not None and stream.writable and stream.queued < MiB:
            self.put(end, stream, size)

    def put(self, end: End, stream: Stream, size: int) -> None:
        """Write so many bytes that tell what was written when."""
        self.count += 1
        payload = (b"%d." % self.count) * (size // 2 + 1)
        end.core.write(stream, payload[:size], self.now)
        end.wrote[stream.id] += payload[:size]

    @precondition(lambda self: any(any(end.unread.values()) for end in self.ends))
    @rule(side=st.integers(0, 1), data=st.data(), share=st.sampled_from([0.1, 0.5, 1.0]))
    def read(self, side: int, data: Any, share: float) -> None:
        end = self.ends[side]
        waiting = [number for number, unread in end.unread.items() if unread]
        if waiting:
            number = data.draw(st.sampled_from(waiting))
            count = max(1, int(len(end.unread[number]) * share))
            self.happened["bytes read"] += count
            end.read[number] += end.unread[number][:count]
            del end.unread[number][:count]
            end.core.consumed(end.live[number], count, self.now)

    @rule(side=st.integers(0, 1), data=st.data())
    def accept(self, side: int, data: Any) -> None:
        stream = self.pick(data, self.ends[side])
        if stream is not None:
            self.ends[side].core.accept(stream)

    @rule(side=st.integers(0, 1), data=st.data())
    def finish(self, side: int, data: Any) -> None:
        stream = self.pick(data, self.ends[side])
        if stream is not None:
            self.happened["half-closes"] += stream.writable
            self.ends[side].core.finish(stream)

    @rule(side=st.integers(0, 1), data=st.data())
    def reset(self, side: int, data: Any) -> None:
        end = self.ends[side]
        stream = self.pick(data, end)
        if stream is not None:
            self.happened["resets"] += 1
            end.core.reset(stream)
            end.drop(stream, self.now)

    @rule(side=st.integers(0, 1))
    def ping(self, side: int) -> None:
        self.ends[side].core.ping(self.now)

    @precondition(lambda self: self.count > 8)
    @rule(side=st.integers(0, 1))
    def go_away(self, side: int) -> None:
        self.happened["go-aways"] += self.ends[side].core.go_away_sent is None
        self.ends[side].core.go_away()

    @rule(side=st.integers(0, 1), held=st.sampled_from([0, 0, 50_000, 200_000]))
    def send(self, side: int, held: int) -> None:
        end = self.ends[side]
        batch = end.core.next_batch(self.now, held)
        assert batch.size == sum(map(len, batch.parts)) <= BATCH_MAX
        end.wire += b"".join(batch.parts)

    @rule(side=st.integers(0, 1), size=st.sampled_from([1, 5, 12, 13, 4096, 100_000]))
    def deliver(self, side: int, size: int) -> None:
        source, sink = self.ends[side], self.ends[1 - side]
        self.now += 0.001
        sink.take(sink.core.receive(bytes(source.wire[:size]), self.now), self.now)
        del source.wire[:size]

    @invariant()
    def books_balance(self) -> None:
        for end in self.ends:
            end.core.check()
            held = sum(len(unread) for unread in end.unread.values())
            assert held <= len(end.core.streams) * 256 * KiB + LIMITS.pool

    @invariant()
    def bytes_are_whole(self) -> None:
        for end, far in (self.ends, self.ends[::-1]):
            for number, read in end.read.items():
                got = read + end.unread[number]
                assert far.wrote.get(number, b"")[: len(got)] == got

    def teardown(self) -> None:
        """Accept, read and finish everything: nothing is left behind."""
        for _ in range(4000):
            self.now += 0.01
            for side, end in enumerate(self.ends):
                for number, stream in end.live.items():
                    end.core.accept(stream)
                    end.core.finish(stream)
                    if end.unread[number]:
                        count = len(end.unread[number])
                        end.read[number] += end.unread[number]
                        end.unread[number].clear()
                        end.core.consumed(stream, count, self.now)
                end.core.ping(self.now)
                self.send(side, 0)
                self.deliver(side, 1 << 30)
            if not any(end.core.streams or end.wire for end in self.ends):
                break
        for end, far in (self.ends, self.ends[::-1]):
            assert not end.core.streams and not end.core.unacked
            assert end.core.pool.free == LIMITS.pool
            for number in end.live:
                if number not in end.cut and number not in far.cut:
                    assert end.read[number] == far.wrote[number] and number in end.clean


class TwoSessionsTests(SynchronousTestCase):
    def test_random_schedule(self) -> None:
        """Bytes arrive once and in order, credit is never negative, buffers stay bounded, nothing is left (MUX-3)."""
        TwoSessions.happened.clear()
        run_state_machine_as_test(TwoSessions, settings=settings(max_examples=80, stateful_step_count=60))
        for what, least in {"bytes read": 100_000, "half-closes": 10, "resets": 10, "go-aways": 3}.items():
            self.assertGreaterEqual(TwoSessions.happened[what], least, what)
