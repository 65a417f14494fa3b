"""What an object store that nobody can ask is told as."""

from __future__ import annotations

from datetime import UTC, datetime

from twisted.internet.defer import Deferred
from twisted.internet.testing import MemoryReactorClock
from twisted.trial.unittest import SynchronousTestCase

from localai_dist.objects.bucket import Bucket
from localai_dist.objects.errors import StoreAway
from localai_dist.objects.store import ObjectStore


class AwayTests(SynchronousTestCase):
    def test_a_name_that_can_not_be_looked_up(self) -> None:
        """A store whose host has an underscore in its name, as containers may, is away, for a reason that is told."""
        bucket = Bucket("http://my_store:9000", "models", "r", "", "")
        store = ObjectStore(bucket, reactor=MemoryReactorClock(), now=lambda: datetime.now(UTC))
        failure = self.failureResultOf(Deferred.fromCoroutine(store.size("key")), StoreAway)
        self.assertIn("my_store", failure.getErrorMessage())
        self.assertIn("invalid hostname", failure.getErrorMessage())
