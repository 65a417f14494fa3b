"""What a call credits, for any schedule of arriving and reading."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from twisted.internet.defer import Deferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from localai_dist.grpcclient.call import WINDOW, Call
from localai_dist.grpcclient.framing import encode_message


class Owner:
    """Counts credit; the backend's view of the window."""

    def __init__(self) -> None:
        self.window = WINDOW
        self.resets: list[int] = []

    def reset(self, stream_id: int) -> None:
        """Note it."""
        self.resets.append(stream_id)

    def credit(self, stream_id: int, count: int) -> None:
        """Open the backend's window."""
        self.window += count


READ = -1


class CallTests(SynchronousTestCase):
    @given(
        st.lists(st.sampled_from([0, 1, 100, 16_000, WINDOW, 2 * WINDOW]), min_size=1, max_size=6),
        st.lists(st.sampled_from([READ, 1, 5, 4000, 16_384, WINDOW]), max_size=80),
    )
    def test_credit(self, sizes: list[int], schedule: list[int]) -> None:
        """
        Whatever is sent and read when: a backend is never allowed more than the window beyond what was read or waited
        for, a waiting reader never leaves it stuck, and every reply arrives whole and in order.
        """
        owner = Owner()
        call = Call(owner, 1, Clock(), None)
        sent = [bytes([index]) * size for index, size in enumerate(sizes)]
        wire = b"".join(map(encode_message, sent))
        at = 0
        got: list[bytes] = []
        waiting: list[Deferred[None]] = []

        def read() -> None:
            if (waiting and not waiting[-1].called) or len(got) == len(sent):
                return
            waiting.append(Deferred.fromCoroutine(call.read()).addCallback(got.append))

        def arrive(count: int) -> None:
            nonlocal at
            chunk = wire[at : at + min(count, owner.window)]
            at += len(chunk)
            owner.window -= len(chunk)
            call.received(chunk, len(chunk))
            call.wake()
            self.assertLessEqual(owner.window, WINDOW)

        for step in schedule:
            read() if step == READ else arrive(step)
        while len(got) < len(sent):
            read()
            if not waiting[-1].called:
                self.assertGreater(owner.window, 0, "a waiting reader and a backend that may not send")
            arrive(65_536)
        self.assertEqual(got, sent)

    def test_after_the_end(self) -> None:
        """
        What comes after the end of a call, or a second end, changes nothing.
        """
        owner = Owner()
        call = Call(owner, 1, Clock(), 5.0)
        call.finish(None)
        call.finish(None)
        call.received(encode_message(b"late"), 9)
        call.cancel()
        self.assertIsNone(self.successResultOf(Deferred.fromCoroutine(call.read())))
        self.assertEqual(owner.resets, [])
