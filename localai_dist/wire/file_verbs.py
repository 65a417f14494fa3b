"""
Control verbs about files: what a request brought goes again, and files by way of an object store.

A worker without an object store answers all of them but the release 404.

Source: docs/wire/files.md; wire contract §6.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from localai_dist.units import MINUTE
from localai_dist.wire.verbs import Empty, Verb, VerbKind


class ReleaseRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """A request whose files are needed no more; late ones of it are refused."""

    request_id: str = ""


class ErrorReply(msgspec.Struct, frozen=True, omit_defaults=True):
    """Done, unless ``error`` says why not."""

    error: str = ""


class EnsureRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """
    Have a file fetched from the object store; asked again and again until the answer has a path.

    Attributes:
        key: the file's staging key.
        object: its key in the bucket.
        sha256, size: what it is.
    """

    key: str = ""
    object: str = ""
    sha256: str = ""
    size: int = 0


class EnsureReply(msgspec.Struct, frozen=True, omit_defaults=True):
    """
    How far a fetch is.

    Attributes:
        local_path: set when the file is whole and verified.
        received: bytes of it that are here.
        verified: bytes of them that are hashed.
        error: why it can't be had; asking again starts anew.
        passing: the error may be gone at the next try.
        absent: the store has no such object.
        damaged: the object is not what it is called.
        full: the worker's disk is full.
    """

    local_path: str = ""
    received: int = 0
    verified: int = 0
    error: str = ""
    passing: bool = False
    absent: bool = False
    damaged: bool = False
    full: bool = False


class TempReply(msgspec.Struct, frozen=True, omit_defaults=True):
    """A new file of the worker's, for an output."""

    local_path: str = ""
    error: str = ""


class StageRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """Put a file of the worker into the object store: ``key`` names it, ``object`` where it goes."""

    key: str = ""
    object: str = ""


class ListRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """The files below a folder's key."""

    prefix: str = ""


class FilesReply(msgspec.Struct, frozen=True, omit_defaults=True):
    """Names relative to the folder asked for."""

    files: list[str] = []
    error: str = ""


FILES_RELEASE: Final = Verb("/v1/control/files/release", VerbKind.UNARY, ReleaseRequest, ErrorReply, 30.0)
FILES_ENSURE: Final = Verb("/v1/control/files/ensure", VerbKind.UNARY, EnsureRequest, EnsureReply, 10 * MINUTE)
FILES_STAGE: Final = Verb("/v1/control/files/stage", VerbKind.UNARY, StageRequest, ErrorReply, 10 * MINUTE)
FILES_TEMP: Final = Verb("/v1/control/files/temp", VerbKind.UNARY, Empty, TempReply, 30.0)
FILES_LISTDIR: Final = Verb("/v1/control/files/listdir", VerbKind.UNARY, ListRequest, FilesReply, 30.0)

FILE_VERBS: Final[dict[str, Verb[Any, Any]]] = {
    verb.path: verb for verb in (FILES_RELEASE, FILES_ENSURE, FILES_STAGE, FILES_TEMP, FILES_LISTDIR)
}
