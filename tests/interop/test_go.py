"""Go's ``hashicorp/yamux``, as Debian packages it."""

from __future__ import annotations

from twisted.internet.defer import Deferred
from twisted.trial.unittest import TestCase

from tests.interop import peers
from tests.interop.suite import Conversation, PeerSuite


class _Go(PeerSuite):
    half_closes = False  # its Read ends after a Close of its own

    def command(self) -> list[str]:
        return peers.go_command()

    def assert_told_go_away(self: TestCase, last: str) -> None:  # type: ignore[misc]
        self.assertTrue(last.startswith("refused: "), last)

    async def test_go_away_of_ours(self) -> None:
        """After our go-away the peer opens no stream, and one that is open finishes."""
        stream = await self.session.open()  # type: ignore[attr-defined]
        conversation = Conversation(b"a\n", half_close=False)
        stream.start(conversation)
        self.session.go_away()  # type: ignore[attr-defined]
        # The go-away is a control frame: it goes ahead of this line.
        stream.write(b"now\n")
        answer: Deferred[bytes] = conversation.done
        self.assertEqual(await answer, b"failed: remote end is not accepting connections")  # type: ignore[attr-defined]


class GoServerTests(_Go, TestCase):
    """We dial; the peer is the yamux server (MUX-9)."""

    peer_dials = False
    skip = peers.go_missing()


class GoClientTests(_Go, TestCase):
    """The peer dials; it is the yamux client (MUX-9)."""

    peer_dials = True
    skip = peers.go_missing()
