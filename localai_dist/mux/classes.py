"""The three traffic classes a stream can have."""

from __future__ import annotations

from enum import IntEnum


class TrafficClass(IntEnum):
    """
    How urgent a stream's bytes are; a smaller number goes first.

    The class belongs to the local end of a stream: nothing of it is in the yamux frames.

    Source: design §5.5.
    """

    CONTROL = 0
    INFERENCE = 1
    BULK = 2

    @property
    def letter(self) -> str:
        """How the class travels in our opening frames: ``c``, ``i`` or ``b``."""
        return "cib"[self]

    @classmethod
    def from_letter(cls, letter: str) -> TrafficClass:
        """
        The class named by ``letter``.

        Raises:
            ValueError: it is none of ``c``, ``i``, ``b``.
        """
        if len(letter) != 1 or letter not in "cib":
            raise ValueError(f"{letter[:8]!r} is not a traffic class: want c, i or b")
        return cls("cib".index(letter))


CONTROL, INFERENCE, BULK = TrafficClass
"""The members once more, for what runs with each frame: on Python 3.11 a look-up in an Enum costs more than a call."""
