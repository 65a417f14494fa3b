"""What of a model goes to a node, under which key: pure, from a listing of its files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from localai_dist.wire.files import PIECE_BYTES, ContentRange
from localai_dist.wire.keys import HASH_SUFFIX, TARGET_SUFFIX


@dataclass(frozen=True, slots=True)
class SourceFile:
    """
    One file to stage.

    Attributes:
        path: where it is on this frontend.
        relative: its name under the models folder, with ``/``.
        size: bytes.
        key: its name on the worker, ``models/<model>/<relative>``.
    """

    path: Path
    relative: str
    size: int
    key: str


@dataclass(frozen=True, slots=True)
class StagedFile:
    """
    One file that is on the node, whole and verified.

    Attributes:
        source: what was staged.
        remote: its absolute path on the worker, in the worker's own words.
        sent: bytes that had to be moved; 0 when it was there already.
    """

    source: SourceFile
    remote: str
    sent: int


def next_piece(offset: int, total: int, limit: int = PIECE_BYTES) -> ContentRange:
    """The range of the request that starts at ``offset``; no request carries more than ``limit`` bytes."""
    return ContentRange(offset, min(offset + limit, total) - 1, total)


def is_sidecar(name: str, siblings: frozenset[str]) -> bool:
    """Whether ``name`` only records the hash of a file beside it; such files would multiply if they were staged."""
    return any(
        name.endswith(suffix) and name.removesuffix(suffix) in siblings for suffix in (TARGET_SUFFIX, HASH_SUFFIX)
    )


def companions(relative: str) -> tuple[str, ...]:
    """Files that belong to ``relative`` when they lie beside it: an ONNX voice's description."""
    return (relative + ".json",) if relative.endswith(".onnx") else ()


def model_root(remote: str, relative: str) -> str:
    """
    The models folder of this model on the worker: the remote file without its path relative to the models folder.

    ``/data/models/tiny/sub/a.gguf`` staged as ``sub/a.gguf`` gives ``/data/models/tiny``. A worker that answered with
    a path of another shape gives the file's own folder.
    """
    path = PurePosixPath(remote)
    depth = len(PurePosixPath(relative).parts)
    if path.parts[-depth:] == PurePosixPath(relative).parts:
        return str(path.parents[depth - 1])
    return str(path.parent)


def total_size(files: Sequence[SourceFile]) -> int:
    """Bytes of all files."""
    return sum(file.size for file in files)
