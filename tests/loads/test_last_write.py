"""The write that ends a load: the job's row out, the replica's row in."""

from __future__ import annotations

from typing import Any

from localai_dist.loads.errors import LoadFailed
from localai_dist.store.errors import StatementFailed
from tests.loads.case import LoadsCase
from tests.loads.doubles import MemoryTable


class LastWriteTests(LoadsCase):
    """The database answers it with an error."""

    def cause(self, sqlstate: str) -> str:
        """What whoever waits is told."""

        async def refuse(*_arguments: Any) -> bool:
            raise StatementFailed("so says the database", sqlstate)

        self.patch(MemoryTable, "finish", refuse)
        return str(self.failureResultOf(self.ensure(self.one), LoadFailed).value)

    def test_a_node_that_was_removed_meanwhile(self) -> None:
        """
        The replica's row refers to a node that is gone: that is what the error says.
        """
        self.assertIn("its node was removed meanwhile", self.cause("23503"))

    def test_any_other_answer(self) -> None:
        """
        What else the database has against it is not blamed on the node.
        """
        cause = self.cause("42703")
        self.assertNotIn("removed", cause)
        self.assertIn("tiny is loaded, but the database did not take its row: so says the database", cause)
