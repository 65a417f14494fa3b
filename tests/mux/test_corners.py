"""What the other tests of a session do not pass by."""

from __future__ import annotations

from localai_dist.mux import errors, events
from localai_dist.mux.classes import TrafficClass
from localai_dist.mux.frame import Flag, FrameType, encode
from localai_dist.mux.session import Session
from localai_dist.units import KiB, MiB
from tests.mux.test_session import SessionCase, sent_by


class QuietCornersTests(SessionCase):
    """What the tests above do not pass by."""

    def test_bulk_class_is_granted_at_once(self) -> None:
        """Classing an accepted stream bulk grants 4 MiB; an ended one gets nothing."""
        stream = self.open_one()
        self.server.accept(stream)
        sent_by(self.server)
        self.server.set_traffic(stream, TrafficClass.BULK)
        self.assert_sent((FrameType.WINDOW_UPDATE, Flag.NONE, 1, 4 * MiB - 256 * KiB))
        self.server.set_traffic(stream, TrafficClass.INFERENCE)
        self.server.receive(encode(FrameType.WINDOW_UPDATE, Flag.FIN, 1, 0), 0.0)
        self.server.set_traffic(stream, TrafficClass.BULK)
        self.assert_sent()

    def test_class_change_moves_a_waiting_stream(self) -> None:
        """A stream in line is moved to its new class, and a reset takes it out of the line."""
        first, second = self.open_one(1), self.open_one(3)
        for stream in (first, second):
            self.server.accept(stream)
            self.server.write(stream, b"x", 0.0)
        self.server.set_traffic(first, TrafficClass.BULK)
        self.assertTrue(self.server.bulk_under_way)
        self.assertFalse(self.server.sender.idle)
        data = [header.stream_id for header, size in sent_by(self.server) if size]
        self.assertEqual(data, [3, 1])
        self.server.write(first, b"x", 0.0)
        self.server.reset(first)
        self.server.reset(first)
        self.assert_sent((FrameType.WINDOW_UPDATE, Flag.RST, 1, 0))
        self.assertTrue(self.server.sender.idle)

    def test_credit_for_a_stream_that_ended_is_not_sent(self) -> None:
        """Bytes taken after the peer's FIN earn it no credit."""
        stream = self.open_one()
        self.server.accept(stream)
        self.server.receive(encode(FrameType.DATA, Flag.NONE, 1, 100 * KiB) + bytes(100 * KiB), 0.0)
        sent_by(self.server)
        self.server.consumed(stream, 50 * KiB, 0.0)
        self.assertTrue(self.server.credit_due)
        self.server.receive(encode(FrameType.WINDOW_UPDATE, Flag.FIN, 1, 0), 0.0)
        self.server.consumed(stream, 50 * KiB, 0.0)
        self.assert_sent()

    def test_finishing_twice_and_consuming_too_much(self) -> None:
        """A second finish is nothing; consuming what never came is a mistake of ours."""
        stream = self.open_one()
        self.server.finish(stream)
        self.server.finish(stream)
        self.assert_sent((FrameType.WINDOW_UPDATE, Flag.FIN, 1, 0))
        self.assertRaises(errors.LocalProtocolError, self.server.consumed, stream, 1, 0.0)

    def test_credit_for_a_bulk_stream_counts_as_arrived(self) -> None:
        """The peer's credit on a bulk stream takes its bytes off what is under way."""
        stream = self.open_one()
        self.server.accept(stream)
        self.server.set_traffic(stream, TrafficClass.BULK)
        self.server.write(stream, b"x" * 50_000, 0.0)
        sent_by(self.server)
        self.assertEqual(self.server.sender.delay.under_way, 50_000)
        self.server.receive(encode(FrameType.WINDOW_UPDATE, Flag.NONE, 1, 40_000), 0.0)
        self.assertEqual(self.server.sender.delay.under_way, 10_000)

    def test_data_for_a_stream_closed_both_ways(self) -> None:
        """A late data frame for a stream kept only for its unread bytes is skipped; those bytes stay whole."""
        stream = self.open_one()
        self.server.receive(encode(FrameType.DATA, Flag.FIN, 1, 3) + b"abc", 0.0)
        self.server.finish(stream)
        sent_by(self.server)
        self.assertEqual(self.server.receive(encode(FrameType.DATA, Flag.NONE, 1, 2) + b"xx", 0.0), [])
        self.assertIn(1, self.server.streams)
        self.server.consumed(stream, 3, 0.0)
        self.assertNotIn(1, self.server.streams)

    def test_pings_without_flags_and_late_acks(self) -> None:
        """A ping that neither asks nor answers, an unknown pong and a repeated ACK change nothing."""
        client = Session(client=True)
        stream = client.open()
        ack = encode(FrameType.WINDOW_UPDATE, Flag.ACK, stream.id, 0)
        self.assertEqual(client.receive(ack, 0.0), [events.StreamAccepted(stream)])
        self.assertEqual(client.receive(ack, 0.0), [])
        for flags in (Flag.NONE, Flag.ACK):
            self.assertEqual(client.receive(encode(FrameType.PING, flags, 0, 9), 0.0), [])
        self.assertFalse(client.flooded)

    def test_a_reset_says_who_did_it(self) -> None:
        """A stream's reset carries whether the peer did it."""
        self.assertTrue(errors.StreamReset("cut", remote=True).remote)

    def test_frames_for_a_reset_stream_with_unread_bytes(self) -> None:
        """A reset stream kept for its unread bytes takes no more of them, and a second reset is nothing."""
        stream = self.open_one()
        self.server.receive(encode(FrameType.DATA, Flag.NONE, 1, 3) + b"abc", 0.0)
        self.server.reset(stream)
        late = encode(FrameType.DATA, Flag.NONE, 1, 2) + b"xx" + encode(FrameType.WINDOW_UPDATE, Flag.RST, 1, 0)
        self.assertEqual(self.server.receive(late, 0.0), [])
        self.server.consumed(stream, 3, 0.0)
        self.server.check()
        self.assertEqual(self.server.streams, {})
