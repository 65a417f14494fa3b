"""A form with a file in it, taken as it arrives: fields into memory, bounded; the file onto the disk."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import cast

from twisted.internet.error import ConnectionClosed

from localai_dist.httpapi.call import Call
from localai_dist.httpapi.errors import bad_request, too_large
from localai_dist.httpapi.multipart import FormEvent, FormReader, PartBegun, PartBytes
from localai_dist.net.request import StreamingRequest
from localai_dist.reach import Cancelled, Unreached
from localai_dist.serving.received import ReceivedFile, ReceivedFiles
from localai_dist.units import KiB
from localai_dist.wire.keys import HASH_SUFFIX

FIELDS = 64
"""Fields of one form at most."""
FIELD_SIZE = 64 * KiB
"""Bytes of one field at most."""

_SUFFIX = re.compile(r".*(\.[A-Za-z0-9]{1,8})", re.DOTALL)


@dataclass(slots=True)
class Form:
    """
    What a client sent.

    Attributes:
        fields: by name; those called ``NAME[]`` are lists.
        file: the one file, whole and closed.
    """

    fields: dict[str, str | list[str]] = field(default_factory=dict)
    file: ReceivedFile | None = None


@asynccontextmanager
async def received_form(call: Call, *, file: str) -> AsyncIterator[Form]:
    """
    The request's form; its file is there for as long as the block, and gone after it in every case.

    Args:
        file: the name of the part that is a file.

    Raises:
        ApiError: 400, no such form; 413 before anything is read when the length is told, else once there is too much.
        DiskFull: this frontend's disk.
        Unreached: ``Cancelled``; the client left.
    """
    limit = call.api.max_body
    length = call.header("content-length")
    if length is not None and int(length) > limit:
        raise too_large(limit)
    taking = _Taking(FormReader(call.header("content-type")), call.api.received, file)
    try:
        await _take(cast(StreamingRequest, call.request), taking, limit)
        yield await taking.form()
    finally:
        if taking.file is not None:
            taking.file.remove()


async def _take(request: StreamingRequest, taking: _Taking, limit: int) -> None:
    total = 0
    try:
        async for chunk in request.body:
            total += len(chunk)
            if total > limit:
                raise too_large(limit)
            for event in taking.reader.feed(chunk):
                await taking.take(event)
    except ConnectionClosed as error:
        raise Unreached(Cancelled()) from error


class _Taking:
    """A form on its way: fields gathered, the file written."""

    def __init__(self, reader: FormReader, files: ReceivedFiles, file_name: str) -> None:
        self.reader = reader
        self.file: ReceivedFile | None = None
        self._files = files
        self._file_name = file_name
        self._name = ""
        self._value = bytearray()
        self._form = Form()

    async def take(self, event: FormEvent) -> None:
        """The next of the form's events."""
        match event:
            case PartBegun(name, filename):
                self._begin(name, filename)
            case PartBytes(data) if self._name == self._file_name and self.file is not None:
                await self.file.write(data)
            case PartBytes(data):
                self._value += data
                if len(self._value) > FIELD_SIZE:
                    raise bad_request(f"{self._name[:80]}: over {FIELD_SIZE} bytes", self._name[:80])
            case _ if self._name != self._file_name:
                self._end_field()

    async def form(self) -> Form:
        """
        All of it.

        Raises:
            ApiError: 400; it broke off, or has no file.
        """
        if not self.reader.ended:
            raise bad_request("the form can't be read: it breaks off before its last boundary")
        if self.file is None:
            raise bad_request(f"{self._file_name}: this field is required, with a file", self._file_name)
        await self.file.close()
        self._form.file = self.file
        return self._form

    def _begin(self, name: str, filename: str | None) -> None:
        self._name = name
        self._value.clear()
        if name != self._file_name:
            return
        if self.file is not None:
            raise bad_request(f"{name}: want one file", name)
        self.file = self._files.new(safe_suffix(filename or ""))

    def _end_field(self) -> None:
        name, fields = self._name, self._form.fields
        value = self._value.decode("utf-8", "replace")
        if len(fields) >= FIELDS:
            raise bad_request(f"want at most {FIELDS} fields")
        if not name.endswith("[]"):
            if name in fields:
                raise bad_request(f"{name[:80]}: this field is there twice", name[:80])
            fields[name] = value
            return
        values = fields.setdefault(name, [])
        if isinstance(values, list) and len(values) < FIELDS:
            values.append(value)


def safe_suffix(filename: str) -> str:
    """The end of a client's file name that tells the kind of file, like ``.wav``; nothing else of it is used."""
    found = _SUFFIX.fullmatch(filename)
    suffix = found[1].lower() if found else ""
    return "" if suffix == HASH_SUFFIX else suffix  # what lies beside staged files is called so
