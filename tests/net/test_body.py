"""A request's body as it arrives: taken in what comes, or gathered, and bounded."""

from __future__ import annotations

from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.error import ConnectionLost
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase

from localai_dist.net.body import BODY_HIGH, SMALL, RequestBody
from localai_dist.units import KiB

CHUNK = bytes(64 * KiB)


class GatherTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.told: list[str] = []
        self.body = RequestBody(lambda: self.told.append("pause"), self.resumed)
        self.ready: list[bytes] = []

    def resumed(self) -> None:
        """The client is read from again; what waited in its connection comes at once."""
        self.told.append("resume")
        ready, self.ready = self.ready, []
        for data in ready:
            self.body.arrived(data)

    def gather(self, count: int) -> Deferred[Any]:
        return Deferred.fromCoroutine(self.body.gather(count))

    def test_as_much_as_was_asked_for_as_it_came(self) -> None:
        """
        Who gathers wakes up once there is enough, and gets all of it uncopied.
        """
        gathering = self.gather(100 * KiB)
        self.body.arrived(CHUNK)
        self.assertNoResult(gathering)
        self.body.arrived(CHUNK)
        first, second = self.successResultOf(gathering)
        self.assertIs(first, CHUNK)
        self.assertIs(second, CHUNK)

    def test_the_end(self) -> None:
        """
        At the end there is less, and then nothing.
        """
        gathering = self.gather(100 * KiB)
        self.body.arrived(CHUNK)
        self.body.end()
        self.assertEqual(self.successResultOf(gathering), [CHUNK])
        self.assertEqual(self.successResultOf(self.gather(1)), [])

    def test_a_client_that_left(self) -> None:
        """
        What came before the client left comes first, then why it left; asking for nothing asks for no reason.
        """
        gathering = self.gather(100 * KiB)
        self.body.arrived(CHUNK)
        self.body.lose(Failure(ConnectionLost()))
        self.assertEqual(self.successResultOf(gathering), [CHUNK])
        self.assertEqual(self.successResultOf(self.gather(0)), [])
        self.failureResultOf(self.gather(1), ConnectionLost)

    def test_cancelling_takes_nothing(self) -> None:
        """
        What had come when the wait was given up is there for the next one.
        """
        gathering = self.gather(100 * KiB)
        self.body.arrived(CHUNK)
        gathering.cancel()
        self.failureResultOf(gathering)
        self.assertEqual(self.successResultOf(self.gather(0)), [CHUNK])

    def test_no_more_waits_than_was_asked_for(self) -> None:
        """
        The client is paused at what is gathered at a time, or at 256 KiB if that is more (LOAD-12).
        """
        for _ in range(BODY_HIGH // len(CHUNK) + 1):
            self.body.arrived(CHUNK)
        self.assertEqual(self.told, ["pause"])
        self.ready = [CHUNK] * 12
        gathering = self.gather(1024 * KiB)
        self.assertEqual(sum(map(len, self.successResultOf(gathering))), (1024 + 64) * KiB)
        self.assertEqual(self.told, ["pause", "resume", "pause", "resume"])

    def test_small_pieces_are_put_together(self) -> None:
        """
        A body that comes byte by byte takes no more memory than one in large pieces (LOAD-12).
        """
        for number in range(10 * SMALL):
            self.body.arrived(b"%d" % (number % 10))
        chunks = self.successResultOf(self.gather(1))
        self.assertEqual(b"".join(chunks), b"0123456789" * SMALL)
        self.assertEqual(len(chunks), 10)
