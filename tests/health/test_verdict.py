"""What one look at a node means."""

from twisted.trial.unittest import SynchronousTestCase

from localai_dist.health.verdict import Demote, Leave, Promote, judge
from localai_dist.reach import NoRoute
from localai_dist.registry.presence import Presence, PresenceState

STATUSES = ("pending", "healthy", "unhealthy", "offline", "draining")


class VerdictTests(SynchronousTestCase):
    def test_every_status_and_presence(self) -> None:
        """
        Only a departed healthy node is demoted, only a connected sick one promoted; nothing else is touched.
        """
        acted = {
            ("healthy", PresenceState.DEPARTED): Demote(NoRoute("w", departed=True)),
            ("unhealthy", PresenceState.CONNECTED): Promote(),
            ("offline", PresenceState.CONNECTED): Promote(),
        }
        for status in STATUSES:
            for state in PresenceState:
                expected = acted.get((status, state), Leave())
                self.assertEqual(judge("w", status, Presence(state)), expected, (status, state))
