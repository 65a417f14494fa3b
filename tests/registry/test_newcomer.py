"""Two workers under one name: what each side is told."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

from twisted.trial.unittest import SynchronousTestCase

from localai_dist.ids import NodeId
from localai_dist.registry.newcomer import Approval, Holder, holder_of, newcomer_text, taken_text
from localai_dist.registry.records import Node

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)

BOX = Node(
    NodeId("n-1"),
    "box",
    "backend",
    "healthy",
    True,
    newcomer_waiting=True,
    registered_from="10.0.0.5",
    last_heartbeat=NOW - timedelta(seconds=3),
    newcomer_from="10.0.0.7",
    newcomer_since=NOW - timedelta(minutes=2),
)


class WordsTests(SynchronousTestCase):
    def test_the_newcomer(self) -> None:
        """It is told who has the name, from where and how lately, and what approving it does to that one (CLUS-8)."""
        self.assertEqual(
            taken_text(BOX, NOW),
            "a node named box exists already (healthy, registered from 10.0.0.5, last heard of 3s ago); "
            "'localai-dist nodes approve box' replaces it: its tunnel ends, and its worker is admitted no more; "
            "to have both, give this one another LOCALAI_NODE_NAME",
        )

    def test_whoever_looks(self) -> None:
        """An operator sees from where the newcomer came, since when it waits, and what approving does."""
        self.assertEqual(
            newcomer_text(BOX, NOW),
            "another worker waits under this name from 10.0.0.7, since 2m ago; 'localai-dist nodes approve box' "
            "replaces it: its tunnel ends, and its worker is admitted no more",
        )
        self.assertEqual(newcomer_text(replace(BOX, newcomer_waiting=False), NOW), "")

    def test_whoever_approved(self) -> None:
        """The answer names the one that was replaced; an ordinary approval has nothing to add."""
        approved = replace(BOX, newcomer_waiting=False, registered_from="10.0.0.7")
        self.assertEqual(
            Approval(approved, holder_of(BOX)).notice(NOW),
            "it replaces the node of that name (healthy, registered from 10.0.0.5, last heard of 3s ago), whose worker "
            "is admitted no more",
        )
        self.assertEqual(Approval(approved).notice(NOW), "")

    def test_both_wait(self) -> None:
        """While the first one was never approved itself, it comes first, and everybody is told so."""
        pending = replace(BOX, status="pending", approved=False)
        for text in (taken_text(pending, NOW), newcomer_text(pending, NOW)):
            self.assertIn("admits the first one, and once more replaces it", text)
        notice = Approval(replace(BOX, approved=True)).notice(NOW)
        self.assertEqual(
            notice, "another worker from 10.0.0.7 waits under its name; approving once more replaces this one by it"
        )

    def test_little_known(self) -> None:
        """A row of an older release has no address, a node may never have beaten, and clocks differ."""
        self.assertEqual(
            Holder("offline", "", None).text(NOW), "offline, registered from an address not known, never heard of"
        )
        ahead = replace(BOX, last_heartbeat=NOW + timedelta(seconds=9), newcomer_from="", newcomer_since=None)
        self.assertIn("last heard of a moment ago", taken_text(ahead, NOW))
        self.assertIn("another worker waits under this name; ", newcomer_text(ahead, NOW))
