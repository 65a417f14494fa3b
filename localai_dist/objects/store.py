"""
What we ask of an object store, over HTTP: is it there, read it from here on, keep this.

Source: the S3 API's HeadObject, GetObject, PutObject and the multipart uploads.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any
from xml.sax.saxutils import escape, unescape

from twisted.internet.defer import Deferred, TimeoutError, succeed
from twisted.internet.error import ConnectError, ConnectionClosed, DNSLookupError
from twisted.internet.interfaces import IConsumer
from twisted.web.client import Agent, RequestTransmissionFailed, ResponseFailed, ResponseNeverReceived, readBody
from twisted.web.http_headers import Headers
from twisted.web.iweb import IBodyProducer, IResponse
from zope.interface import implementer

from localai_dist.objects.body import ObjectBody
from localai_dist.objects.bucket import Bucket
from localai_dist.objects.errors import ObjectAbsent, StoreAway, StoreRefused
from localai_dist.objects.signing import query_string, signed

CONNECT_TIMEOUT = 10.0
ANSWER_TIMEOUT = 60.0
"""Seconds until the head of an answer to a request without a body; a part's answer is its hold's to wait for."""

_LATER = (408, 429, 500, 502, 503, 504)
_WORDS = re.compile(rb"<(Code|Message)>([^<]{0,300})")
_UPLOAD_ID = re.compile(r"<UploadId>([^<]+)</UploadId>")
_BROKEN = (
    ConnectError,
    ConnectionClosed,
    DNSLookupError,
    RequestTransmissionFailed,
    ResponseFailed,
    ResponseNeverReceived,
    TimeoutError,
)


class ObjectStore:
    """
    One bucket.

    Every method raises ``StoreAway`` when it may be different later and ``StoreRefused`` when not.

    Args:
        now: the time, UTC, for the signature.
    """

    def __init__(self, bucket: Bucket, *, reactor: Any, now: Callable[[], datetime]) -> None:
        self._bucket = bucket
        self._reactor = reactor
        self._now = now
        self._agent = Agent(reactor, connectTimeout=CONNECT_TIMEOUT)

    async def size(self, key: str) -> int | None:
        """Bytes of an object; None if there is none."""
        response = await self._ask("HEAD", key)
        if response.code == 404:
            return None
        await self._demand(response, "HEAD", key, 200)
        return int(response.headers.getRawHeaders("content-length", ["0"])[0])

    async def read(self, key: str, start: int) -> ObjectBody:
        """
        The bytes of an object from ``start`` on; close it when they are not wanted any more.

        Raises:
            ObjectAbsent: there is none.
        """
        wanted = {"Range": f"bytes={start}-"} if start else {}
        response = await self._ask("GET", key, headers=wanted)
        if response.code == 404:
            await readBody(response)
            raise ObjectAbsent(f"the object store has no {key}")
        await self._demand(response, "GET", key, 206 if start else 200)
        body = ObjectBody()
        response.deliverBody(body)
        return body

    async def put(self, key: str, body: IBodyProducer) -> None:
        """Keep one object, whole or not at all."""
        await self._demand(await self._ask("PUT", key, body=body), "PUT", key, 200)

    async def begin(self, key: str) -> str:
        """Begin an upload in parts: its id."""
        response = await self._ask("POST", key, {"uploads": ""}, body=_Text(b""))
        await self._demand(response, "POST", key, 200)
        found = _UPLOAD_ID.search((await readBody(response)).decode("utf-8", "replace"))
        if found is None:
            raise StoreRefused(f"the object store began an upload of {key} without an id")
        return unescape(found[1])

    async def put_part(self, key: str, upload: str, number: int, body: IBodyProducer) -> str:
        """Keep one part, ``number`` from 1: its tag."""
        response = await self._ask("PUT", key, {"partNumber": str(number), "uploadId": upload}, body=body)
        await self._demand(response, "PUT", key, 200)
        return str(response.headers.getRawHeaders("etag", [""])[0])

    async def complete(self, key: str, upload: str, tags: Sequence[str]) -> None:
        """Make the parts an object."""
        parts = "".join(
            f"<Part><PartNumber>{number}</PartNumber><ETag>{escape(tag)}</ETag></Part>"
            for number, tag in enumerate(tags, 1)
        )
        body = _Text(f"<CompleteMultipartUpload>{parts}</CompleteMultipartUpload>".encode())
        response = await self._ask("POST", key, {"uploadId": upload}, body=body)
        await self._demand(response, "POST", key, 200)
        answer = await readBody(response)
        if b"<Error>" in answer:  # the store may find out after it has said 200
            raise StoreAway(f"the object store could not put {key} together: {_words(answer)}")

    async def abandon(self, key: str, upload: str) -> None:
        """Throw the parts away."""
        await self._demand(await self._ask("DELETE", key, {"uploadId": upload}), "DELETE", key, 204)

    async def _ask(
        self,
        method: str,
        key: str,
        query: Mapping[str, str] | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        body: IBodyProducer | None = None,
    ) -> IResponse:
        path = self._bucket.path(key)
        sent = {**signed(self._bucket, method, path, query or {}, at=self._now()), **(headers or {})}
        base = self._bucket.url[: self._bucket.url.index(self._bucket.host)] + self._bucket.host
        url = base + path + (f"?{query_string(query)}" if query else "")
        asked: Deferred[IResponse] = self._agent.request(
            method.encode(), url.encode(), Headers({name: [value] for name, value in sent.items()}), body
        )
        if body is None or isinstance(body, _Text):
            asked.addTimeout(ANSWER_TIMEOUT, self._reactor)
        try:
            return await asked
        except _BROKEN as error:
            raise StoreAway(f"the object store {self._bucket.host} can't be reached: {_reasons(error)}") from error
        except ValueError as error:  # a name that Twisted does not look up, for an underscore in it, say
            raise StoreAway(f"the object store {self._bucket.host} can't be reached: {error}") from error

    async def _demand(self, response: IResponse, method: str, key: str, wanted: int) -> None:
        if response.code == wanted:
            return
        try:
            answer = b"" if method == "HEAD" else await readBody(response)
        except _BROKEN:
            answer = b""
        text = f"the object store answered {response.code} to {method} {key}: {_words(answer) or 'no reason given'}"
        raise StoreAway(text) if response.code in _LATER else StoreRefused(text)


@implementer(IBodyProducer)
class _Text:
    """A small request body."""

    def __init__(self, text: bytes) -> None:
        self._text = text
        self.length = len(text)

    def startProducing(self, consumer: IConsumer) -> Deferred[None]:
        """Write it."""
        consumer.write(self._text)
        return succeed(None)

    def pauseProducing(self) -> None:
        """There is nothing left to pause."""

    def resumeProducing(self) -> None:
        """There is nothing left to resume."""

    def stopProducing(self) -> None:
        """There is nothing left to stop."""


def _words(answer: bytes) -> str:
    return ": ".join(unescape(text.decode("utf-8", "replace")) for _, text in _WORDS.findall(answer[:4096]))


def _reasons(error: Any) -> str:
    reasons = getattr(error, "reasons", None)
    return "; ".join(reason.getErrorMessage() for reason in reasons) if reasons else str(error) or type(error).__name__
