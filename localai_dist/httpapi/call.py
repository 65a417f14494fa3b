"""One request, as the routes see it: path values, headers, the validated body, and what it may answer with."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeVar

from twisted.web.server import Request

from localai_dist.catalog.model import ModelConfig
from localai_dist.errors import InvalidQuantity
from localai_dist.httpapi.auth import Access, presented_key
from localai_dist.httpapi.errors import ApiError, bad_request, model_not_found
from localai_dist.httpapi.routing import Route
from localai_dist.httpapi.validation import decode
from localai_dist.net.head import header, query
from localai_dist.units import parse_duration

if TYPE_CHECKING:
    from localai_dist.httpapi.api import FrontendApi
    from localai_dist.httpapi.sse import EventStream

T = TypeVar("T")

FORWARDED_LIMIT = 64
"""Characters of an address that a proxy tells; an IPv6 address has 45."""

TIMEOUT_HEADER = "X-LocalAI-Timeout"
"""A caller's own deadline for the whole request, a duration like ``5s``. Source: design §7."""


@dataclass(frozen=True, slots=True)
class Json:
    """An answer with a JSON body."""

    value: object
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Text:
    """An answer with a body of text."""

    value: str
    content_type: str = "text/plain; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Empty:
    """An answer without a body."""

    status: int = 204


@dataclass(frozen=True, slots=True)
class Streamed:
    """The route wrote and finished its answer itself."""


Answer = Json | Text | Empty | Streamed


class Call:
    """
    One request on its way through a route.

    Attributes:
        api: the objects the routes work with.
        values: the path's ``:name`` values.
        id: the request's id, told to the client in ``x-request-id``.
        deadline: the client's own, an instant of the clock (s).
        granted: the same as the client said it, a duration (s).
        events: the event stream, once a route made one.
        gone: whether the client went away.
        access: what the route asks of its caller, once the route is found.
    """

    def __init__(self, api: FrontendApi, request: Request, values: Mapping[str, str], request_id: str) -> None:
        self.api = api
        self.request = request
        self.values = values
        self.id = request_id
        self.deadline: float | None = None
        self.granted: float | None = None
        self.events: EventStream | None = None
        self.gone = False
        self.access = Access.OPEN

    def header(self, name: str) -> str | None:
        """The request header ``name``, or None; see ``net.head`` for one that is there twice."""
        return header(self.request, name)

    def presented_key(self) -> str | None:
        """The API key that the caller shows, in whichever header."""
        return presented_key(self.header("Authorization"), self.header("x-api-key"), self.header("xi-api-key"))

    def now(self) -> datetime:
        """The time of day."""
        return datetime.fromtimestamp(self.api.clock.seconds(), UTC)

    def seen_from(self) -> str:
        """
        Where the request came from, for people only: the address of the connection, and whom its proxies name.

        Anybody can write such a header; nothing is decided by it.
        """
        address = getattr(self.request.getClientAddress(), "host", None) or ""
        claimed = (self.header("X-Forwarded-For") or "").split(",")[0].strip()[:FORWARDED_LIMIT]
        if not claimed or not claimed.isascii() or not claimed.isprintable():
            return str(address)
        return f"{claimed} by way of {address}" if address else claimed

    def query(self, name: str) -> str | None:
        """The first query value ``name``, or None."""
        return query(self.request, name)

    def body(self, kind: type[T]) -> T:
        """
        The JSON body as ``kind``.

        Raises:
            ApiError: 400, with the field at fault in ``param``.
        """
        content = self.request.content
        if content is None:
            return decode(b"", kind)
        content.seek(0)
        return decode(content.read(), kind)

    def model(self, name: str) -> ModelConfig:
        """
        The served model ``name``.

        Raises:
            ApiError: 404 ``model_not_found``; 403 when it is switched off.
        """
        model = self.listed_model(name)
        if model.disabled:
            raise ApiError(403, "model_disabled", f"the model {name!r} is disabled in its model file", param="model")
        return model

    def listed_model(self, name: str) -> ModelConfig:
        """
        The model ``name``, switched off or not.

        Raises:
            ApiError: 404 ``model_not_found``.
        """
        catalog = self.api.catalog
        model = catalog.get(name)
        if model is None:
            raise model_not_found(name, [one.name for one in catalog.all()], catalog.problems)
        return model

    def read_deadline(self) -> None:
        """
        Take the deadline from ``X-LocalAI-Timeout``.

        Raises:
            ApiError: 400; not a duration, or not longer than nothing.
        """
        text = self.header(TIMEOUT_HEADER)
        if text is None:
            return
        try:
            seconds = parse_duration(text)
        except InvalidQuantity as error:
            raise bad_request(f"{TIMEOUT_HEADER}: {error}", TIMEOUT_HEADER) from error
        if seconds <= 0:
            raise bad_request(f"{TIMEOUT_HEADER}: want more than nothing, like 5s", TIMEOUT_HEADER)
        self.granted = seconds
        self.deadline = self.api.clock.seconds() + seconds


Run = Callable[[Call], Coroutine[Any, Any, Answer]]
ApiRoute = Route[Run]
