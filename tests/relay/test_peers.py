"""Links to other frontends."""

from __future__ import annotations

from twisted.internet.defer import CancelledError, Deferred

from localai_dist import __version__
from localai_dist.mux.classes import TrafficClass
from localai_dist.net.errors import DialFailed, DialRefused
from localai_dist.net.stream import MuxStream
from localai_dist.reach import PeerUnreachable, Unreached
from localai_dist.relay.peers import PoolClosed
from tests.relay.mesh import THERE, MeshCase

AT = "10.0.0.2:8080"


class PeerPoolTests(MeshCase):
    """One session per peer."""

    def open(self, address: str = AT) -> Deferred[MuxStream]:
        """Begin an open."""
        return self.begin(self.pool.open(THERE, address, TrafficClass.INFERENCE))

    def test_dials_the_peer_door_with_both_credentials(self) -> None:
        """A link presents the shared token and this frontend's own secret, as the yamux client (CLUS-7)."""
        self.successResultOf(self.open())
        ((url, options),) = self.dials
        self.assertEqual(url, "ws://10.0.0.2:8080/api/cluster/peer?id=here")
        self.assertEqual(
            options["headers"],
            {
                "Authorization": "Bearer shared",
                "X-LocalAI-Peer-Token": "mine",
                "X-LocalAI-Dist-Version": __version__,
            },
        )
        self.assertIs(options["client"], True)

    def test_sixteen_opens_are_one_dial(self) -> None:
        """However many requests need a peer at once, it is dialled once (CLUS-9)."""
        self.dial_hang = Deferred()
        opening = [self.open() for _ in range(16)]
        self.dial_hang.callback(None)
        self.settle()
        streams = [self.successResultOf(each) for each in opening]
        self.assertEqual((len(self.dials), len({stream.id for stream in streams})), (1, 16))

    def test_one_who_gives_up_does_not_cost_the_others(self) -> None:
        """A caller that goes away while a peer is dialled takes nobody's link with it."""
        hang = self.dial_hang = Deferred()
        opening = [self.open() for _ in range(3)]
        opening[0].cancel()
        self.failureResultOf(opening[0], CancelledError)
        hang.callback(None)
        self.settle()
        for each in opening[1:]:
            self.successResultOf(each)
        self.assertEqual(len(self.dials), 1)

    def test_all_give_up_and_the_dial_fails(self) -> None:
        """A dial nobody waits for any more fails without an unhandled error."""
        hang = self.dial_hang = Deferred()
        opening = self.open()
        opening.cancel()
        self.failureResultOf(opening, CancelledError)
        self.dial_error = DialFailed("refused")
        hang.callback(None)
        self.settle()

    def test_a_failed_dial_fails_all_and_is_not_kept(self) -> None:
        """Every waiting request hears why; the next one dials anew."""
        hang = self.dial_hang = Deferred()
        opening = [self.open() for _ in range(3)]
        self.dial_error = DialFailed("10.0.0.2:8080: refused")
        hang.callback(None)
        self.settle()
        for each in opening:
            outcome = self.failureResultOf(each, Unreached).value.outcome
            self.assertEqual(outcome, PeerUnreachable("there", "10.0.0.2:8080: refused", address="10.0.0.2:8080"))
        self.dial_hang = self.dial_error = None
        self.successResultOf(self.open())
        self.assertEqual(len(self.dials), 2)

    def test_a_peer_of_another_release_is_named(self) -> None:
        """A peer that refuses this release is unreachable, with both releases and the upgrade order (CLUS-28)."""
        self.dial_error = DialRefused(426, {"x-localai-dist-version": "9.9.9"}, "HTTP 426")
        outcome = self.failureResultOf(self.open(), Unreached).value.outcome
        assert isinstance(outcome, PeerUnreachable)
        self.assertFalse(outcome.rejected)
        for words in ("9.9.9", __version__, "upgrade all frontends first, then the workers"):
            self.assertIn(words, outcome.text)

    def test_a_link_that_opens_no_stream_is_dialled_once_more(self) -> None:
        """A stale link costs one new dial, not the request."""
        self.successResultOf(self.open())
        self.links[0].server.go_away()
        self.settle()
        stream = self.successResultOf(self.open())
        self.assertIs(stream.session, self.links[1].client)
        self.assertFalse(self.links[0].client.is_open)
        self.assertEqual(len(self.dials), 2)

    def test_a_dead_link_is_dialled_anew(self) -> None:
        """After a link ended the next open dials, and whoever believed in it is told."""
        lost: list[str] = []
        self.pool.on_link_lost = lost.append
        self.successResultOf(self.open())
        self.links[0].server.abort(Exception("pulled"))
        self.settle()
        self.assertEqual(lost, [THERE])
        self.successResultOf(self.open())
        self.assertEqual(len(self.dials), 2)

    def test_a_peer_that_restarted_elsewhere(self) -> None:
        """A known peer at another address is dialled there, and the old link is closed (CLUS-9)."""
        self.successResultOf(self.open())
        self.successResultOf(self.open("10.0.0.9:8080"))
        self.assertEqual([url.split("/")[2] for url, _ in self.dials], [AT, "10.0.0.9:8080"])
        self.assertFalse(self.links[0].client.is_open)

    def test_a_reset_of_one_stream_never_costs_the_link(self) -> None:
        """A stream the peer cuts ends alone (CLUS-9)."""
        self.serve_link = lambda stream: stream.abortConnection()
        self.successResultOf(self.open())
        self.settle()
        self.successResultOf(self.open())
        self.assertEqual(len(self.dials), 1)

    def test_too_many_streams_do_not_cost_the_link(self) -> None:
        """A link that is full is not closed for it."""
        self.serve_link = lambda stream: stream.accept()
        opened = [self.open() for _ in range(1000)]
        self.settle()
        for each in opened:
            self.successResultOf(each)
        self.failureResultOf(self.open(), Unreached)
        self.assertTrue(self.links[0].client.is_open)

    def test_close(self) -> None:
        """A closed pool ends its links, may be closed again, and opens nothing more."""
        self.successResultOf(self.open())
        self.pool.close()
        self.pool.close()
        self.assertFalse(self.links[0].client.is_open)
        self.failureResultOf(self.open(), PoolClosed)

    def test_close_while_dialling(self) -> None:
        """Closing ends the dial under way."""
        self.dial_hang = Deferred()
        opening = self.open()
        self.pool.close()
        self.failureResultOf(opening, PoolClosed)
