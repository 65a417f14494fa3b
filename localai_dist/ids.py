"""Distinct types for the names things have, with their parsers."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from typing import NewType

from localai_dist.errors import InvalidName

NodeId = NewType("NodeId", str)
"""The registered identity of a worker or agent worker (a uuid in text)."""

InstanceId = NewType("InstanceId", str)
"""One running frontend process."""

ModelName = NewType("ModelName", str)
"""A model as clients name it."""

Epoch = NewType("Epoch", int)
"""Fencing token of one tunnel ownership: unique, compared for equality only, never by size."""

MAX_PATH_BYTES = 2048
"""Bytes in one relative path, UTF-8. Source: ours; well under PATH_MAX (4096) with a root in front."""

MAX_PART_BYTES = 255
"""Bytes in one part of a path, UTF-8. Source: NAME_MAX of Linux file systems."""

MAX_PATH_PARTS = 64
"""Parts of one path. Source: ours; folders are made and walked one inside the other, and no model is that deep."""

MAX_FILE_NAME_BYTES = MAX_PART_BYTES - 18
"""Bytes in a staged file's name, UTF-8: what a worker keeps beside it has a name up to 18 bytes longer."""

NAMES_KEPT = 10_000
"""How many names of nodes are remembered."""

_IDENTIFIER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,35}")


class NodeNames:
    """
    What people call the nodes that this process has heard of: for logs and errors, never for a decision.

    Whoever reads a node's row says so here; a name stays with its node for good.
    """

    def __init__(self) -> None:
        self._names: dict[str, str] = {}

    def learn(self, node: str, name: str) -> None:
        """``node`` is called ``name``."""
        if node in self._names or not name:
            return
        if len(self._names) >= NAMES_KEPT:
            del self._names[next(iter(self._names))]
        self._names[node] = name

    def __call__(self, node: str) -> str:
        """The node's name; its id while the name is not known."""
        return self._names.get(node, node)

    def with_id(self, node: str) -> str:
        """``worker-1 (86e6276e-…)``, for a line by which somebody may want to look for the node elsewhere."""
        name = self(node)
        return node if name == node else f"{name} ({node})"


def approval_of(name: str) -> str:
    """The command that admits the node ``name``, fit to be pasted: whoever registers chooses what it is called."""
    return f"localai-dist nodes approve {'-- ' if name.startswith('-') else ''}{shlex.quote(name)}"


def parse_node_id(text: str) -> NodeId:
    """
    The node id in ``text``.

    Raises:
        InvalidName: empty, longer than 36 characters, or with a space or control character in it.
    """
    return NodeId(_identifier(text, "node id"))


def parse_instance_id(text: str) -> InstanceId:
    """
    The frontend instance id in ``text``.

    Raises:
        InvalidName: as for ``parse_node_id``.
    """
    return InstanceId(_identifier(text, "instance id"))


def _identifier(text: str, what: str) -> str:
    if not _IDENTIFIER.fullmatch(text):
        raise InvalidName(f"{text[:48]!r} is not a {what}: want 1 to 36 letters, digits, or any of . _ : -")
    return text


@dataclass(frozen=True, slots=True, order=True)
class ProcessKey:
    """
    One replica of a model on a node, as the worker names its process: ``model#replica``.

    Attributes:
        model: the model's name (or the backend's, when a backend is started without a model).
        replica: index on this node, from 0.
    """

    model: str
    replica: int = 0

    def __str__(self) -> str:
        """The key as it travels: ``model#0``."""
        return f"{self.model}#{self.replica}"


def parse_process_key(text: str) -> ProcessKey:
    """
    The process key in ``text``; a name without ``#n`` is replica 0.

    Raises:
        InvalidName: no model name, or a replica index that is not a plain number.
    """
    model, separator, index = text.rpartition("#")
    if not separator:
        model, index = text, "0"
    if not model or not (index.isascii() and index.isdigit()):
        raise InvalidName(f"{text[:80]!r} is not a process key: want model#replica, like tiny-facts#0")
    return ProcessKey(model, int(index))


def path_parts(text: str) -> tuple[str, ...]:
    """
    The parts of the relative path ``text``, which can be made below any folder.

    Raises:
        InvalidName: absolute, empty, too long or deep, or with an empty, ``.`` or ``..`` part or a control character.
    """
    if not text:
        raise InvalidName("an empty path names nothing")
    if len(text.encode("utf-8", "surrogatepass")) > MAX_PATH_BYTES:
        raise InvalidName(f"{text[:80]!r}… is longer than {MAX_PATH_BYTES} bytes")
    if any(ord(character) < 32 or ord(character) == 127 or character == "\\" for character in text):
        raise InvalidName(f"{text[:80]!r} has a control character or a backslash in it")
    if any(0xD800 <= ord(character) <= 0xDFFF for character in text):
        raise InvalidName(f"{text[:80]!r} is not UTF-8")
    parts = tuple(text.split("/"))
    for part in parts:
        if part in ("", ".", ".."):
            raise InvalidName(f"{text[:80]!r} is not a path below its folder: empty, '.' or '..' part")
        if len(part.encode()) > MAX_PART_BYTES:
            raise InvalidName(f"{part[:80]!r}… is longer than {MAX_PART_BYTES} bytes")
    if len(parts) > MAX_PATH_PARTS:
        raise InvalidName(f"{text[:80]!r}… has {len(parts)} parts, want at most {MAX_PATH_PARTS}")
    return parts


def folder_of(name: str) -> str:
    """
    The one folder below which everything of ``name`` lies: a ``/`` in it is no level of its own.

    Else what belongs to ``a`` would hold what belongs to ``a/b``, and go with it.

    Raises:
        InvalidName: as for ``path_parts``.
    """
    path_parts(name)
    (folder,) = path_parts(name.replace("%", "%25").replace("/", "%2F"))
    return folder


def file_parts(text: str) -> tuple[str, ...]:
    """
    The parts of a path whose last one is a file that can be staged.

    Raises:
        InvalidName: as for ``path_parts``, or the file's name is too long.
    """
    parts = path_parts(text)
    if len(parts[-1].encode()) > MAX_FILE_NAME_BYTES:
        raise InvalidName(f"{parts[-1][:80]!r}… is longer than {MAX_FILE_NAME_BYTES} bytes, too long for a file's name")
    return parts
