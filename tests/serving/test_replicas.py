"""Which replica is tried first."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta

from twisted.trial.unittest import SynchronousTestCase

from localai_dist.ids import NodeId
from localai_dist.serving.replicas import in_order, key_of
from tests.serving.doubles import USED, FakeReplica

A, B, C = (FakeReplica(NodeId(name)) for name in "abc")


class OrderTests(SynchronousTestCase):
    def test_connected_before_idle_before_unused(self) -> None:
        """
        A node out of reach comes last, then the busier one, then the one used later.
        """
        busy = replace(A, in_flight=1)
        later = replace(C, last_used=USED + timedelta(seconds=1))
        order = in_order([busy, later, B], {}, ())
        self.assertEqual(order, [B, later, busy])
        self.assertEqual(in_order([busy, later, B], {B.node_id: False, A.node_id: True}, ()), [later, busy, B])

    def test_never_used_comes_first(self) -> None:
        """
        A replica that nobody used yet is the longest unused; a time without a zone is read as UTC.
        """
        unused, naive = replace(A, last_used=None), replace(B, last_used=datetime(2025, 1, 1))
        self.assertEqual(in_order([C, naive, unused], {}, ()), [unused, naive, C])

    def test_tried_ones_are_left_out(self) -> None:
        """
        A replica that failed in this request is not tried again while others are left.
        """
        self.assertEqual(in_order([A, B], {}, {key_of(A)}), [B])
        self.assertEqual(in_order([A], {}, {key_of(A)}), [])
