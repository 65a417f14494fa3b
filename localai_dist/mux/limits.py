"""The bounds of a session, as values."""

from __future__ import annotations

from dataclasses import dataclass

from localai_dist.mux.window import SPEC_WINDOW
from localai_dist.units import MiB


@dataclass(frozen=True, slots=True)
class Limits:
    """
    The bounds of a session.

    Attributes:
        initial_window: announced with each SYN and ACK; at least 256 KiB (bytes).
        max_window: no receive window grows beyond this (bytes).
        max_streams: concurrent streams each end may have opened.
        backlog: own streams the peer has not accepted yet.
        pool: what all windows may grow by, together (bytes).

    Source: design §7.
    """

    initial_window: int = SPEC_WINDOW
    max_window: int = 16 * MiB
    max_streams: int = 1000
    backlog: int = 256
    pool: int = 64 * MiB
