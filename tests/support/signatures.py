"""Whether one object may stand where another is expected, judged by the signatures of its methods."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

Triple: TypeAlias = tuple[type, type, type]
"""A protocol, the real thing and its double."""


def misfits(triples: Iterable[Triple]) -> list[str]:
    """What the real things and the doubles lack of their protocols."""
    return [found for wanted, real, double in triples for one in (real, double) for found in differences(wanted, one)]


def public_methods(kind: type) -> dict[str, Callable[..., Any]]:
    """The methods a protocol asks for; ``__call__`` and ``__aiter__`` count, properties do not."""
    return {
        name: member
        for name, member in vars(kind).items()
        if inspect.isfunction(member) and (not name.startswith("_") or name in ("__call__", "__aiter__"))
    }


def differences(wanted: type, offered: type) -> list[str]:
    """What ``offered`` lacks of the protocol ``wanted``: methods, parameters by name and kind, being a coroutine."""
    return [
        f"{offered.__name__}.{name}: {problem}"
        for name, method in public_methods(wanted).items()
        for problem in _differences(method, getattr(offered, name, None))
    ]


def _differences(wanted: Callable[..., Any], offered: Callable[..., Any] | None) -> list[str]:
    if offered is None:
        return ["missing"]
    asked, has = (dict(inspect.signature(one).parameters) for one in (wanted, offered))
    asked.pop("self"), has.pop("self")
    problems = [f"no parameter {name}" for name in asked if name not in has]
    for name, parameter in has.items():
        if name not in asked and parameter.default is parameter.empty:
            problems.append(f"demands {name}")
        elif (
            name in asked and asked[name].kind is parameter.KEYWORD_ONLY and parameter.kind is parameter.POSITIONAL_ONLY
        ):
            problems.append(f"{name} can't be named")
        elif name in asked and asked[name].default is not parameter.empty and parameter.default is parameter.empty:
            problems.append(f"{name} has no default")
    positional = [name for name, one in asked.items() if one.kind is not one.KEYWORD_ONLY]
    if [name for name in has if name in positional] != positional:
        problems.append("another order")
    if inspect.iscoroutinefunction(wanted) and not inspect.iscoroutinefunction(offered):
        problems.append("no coroutine")
    return problems
