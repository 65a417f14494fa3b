"""What the driver's errors mean."""

from __future__ import annotations

import psycopg2
from twisted.trial.unittest import SynchronousTestCase

from localai_dist.store.errors import NewerSchema, StatementFailed, StoreUnavailable, fault_of


class FakeError(psycopg2.Error):
    """A driver's error with a code of our choice."""

    def __init__(self, code: str | None, text: str = "some\n text") -> None:
        super().__init__(text)
        self.code = code

    @property
    def pgcode(self) -> str | None:  # type: ignore[override]
        """The code."""
        return self.code


class FaultTests(SynchronousTestCase):
    """Each code means one thing for the caller and one for the connection."""

    def test_codes(self) -> None:
        """A code says whether anything is known about the statement, and whether the connection may be used again."""
        for code, kind, lost in (
            (None, StoreUnavailable, True),
            ("", StoreUnavailable, True),
            ("57P01", StoreUnavailable, True),
            ("25006", StoreUnavailable, True),
            ("08006", StoreUnavailable, True),
            ("XX000", StoreUnavailable, True),
            ("57014", StoreUnavailable, False),
            ("55P03", StoreUnavailable, False),
            ("40P01", StoreUnavailable, False),
            ("53300", StoreUnavailable, False),
            ("23505", StatementFailed, False),
            ("42P01", StatementFailed, False),
        ):
            fault = fault_of(FakeError(code))
            self.assertEqual((type(fault.error), fault.lost), (kind, lost), code)
            self.assertIn("some text", str(fault.error))

    def test_a_silent_error_is_named(self) -> None:
        """An error without text is at least called by its class."""
        self.assertIn("FakeError", str(fault_of(FakeError(None, "")).error))

    def test_both_versions_are_named(self) -> None:
        """A newer schema is refused with both versions in the text (WALK-14)."""
        text = str(NewerSchema(7, 2, "3.0", "1.0"))
        for part in ("7", "2", "3.0", "1.0", "upgrade"):
            self.assertIn(part, text)
