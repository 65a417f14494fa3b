"""
The functions a chat offers its model (pure): validated, and bounded before anybody below walks through them.

Source: reference/surface.md §3; the bounds are OpenAI's, but for the depth.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from localai_dist.httpapi.errors import bad_request
from localai_dist.serving.sampling import Offer

MAX_TOOLS: Final = 128
MAX_DEPTH: Final = 64
"""Objects and lists within each other in one schema; templates and grammars recurse over them."""

Identifier = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
"""OpenAI's, and the dot that some tool servers use."""

_CHOICES = ("none", "auto", "required")


class Function(msgspec.Struct, omit_defaults=True):
    """A function the model may call; ``parameters`` is a JSON schema."""

    name: Identifier
    description: str | None = None
    parameters: dict[str, object] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct):
    """One tool; only those of type ``function`` are served."""

    type: str
    function: Function | None = None


class Named(msgspec.Struct):
    """The function of a choice."""

    name: str


class NamedChoice(msgspec.Struct):
    """The tool that must be called."""

    type: str
    function: Named | None = None


Tools = Annotated[list[Tool], Meta(max_length=MAX_TOOLS)]
Choice = str | NamedChoice


def offer_of(tools: Sequence[Tool], choice: Choice | None, *, parallel: bool) -> Offer | None:
    """
    What the backend is told of the tools; None when there are none, or none may be called.

    A function that is chosen by name is the only one told: there are backends that know ``required`` alone.

    Args:
        parallel: whether one answer may hold several calls.

    Raises:
        ApiError: 400; a tool or a choice that is not served, and why.
    """
    functions = [_function(tool, f"tools[{index}]") for index, tool in enumerate(tools)]
    _no_twins(functions)
    chosen = _chosen(choice, [function.name for function in functions])
    if not functions or choice == "none":
        return None
    told = [function for function in functions if chosen in (None, function.name)]
    return Offer(
        tools=encoded([{"type": "function", "function": function} for function in told], "tools"),
        choice=encoded(choice if choice is not None else "auto", "tool_choice"),
        single=not parallel,
    )


def encoded(value: object, where: str) -> str:
    """
    ``value`` as JSON.

    Raises:
        ApiError: 400; nested too deeply.
    """
    try:
        return msgspec.json.encode(value).decode()
    except RecursionError as error:
        raise bad_request(f"{where}: nested too deeply", where) from error


def check_depth(value: object, where: str) -> None:
    """
    Refuse what is nested more than ``MAX_DEPTH`` deep.

    Raises:
        ApiError: 400.
    """
    level: list[object] = [value]
    for _ in range(MAX_DEPTH):
        level = [inner for one in level for inner in _within(one)]
        if not level:
            return
    raise bad_request(f"{where}: nested more than {MAX_DEPTH} deep", where)


def _within(value: object) -> Iterable[object]:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return (one for one in inner if isinstance(one, dict | list))


def _function(tool: Tool, where: str) -> Function:
    if tool.type != "function":
        raise bad_request(f"{where}.type: only function is served here, not {tool.type[:40]!r}", f"{where}.type")
    if tool.function is None:
        raise bad_request(f"{where}.function: this field is required", f"{where}.function")
    if tool.function.parameters is not None:
        check_depth(tool.function.parameters, f"{where}.function.parameters")
    return tool.function


def _no_twins(functions: Sequence[Function]) -> None:
    seen: set[str] = set()
    for index, function in enumerate(functions):
        if function.name in seen:
            where = f"tools[{index}].function.name"
            raise bad_request(f"{where}: {function.name!r} is the name of another tool too", where)
        seen.add(function.name)


def _chosen(choice: Choice | None, names: Sequence[str]) -> str | None:
    """The name of the function that must be called, if the choice names one."""
    if choice is None or choice in ("none", "auto"):
        return None
    if isinstance(choice, str) and choice not in _CHOICES:
        raise bad_request(f"tool_choice: want {', '.join(_CHOICES)}, or a function by its name", "tool_choice")
    if not names:
        raise bad_request("tool_choice: there are no tools to choose from", "tool_choice")
    if isinstance(choice, str):
        return None
    if choice.type != "function" or choice.function is None:
        text = 'tool_choice: want {"type": "function", "function": {"name": ...}}'
        raise bad_request(f"{text}, not type {choice.type[:40]!r}", "tool_choice")
    if choice.function.name not in names:
        raise bad_request(f"tool_choice: no tool is named {choice.function.name[:64]!r}", "tool_choice")
    return choice.function.name
