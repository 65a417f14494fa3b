"""Seconds and bytes: the constants, and durations, sizes and percentages in and out of text."""

from __future__ import annotations

import re

from localai_dist.errors import InvalidQuantity

SECOND = 1.0
MINUTE = 60.0
HOUR = 3600.0

KiB = 1024
MiB = 1024 * KiB
GiB = 1024 * MiB
TiB = 1024 * GiB

_DURATION_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": SECOND, "m": MINUTE, "h": HOUR, "d": 24 * HOUR}
_DURATION_PART = re.compile(r"(\d+(?:\.\d+)?)(ns|us|µs|ms|s|m|h|d)")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]i?B|B)?", re.IGNORECASE)
_SIZE_UNITS = {
    "b": 1,
    "kb": 1000,
    "mb": 1000**2,
    "gb": 1000**3,
    "tb": 1000**4,
    "kib": KiB,
    "mib": MiB,
    "gib": GiB,
    "tib": TiB,
}


def parse_duration(text: str) -> float:
    """
    Seconds in a text like ``15m``, ``1h30m``, ``500ms``; a bare ``0`` is zero.

    Raises:
        InvalidQuantity: anything else, a bare number other than 0 included (its unit would be a guess).
    """
    text = text.strip()
    if text == "0":
        return 0.0
    parts = _DURATION_PART.findall(text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise InvalidQuantity(f"{text!r} is not a duration: want a number with a unit, like 90s, 15m or 1h30m")
    return sum(float(number) * _DURATION_UNITS[unit] for number, unit in parts)


def format_duration(seconds: float) -> str:
    """A duration as a person writes it: ``350ms``, ``42s``, ``15m``, ``1h30m``."""
    if seconds < 1:
        return f"{round(seconds * 1000)}ms"
    whole = round(seconds)
    hours, rest = divmod(whole, 3600)
    minutes, left = divmod(rest, 60)
    text = (f"{hours}h" if hours else "") + (f"{minutes}m" if minutes else "") + (f"{left}s" if left else "")
    return text or "0s"


def parse_size(text: str) -> int:
    """
    Bytes in a text like ``12GB``, ``12GiB``, ``512 MiB`` or a bare number of bytes.

    Raises:
        InvalidQuantity: anything else.
    """
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise InvalidQuantity(f"{text!r} is not a size: want bytes or a number with a unit, like 12GB or 12GiB")
    return int(float(found[1]) * _SIZE_UNITS[(found[2] or "b").lower()])


def format_size(count: int) -> str:
    """A number of bytes as a person reads it, in binary units: ``984.0 KiB``, ``4.0 GiB``."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{count} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def parse_fraction(text: str) -> float:
    """
    A share between 0 and 1 from ``80%`` or ``0.8``.

    Raises:
        InvalidQuantity: not a number, or outside 0 to 100 %.
    """
    raw = text.strip()
    try:
        value = float(raw[:-1]) / 100 if raw.endswith("%") else float(raw)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise InvalidQuantity(f"{text!r} is not a share: want a percentage like 80%, or a number from 0 to 1")
    return value
