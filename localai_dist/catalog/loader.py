"""
YAML as people write model files: the plain kinds of values, with a bound on what aliases repeat.

Source: YAML 1.1; the "billion laughs" attack, where aliases of aliases stand for more than any memory holds.
"""

from __future__ import annotations

from typing import Any

import yaml
from yaml.composer import ComposerError
from yaml.constructor import ConstructorError
from yaml.events import AliasEvent, Event, ScalarEvent
from yaml.nodes import Node

from localai_dist.units import MiB

ALIAS_LIMIT = 100
"""Aliases (``*name``) in one file."""

SIZE_LIMIT = 1 * MiB
"""Characters of all values, aliases written out, and one for each value."""


class _Loader(yaml.SafeLoader):
    """Counts while the tree is composed, before anything is made of it; there an alias costs nothing yet."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._aliases = 0
        self._size = 0
        self._sizes: dict[str, int] = {}

    def compose_node(self, parent: Node | None, index: int) -> Node | None:
        event = self.peek_event()
        if isinstance(event, AliasEvent):
            self._follow(event)
            return super().compose_node(parent, index)
        before = self._size
        self._grow(event, 1 + (len(event.value) if isinstance(event, ScalarEvent) else 0))
        node = super().compose_node(parent, index)
        if event.anchor is not None:
            self._sizes[event.anchor] = self._size - before
        return node

    def construct_object(self, node: Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep=deep)
        except (yaml.YAMLError, RecursionError):
            raise
        except Exception as error:  # `!!bool maybe` is a KeyError, `!!int ""` an IndexError, ...
            kind = node.tag.rpartition(":")[2]
            why = f": {error}" if isinstance(error, ValueError) else ""  # others speak of the library's inside
            text = f"{str(node.value)[:60]!r} can't be read as {kind}{why}"
            raise ConstructorError(None, None, text, node.start_mark) from error

    def _follow(self, event: AliasEvent) -> None:
        self._aliases += 1
        if self._aliases > ALIAS_LIMIT:
            raise _refusal(event, f"more than {ALIAS_LIMIT} aliases")
        if event.anchor in self._sizes:
            self._grow(event, self._sizes[event.anchor])
        elif event.anchor in self.anchors:
            raise _refusal(event, f"the alias {event.anchor!r} stands inside of what it names")

    def _grow(self, event: Event, size: int) -> None:
        self._size += size
        if self._size > SIZE_LIMIT:
            raise _refusal(event, f"with its aliases written out the file has more than {SIZE_LIMIT} characters")


def read_yaml(text: str) -> Any:
    """
    The values in ``text``.

    Raises:
        yaml.YAMLError: no YAML, a value that is none of its kind, or aliases that stand for too much.
        Exception: other complaints of the library about ``text``: OverflowError, RecursionError, ...
    """
    loader = _Loader(text)
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()


def _refusal(event: Event, text: str) -> ComposerError:
    return ComposerError(None, None, text, event.start_mark)  # type: ignore[arg-type]  # the stubs' Marks disagree
