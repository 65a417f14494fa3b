"""Which frontend a worker dials next, and at what address (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final
from urllib.parse import quote

from localai_dist.errors import UserMistake
from localai_dist.ids import NodeId
from localai_dist.urls import FRONTEND_SCHEMES, InvalidUrl, parse_url

CONNECT_PATH: Final = "/api/cluster/connect"


def connect_url(frontend: str, node: NodeId) -> str:
    """
    Where ``node`` opens its tunnel at ``frontend``: its base path, then ``/api/cluster/connect?id=``.

    Raises:
        InvalidUrl: no http, https, ws or wss URL with a host.
    """
    try:
        there = parse_url(frontend, FRONTEND_SCHEMES)
    except InvalidUrl as error:
        raise InvalidUrl(f"{frontend[:120]!r} is not a frontend's address, {error}") from error
    return f"{there.scheme}://{there.authority}{there.path.rstrip('/')}{CONNECT_PATH}?id={quote(node, safe='')}"


class Rotation:
    """
    The order in which several frontends are tried: the last one that worked first, then on around the list.

    Args:
        urls: one or several.

    Source: design §5.15.
    """

    def __init__(self, urls: Sequence[str]) -> None:
        if not urls:
            raise UserMistake("no frontend URL given: set LOCALAI_REGISTER_TO to one or several, comma-separated")
        self._urls = tuple(urls)
        self._first = 0

    def __len__(self) -> int:
        """How many frontends there are."""
        return len(self._urls)

    def order(self) -> tuple[str, ...]:
        """Every URL once, in the order of the next round."""
        return self._urls[self._first :] + self._urls[: self._first]

    def worked(self, url: str) -> None:
        """``url`` gave a tunnel: it is tried first next time."""
        self._first = self._urls.index(url)

    def skip(self) -> None:
        """The frontend in front went away or fell silent: start with its neighbour next time."""
        self._first = (self._first + 1) % len(self._urls)
