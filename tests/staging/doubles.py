"""A worker's file server in memory, with the same decisions as the real one, and a way to it that can be cut."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

from twisted.internet.defer import Deferred, maybeDeferred
from twisted.internet.interfaces import IConsumer
from twisted.python.failure import Failure
from twisted.web.client import ResponseDone
from twisted.web.http_headers import Headers
from twisted.web.iweb import IBodyProducer
from zope.interface import implementer

from localai_dist.ids import NodeId
from localai_dist.mux.classes import TrafficClass
from localai_dist.reach import NotServed, Unreached
from localai_dist.wire.files import (
    CONTENT_RANGE,
    CONTENT_SHA256,
    FILE_SIZE,
    FILES_PATH,
    FINGERPRINT,
    LOCAL_PATH,
    TARGET_SHA256,
    VERIFIED_BYTES,
    AlreadyWhole,
    PutRequest,
    StartOver,
    Stored,
    Target,
    WritePiece,
    WriteWhole,
    WrongOffset,
    decide_put,
    parse_content_range,
)


def at_once(call: Any, *arguments: Any) -> Deferred[Any]:
    """``InThread`` without a thread."""
    return maybeDeferred(call, *arguments)


class Answer:
    """An ``IResponse`` with its body at hand."""

    def __init__(self, code: int, headers: Mapping[str, str] | None = None, body: bytes = b"") -> None:
        self.code = code
        self.headers = Headers({name: [value] for name, value in (headers or {}).items()})
        self.body = body
        self.length = len(body)

    def deliverBody(self, protocol: Any) -> None:
        protocol.makeConnection(None)
        protocol.dataReceived(self.body)
        protocol.connectionLost(Failure(ResponseDone()))


@implementer(IConsumer)
class Sink:
    """Takes a body; the way breaks after ``limit`` bytes."""

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self.data = bytearray()
        self.broken: Deferred[None] = Deferred()

    def write(self, data: bytes) -> None:
        self.data += data
        if self.limit is not None and len(self.data) >= self.limit and not self.broken.called:
            del self.data[self.limit :]
            self.broken.callback(None)

    def registerProducer(self, producer: Any, streaming: bool) -> None:
        raise NotImplementedError

    def unregisterProducer(self) -> None:
        raise NotImplementedError


@dataclass
class Kept:
    """What is under one key."""

    data: bytearray = field(default_factory=bytearray)
    target: Target | None = None
    sha256: str | None = None
    verified: int | None = None


class FileServer:
    """
    ``NodeHttp`` to one worker.

    Attributes:
        cuts: for each coming PUT, after how many bytes of its body the way breaks (None = not at all).
        refusals: answers given to coming requests instead of serving them.
        requests: (method, content range) of what came.
        corrupt: flips the first byte of so many coming bodies.
        old: whether it knows no fingerprints.
        names: what each PUT said the file is: its hash and its fingerprint.
    """

    def __init__(self) -> None:
        self.files: dict[str, Kept] = {}
        self.cuts: list[int | None] = []
        self.refusals: list[Answer | Exception] = []
        self.requests: list[tuple[str, str]] = []
        self.classes: set[TrafficClass] = set()
        self.corrupt = 0
        self.old = False
        self.names: list[tuple[str, str]] = []
        self.received = 0

    async def request(
        self,
        node: NodeId,
        method: str,
        path: str,
        *,
        headers: Mapping[str, str],
        body: IBodyProducer | None,
        traffic: TrafficClass,
        deadline: float | None,
    ) -> Any:
        self.requests.append((method, headers.get(CONTENT_RANGE, "")))
        if self.refusals:
            refusal = self.refusals.pop(0)
            if isinstance(refusal, Exception):
                raise refusal
            return refusal
        key = unquote(path.removeprefix(FILES_PATH))
        if method == "HEAD":
            return self._head(key)
        self.classes.add(traffic)
        assert body is not None
        return await self._put(key, headers, body)

    def _head(self, key: str) -> Answer:
        kept = self.files.get(key)
        if kept is not None and kept.target is not None and len(kept.data) == kept.target.total:
            self._settle(key, kept.target.sha256)  # every byte came, its answer was lost: the hash decides
            kept = self.files.get(key)
        if kept is None:
            return Answer(404, {} if self.old else {FINGERPRINT: "known"})
        headers = {FILE_SIZE: str(len(kept.data)), LOCAL_PATH: f"/worker/{key}"}
        if kept.verified is not None:
            headers[VERIFIED_BYTES] = str(kept.verified)
        elif kept.sha256 is not None:
            headers[CONTENT_SHA256] = kept.sha256
        elif kept.target is not None:
            headers[TARGET_SHA256] = kept.target.sha256
        return Answer(200, headers)

    async def _put(self, key: str, headers: Mapping[str, str], body: IBodyProducer) -> Answer:
        kept = self.files.get(key)
        stored = Stored() if kept is None else Stored(len(kept.data), True, kept.target, kept.sha256)
        wanted = parse_content_range(headers[CONTENT_RANGE]) if CONTENT_RANGE in headers else None
        length = int(body.length)  # type: ignore[call-overload]
        mark = None if self.old else headers.get(FINGERPRINT)
        self.names.append((headers[CONTENT_SHA256], mark or ""))
        decision = decide_put(stored, PutRequest(wanted, headers[CONTENT_SHA256], length, mark))
        match decision:
            case AlreadyWhole():
                return self._staged(key)
            case WrongOffset(size):
                return Answer(416, {FILE_SIZE: str(size)})
            case StartOver(wipe):
                if wipe:
                    self.files.pop(key, None)
                return Answer(409, body=b"start again from 0")
            case WriteWhole(sha256):
                await self._take(self.files.setdefault(key, Kept()), body)
                return self._settle(key, sha256 or "")
            case WritePiece(range_, target, fresh, _):
                if fresh:
                    self.files[key] = Kept()
                self.files[key].target = target
                await self._take(self.files[key], body)
                return self._settle(key, target.sha256) if range_.finishes else Answer(308)
            case _:
                return Answer(400, body=b"bad request")

    async def _take(self, kept: Kept, body: IBodyProducer) -> None:
        sink = Sink(self.cuts.pop(0) if self.cuts else None)
        done = body.startProducing(sink)
        if sink.broken.called:
            body.stopProducing()
        else:
            await done
        if self.corrupt and sink.data:
            self.corrupt -= 1
            sink.data[0] ^= 1
        self.received += len(sink.data)
        kept.data += sink.data
        if sink.broken.called:
            raise Unreached(NotServed("the stream ended before the answer"))

    def _settle(self, key: str, sha256: str) -> Answer:
        kept = self.files[key]
        if hashlib.sha256(kept.data).hexdigest() != sha256:
            del self.files[key]
            return Answer(400, body=b"the hash differs: start again from 0")
        kept.sha256, kept.target = sha256, None
        return self._staged(key)

    def _staged(self, key: str) -> Answer:
        return Answer(200, body=b'{"local_path":"/worker/%s"}' % key.encode())


class CountingHold:
    """A hold that never ends."""

    deadline = 1e12

    def __init__(self) -> None:
        self.observed = 0

    def observe(self) -> None:
        self.observed += 1

    def check(self) -> None:
        """Never over."""
