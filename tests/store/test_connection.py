"""What our connection corrects in txpostgres."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase
from txpostgres import txpostgres

from localai_dist.store.connection import _Watched


class Descriptor:
    """Something the reactor could watch."""

    def __init__(self, number: int) -> None:
        self.number = number

    def fileno(self) -> int:
        """Its descriptor; -1 once libpq closed it."""
        return self.number


class FakeReactor:
    """Notes what it is asked to watch."""

    def __init__(self) -> None:
        self.watched: list[tuple[str, int]] = []

    def addReader(self, descriptor: Descriptor) -> None:
        """Watch for reading."""
        self.watched.append(("read", descriptor.fileno()))

    def addWriter(self, descriptor: Descriptor) -> None:
        """Watch for writing."""
        self.watched.append(("write", descriptor.fileno()))

    removeReader = removeWriter = callLater = None


class WatchedTests(SynchronousTestCase):
    """The reactor as txpostgres sees it."""

    def test_a_closed_descriptor_is_a_lost_connection(self) -> None:
        """A socket libpq has closed is never given to the reactor; the connection is lost instead."""
        reactor, lost = FakeReactor(), []  # type: ignore[var-annotated]
        watched = _Watched(reactor, lambda: lost.append("lost"))
        watched.addReader(Descriptor(7))
        watched.addWriter(Descriptor(8))
        self.assertEqual((reactor.watched, lost), ([("read", 7), ("write", 8)], []))
        watched.addReader(Descriptor(-1))
        watched.addWriter(Descriptor(-1))
        self.assertEqual((len(reactor.watched), lost), (2, ["lost", "lost"]))

    def test_the_private_names_we_lean_on_exist(self) -> None:
        """txpostgres still calls what we override."""
        for owner, name in (
            (txpostgres.Cursor, "_handleCancellation"),
            (txpostgres.Connection, "checkForNotifies"),
            (txpostgres.Connection, "cursorFactory"),
            (txpostgres.Connection, "doRead"),
        ):
            self.assertTrue(hasattr(owner, name), name)
        self.assertIsNone(txpostgres.Connection(object(), object())._connection)
