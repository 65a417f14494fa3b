"""Everything a session sends, as bytes and as headers."""

from __future__ import annotations

from localai_dist.mux.frame import HEADER_SIZE, FrameType, Header, decode
from localai_dist.mux.session import Session


def wire_of(session: Session, now: float = 0.0) -> bytes:
    """Everything a session sends now."""
    data = b""
    while (batch := session.next_batch(now, 0)).parts:
        data += b"".join(batch.parts)
    return data


def frames_of(wire: bytes) -> list[Header]:
    """The headers of whole frames."""
    found, at = [], 0
    while at < len(wire):
        found.append(decode(wire, at))
        at += HEADER_SIZE + (found[-1].length if found[-1].type == FrameType.DATA else 0)
    return found
