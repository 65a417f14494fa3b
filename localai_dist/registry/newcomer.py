"""
What people are told about two workers under one name, and what approving the second one does: pure.

A name belongs to whoever holds the node's token (``identity``); the second worker waits, and approving it replaces the
first. Whoever waits, and whoever approves, should know whom that hits.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from localai_dist.ids import approval_of
from localai_dist.registry.records import Node
from localai_dist.units import format_duration


@dataclass(frozen=True, slots=True)
class Holder:
    """
    Who has, or had, a name.

    Attributes:
        registered_from: the address it registered from, as the frontend saw it; empty when not known.
    """

    status: str
    registered_from: str
    last_heartbeat: datetime | None

    def text(self, now: datetime) -> str:
        """``healthy, registered from 10.0.0.5, last heard of 3s ago``."""
        since = "never heard of" if self.last_heartbeat is None else f"last heard of {_ago(self.last_heartbeat, now)}"
        return f"{self.status}, registered from {self.registered_from or 'an address not known'}, {since}"


@dataclass(frozen=True, slots=True)
class Approval:
    """
    What an approval came to.

    Attributes:
        node: as it is now.
        replaced: who had the name until now, when a newcomer took it over.
    """

    node: Node
    replaced: Holder | None = None

    def notice(self, now: datetime) -> str:
        """What the operator should know beyond "approved"; empty when there is nothing."""
        if self.replaced is not None:
            return f"it replaces the node of that name ({self.replaced.text(now)}), whose worker is admitted no more"
        if self.node.newcomer_waiting:
            return f"another worker{_from(self.node)} waits under its name; approving once more replaces this one by it"
        return ""


def holder_of(node: Node) -> Holder:
    """Who has the name of ``node``."""
    return Holder(node.status, node.registered_from, node.last_heartbeat)


def taken_text(node: Node, now: datetime) -> str:
    """For the worker that registered under the name of ``node`` without its token."""
    known = f"a node named {node.name} exists already ({holder_of(node).text(now)})"
    return f"{known}; {_replaces(node)}; to have both, give this one another LOCALAI_NODE_NAME"


def newcomer_text(node: Node, now: datetime) -> str:
    """For the operator who looks at a node under whose name a newcomer waits; empty when none does."""
    if not node.newcomer_waiting:
        return ""
    since = "" if node.newcomer_since is None else f", since {_ago(node.newcomer_since, now)}"
    return f"another worker waits under this name{_from(node)}{since}; {_replaces(node)}"


def _replaces(node: Node) -> str:
    command = f"'{approval_of(node.name)}'"
    if not node.approved:
        return f"{command} admits the first one, and once more replaces it by the one that came later"
    return f"{command} replaces it: its tunnel ends, and its worker is admitted no more"


def _from(node: Node) -> str:
    return f" from {node.newcomer_from}" if node.newcomer_from else ""


def _ago(moment: datetime, now: datetime) -> str:
    seconds = round((now - moment).total_seconds())
    return "a moment ago" if seconds < 1 else f"{format_duration(seconds)} ago"
