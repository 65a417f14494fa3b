"""What can be wrong with a model file."""

from __future__ import annotations

from localai_dist.errors import UserMistake


class BadModelFile(UserMistake):
    """
    A model file that can't be served; the others are.

    Attributes:
        source: the YAML file's name.
        reason: what is wrong, and what would be right.
    """

    def __init__(self, source: str, reason: str) -> None:
        super().__init__(f"{source}: {reason}")
        self.source = source
        self.reason = reason
