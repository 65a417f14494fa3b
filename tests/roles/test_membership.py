"""What a node's /readyz says of its way into the cluster."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

from twisted.trial.unittest import SynchronousTestCase

from localai_dist.ids import NodeId
from localai_dist.roles.membership import Member
from localai_dist.tunnel.dialer import TunnelClient, TunnelState
from localai_dist.worker.registration import Registration


class ChecksTests(SynchronousTestCase):
    def why(self, state: TunnelState, *, node: str | None = "n-1", why_not: str = "") -> str:
        """The tunnel's check."""
        registration = SimpleNamespace(
            node_id=lambda: None if node is None else NodeId(node),
            why_not=lambda: why_not,
            waiting=lambda: "approve me",
        )
        member = Member(cast(Registration, registration), cast(TunnelClient, SimpleNamespace(state=state)))
        self.assertEqual(member.checks["registration"](), why_not)
        return member.checks["tunnel"]()

    def test_why_there_is_no_tunnel(self) -> None:
        """While a node waits for approval its tunnel says so; before it is registered it says why it is not."""
        self.assertEqual(self.why(TunnelState(True, 1.0, "connected")), "")
        self.assertEqual(self.why(TunnelState(reason="x", refused=403)), "approve me")
        self.assertEqual(self.why(TunnelState(reason="x", refused=401)), "x")
        self.assertEqual(self.why(TunnelState(reason="x"), node=None, why_not="nobody answers"), "nobody answers")
