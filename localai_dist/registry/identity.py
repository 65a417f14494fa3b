"""
Whose name is it: what a registration may change.

A name belongs to whoever holds the node's own token. A newcomer under a known name changes nothing about that node: it
gets a token whose hash is parked beside the node's, and waits until an admin approves it.

Source: design §5 item 13.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from localai_dist.wire.credentials import matches


class Claim(Enum):
    """What a registration is."""

    NEW = "nobody had that name"
    OWN = "the node itself came back: it keeps its token"
    ROTATED = "the node itself, in loose mode: it gets a new token"
    NEWCOMER = "somebody without the node's token: parked under a new token"
    WAITING = "the parked newcomer came back: it keeps its parked token"


@dataclass(frozen=True, slots=True)
class StoredIdentity:
    """
    What the registry has for a name.

    Attributes:
        node_token_hash: of the node's own token ('' for a row that never had one).
        parked_token_hash: of a waiting newcomer's.
    """

    node_token_hash: str
    parked_token_hash: str


def judge(stored: StoredIdentity | None, presented: str | None, *, loose: bool) -> Claim:
    """
    What a registration that presents this node token is.

    Args:
        stored: None when nobody has that name.
        presented: the token, or None.
        loose: stock workers never present one, so whoever registers a name is believed.
    """
    if stored is None:
        return Claim.NEW
    if loose:
        return Claim.ROTATED
    if matches(presented, stored.node_token_hash):
        return Claim.OWN
    if matches(presented, stored.parked_token_hash):
        return Claim.WAITING
    return Claim.NEWCOMER


class TokenCheck(Enum):
    """What came of checking a node token."""

    UNKNOWN_NODE = "no such node"
    NO_TOKEN = "the node has no token"
    WRONG = "not that node's token"
    PENDING = "right, but not approved yet"
    OK = "right"


def check(stored: StoredIdentity, presented: str | None, *, approved: bool) -> TokenCheck:
    """
    Whether ``presented`` may dial as this node.

    A parked newcomer is told that it is pending: its token is right, the approval is missing.
    """
    if matches(presented, stored.node_token_hash):
        return TokenCheck.OK if approved else TokenCheck.PENDING
    if matches(presented, stored.parked_token_hash):
        return TokenCheck.PENDING
    return TokenCheck.WRONG if stored.node_token_hash else TokenCheck.NO_TOKEN


def restarted(stored_boot: str, boot: str) -> bool:
    """Whether what the node had loaded is gone: another worker process, or one that does not say."""
    return not boot or boot != stored_boot
