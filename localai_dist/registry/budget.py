"""A VRAM budget in bytes."""

from __future__ import annotations

from localai_dist.units import parse_fraction, parse_size


def budget_bytes(text: str, total_vram: int) -> int:
    """
    Bytes a budget like ``80%``, ``0.8``, ``12GB`` or ``12GiB`` allows of ``total_vram``; 0 = no budget.

    A bare number up to 1 is a share, a larger one bytes. Never more than there is, when that is known.

    Raises:
        InvalidQuantity: neither a share nor a size.
    """
    text = text.strip()
    if not text:
        return 0
    if text.endswith("%") or _is_share(text):
        return int(parse_fraction(text) * total_vram)
    wanted = parse_size(text)
    return min(wanted, total_vram) if total_vram else wanted


def capped(available: int, budget: int) -> int:
    """Free VRAM as placement may count on it."""
    return min(available, budget) if budget else available


def _is_share(text: str) -> bool:
    try:
        return 0 < float(text) <= 1
    except ValueError:
        return False
