"""Distinct types for the names things have, with their parsers."""

from __future__ import annotations

import re
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

_IDENTIFIER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,35}")


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
