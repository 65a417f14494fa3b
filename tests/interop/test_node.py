"""``@libp2p/yamux`` on Node."""

from __future__ import annotations

from twisted.trial.unittest import TestCase

from tests.interop import peers
from tests.interop.suite import PeerSuite


class _Node(PeerSuite):
    def command(self) -> list[str]:
        return peers.node_command()

    def assert_told_go_away(self: TestCase, last: str) -> None:  # type: ignore[misc]
        self.assertIn(last, ("go-away 0", "go-away none") if "go_away" in self.id() else ("go-away 0",))


class NodeServerTests(_Node, TestCase):
    """We dial; the peer is the yamux server (MUX-8)."""

    peer_dials = False
    skip = peers.node_missing()


class NodeClientTests(_Node, TestCase):
    """The peer dials; it is the yamux client (MUX-8)."""

    peer_dials = True
    skip = peers.node_missing()
