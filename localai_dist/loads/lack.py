"""
What frontends lack of a model's files, and who loads it when every one of them lacks something: pure.

A frontend that has every file comes first. Only when each live one has said what it lacks, or was silent for too long,
the one that lacks the least loads the model with what it has, because a file may be optional. Without the first file,
or with one that can't be read, there is nothing to load.

Source: LOAD-13, LOAD-19, LOAD-22.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from localai_dist.errors import without_coordinates
from localai_dist.ids import InstanceId


@dataclass(frozen=True, slots=True)
class Lack:
    """
    What one frontend lacks.

    Attributes:
        why: in words, with the folder.
        without: how many files the model could be loaded without there; 0 = it can't be loaded there at all.
        told: the same without the folder, for clients.
    """

    why: str
    without: int = 0
    told: str = ""

    def as_json(self) -> object:
        """For the job's row: a text when nothing can be loaded, which is what older versions write and read."""
        if self.without:
            return {"why": self.why, "without": self.without, "told": self.told}
        return self.why


def lack_of(written: Any) -> Lack:
    """What a row says; anything else than ``as_json`` gives is a reason in words."""
    if isinstance(written, dict) and isinstance(written.get("without"), int):
        return Lack(str(written.get("why", "")), max(0, written["without"]), str(written.get("told", "")))
    return Lack(str(written))


def lacking_text(lacking: Mapping[str, Lack], silent: tuple[str, ...] = ()) -> str:
    """Who lacks what, and who did not say."""
    return _text({name: lack.why for name, lack in lacking.items()}, silent)


def lacking_told(lacking: Mapping[str, Lack], silent: tuple[str, ...] = ()) -> str:
    """The same without anybody's folder."""
    return _text({name: lack.told or without_coordinates(lack.why) for name, lack in lacking.items()}, silent)


def _text(said: Mapping[str, str], silent: tuple[str, ...]) -> str:
    lacks = [f"frontend {name}: {why}" for name, why in sorted(said.items())]
    return "; ".join(lacks + [f"frontend {name} did not answer" for name in sorted(silent)])


class Resort(Enum):
    """What a frontend that lacks something does about a job that nobody runs."""

    WAIT = "leave it to the others"
    RUN = "load it with what is here"
    REFUSE = "nobody can load it"


def last_resort(
    lacking: Mapping[str, Lack], live: frozenset[str], me: InstanceId, *, offered_for: float, patience: float
) -> Resort:
    """
    What to do about a job without an owner that ``me`` lacks something for.

    Args:
        lacking: what every frontend that was asked lacks.
        live: the live frontends; one without an address of its own is not among them.
        offered_for: how long the job has looked for a frontend with every file (s).
        patience: how long those that were not asked yet are waited for (s). The one whose turn it is has the same time
            again; then it is the turn of any that can.
    """
    if live - lacking.keys() and offered_for < patience:
        return Resort.WAIT
    able = {name: lack for name, lack in lacking.items() if lack.without and (name in live or name == me)}
    if not able:
        return Resort.REFUSE
    best = min(able, key=lambda name: (able[name].without, name))
    return Resort.RUN if best == me or (me in able and offered_for >= 2 * patience) else Resort.WAIT
