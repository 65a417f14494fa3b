"""What the answers of a worker's file server mean for an upload: pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

import msgspec

from localai_dist.wire.files import CONTENT_SHA256, FILE_SIZE, LOCAL_PATH, TARGET_SHA256, VERIFIED_BYTES


@dataclass(frozen=True, slots=True)
class There:
    """The file is on the node, whole, with the right hash, at ``path``."""

    path: str


@dataclass(frozen=True, slots=True)
class ResumeAt:
    """Its first ``offset`` bytes are there; 0 for a file that has to be sent from the start."""

    offset: int


@dataclass(frozen=True, slots=True)
class Verifying:
    """The worker hashes what it has; ``verified`` bytes so far. Ask again."""

    verified: int


Found: TypeAlias = There | ResumeAt | Verifying


def read_probe(status: int, headers: Mapping[str, str], *, sha256: str, size: int, fingerprint: str = "") -> Found:
    """
    What a HEAD found, for a file with this hash and size.

    Args:
        headers: of the answer, names in lower case.
        fingerprint: what may stand for the hash of an unfinished file.
    """
    if status != 200:
        return ResumeAt(0)
    stored = _number(headers.get(FILE_SIZE.lower(), ""))
    if headers.get(CONTENT_SHA256.lower(), "").lower() == sha256 and stored in (size, None):
        return There(headers.get(LOCAL_PATH.lower(), ""))
    verified = _number(headers.get(VERIFIED_BYTES.lower(), ""))
    if verified is not None and headers.get(CONTENT_SHA256.lower()) is None:
        return Verifying(verified)
    ours = headers.get(TARGET_SHA256.lower(), "").lower() in {sha256, fingerprint or sha256}
    return ResumeAt(stored if ours and stored is not None and stored < size else 0)


class PutVerdict(Enum):
    """What to do after one PUT."""

    DONE = "done"
    NEXT = "next piece"
    PROBE = "ask where it stands"
    RESTART = "restart from 0"
    AGAIN = "try again later"
    REFUSED = "give up"


def judge_put(status: int, *, last: bool) -> PutVerdict:
    """
    What the status of a PUT means; ``last`` for the piece that finishes the file.

    A 400 on the last piece is the worker's hash check: what arrived is not what was sent, and it was thrown away.
    """
    match status:
        case 200:
            return PutVerdict.DONE if last else PutVerdict.PROBE
        case 308:
            return PutVerdict.PROBE if last else PutVerdict.NEXT
        case 416:
            return PutVerdict.PROBE
        case 409:
            return PutVerdict.RESTART
        case 400 if last:
            return PutVerdict.RESTART
        case 408 | 429 | 502 | 503 | 504:
            return PutVerdict.AGAIN
        case _:
            return PutVerdict.REFUSED


class _Stored(msgspec.Struct):
    local_path: str


def local_path(text: str) -> str | None:
    """Where the worker says the whole file is, in the body of its answer; None if it does not say."""
    try:
        return msgspec.json.decode(text, type=_Stored).local_path
    except msgspec.DecodeError:
        return None


def _number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() else None
