"""``multipart/form-data``, bytes in, events out (pure but for the library's own state)."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, TypeAlias

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from localai_dist.httpapi.errors import bad_request
from localai_dist.units import KiB

# The library warns of malformed forms by way of logging, whose last resort is stderr: clients would write our log.
logging.getLogger("python_multipart").addHandler(logging.NullHandler())

HEAD_SIZE = 8 * KiB
"""Bytes of the headers of one part at most."""

MEDIA_TYPE = b"multipart/form-data"


@dataclass(frozen=True, slots=True)
class PartBegun:
    """
    A field or a file begins.

    Attributes:
        filename: as the client calls it; None for a field.
    """

    name: str
    filename: str | None


@dataclass(frozen=True, slots=True)
class PartBytes:
    """More of the part that began last."""

    data: bytes


@dataclass(frozen=True, slots=True)
class PartEnded:
    """The part that began last is whole."""


FormEvent: TypeAlias = PartBegun | PartBytes | PartEnded


class FormReader:
    """
    One form as it arrives. What is kept of it between two calls is at most the headers of one part.

    Args:
        content_type: the request's.

    Attributes:
        ended: whether the form's last boundary came.

    Raises:
        ApiError: 400; no form, or one without a boundary.
    """

    def __init__(self, content_type: str | None) -> None:
        # An HTTP header is Latin-1; what has other letters in it comes from no client that means a form.
        media_type, options = parse_options_header((content_type or "").encode("latin-1", "replace"))
        boundary = options.get(b"boundary")
        if media_type != MEDIA_TYPE or not boundary:
            raise bad_request("want a form: Content-Type multipart/form-data with a boundary")
        self.ended = False
        self._events: list[FormEvent] = []
        self._headers: dict[bytes, bytes] = {}
        self._field = self._value = b""
        self._head = 0
        try:
            self._parser = MultipartParser(boundary, self._callbacks())
        except FormParserError as error:
            raise bad_request(f"the form's boundary can't be used: {error}") from error

    def feed(self, data: bytes) -> list[FormEvent]:
        """
        What ``data`` completes.

        Raises:
            ApiError: 400; it is no form.
        """
        if not self.ended:  # what follows the last boundary is nobody's
            try:
                self._parser.write(data)
            except FormParserError as error:
                raise bad_request(f"the form can't be read: {error}") from error
        events, self._events = self._events, []
        return events

    def _callbacks(self) -> Any:
        return {
            "on_part_begin": self._part_begins,
            "on_header_field": self._more_of_field,
            "on_header_value": self._more_of_value,
            "on_header_end": self._header_ended,
            "on_headers_finished": self._part_begun,
            "on_part_data": lambda data, start, end: self._events.append(PartBytes(data[start:end])),
            "on_part_end": lambda: self._events.append(PartEnded()),
            "on_end": self._form_ended,
        }

    def _part_begins(self) -> None:
        self._headers.clear()
        self._head = 0

    def _more_of_field(self, data: bytes, start: int, end: int) -> None:
        self._count_head(end - start)
        self._field += data[start:end]

    def _more_of_value(self, data: bytes, start: int, end: int) -> None:
        self._count_head(end - start)
        self._value += data[start:end]

    def _count_head(self, count: int) -> None:
        self._head += count
        if self._head > HEAD_SIZE:
            raise bad_request(f"the form can't be read: the headers of a part are over {HEAD_SIZE} bytes")

    def _header_ended(self) -> None:
        self._headers[self._field.lower()] = self._value
        self._field = self._value = b""

    def _part_begun(self) -> None:
        disposition, options = parse_options_header(self._headers.get(b"content-disposition"))
        name = options.get(b"name")
        if disposition != b"form-data" or name is None:
            raise bad_request("the form can't be read: a part has no name")
        filename = options.get(b"filename")
        self._events.append(PartBegun(_text(name), None if filename is None else _text(filename)))

    def _form_ended(self) -> None:
        self.ended = True


def _text(name: bytes) -> str:
    return name.decode("utf-8", "replace")
