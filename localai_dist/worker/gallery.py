"""
Index entries of installable backends: a YAML list, read and looked up.

A *concrete* entry has a ``uri``; a *meta* entry has ``capabilities`` and names the concrete one for each.

Source: surface §4.3.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import yaml

from localai_dist.worker.errors import InstallFailed

DEFAULT_CAPABILITY = "default"


@dataclass(frozen=True, slots=True)
class Gallery:
    """Where an index is (a path, or ``file://…``), and its name."""

    url: str
    name: str = ""


@dataclass(frozen=True, slots=True)
class Entry:
    """
    One backend of an index.

    Attributes:
        uri: a directory, absolute or relative to the index; empty for a meta entry.
        capabilities: for a meta entry, the concrete name by capability.
    """

    name: str
    uri: str = ""
    alias: str = ""
    version: str = ""
    capabilities: Mapping[str, str] = field(default_factory=dict)


def parse_galleries(text: str) -> list[Gallery]:
    """
    The galleries in a verb's ``backend_galleries`` (JSON) or in the setting of that name (JSON too).

    Raises:
        InstallFailed: not a JSON list of objects with a ``url``.
    """
    if not text.strip():
        return []
    try:
        return msgspec.json.decode(text, type=list[Gallery])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InstallFailed(f"backend_galleries is not a JSON list of {{url, name}}: {error}") from error


def parse_index(text: str, where: str) -> list[Entry]:
    """
    The entries of an index; fields we don't know are ignored.

    Raises:
        InstallFailed: not a YAML list of entries with a name; ``where`` is in the text.
    """
    try:
        raw: Any = yaml.safe_load(text) or []
        return msgspec.convert(raw, list[Entry])
    except (yaml.YAMLError, msgspec.ValidationError) as error:
        raise InstallFailed(f"the backend index {where} can't be read: {error}") from error


def choose(entries: Sequence[Entry], name: str, capabilities: Sequence[str] = (DEFAULT_CAPABILITY,)) -> Entry | None:
    """
    The concrete entry for ``name``: by its name, else by its alias; a meta entry through ``capabilities``.

    Args:
        entries: of one index.
        name: as the verb asks.
        capabilities: the worker's own, the one it likes most first; the first that a meta entry knows is taken.
    """
    by_name = {entry.name: entry for entry in entries}
    found = by_name.get(name) or next((entry for entry in entries if entry.alias == name), None)
    if found is None or found.uri:
        return found
    concrete = next((made for word in capabilities if (made := found.capabilities.get(word))), "")
    chosen = by_name.get(concrete)
    return chosen if chosen is not None and chosen.uri else None
