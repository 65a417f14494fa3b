"""A request's method and path -> one route and the values in its path (pure)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar
from urllib.parse import unquote

from localai_dist.httpapi.auth import Access

Run = TypeVar("Run")


@dataclass(frozen=True, slots=True)
class Route(Generic[Run]):
    """
    One thing the API can be asked.

    Attributes:
        method: ``GET`` and the like; ``HEAD`` is answered by ``GET`` routes.
        pattern: segments with ``:name`` for a value, like ``/api/nodes/:id``.
        access: what the caller must show.
        run: the coroutine function that answers.
        streams: whether ``run`` reads the body itself, as it arrives; else it has been read when ``run`` is called.
    """

    method: str
    pattern: str
    access: Access
    run: Run
    streams: bool = False


@dataclass(frozen=True, slots=True)
class Found(Generic[Run]):
    """A route and the values of its ``:name`` segments."""

    route: Route[Run]
    values: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class WrongMethod:
    """The path exists with other methods."""

    allowed: tuple[str, ...]


def segments_of(path: str) -> tuple[str, ...]:
    """The decoded segments of a request's path; a trailing slash makes no difference."""
    return tuple(unquote(segment) for segment in path.strip("/").split("/"))


class RouteTable(Generic[Run]):
    """All routes; a fixed segment wins over a ``:name`` one."""

    def __init__(self, routes: Sequence[Route[Run]]) -> None:
        ordered = sorted(routes, key=lambda route: [part.startswith(":") for part in route.pattern.split("/")])
        self._by_length: dict[int, list[tuple[tuple[str, ...], Route[Run]]]] = {}
        for route in ordered:
            parts = tuple(route.pattern.strip("/").split("/"))
            self._by_length.setdefault(len(parts), []).append((parts, route))

    def find(self, method: str, path: str) -> Found[Run] | WrongMethod | None:
        """The route for ``method`` and ``path`` (raw, still percent-encoded)."""
        segments = segments_of(path)
        wanted = "GET" if method == "HEAD" else method
        allowed: list[str] = []
        for parts, route in self._by_length.get(len(segments), ()):
            values = _values(parts, segments)
            if values is None:
                continue
            if route.method == wanted:
                return Found(route, values)
            allowed.append(route.method)
        return WrongMethod(tuple(dict.fromkeys(allowed))) if allowed else None


def _values(parts: tuple[str, ...], segments: tuple[str, ...]) -> dict[str, str] | None:
    values: dict[str, str] = {}
    for part, segment in zip(parts, segments, strict=True):
        if part.startswith(":"):
            if not segment or "\0" in segment:
                return None
            values[part[1:]] = segment
        elif part != segment:
            return None
    return values
