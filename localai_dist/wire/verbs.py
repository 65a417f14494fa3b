"""
Control verbs: what a frontend asks of a worker, and what it gets back, to and from JSON.

A verb is a path below ``/v1/control/`` and a shape: ``unary`` (one JSON body each way), ``stream`` (newline-delimited
JSON: progress lines, then exactly one reply line) or ``silent`` (204). A verb's *own* failure is an answer with
``error`` set, never an HTTP status; 404 means this worker does not know the verb.

``file_verbs`` has the verbs about files.

Source: docs/wire/verbs.md; wire contract §6, surface §1.7.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, Generic, TypeVar

import msgspec

from localai_dist.errors import UserMistake
from localai_dist.units import MINUTE, MiB

CONTROL_PREFIX: Final = "/v1/control/"

MAX_BODY_BYTES: Final = 8 * MiB
"""Largest request body of a verb. Source: wire contract §6."""

MAX_LINE_BYTES: Final = 8 * MiB
"""Largest line of a streaming reply."""

ECHO_BYTES: Final = 128
"""How much of an unknown path is echoed. Source: wire contract §6."""


class InvalidBody(UserMistake):
    """A verb's body or line that is not the JSON it should be."""


class VerbKind(StrEnum):
    """How a verb answers."""

    UNARY = "unary"
    STREAM = "stream"
    SILENT = "silent"


class Empty(msgspec.Struct, frozen=True):
    """A body without fields."""


class InstallRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """
    Install a backend if it is not there, and start it for a model.

    Attributes:
        backend: name in the gallery.
        model_id: the model it is started for; empty = install only, nothing is started.
        backend_galleries: JSON text ``[{"url","name"}]``; empty = the worker's own.
        uri: install from here instead of a gallery.
        replica_index: which copy of the model on this node, from 0.
        force: install again, stopping what runs from the old files.
        op_id: asks for progress lines with this id.
        attempt: the load job's fence, for the log.
    """

    backend: str = ""
    model_id: str = ""
    backend_galleries: str = ""
    uri: str = ""
    name: str = ""
    alias: str = ""
    replica_index: int = 0
    force: bool = False
    op_id: str = ""
    attempt: int = 0


class InstallReply(msgspec.Struct, frozen=True, omit_defaults=True):
    """
    The started process.

    Attributes:
        address: ``127.0.0.1:port``, meaningful on the worker only (or through its tunnel).
        backend_token: what the process wants as gRPC bearer.
    """

    success: bool
    address: str = ""
    error: str = ""
    backend_token: str = ""


class InstallProgress(msgspec.Struct, frozen=True, omit_defaults=True):
    """One step of an install; ``phase`` is resolving, downloading, extracting or starting."""

    phase: str
    op_id: str = ""
    node_id: str = ""
    backend: str = ""
    file_name: str = ""
    current: int = 0
    total: int = 0
    percentage: float = 0.0


class UpgradeRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """Stop every process of a backend and install it again; nothing is started."""

    backend: str = ""
    backend_galleries: str = ""
    uri: str = ""
    name: str = ""
    alias: str = ""
    replica_index: int = 0
    op_id: str = ""


class StoppedReply(msgspec.Struct, frozen=True, omit_defaults=True):
    """
    Answer of upgrade and delete.

    Attributes:
        stopped_process_keys: processes that are gone, also on partial failure.
        reports_stopped_processes: True here; an older worker's silence is not a report.
    """

    success: bool
    error: str = ""
    stopped_process_keys: list[str] = []
    reports_stopped_processes: bool = False


class BackendEntry(msgspec.Struct, frozen=True, omit_defaults=True):
    """One installed backend."""

    name: str
    is_system: bool = False
    is_meta: bool = False
    installed_at: str = ""
    gallery_url: str = ""
    version: str = ""
    uri: str = ""
    digest: str = ""


class ListReply(msgspec.Struct, frozen=True, omit_defaults=True):
    """The installed backends."""

    backends: list[BackendEntry] = []
    error: str = ""


class StopRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """Stop processes of a backend, of a model, or one ``model#n``; a blank name = all of them."""

    backend: str = ""
    force: bool = False


class DeleteRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """Remove an installed backend; its processes are stopped first."""

    backend: str = ""


class ModelStopRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """
    Stop exactly one process.

    Attributes:
        process_key: ``model#replica``.
        expected_address: if given, the process must have this address, or nothing is done.
        force: skip Free.
    """

    model_name: str = ""
    process_key: str = ""
    expected_address: str = ""
    force: bool = False
    config_revision: str = ""
    attempt: int = 0


class ModelStopReply(msgspec.Struct, frozen=True, omit_defaults=True):
    """
    Attributes:
        matched: the process was there.
        freed: it gave its memory back by itself.
        terminated: it is gone now, or was not there at all.
    """

    matched: bool = False
    freed: bool = False
    terminated: bool = False
    process_key: str = ""
    address: str = ""
    error: str = ""


class ModelUnloadRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """Ask the process of a model to give its memory back (Free)."""

    model_name: str = ""
    address: str = ""


class ModelDeleteRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """
    Remove the staged files of a model.

    Attributes:
        unfinished_only: whole files stay, and what is being written.
    """

    model_name: str = ""
    unfinished_only: bool = False


class DoneReply(msgspec.Struct, frozen=True, omit_defaults=True):
    """Done, or why not."""

    success: bool
    error: str = ""


class RunningModel(msgspec.Struct, frozen=True, omit_defaults=True):
    """One process that serves; ``address`` is worker-local."""

    model_id: str
    replica_index: int = 0
    address: str = ""


class RunningReply(msgspec.Struct, frozen=True, omit_defaults=True):
    """Every process that serves: dead and stopping ones are left out."""

    models: list[RunningModel] = []
    error: str = ""


Q = TypeVar("Q")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class StreamLine(Generic[R]):
    """
    One line of a streaming answer: ``progress`` xor ``reply``.

    Attributes:
        subject: a request that the frontend re-broadcasts the line; empty = none.
        progress: a step's object as JSON values.
        reply: the verb's answer, the last line.
    """

    subject: str = ""
    progress: dict[str, Any] | None = None
    reply: R | None = None


class _Written(msgspec.Struct, omit_defaults=True):
    subject: str = ""
    progress: dict[str, Any] | None = None
    reply: Any = None


class _Read(msgspec.Struct):
    subject: str = ""
    progress: dict[str, Any] | None = None
    reply: msgspec.Raw = msgspec.Raw(b"null")


@dataclass(frozen=True, slots=True)
class Verb(Generic[Q, R]):
    """
    One verb.

    Attributes:
        path: absolute path on the worker's server.
        kind: how it answers.
        request: type of the request body.
        reply: type of the answer; ``Empty`` for a silent verb.
        budget: how long a frontend waits for the answer (s).
        survives_caller: it goes on when the caller goes away.
    """

    path: str
    kind: VerbKind
    request: type[Q]
    reply: type[R]
    budget: float
    survives_caller: bool = False

    def encode_request(self, request: Q) -> bytes:
        """The request body."""
        return msgspec.json.encode(request)

    def decode_request(self, body: bytes) -> Q:
        """
        The request in ``body``; an empty body is one without fields, unknown fields are ignored.

        Raises:
            InvalidBody: not JSON, or a field of the wrong type.
        """
        return _decode(body.strip() or b"{}", self.request)

    def encode_reply(self, reply: R) -> bytes:
        """The answer's body."""
        return msgspec.json.encode(reply)

    def decode_reply(self, body: bytes) -> R:
        """
        The answer in ``body``; a silent verb's empty body is ``Empty()``.

        Raises:
            InvalidBody: not JSON, or a field missing or of the wrong type.
        """
        return _decode(body.strip() or b"{}", self.reply)

    def encode_line(self, line: StreamLine[R]) -> bytes:
        """One line with its newline."""
        return msgspec.json.encode(_Written(line.subject, line.progress, line.reply)) + b"\n"

    def decode_line(self, line: bytes) -> StreamLine[R]:
        """
        The line in ``line`` (newline or not).

        Raises:
            InvalidBody: not JSON, both or neither of progress and reply, or an answer of the wrong shape.
        """
        read = _decode(line, _Read)
        raw = bytes(read.reply)
        if (read.progress is None) == (raw == b"null"):
            raise InvalidBody("a line must carry either progress or a reply")
        reply = None if raw == b"null" else _decode(raw, self.reply)
        return StreamLine(read.subject, read.progress, reply)


def progress_line(progress: InstallProgress) -> StreamLine[Any]:
    """A line that tells ``progress``."""
    return StreamLine(progress=msgspec.to_builtins(progress))


def read_progress(line: StreamLine[Any]) -> InstallProgress | None:
    """The install step a line tells, or None if it tells something else."""
    try:
        return None if line.progress is None else msgspec.convert(line.progress, InstallProgress)
    except msgspec.ValidationError:
        return None


INSTALL: Final = Verb("/v1/control/backend/install", VerbKind.STREAM, InstallRequest, InstallReply, 15 * MINUTE)
UPGRADE: Final = Verb(
    "/v1/control/backend/upgrade", VerbKind.STREAM, UpgradeRequest, StoppedReply, 15 * MINUTE, survives_caller=True
)
LIST: Final = Verb("/v1/control/backend/list", VerbKind.UNARY, Empty, ListReply, 30.0)
STOP: Final = Verb("/v1/control/backend/stop", VerbKind.SILENT, StopRequest, Empty, 30.0, survives_caller=True)
DELETE: Final = Verb(
    "/v1/control/backend/delete", VerbKind.UNARY, DeleteRequest, StoppedReply, 2 * MINUTE, survives_caller=True
)
MODEL_STOP: Final = Verb(
    "/v1/control/model/stop", VerbKind.UNARY, ModelStopRequest, ModelStopReply, 10.0, survives_caller=True
)
MODEL_UNLOAD: Final = Verb("/v1/control/model/unload", VerbKind.UNARY, ModelUnloadRequest, DoneReply, 30.0)
MODEL_DELETE: Final = Verb("/v1/control/model/delete", VerbKind.UNARY, ModelDeleteRequest, DoneReply, 30.0)
MODELS_RUNNING: Final = Verb("/v1/control/models/running", VerbKind.UNARY, Empty, RunningReply, 10.0)
NODE_STOP: Final = Verb("/v1/control/node/stop", VerbKind.SILENT, Empty, Empty, 10.0)

VERBS: Final[dict[str, Verb[Any, Any]]] = {
    verb.path: verb
    for verb in (
        INSTALL,
        UPGRADE,
        LIST,
        STOP,
        DELETE,
        MODEL_STOP,
        MODEL_UNLOAD,
        MODEL_DELETE,
        MODELS_RUNNING,
        NODE_STOP,
    )
}


def unknown_verb_text(path: str) -> str:
    """What the 404 for ``path`` says; at most ``ECHO_BYTES`` of the path, cut between characters."""
    raw = path.encode("utf-8", "replace")
    echoed = path if len(raw) <= ECHO_BYTES else raw[:ECHO_BYTES].decode("utf-8", "ignore") + "…"
    return f"this worker does not serve the verb {echoed}"


def _decode(body: bytes, type_: type[R]) -> R:
    try:
        return msgspec.json.decode(body, type=type_)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidBody(f"not the JSON a {type_.__name__} should be: {error}") from error
