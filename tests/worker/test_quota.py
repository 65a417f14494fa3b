"""How much room the files of requests may have."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from localai_dist.units import GiB
from localai_dist.worker.errors import NoRoom, RequestOver
from localai_dist.worker.quota import TOMBSTONE, TOMBSTONES, Quota, default_floor, default_limit

PLENTY = 1000 * GiB


class QuotaTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.quota = Quota(limit=100, floor=50)

    def begin(self, request: str, name: str, size: int, *, there: int = 0, free: int = PLENTY, now: float = 0) -> None:
        self.quota.begin(request, name, size, there=there, free=free, now=now)

    def test_the_limit_is_on_all_requests_together(self) -> None:
        """What is reserved counts, written or not; exactly the limit fits, one byte more does not (LOAD-23)."""
        self.begin("a", "x", 60)
        self.begin("b", "x", 40)
        error = self.assertRaises(NoRoom, self.begin, "c", "x", 1)
        self.assertIn("100 B are taken", str(error))
        self.assertEqual(self.quota.held, 100)

    def test_a_file_sent_again_is_counted_once(self) -> None:
        """The next piece of a file, or the file again, takes no more room than it has (LOAD-23)."""
        for _ in range(3):
            self.begin("a", "x", 100, there=60)
        self.assertEqual(self.quota.held, 100)

    def test_the_floor_counts_what_is_still_to_come(self) -> None:
        """The disk keeps its free space; bytes of the file that are there already are no new ones (LOAD-23)."""
        self.begin("a", "x", 80, free=130)
        self.assertRaises(NoRoom, self.begin, "a", "x", 80, free=129)
        self.begin("a", "x", 80, there=70, free=60)
        self.assertRaises(NoRoom, self.begin, "a", "x", 80, there=70, free=59)

    def test_what_is_refused_reserves_nothing(self) -> None:
        """A refused file leaves the others their room (LOAD-23)."""
        self.assertRaises(NoRoom, self.begin, "a", "x", 101)
        self.assertRaises(NoRoom, self.begin, "a", "x", 10, free=0)
        self.assertEqual((self.quota.held, self.quota.is_live("a")), (0, False))

    def test_live_while_written(self) -> None:
        """A request is live until its last write ended; its room stays taken until its files are gone (LOAD-23)."""
        self.begin("a", "x", 10)
        self.begin("a", "y", 10)
        self.assertEqual(self.quota.being_written(but=("a", "y")), {("a", "x"): 10})
        self.quota.end("a", "x")
        self.assertTrue(self.quota.is_live("a"))
        self.quota.end("a", "y")
        self.assertEqual((self.quota.is_live("a"), self.quota.held), (False, 20))
        self.quota.forget("a")
        self.assertEqual(self.quota.held, 0)

    def test_a_released_request_is_over_for_an_hour(self) -> None:
        """A late file of a released request is refused, for an hour (LOAD-23)."""
        self.quota.release("a", now=10)
        self.assertRaises(RequestOver, self.begin, "a", "x", 1, now=10 + TOMBSTONE - 1)
        self.begin("b", "x", 1, now=10)
        self.begin("a", "x", 1, now=10 + TOMBSTONE)

    def test_tombstones_are_bounded(self) -> None:
        """At most 16384 released requests are remembered, the newest (LOAD-23)."""
        for number in range(TOMBSTONES + 2):
            self.quota.release(str(number), now=number / 1e6)
        over = [self.quota.is_over(str(number), 1) for number in (0, 1, 2, TOMBSTONES + 1)]
        self.assertEqual(over, [False, False, True, True])

    def test_releasing_again_renews_it(self) -> None:
        """A second release counts from then on."""
        self.quota.release("a", now=0)
        self.quota.release("b", now=1)
        self.quota.release("a", now=100)
        self.assertEqual([self.quota.is_over(it, TOMBSTONE + 50) for it in "ab"], [True, False])

    def test_what_was_left_counts(self) -> None:
        """Files of an earlier run have their room until they are swept; a running one is not overwritten (LOAD-23)."""
        self.begin("a", "x", 30)
        self.quota.found("a", "x", 5)
        self.quota.found("b", "x", 60)
        self.assertEqual(self.quota.held, 90)

    def test_who_was_seen(self) -> None:
        """A request is seen when it writes and when it is asked about; one without files is not noted (LOAD-23)."""
        self.begin("a", "x", 1, now=5)
        self.quota.saw("a", 7)
        self.quota.saw("b", 7)
        self.assertEqual((self.quota.requests(), [self.quota.last_seen(it) for it in "ab"]), ({"a"}, [7, 0]))
        self.quota.forget("a")
        self.assertEqual((self.quota.requests(), self.quota.last_seen("a")), (set(), 0))

    def test_defaults(self) -> None:
        """By the file system's size: a tenth but at most 10 GiB; a twentieth but at least 1 GiB free (LOAD-23)."""
        self.assertEqual([default_limit(disk) for disk in (50 * GiB, 1000 * GiB)], [5 * GiB, 10 * GiB])
        self.assertEqual([default_floor(disk) for disk in (10 * GiB, 100 * GiB)], [1 * GiB, 5 * GiB])
