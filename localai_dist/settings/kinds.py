"""How one option's text is read and shown: a small closed set of kinds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from localai_dist.errors import InvalidQuantity, UserMistake
from localai_dist.units import MiB, format_duration, format_size, parse_duration, parse_fraction, parse_size
from localai_dist.urls import FRONTEND_SCHEMES, InvalidUrl, bracketed, parse_url

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class HostPort:
    """
    Where to listen or whom to dial.

    Attributes:
        host: empty means every address of this machine.
        port: 0 means any free port.
    """

    host: str
    port: int

    def __str__(self) -> str:
        """As it is written: ``127.0.0.1:8080``, ``[::1]:8080``, ``:8080``."""
        return f"{bracketed(self.host)}:{self.port}"


@dataclass(frozen=True, slots=True)
class Kind(Generic[T]):
    """
    One way to read a value.

    Attributes:
        name: what the documentation calls it.
        parse: text -> value; raises ``UserMistake`` saying what would be right.
        show: value -> text that ``parse`` reads back to the same value.
    """

    name: str
    parse: Callable[[str], T]
    show: Callable[[T], str] = str


_YES = frozenset({"1", "true", "yes", "y", "on", "enabled", "t"})
_NO = frozenset({"0", "false", "no", "n", "off", "disabled", "f"})


def parse_switch(text: str) -> bool:
    """
    True or false.

    Raises:
        UserMistake: neither; a guess would switch a safety off or on behind the operator's back.
    """
    word = text.strip().lower()
    if word in _YES:
        return True
    if word in _NO:
        return False
    raise UserMistake(f"{text!r} is neither true nor false: want true, false, yes, no, on, off, 1 or 0")


def parse_host_port(text: str) -> HostPort:
    """
    A ``host:port``, ``:port`` or ``[v6]:port``.

    Raises:
        UserMistake: no port, or one outside 0 to 65535.
    """
    host, separator, port = text.strip().rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    bare = host[1:-1] if bracketed else host
    plain = port.isascii() and port.isdigit() and len(port) <= 5
    if not separator or not plain or int(port) > 65535 or (":" in bare and not bracketed) or " " in bare:
        raise UserMistake(f"{text!r} is not an address: want host:port or :port, with a port from 0 to 65535")
    return HostPort(bare, int(port))


def parse_count(text: str) -> int:
    """
    A whole number from 0.

    Raises:
        UserMistake: anything else.
    """
    word = text.strip()
    if not (word.isascii() and word.isdigit() and len(word) <= 18):
        raise UserMistake(f"{text!r} is not a whole number from 0")
    return int(word)


def parse_port(text: str) -> int:
    """
    A port from 0 to 65535.

    Raises:
        UserMistake: anything else.
    """
    port = parse_count(text)
    if port > 65535:
        raise UserMistake(f"{text!r} is not a port: want 0 to 65535")
    return port


def parse_list(text: str) -> tuple[str, ...]:
    """The comma-separated words of ``text``, without the empty ones."""
    return tuple(word for word in (part.strip() for part in text.split(",")) if word)


def parse_urls(text: str) -> tuple[str, ...]:
    """
    One or several ``http(s)`` or ``ws(s)`` addresses, comma-separated, without trailing slashes.

    Raises:
        UserMistake: one has no such scheme, no host, a bad port, a password, or more than a path behind it.
    """
    return tuple(_url(word) for word in parse_list(text))


def _url(word: str) -> str:
    try:
        frontend = parse_url(word, FRONTEND_SCHEMES)
    except InvalidUrl as error:
        shown = "one with an @" if "@" in word else repr(word)  # there may be a password before it
        raise UserMistake(
            f"{shown} is not a frontend's address, {error}: want http://host:port or https://host"
        ) from error
    if frontend.user is not None:
        raise UserMistake("a frontend's address carries no user and password: the registration token is the credential")
    if any(mark in word for mark in "?#") or frontend.authority.endswith(":"):
        raise UserMistake("a frontend's address ends with its port or a path: no '?', no '#', no colon without a port")
    return word.rstrip("/")


def parse_labels(text: str) -> Mapping[str, str]:
    """
    Labels ``k=v,k=v``.

    Raises:
        UserMistake: a part without ``=``, or with an empty key.
    """
    labels: dict[str, str] = {}
    for word in parse_list(text):
        key, separator, value = word.partition("=")
        if not separator or not key.strip():
            raise UserMistake(f"{word!r} is not a label: want key=value, several with commas between")
        labels[key.strip()] = value.strip()
    return labels


def parse_vram_budget(text: str) -> str:
    """
    A share (``80%``, ``0.8``) or a size (``12GB``, ``12GiB``, bytes), kept as written: the worker sends it as text.

    Raises:
        UserMistake: neither.
    """
    word = text.strip()
    for reader in (parse_fraction, parse_size):
        try:
            reader(word)
        except InvalidQuantity:
            continue
        return word
    raise UserMistake(f"{text!r} is no VRAM budget: want a share like 80% or a size like 12GB or 12GiB")


def parse_upload_limit(text: str) -> int:
    """
    Bytes; a bare number means MiB, as the option always did.

    Raises:
        InvalidQuantity: not a size.
    """
    word = text.strip()
    return int(word) * MiB if word.isascii() and word.isdigit() else parse_size(word)


def _one_line(text: str) -> str:
    if any(character in text for character in "\r\n\0"):
        raise UserMistake("want one line of text")
    return text


def choice(*allowed: str) -> Kind[str]:
    """The kind of an option that takes one of ``allowed``."""

    def parse(text: str) -> str:
        word = text.strip().lower()
        if word not in allowed:
            raise UserMistake(f"{text!r} is not one of: {', '.join(allowed)}")
        return word

    return Kind(" or ".join(f"`{word}`" for word in allowed), parse)


TEXT: Kind[str] = Kind("text", _one_line)
PATH: Kind[str] = Kind("path", _one_line)
SWITCH: Kind[bool] = Kind("switch", parse_switch, lambda value: "true" if value else "false")
COUNT: Kind[int] = Kind("number", parse_count)
PORT: Kind[int] = Kind("port", parse_port)
DURATION: Kind[float] = Kind("duration", parse_duration, format_duration)
MAYBE_DURATION: Kind[float | None] = Kind("duration", parse_duration, lambda v: "" if v is None else format_duration(v))
UPLOAD: Kind[int] = Kind("size (a bare number is MiB)", parse_upload_limit, format_size)
MAYBE_SIZE: Kind[int | None] = Kind("size", parse_size, lambda value: "" if value is None else format_size(value))
ADDRESS: Kind[HostPort] = Kind("host:port", parse_host_port)
MAYBE_ADDRESS: Kind[HostPort | None] = Kind("host:port", parse_host_port, lambda v: "" if v is None else str(v))
LIST: Kind[tuple[str, ...]] = Kind("list, comma-separated", parse_list, ",".join)
URLS: Kind[tuple[str, ...]] = Kind("URLs, comma-separated", parse_urls, ",".join)
LABELS: Kind[Mapping[str, str]] = Kind(
    "key=value, comma-separated", parse_labels, lambda v: ",".join(f"{key}={value}" for key, value in v.items())
)
VRAM: Kind[str] = Kind("share or size", parse_vram_budget)
