"""One stream's table and queue."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from localai_dist.mux.classes import TrafficClass
from localai_dist.mux.errors import LocalProtocolError
from localai_dist.mux.stream import BEFORE_ACK, PAUSE, TRANSITIONS, IllegalInput, Input, State, Stream, step
from localai_dist.mux.window import WindowPool
from localai_dist.units import KiB, MiB

ILLEGAL = {
    (State.LOCAL_CLOSED, Input.SEND_DATA),
    (State.LOCAL_CLOSED, Input.SEND_FIN),
    (State.REMOTE_CLOSED, Input.RECV_DATA),
    (State.CLOSED, Input.SEND_DATA),
    (State.CLOSED, Input.SEND_FIN),
    (State.CLOSED, Input.SEND_RST),
    (State.CLOSED, Input.RECV_DATA),
    (State.RESET, Input.SEND_DATA),
    (State.RESET, Input.SEND_FIN),
}


class TableTests(SynchronousTestCase):
    def test_every_pair_is_decided(self) -> None:
        """Each state takes or refuses each input, and the refused ones are exactly these (MUX-2)."""
        every = {(state, input_) for state in State for input_ in Input}
        self.assertEqual(every - set(TRANSITIONS), ILLEGAL)
        for state, input_ in ILLEGAL:
            self.assertRaises(IllegalInput, step, state, input_)

    def test_endings_are_final(self) -> None:
        """Nothing leads out of a stream that is over (MUX-2)."""
        for (state, _), after in TRANSITIONS.items():
            if state in (State.CLOSED, State.RESET):
                self.assertIs(after, state)

    def test_both_orders_of_closing(self) -> None:
        """Whoever sends FIN first, two of them close the stream."""
        for first, second in ((Input.SEND_FIN, Input.RECV_FIN), (Input.RECV_FIN, Input.SEND_FIN)):
            self.assertIs(step(step(State.OPEN, first), second), State.CLOSED)


class QueueTests(SynchronousTestCase):
    def stream(self, traffic: TrafficClass = TrafficClass.INFERENCE, *, acked: bool = True) -> Stream:
        stream = Stream(1, local=True, traffic=traffic, pool=WindowPool(64 * MiB), maximum=16 * MiB)
        stream.acked = acked
        return stream

    def test_cuts_and_joins(self) -> None:
        """What is taken is what was written, however it was cut."""
        stream = self.stream()
        for number in range(100):
            stream.append(b"%d," % number, 0.0)
        taken = []
        while stream.queued:
            parts, count = stream.take(7, 0.0)
            self.assertEqual(sum(map(len, parts)), count)
            taken += parts
        self.assertEqual(b"".join(taken), b"".join(b"%d," % n for n in range(100)))

    def test_long_write_is_not_copied(self) -> None:
        """The frames of a huge write are views of it, and nothing of it is copied before they are joined."""
        stream = self.stream()
        written = bytes(200 * KiB) + b"x" * (5 * MiB)
        stream.append(written, 0.0)
        first, second = stream.take(100 * KiB, 0.0)[0], stream.take(120 * KiB, 0.0)[0]
        for (part,), begin, end in ((first, 0, 100 * KiB), (second, 100 * KiB, 220 * KiB)):
            assert isinstance(part, memoryview)
            self.assertIs(part.obj, written)
            self.assertTrue(part == written[begin:end])
        self.assertEqual(stream.queued, len(written) - 220 * KiB)

    def test_restraint_before_accept(self) -> None:
        """Before the far side accepted, little of a stream is sent."""
        stream = self.stream(acked=False)
        stream.append(b"x" * MiB, 0.0)
        self.assertEqual(stream.take(MiB, 0.0)[1], BEFORE_ACK)
        self.assertFalse(stream.wants_turn)
        stream.acked = True
        self.assertEqual(stream.sendable, 256 * KiB - BEFORE_ACK)

    def test_turns_bulk_and_back(self) -> None:
        """A stream nobody classed is bulk after 1 MiB without a pause, and no longer after one (MUX-15)."""
        stream = self.stream()
        stream.send_window.available = 100 * MiB
        for _ in range(16):
            self.assertIs(stream.traffic, TrafficClass.INFERENCE)
            stream.append(b"x" * 64 * KiB, 1.0)
            stream.take(64 * KiB, 1.0)
        self.assertIs(stream.traffic, TrafficClass.BULK)
        stream.append(b"x", 1.0 + PAUSE / 2)
        self.assertIs(stream.traffic, TrafficClass.BULK)
        stream.take(10, 1.0 + PAUSE / 2)
        stream.append(b"x", 1.0 + 2 * PAUSE)
        self.assertIs(stream.traffic, TrafficClass.INFERENCE)

    def test_write_after_finish_is_refused(self) -> None:
        """Nothing can be queued behind a FIN."""
        stream = self.stream()
        stream.finishing = True
        self.assertRaises(LocalProtocolError, stream.append, b"x", 0.0)
