"""
One file onto a node: probe, skip, resume, send in pieces, have the hash checked; go on after every cut.

The way is HTTP over the node's tunnel, in the bulk class. Progress is what the transport took, what was hashed on
either side, and a confirmed skip; each moves the hold. The hold is the retry budget: silence ends it, size does not.

Source: surface §5.6, internals §4b, LOAD-3, LOAD-10, LOAD-11.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol
from urllib.parse import quote

from twisted.internet.interfaces import IReactorTime
from twisted.internet.task import deferLater
from twisted.logger import Logger
from twisted.web.iweb import IBodyProducer, IResponse

from localai_dist.backoff import Backoff
from localai_dist.ids import NodeId
from localai_dist.mux.classes import TrafficClass
from localai_dist.relay.body import read_beginning
from localai_dist.staging.answers import (
    Found,
    PutVerdict,
    ResumeAt,
    There,
    Verifying,
    judge_put,
    local_path,
    read_probe,
)
from localai_dist.staging.digests import Digests
from localai_dist.staging.errors import NoSpace, UploadRefused
from localai_dist.staging.identity import Identity
from localai_dist.staging.piece import PieceBody
from localai_dist.staging.plan import SourceFile, StagedFile, next_piece
from localai_dist.staging.progress import Progress
from localai_dist.staging.reader import InThread
from localai_dist.staging.transient import WAY_FAILURES, Later, passes
from localai_dist.wire.files import (
    CONTENT_RANGE,
    FILES_PATH,
    FINGERPRINT,
    RESUME_INCOMPLETE,
    TARGET_SHA256,
    ContentRange,
)

RETRY = Backoff(first=1.0, cap=5.0)
"""Between attempts. Short: a newer tunnel of the worker is to be used at once, and asking costs one query."""

VERIFY_POLL = 1.0
"""Between two looks at how far the worker's hashing has come (s)."""

PROBE_TIMEOUT = 60.0
"""A HEAD without an answer for so long is tried again on a fresh stream (s)."""

NO_SPACE = 507
"""A worker's answer when its disk is full."""

_RESTARTS = 1
_ANSWER_LIMIT = 64 * 1024


class NodeHttp(Protocol):
    """HTTP to a node's own server (``relay.http.NodeHttp``)."""

    def request(
        self,
        node: NodeId,
        method: str,
        path: str,
        *,
        headers: Mapping[str, str],
        body: IBodyProducer | None,
        traffic: TrafficClass,
        deadline: float | None,
    ) -> Awaitable[IResponse]:
        """The answer's head; raises ``reach.Unreached``."""


class HoldLike(Protocol):
    """What is needed of a ``HoldTimer``."""

    @property
    def deadline(self) -> float:
        """The cap."""

    def observe(self) -> None:
        """Progress."""

    def check(self) -> None:
        """Raise if the load is over."""


class Means(Protocol):
    """What every upload of a frontend shares (``stager.Stager``)."""

    @property
    def http(self) -> NodeHttp:
        """Requests to nodes."""

    @property
    def clock(self) -> IReactorTime:
        """Times the pauses."""

    @property
    def in_thread(self) -> InThread:
        """Runs blocking file calls."""

    @property
    def chance(self) -> Callable[[], float]:
        """Random numbers from 0 to 1, for the jitter."""

    @property
    def piece(self) -> int:
        """The most bytes of one PUT."""

    @property
    def called(self) -> Callable[[NodeId], str]:
        """What people call a node."""

    @property
    def digests(self) -> Digests:
        """Hashes of the source files."""


class Upload:
    """One file on its way to one node."""

    log = Logger()

    def __init__(self, means: Means, node: NodeId, file: SourceFile, progress: Progress, hold: HoldLike) -> None:
        self._means = means
        self._node = node
        self._file = file
        self._progress = progress
        self._hold = hold
        self._path = FILES_PATH + quote(file.key)
        self._names = Identity(means.digests, file.path, hold.observe)
        self._sent = 0
        self._restarts = 0

    async def run(self) -> StagedFile:
        """Until the file is there; see ``Stager.stage`` for what it raises."""
        self._progress.phase = "hashing"
        try:
            await self._names.recall()
            return await self._attempts(await self._first_look())
        finally:
            self._names.close()

    async def once(self) -> StagedFile:
        """
        One attempt, for who decides about the next one itself; a later one goes on from what is there.

        Raises:
            StagingError: as ``Stager.stage``; and whatever broke the way (``transient.WAY_FAILURES``).
        """
        return StagedFile(self._file, await self._once(), self._sent)

    async def _attempts(self, start: int | None) -> StagedFile:
        attempt = 0
        while True:
            self._hold.check()
            before = self._sent
            try:
                return StagedFile(self._file, await self._once(start), self._sent)
            except WAY_FAILURES as error:
                self._hold.check()
                self._raise_unless_passing(error)
            start = None
            attempt = 1 if self._sent > before else attempt + 1
            await self._pause(attempt)

    async def _first_look(self) -> int | None:
        """
        0 for a large file that has to be hashed and of which the worker has nothing, None to ask again with its hash.

        Its pieces may go while it is hashed, if the worker knows how. What is there may be this very file, and that
        needs no sending, so it is only compared.
        """
        if self._names.sha256 or self._file.size <= self._means.piece:
            return None
        try:
            response = await self._head()
        except WAY_FAILURES as error:
            self._hold.check()
            self._raise_unless_passing(error)
            return None
        if response.code != 404:
            return None
        if FINGERPRINT.lower() in _headers(response):
            await self._names.sample()
            self._names.begin()
        return 0

    async def _once(self, start: int | None = None) -> str:
        """The remote path, after as many pieces as it takes; from ``start`` if it is known where it stands."""
        while True:
            if start is None:
                await self._hash()
                found = await self._where()
                if isinstance(found, There):
                    return found.path
                start = found.offset
                if start or self._sent:
                    self._tell("goes on", start)
            before = self._sent
            remote = await self._send_from(start)
            if remote is not None:
                return remote
            if self._sent == before:
                raise Later("the worker's answers about this file do not agree with each other")
            start = None

    async def _hash(self) -> None:
        """Until the hash is found."""
        if not self._names.sha256:
            self._progress.phase = "hashing"
            await self._names.settle()

    async def _where(self) -> There | ResumeAt:
        """Where the upload stands; waits while the worker verifies, as long as its count moves."""
        seen = -1
        while isinstance(found := await self._probe(), Verifying):
            self._progress.phase = "verifying"
            if found.verified > seen:
                seen = found.verified
                self._hold.observe()
            await deferLater(self._means.clock, VERIFY_POLL)
        self._progress.in_file = found.offset if isinstance(found, ResumeAt) else 0
        self._progress.goes_on()
        if isinstance(found, There):
            self._hold.observe()
        return found

    async def _probe(self) -> Found:
        response = await self._head()
        if judge_put(response.code, last=True) is PutVerdict.AGAIN:
            raise Later(f"the worker answered {response.code}")
        if response.code not in (200, 404):
            raise self._refused(response.code, "")
        headers, names = _headers(response), self._names
        if headers.get(TARGET_SHA256.lower(), names.sha256) != names.sha256:
            await names.sample()  # another frontend may have begun before it had the hash
        size = self._file.size
        return read_probe(response.code, headers, sha256=names.sha256, size=size, fingerprint=names.fingerprint)

    async def _head(self) -> IResponse:
        deadline = min(self._hold.deadline, self._means.clock.seconds() + PROBE_TIMEOUT)
        return await self._request("HEAD", {}, None, TrafficClass.CONTROL, deadline)

    async def _send_from(self, offset: int) -> str | None:
        """Send pieces from ``offset``: the remote path once the file is whole, None to ask where it stands."""
        while True:
            range_ = next_piece(offset, self._file.size, self._means.piece) if self._file.size else None
            last = range_ is None or range_.finishes
            if last or self._names.is_ready or not self._names.fingerprint:
                await self._hash()
            self._progress.phase = "sending"
            status, text = await self._put(range_)
            match judge_put(status, last=last):
                case PutVerdict.DONE:
                    self._hold.observe()
                    return local_path(text)
                case PutVerdict.NEXT:
                    assert range_ is not None
                    offset = range_.end + 1
                case PutVerdict.PROBE:
                    return None
                case PutVerdict.RESTART if self._restarts < _RESTARTS:
                    self._restarts += 1
                    self._note(Later(f"the worker threw away what it had ({status}): {text}"))
                    offset, self._progress.in_file = 0, 0
                    await self._hash()  # it may be this very file, by another frontend: by its hash it is kept
                case PutVerdict.AGAIN:
                    raise Later(f"the worker answered {status}: {text}")
                case _:
                    raise self._refused(status, text)

    async def _put(self, range_: ContentRange | None) -> tuple[int, str]:
        """Status and text of the answer to one piece (None: the whole, empty file)."""
        headers = self._names.headers()
        if range_ is not None:
            headers[CONTENT_RANGE] = str(range_)
        start, length = (0, 0) if range_ is None else (range_.start, range_.length)
        body = PieceBody(self._file.path, start, length, in_thread=self._means.in_thread, taken=self._taken)
        try:
            response = await self._request("PUT", headers, body, TrafficClass.BULK, self._hold.deadline)
            if response.code in (200, RESUME_INCOMPLETE):
                body.confirmed()
            return response.code, await _text(response)
        finally:
            body.stopProducing()  # an answer may come before the whole body was taken

    async def _request(
        self,
        method: str,
        headers: Mapping[str, str],
        body: IBodyProducer | None,
        traffic: TrafficClass,
        deadline: float,
    ) -> IResponse:
        return await self._means.http.request(
            self._node, method, self._path, headers=headers, body=body, traffic=traffic, deadline=deadline
        )

    def _taken(self, count: int) -> None:
        self._sent += count
        self._progress.sent(count)
        self._hold.observe()

    async def _pause(self, attempt: int) -> None:
        self._progress.phase = "waiting"
        await deferLater(self._means.clock, RETRY.delay(attempt, self._means.chance()))

    def _raise_unless_passing(self, error: Exception) -> None:
        if not passes(error):
            raise error
        self._note(error)

    def _note(self, error: Exception) -> None:
        self._progress.interrupted(error)
        self._tell("interrupted", self._progress.in_file, self._progress.trouble)

    def _tell(self, what: str, at: int, text: str = "") -> None:
        self.log.info(
            "staging {file} on node {node} {what} at {at} of {size} bytes{text}",
            file=self._file.relative,
            node=self._means.called(self._node),
            what=what,
            at=at,
            size=self._file.size,
            text=f": {text}" if text else "",
        )

    def _refused(self, status: int, text: str) -> UploadRefused:
        kind = NoSpace if status == NO_SPACE else UploadRefused
        return kind(f"{self._where_to()}: the worker answered {status}: {text or 'no reason given'}")

    def _where_to(self) -> str:
        return f"staging {self._file.relative} on node {self._means.called(self._node)}"


async def _text(response: IResponse) -> str:
    return " ".join((await read_beginning(response, _ANSWER_LIMIT)).decode("utf-8", "replace").split())


def _headers(response: IResponse) -> dict[str, str]:
    found = response.headers.getAllRawHeaders()
    return {name.decode("latin-1").lower(): values[-1].decode("latin-1") for name, values in found if values}
