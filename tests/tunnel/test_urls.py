"""Which frontend is dialled next, and where."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from localai_dist.errors import UserMistake
from localai_dist.ids import NodeId
from localai_dist.tunnel.urls import Rotation, connect_url
from localai_dist.urls import InvalidUrl


class ConnectUrlTests(SynchronousTestCase):
    """The address of the tunnel door."""

    def test_base_path_is_kept_and_trimmed(self) -> None:
        """The door is below the frontend's own base path, whatever slashes it ends with."""
        for frontend, url in [
            ("http://f:8080", "http://f:8080/api/cluster/connect?id=n-1"),
            ("http://f:8080/", "http://f:8080/api/cluster/connect?id=n-1"),
            ("https://f/ai//", "https://f/ai/api/cluster/connect?id=n-1"),
            ("wss://f/ai?x=1#y", "wss://f/ai/api/cluster/connect?id=n-1"),
            ("ws://[::1]:8080", "ws://[::1]:8080/api/cluster/connect?id=n-1"),
        ]:
            self.assertEqual(connect_url(frontend, NodeId("n-1")), url)

    def test_the_id_is_quoted(self) -> None:
        """An odd node id can't change the address."""
        self.assertTrue(connect_url("http://f", NodeId("a&b=c")).endswith("?id=a%26b%3Dc"))

    def test_no_frontend_url(self) -> None:
        """What is no http, https, ws or wss URL is refused."""
        for text in ("", "f:8080", "ftp://f", "http://", "http:///x", "http://[::1"):
            with self.assertRaises(InvalidUrl):
                connect_url(text, NodeId("n"))


class RotationTests(SynchronousTestCase):
    """Several frontends."""

    def test_the_last_that_worked_is_first(self) -> None:
        """A round starts with the frontend that worked last, and visits each once."""
        rotation = Rotation(["a", "b", "c"])
        self.assertEqual(rotation.order(), ("a", "b", "c"))
        rotation.worked("b")
        self.assertEqual(rotation.order(), ("b", "c", "a"))

    def test_skip_goes_to_the_neighbour(self) -> None:
        """After a go-away the next frontend is first, around the list."""
        rotation = Rotation(["a", "b"])
        rotation.skip()
        self.assertEqual(rotation.order(), ("b", "a"))
        rotation.skip()
        self.assertEqual(rotation.order(), ("a", "b"))
        self.assertEqual(len(rotation), 2)

    def test_none_given(self) -> None:
        """No URL at all names the setting."""
        with self.assertRaisesRegex(UserMistake, "LOCALAI_REGISTER_TO"):
            Rotation([])
