"""
Which HTTP proxy leads to an address: ``HTTPS_PROXY``, ``HTTP_PROXY``, ``NO_PROXY``, as Go's programs read them. Pure.

The variables are the machine's, not ours, so they are no options: the names in capitals win over the small ones, and
this machine's own addresses are never asked for through a proxy.
"""

from __future__ import annotations

import base64
import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, TypeAlias
from urllib.parse import unquote

from localai_dist.errors import UserMistake
from localai_dist.urls import InvalidUrl, bracketed, parse_url

HTTPS: Final = "HTTPS_PROXY"
HTTP: Final = "HTTP_PROXY"
NONE: Final = "NO_PROXY"
_VARIABLES: Final = {"https": HTTPS, "wss": HTTPS, "http": HTTP, "ws": HTTP}
_PORTS: Final = {HTTPS: 443, HTTP: 80}
_DEFAULT_PORT: Final = 80
"""Of a proxy whose address names none."""

_Ip: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address


@dataclass(frozen=True, slots=True)
class Proxy:
    """
    One proxy.

    Attributes:
        variable: where it was found.
        host: its name or address.
        port: where it listens.
        authorization: the value of ``Proxy-Authorization``, if it wants one; in no text of this object.
    """

    variable: str
    host: str
    port: int
    authorization: str | None = field(default=None, repr=False)

    def __str__(self) -> str:
        """``host:port``."""
        return f"{bracketed(self.host)}:{self.port}"


@dataclass(frozen=True, slots=True)
class Proxies:
    """
    The proxies of this machine, by the variable that names them, and what is reached without one.

    Attributes:
        named: ``HTTPS_PROXY`` and ``HTTP_PROXY``, those that are set; in place of one that names no proxy the mistake.
        exceptions: the words of ``NO_PROXY``, in lower case.
    """

    named: Mapping[str, Proxy | UserMistake] = field(default_factory=dict)
    exceptions: tuple[str, ...] = ()

    def towards(self, scheme: str, host: str, port: int | None = None) -> Proxy | None:
        """
        The proxy that leads to ``host``, or None for the direct way.

        Args:
            scheme: ``https`` or ``wss``, ``http`` or ``ws``.
            port: None is the scheme's own.

        Raises:
            UserMistake: a proxy is wanted, and its variable names none.
        """
        variable = _VARIABLES[scheme]
        found = self.named.get(variable)
        if found is None or _is_here(host):
            return None
        at = _PORTS[variable] if port is None else port
        if any(_covers(word, host.lower().rstrip("."), at) for word in self.exceptions):
            return None
        if isinstance(found, UserMistake):
            raise found
        return found


def parse_proxies(environ: Mapping[str, str]) -> Proxies:
    """
    The proxies an environment names; an empty variable names none.

    A variable that names no ``http`` proxy is the machine's, and is a mistake only where it is needed. What is said of
    it repeats nothing of it, since it may hold a password.
    """
    named: dict[str, Proxy | UserMistake] = {}
    for variable in (HTTPS, HTTP):
        text = _read(environ, variable)
        if text:
            try:
                named[variable] = _proxy(variable, text)
            except UserMistake as mistake:
                named[variable] = mistake
    return Proxies(named, tuple(filter(None, (word.strip().lower() for word in _read(environ, NONE).split(",")))))


def _read(environ: Mapping[str, str], variable: str) -> str:
    return (environ.get(variable) or environ.get(variable.lower()) or "").strip()


def _proxy(variable: str, text: str) -> Proxy:
    """One with or without a scheme."""
    try:
        url = parse_url(text if "://" in text else f"http://{text}")
        if not text.isascii():
            raise InvalidUrl("not every letter of it is ASCII")
    except InvalidUrl as error:
        want = "want http://host:port or http://user:password@host:port"
        raise UserMistake(f"{variable} is no proxy's address, {error}: {want}") from None
    if url.scheme != "http":
        raise UserMistake(f"{variable}: only http:// proxies are spoken to, not {url.scheme[:16]}://")
    return Proxy(variable, url.host, url.port or _DEFAULT_PORT, _basic(url.user, url.password))


def _basic(user: str | None, password: str | None) -> str | None:
    if user is None:
        return None
    pair = f"{unquote(user)}:{unquote(password or '')}"
    return "Basic " + base64.b64encode(pair.encode("utf-8")).decode("ascii")


def _is_here(host: str) -> bool:
    address = _address(host)
    return host.lower().rstrip(".") == "localhost" if address is None else address.is_loopback


def _covers(word: str, host: str, port: int) -> bool:
    """Whether one word of ``NO_PROXY`` means ``host``."""
    if word == "*":
        return True
    address, network = _address(host), _network(word)
    if network is not None:
        return address is not None and address in network
    name, wanted = _without_port(word)
    if wanted is not None and wanted != port:
        return False
    alone = _address(name)
    if alone is not None:
        return alone == address
    return host.endswith(name.removeprefix("*")) if name.startswith((".", "*.")) else _is_below(host, name)


def _is_below(host: str, name: str) -> bool:
    return bool(name) and (host == name or host.endswith(f".{name}"))


def _without_port(word: str) -> tuple[str, int | None]:
    """A host and the port behind it, None for any."""
    name, colon, digits = word.rpartition(":")
    if not colon or not digits.isdecimal() or (":" in name and not name.endswith("]")):
        name, digits = word, ""
    return name.removeprefix("[").removesuffix("]"), int(digits) if digits else None


def _address(text: str) -> _Ip | None:
    try:
        return ipaddress.ip_address(text.removeprefix("[").removesuffix("]"))
    except ValueError:
        return None


def _network(text: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
    try:
        return ipaddress.ip_network(text, strict=False) if "/" in text else None
    except ValueError:
        return None
