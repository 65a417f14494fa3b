"""Waiting for a fact, with a bound that names it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from localai_dist.errors import LocalAIDistError

T = TypeVar("T")


class NeverCame(LocalAIDistError):
    """A fact that was waited for did not come within its bound."""


def until(what: str, fact: Callable[[], T | None], bound: float, *, every: float = 0.05) -> T:
    """
    The first value of ``fact`` that counts as true; an empty list or text is no fact yet.

    Args:
        what: the fact in words, for the failure.
        fact: asked again and again; what it raises ends the waiting.
        bound: how long to wait (s).
        every: pause between two questions (s); grows to four times that.

    Raises:
        NeverCame: the bound passed.
    """
    ends, pause = time.monotonic() + bound, every
    while True:
        last = time.monotonic() >= ends  # of before the question: one that takes long is asked once more
        value = fact()
        if value:
            return value
        if last:
            raise NeverCame(f"{what} did not come within {bound:g} s")
        time.sleep(pause)
        pause = min(pause * 1.2, every * 4)
