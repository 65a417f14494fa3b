"""
The file protocol as HTTP resources: HEAD, PUT and GET of one file, a folder's listing, a temporary file.

Source: surface §5.6.
"""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path
from typing import Any, assert_never

import msgspec
from twisted.web.server import NOT_DONE_YET
from twisted.web.static import NoRangeStaticProducer

from localai_dist.errors import InvalidName, UserMistake
from localai_dist.net.head import header
from localai_dist.net.request import StreamingRequest
from localai_dist.wire.files import (
    CONTENT_RANGE,
    CONTENT_SHA256,
    FILE_SIZE,
    FINGERPRINT,
    LOCAL_PATH,
    PIECE_BYTES,
    RESUME_INCOMPLETE,
    TARGET_SHA256,
    TARGET_SIZE,
    VERIFIED_BYTES,
    PutRequest,
    parse_content_range,
    parse_sha256,
)
from localai_dist.wire.keys import HASH_SUFFIX, TARGET_SUFFIX, StagingKey, is_sidecar, parse_key, parse_prefix
from localai_dist.worker.answers import (
    Absent,
    Conflict,
    Incomplete,
    Partial,
    PutAnswer,
    Staged,
    Unusable,
    Verifying,
    Whole,
)
from localai_dist.worker.containment import Areas
from localai_dist.worker.errors import EscapesRoot, NoRoom, RequestOver
from localai_dist.worker.offload import Offload
from localai_dist.worker.request_files import RequestFiles
from localai_dist.worker.resources import GuardedResource, refusal, respond, rest_of_path
from localai_dist.worker.sums import DRAFT_SUFFIX
from localai_dist.worker.timing import TooLate
from localai_dist.worker.uploads import Uploads

_NOT_FOUND = "there is no such file"
_MISFITS = {
    errno.EISDIR: (409, "there is a folder of that name"),
    errno.ENOTDIR: (409, "a part of the path is a file, not a folder"),
    errno.EEXIST: (409, "a part of the path is a file, not a folder"),
    errno.ENAMETOOLONG: (400, "the path is too long for this worker's disk"),
    errno.ELOOP: (400, "the path has too many symbolic links in it"),
}
"""What the disk says of a key that does not fit what is there: the asker's fault, with status and words."""

_HIDDEN = (HASH_SUFFIX, TARGET_SUFFIX, DRAFT_SUFFIX, HASH_SUFFIX + ".tmp", TARGET_SUFFIX + ".tmp")


class FilesResource(GuardedResource):
    """``/v1/files/<key>`` and ``/v1/files/temp``."""

    def __init__(
        self, token: str, *, areas: Areas, uploads: Uploads, requests: RequestFiles, offload: Offload, temp: Path
    ) -> None:
        super().__init__(token)
        self._areas = areas
        self._requests = requests
        self._uploads = uploads
        self._offload = offload
        self._temp = temp

    def streams_body_for(self, request: Any) -> bool:
        """A PUT's body is taken as it arrives."""
        return bool(request.method == b"PUT")

    def answer(self, request: StreamingRequest) -> Any:
        """By method."""
        if request.method == b"POST" and request.postpath == [b"temp"]:
            return respond(request, self._make_temp(request))
        try:
            key = parse_key(_key_text(request))
            path = self._path(key)
        except (UserMistake, EscapesRoot) as error:
            return refusal(request, 400, str(error))
        except OSError as error:
            return _misfit(request, error)
        if request.method == b"HEAD":
            self._requests.saw(key)
            return respond(request, self._head(request, path))
        if request.method == b"GET":
            return self._get(request, path)
        if request.method == b"PUT":
            return self._put(request, key, path)
        return self.not_allowed(request, "HEAD, GET, PUT")

    def _path(self, key: StagingKey) -> Path:
        path = self._areas.path(key)
        for suffix in (TARGET_SUFFIX, HASH_SUFFIX):
            if path.name.endswith(suffix) and path.with_name(path.name.removesuffix(suffix)).exists():
                raise UserMistake(f"{path.name} is kept by this worker itself, beside the file it belongs to")
        return path

    async def _head(self, request: StreamingRequest, path: Path) -> bytes:
        try:
            answer = await self._uploads.head(path)
        except OSError as error:
            return _misfit(request, error)
        if isinstance(answer, Absent):
            return refusal(request, 404, _NOT_FOUND, headers=[(FINGERPRINT, "known")])
        for name, value in _head_headers(answer).items():
            request.setHeader(name, value)
        request.setHeader("Accept-Ranges", "bytes")
        request.setHeader(LOCAL_PATH, str(path))
        return b""

    def _get(self, request: StreamingRequest, path: Path) -> Any:
        try:
            file = path.open("rb") if path.is_file() else None
        except OSError as error:
            if error.errno in _MISFITS:
                return _misfit(request, error)
            return refusal(request, 500, f"{path.name} can't be read: {error.strerror}")
        if file is None:
            return refusal(request, 404, _NOT_FOUND)
        request.setHeader("content-type", "application/octet-stream")
        request.setHeader("content-length", str(os.fstat(file.fileno()).st_size))
        NoRangeStaticProducer(request, file).start()
        return NOT_DONE_YET

    def _put(self, request: StreamingRequest, key: StagingKey, path: Path) -> Any:
        try:
            put = _put_request(request)
        except UserMistake as error:
            return refusal(request, 400, str(error))
        return respond(request, self._take(request, key, path, put))

    async def _take(self, request: StreamingRequest, key: StagingKey, path: Path, put: PutRequest) -> bytes:
        try:
            async with self._requests.writing(key, put):
                answer = await self._uploads.put(path, put, request.body)
        except (InvalidName, RequestOver, NoRoom) as error:
            await _drain(request)
            status = 410 if isinstance(error, RequestOver) else 507 if isinstance(error, NoRoom) else 400
            return refusal(request, status, str(error))
        except OSError as error:
            answered = _misfit(request, error)
            await _drain(request)
            return answered
        except TooLate as error:
            return refusal(request, 503, str(error))  # nobody may hear it: what is left of the body is not waited for
        if not request.body.ended:
            await _drain(request)
        return _put_answer(request, answer)

    async def _make_temp(self, request: StreamingRequest) -> bytes:
        def make() -> str:
            self._temp.mkdir(parents=True, exist_ok=True)
            descriptor, name = tempfile.mkstemp(dir=self._temp)
            os.close(descriptor)
            return name

        return _json(request, {"local_path": await self._offload(make)})


class FilesListResource(GuardedResource):
    """``/v1/files-list/<prefix>``: the files below a folder, relative to it, without hash files."""

    def __init__(self, token: str, *, areas: Areas, offload: Offload) -> None:
        super().__init__(token)
        self._areas = areas
        self._offload = offload

    def answer(self, request: StreamingRequest) -> Any:
        """GET only."""
        if request.method != b"GET":
            return self.not_allowed(request, "GET")
        try:
            folder = self._areas.path(parse_prefix(_key_text(request)))
        except (UserMistake, EscapesRoot) as error:
            return refusal(request, 400, str(error))
        return respond(request, self._listing(request, folder))

    async def _listing(self, request: StreamingRequest, folder: Path) -> bytes:
        files = await self._offload(files_below, folder)
        if files is None:
            return refusal(request, 404, "there is no such folder")
        return _json(request, {"files": files})


def files_below(folder: Path) -> list[str] | None:
    """The files below ``folder``, relative to it, sorted, without hash files; None if it is no folder."""
    if not folder.is_dir():
        return None
    found: list[str] = []
    for parent, _folders, names in os.walk(folder):
        here = Path(parent)
        found += [str((here / name).relative_to(folder)) for name in names if not _is_hidden(here, name)]
    return sorted(found)


def _is_hidden(folder: Path, name: str) -> bool:
    if name.endswith(DRAFT_SUFFIX):
        return True
    if not is_sidecar(name.removesuffix(".tmp")):
        return False
    owner = next(name.removesuffix(suffix) for suffix in _HIDDEN if name.endswith(suffix))
    return (folder / owner).exists()


def _head_headers(answer: Whole | Partial | Verifying) -> dict[str, str]:
    headers = {FILE_SIZE: str(answer.size)}
    match answer:
        case Whole():
            headers[CONTENT_SHA256] = answer.sha256
            return headers
        case Verifying():
            headers[VERIFIED_BYTES] = str(answer.verified)
        case Partial():
            pass
    if answer.target is not None:
        headers[TARGET_SHA256] = answer.target.sha256
        if answer.target.total is not None:
            headers[TARGET_SIZE] = str(answer.target.total)
    return headers


def _put_request(request: StreamingRequest) -> PutRequest:
    range_ = header(request, CONTENT_RANGE)
    sha256 = header(request, CONTENT_SHA256)
    fingerprint = header(request, FINGERPRINT)
    length = header(request, "content-length")
    return PutRequest(
        range=None if range_ is None else parse_content_range(range_),
        sha256=None if sha256 is None else parse_sha256(sha256),
        content_length=None if length is None else int(length),
        fingerprint=None if fingerprint is None else parse_sha256(fingerprint),
    )


def _put_answer(request: StreamingRequest, answer: PutAnswer) -> bytes:
    match answer:
        case Staged(path):
            return _json(request, {"local_path": str(path)})
        case Incomplete(size, wrong_offset):
            headers = [(FILE_SIZE, str(size))]
            if wrong_offset:
                return refusal(request, 416, f"this file has {size} bytes: continue there", headers=headers)
            request.setResponseCode(RESUME_INCOMPLETE)
            request.setHeader(FILE_SIZE, str(size))
            request.setHeader("Range", f"bytes=0-{size - 1}")
            return b""
        case Conflict(text):
            return refusal(request, 409, text)
        case Unusable(text):
            return refusal(request, 400, text)
        case _:
            assert_never(answer)


def _misfit(request: StreamingRequest, error: OSError) -> bytes:
    """
    The refusal of a key that does not fit what is on the disk.

    Raises:
        OSError: ``error``, when it is nothing the asker did.
    """
    found = _MISFITS.get(error.errno or 0)
    if found is None:
        raise error
    return refusal(request, found[0], found[1])


async def _drain(request: StreamingRequest) -> None:
    """Read and drop what is left of a refused piece: a client that is still sending would see a reset, not why."""
    dropped = 0
    while dropped < PIECE_BYTES and (chunk := await request.body.read(PIECE_BYTES)):
        dropped += len(chunk)


def _key_text(request: StreamingRequest) -> str:
    return rest_of_path(request, "surrogateescape")


def _json(request: StreamingRequest, value: Any) -> bytes:
    request.setHeader("content-type", "application/json")
    return msgspec.json.encode(value)
