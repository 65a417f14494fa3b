"""Who may ask what: API keys, the registration token, and a node's own token."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import assert_never

from localai_dist.httpapi.errors import ApiError, forbidden, node_not_found, unauthorized
from localai_dist.registry.identity import TokenCheck
from localai_dist.wire.credentials import NODE_TOKEN, bearer, same_secret


class Access(Enum):
    """What a route asks of its caller."""

    OPEN = "open"
    KEY = "an API key, if any is configured"
    ADMIN = "an API key, always"
    NODE = "the registration token"


class Keys:
    """
    The configured API keys.

    Source: design §8; with none configured inference is open and the admin routes are closed.
    """

    def __init__(self, keys: Sequence[str]) -> None:
        self._keys = tuple(key for key in keys if key)

    def __bool__(self) -> bool:
        return bool(self._keys)

    def admits(self, presented: str | None) -> bool:
        """Whether ``presented`` is one of them; every key is compared, whichever matches."""
        matches = [same_secret(presented, key) for key in self._keys]
        return any(matches)


def presented_key(authorization: str | None, *others: str | None) -> str | None:
    """The API key of a request: bearer first, then the other headers in their order."""
    return bearer(authorization) or next((other for other in others if other), None)


def check_key(keys: Keys, presented: str | None, *, always: bool) -> None:
    """
    Let the caller pass or raise.

    Args:
        always: ask for a key even when none is configured (the admin routes).

    Raises:
        ApiError: 401.
    """
    if not keys and not always:
        return
    if not keys:
        raise unauthorized("no API key is configured here, so the routes for operators are closed: set LOCALAI_API_KEY")
    if not presented:
        raise unauthorized("an API key is required: send it as Authorization: Bearer KEY")
    if not keys.admits(presented):
        raise unauthorized("this API key is not valid here")


def check_registration(configured: str, authorization: str | None, body_token: str = "") -> None:
    """
    The registration token, in the header; stock workers send it in the body as well, and then it must agree.

    Raises:
        ApiError: 401; always when none is configured (an empty secret admits nobody).
    """
    presented = bearer(authorization)
    if presented is None:
        raise unauthorized("missing or invalid Authorization header", "invalid_registration_token")
    if not same_secret(presented, configured) or (body_token and not same_secret(body_token, configured)):
        raise unauthorized("invalid registration token", "invalid_registration_token")


def refuse_token(check: TokenCheck, presented: str | None, node: str) -> ApiError | None:
    """
    The refusal for a node token that was checked against the registry; None lets the caller pass.

    A node that waits for approval may report: only its tunnel is refused. Source: design §5 item 13.
    """
    match check:
        case TokenCheck.OK | TokenCheck.PENDING:
            return None
        case TokenCheck.UNKNOWN_NODE:
            return node_not_found(node)
        case TokenCheck.NO_TOKEN | TokenCheck.WRONG:
            if not presented:
                return unauthorized(f"this node's own token is required, in {NODE_TOKEN}", "node_token_required")
            return forbidden(f"the token in {NODE_TOKEN} is not the one of node {node}")
        case _:
            assert_never(check)
