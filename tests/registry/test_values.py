"""Status, presence, identity, labels, budgets, records."""

from __future__ import annotations

from itertools import product

from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from localai_dist.errors import UserMistake
from localai_dist.reach import NoRoute, Reconnecting, describe, may_demote, may_reap
from localai_dist.registry.budget import budget_bytes, capped
from localai_dist.registry.identity import Claim, StoredIdentity, TokenCheck, check, judge, restarted
from localai_dist.registry.labels import labels_of, vram_label
from localai_dist.registry.membership import retention
from localai_dist.registry.presence import NEVER_DIALLED, Presence, PresenceState, outcome_of, presence_of, route_of
from localai_dist.registry.records import (
    BadRegistration,
    BadScheduling,
    Readings,
    Registration,
    SchedulingRow,
    scheduling_of,
)
from localai_dist.registry.status import TRANSITIONS, Status, Trigger, step
from localai_dist.units import GiB
from localai_dist.wire.credentials import digest


class StatusTests(SynchronousTestCase):
    """The status of a node."""

    def test_pending_ends_by_approval_alone(self) -> None:
        """Whatever happens to a pending node, only approval makes it anything else, and nothing makes one pending."""
        for status, trigger in product(Status, Trigger):
            after = step(status, trigger)
            self.assertEqual(after is Status.PENDING, status is Status.PENDING and trigger is not Trigger.APPROVE)

    def test_every_pair_is_decided(self) -> None:
        """Each status and trigger gives a status; every listed transition changes something."""
        for status, trigger in product(Status, Trigger):
            self.assertIn(step(status, trigger), Status)
        for (before, _), after in TRANSITIONS.items():
            self.assertNotEqual(before, after)

    def test_a_good_bye_and_a_drain_outlast_heartbeats(self) -> None:
        """A heartbeat ends nothing but the silence of an offline node."""
        moved = {status for status in Status if step(status, Trigger.HEARTBEAT) is not status}
        self.assertEqual(moved, {Status.OFFLINE})


class PresenceTests(SynchronousTestCase):
    """Where a node is."""

    def test_only_departed_permits_action(self) -> None:
        """Of the four values only departed may demote or reap."""
        for state in PresenceState:
            outcome = outcome_of("n", Presence(state, grace_left=4.0))
            acts = outcome is not None and (may_demote(outcome) or may_reap(outcome))
            self.assertEqual(acts, state is PresenceState.DEPARTED)

    def test_outcomes(self) -> None:
        """Each value says why there is no route, or that there is one."""
        self.assertEqual(outcome_of("n", NEVER_DIALLED), NoRoute("n", departed=False))
        self.assertEqual(outcome_of("n", Presence(PresenceState.RECONNECTING, grace_left=4.0)), Reconnecting("n", 4.0))
        self.assertIsNone(outcome_of("n", Presence(PresenceState.CONNECTED)))

    def test_rows(self) -> None:
        """A row becomes a presence and a route; time left is never negative, an empty address is none."""
        row = {
            "state": "reconnecting",
            "owner": None,
            "address": "",
            "epoch": 7,
            "connected_at": None,
            "disconnected_at": None,
            "grace_ends_at": None,
            "grace_left": -0.5,
            "name": "worker-1",
        }
        self.assertEqual(presence_of(row).grace_left, 0.0)
        self.assertEqual((route_of(row).address, route_of(row).epoch), (None, 7))
        lost = outcome_of("id-1", presence_of(row))
        assert lost is not None
        self.assertIn("node worker-1 lost its tunnel", describe(lost))


class IdentityTests(SynchronousTestCase):
    """Whose name it is."""

    def test_every_claim(self) -> None:
        """What a registration is depends on the token it presents, and in loose mode on nothing."""
        stored = StoredIdentity(digest("own"), digest("parked"))
        for presented, claim in (
            ("own", Claim.OWN),
            ("parked", Claim.WAITING),
            ("x", Claim.NEWCOMER),
            ("", Claim.NEWCOMER),
            (None, Claim.NEWCOMER),
        ):
            self.assertEqual(judge(stored, presented, loose=False), claim)
            self.assertEqual(judge(stored, presented, loose=True), Claim.ROTATED)
        self.assertEqual(judge(None, "own", loose=True), Claim.NEW)

    def test_nothing_matches_an_empty_hash(self) -> None:
        """A row without hashes admits nobody, least of all an empty token."""
        empty = StoredIdentity("", "")
        for presented in (None, "", "x", digest("")):
            self.assertEqual(judge(empty, presented, loose=False), Claim.NEWCOMER)
            self.assertEqual(check(empty, presented, approved=True), TokenCheck.NO_TOKEN)

    @given(st.text(), st.text(), st.booleans())
    def test_only_the_right_token_of_an_approved_node_is_ok(self, token: str, presented: str, approved: bool) -> None:
        """OK means: that very token, of an approved node."""
        stored = StoredIdentity(digest(token) if token else "", "")
        ok = check(stored, presented, approved=approved) is TokenCheck.OK
        self.assertEqual(ok, approved and bool(token) and token == presented)

    def test_restarted(self) -> None:
        """The same boot id means the same process; none means nobody knows, so it restarted."""
        self.assertEqual(
            [restarted("a", "a"), restarted("a", "b"), restarted("a", ""), restarted("", "")], [False, True, True, True]
        )


class AmountTests(SynchronousTestCase):
    """Labels, budgets, retention."""

    def test_vram_classes(self) -> None:
        """VRAM is labelled by its class; below 8 GB by the number."""
        sizes = (4, 8, 15, 16, 24, 47, 48, 80, 141)
        labels = ["4GB", "8GB", "8GB", "16GB", "24GB", "24GB", "48GB", "80GB+", "80GB+"]
        self.assertEqual([vram_label(size * GiB) for size in sizes], labels)

    def test_own_labels_win_over_given_ones(self) -> None:
        """A worker can't give itself another node's name by a label."""
        found = labels_of(Registration("me", labels={"node.name": "you", "rack": "7"}, max_replicas_per_model=0))
        self.assertEqual(found, {"node.name": "me", "rack": "7", "node.replica-slots": "1"})

    def test_budgets(self) -> None:
        """A budget is a share or a size, never more than there is."""
        for text, total, wanted in (
            ("", 10, 0),
            ("50%", 10, 5),
            ("0.8", 10, 8),
            ("1", 10, 10),
            ("12GiB", 8 * GiB, 8 * GiB),
            ("12GiB", 0, 12 * GiB),
            (" 4GB ", 8 * GiB, 4 * 10**9),
        ):
            self.assertEqual(budget_bytes(text, total), wanted, text)
        self.assertRaises(UserMistake, budget_bytes, "lots", 10)
        self.assertEqual([capped(9, 0), capped(9, 5), capped(3, 5)], [9, 5, 3])

    def test_retention(self) -> None:
        """Departures are kept for five graces, at least five minutes."""
        self.assertEqual([retention(90), retention(1)], [450, 300])


class RecordTests(SynchronousTestCase):
    """What is refused, naming the field."""

    def test_bad_registrations(self) -> None:
        """A registration the database could not store is refused, naming the field."""
        for field, bad in (
            ("name", {"name": ""}),
            ("name", {"name": "x" * 256}),
            ("name", {"name": "a\nb"}),
            ("node_type", {"node_type": "toaster"}),
            ("total_vram", {"total_vram": 2**63}),
            ("available_vram", {"available_vram": -1}),
            ("boot_id", {"boot_id": "x" * 65}),
            ("labels", {"labels": {"": "x"}}),
            ("labels", {"labels": {"k": "\0"}}),
            ("max_replicas_per_model", {"max_replicas_per_model": -1}),
        ):
            error = self.assertRaises(BadRegistration, lambda bad=bad: Registration(**{"name": "n", **bad}))
            self.assertTrue(str(error).startswith(field), str(error))
        self.assertRaises(BadRegistration, lambda: Readings(total_disk=-1))

    def test_bad_wishes(self) -> None:
        """A wish that contradicts itself is refused, naming the field."""
        for field, bad in (
            ("model_name", {"model_name": ""}),
            ("min_replicas", {"min_replicas": -1}),
            ("min_replicas", {"min_replicas": 3, "max_replicas": 2}),
            ("spread_all", {"spread_all": True, "min_replicas": 1}),
            ("route_policy", {"route_policy": "random"}),
            ("balance_abs_threshold", {"balance_rel_threshold": 0.5}),
            ("min_prefix_match", {"min_prefix_match": 1.5}),
        ):
            error = self.assertRaises(BadScheduling, lambda bad=bad: SchedulingRow(**{"model_name": "m", **bad}))
            self.assertTrue(str(error).startswith(field), str(error))
        SchedulingRow("m", min_replicas=3)

    def test_a_wish_out_of_a_row(self) -> None:
        """The selector is JSON in text, or nothing; columns nobody asked for are left out."""
        row = {"model_name": "m", "node_selector": '{"a": "b"}', "some_later_column": 1}
        self.assertEqual(scheduling_of(row).node_selector, {"a": "b"})
        self.assertEqual(scheduling_of({**row, "node_selector": ""}).node_selector, {})
