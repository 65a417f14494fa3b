"""Addresses like ``https://host:8080/path``: read, or refused in words that repeat nothing of them."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import SplitResult, urlsplit

from localai_dist.errors import UserMistake

HTTP_SCHEMES: Final = ("http", "https")
FRONTEND_SCHEMES: Final = (*HTTP_SCHEMES, "ws", "wss")
"""What a frontend's address may begin with; a worker asks it and dials it all the same."""


class InvalidUrl(UserMistake):
    """No usable address; the text says why, as the end of a sentence, without a word of it: it may hold a password."""


_NAME: Final = re.compile(r"(?:[\w-]{1,63}\.)*[\w-]{1,63}\.?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Url:
    """
    One address; no text of this object has its user or password.

    Attributes:
        scheme: in lower case.
        host: in lower case, without brackets; never empty.
        port: from 1; None if it names none.
        authority: host and port as written, with the user and the password before them.
        path, query: as written.
        user, password: as written, still quoted; None if it names none.
    """

    scheme: str
    host: str
    port: int | None
    authority: str = field(repr=False)
    path: str
    query: str
    user: str | None = field(repr=False)
    password: str | None = field(repr=False)


def parse_url(text: str, schemes: Collection[str] = ()) -> Url:
    """
    The address in ``text``.

    Args:
        schemes: those it may have; none = any.

    Raises:
        InvalidUrl: it has another scheme, no host, a port that is none, or a character that no address has.
    """
    if any(character <= " " or character == "\x7f" for character in text):
        raise InvalidUrl("there is a space or a line break in it")
    parts = _split(text)
    if parts.scheme not in (schemes or (parts.scheme,)):
        raise InvalidUrl(f"it does not begin with {' or '.join(f'{scheme}://' for scheme in schemes)}")
    return Url(
        parts.scheme,
        _host(parts),
        _port(parts),
        parts.netloc,
        parts.path,
        parts.query,
        parts.username,
        parts.password,
    )


def bracketed(host: str) -> str:
    """``host`` as it stands before a colon and a port."""
    return f"[{host}]" if ":" in host else host


def _split(text: str) -> SplitResult:
    try:
        return urlsplit(text)
    except ValueError:  # such as http://[::1; its words repeat what they are about
        raise InvalidUrl("what should be its host is none") from None


def _host(parts: SplitResult) -> str:
    host = parts.hostname
    if not host:
        raise InvalidUrl("it names no host")
    if not host.isascii():
        raise InvalidUrl("its host is not written in ASCII (a name like that begins with xn--)")
    _, _, written = parts.netloc.rpartition("@")
    _, bracket, behind = written.partition("]")
    usable = _is_ipv6(host) and behind[:1] in ("", ":") if bracket else _NAME.fullmatch(host)
    if not usable:
        raise InvalidUrl("what should be its host is none")
    return host


def _is_ipv6(text: str) -> bool:
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True


def _port(parts: SplitResult) -> int | None:
    try:
        port = parts.port
    except ValueError:
        port = 0
    if port == 0:
        raise InvalidUrl("its port is none: want 1 to 65535")
    return port
