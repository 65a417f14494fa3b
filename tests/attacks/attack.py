"""What an attack is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Attack:
    """
    One way to break the code.

    Attributes:
        name: what is broken, in words with dashes.
        file: path from the root of the checkout.
        old: the text that is replaced; it stands in the file exactly once.
        new: what stands there instead.
        reddens: test ids of which each must fail.
        leaves_green: test ids of which each must still pass, so that the edit did not simply break everything.
        also: more edits that belong to it, each (file, old, new): a rule with two guards falls only when both do.
    """

    name: str
    file: str
    old: str
    new: str
    reddens: tuple[str, ...]
    leaves_green: tuple[str, ...]
    also: tuple[tuple[str, str, str], ...] = ()

    @property
    def edits(self) -> tuple[tuple[str, str, str], ...]:
        """Every edit: file, old, new."""
        return ((self.file, self.old, self.new), *self.also)
