"""The tool calls of one answer (pure): numbered from 0, each one's id and name told once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from localai_dist.rpc import backend_pb2 as pb


@dataclass(frozen=True, slots=True)
class CallPiece:
    """
    A piece of a call, or a whole one.

    Attributes:
        number: which call of the answer.
        id, name: in the first piece alone: clients string together what comes twice.
        arguments: the next piece of a JSON text.
    """

    number: int
    arguments: str
    id: str = ""
    name: str = ""


@dataclass(slots=True)
class _Begun:
    number: int
    id: str
    named: bool


class Calls:
    """
    Tool calls as a backend sends them -> as a client is told.

    Args:
        single: only the first call is told.
        new_id: makes an id for a call that comes without.
    """

    def __init__(self, *, single: bool, new_id: Callable[[], str]) -> None:
        self._single = single
        self._new_id = new_id
        self._begun: dict[int, _Begun] = {}
        self._count = 0

    @property
    def any(self) -> bool:
        """Whether there was one."""
        return self._count > 0

    @property
    def enough(self) -> bool:
        """Whether a call began that nobody wants: what the backend says from here on is not told."""
        return self._single and self._count > 1

    def take(self, delta: pb.ToolCallDelta) -> CallPiece | None:
        """The piece that ``delta`` is; None when the client is not told of it."""
        if not (delta.id or delta.name or delta.arguments):
            return None
        call = self._begun.get(delta.index)
        if call is None or (delta.id and call.id and delta.id != call.id):  # some backends number all of them 0
            return self._begin(delta)
        if self._single and call.number > 0:
            return None
        name = "" if call.named else delta.name
        call.named = call.named or bool(name)
        return CallPiece(call.number, delta.arguments, name=name) if name or delta.arguments else None

    def _begin(self, delta: pb.ToolCallDelta) -> CallPiece | None:
        number, self._count = self._count, self._count + 1
        self._begun[delta.index] = _Begun(number, delta.id, bool(delta.name))
        if self._single and number > 0:
            return None
        return CallPiece(number, delta.arguments, id=delta.id or self._new_id(), name=delta.name)


def joined(pieces: Iterable[CallPiece]) -> list[CallPiece]:
    """The calls that ``pieces`` make up, in order."""
    whole: dict[int, CallPiece] = {}
    texts: dict[int, list[str]] = {}
    for piece in pieces:
        first = whole.setdefault(piece.number, piece)
        whole[piece.number] = replace(first, name=first.name or piece.name)
        texts.setdefault(piece.number, []).append(piece.arguments)
    return [replace(call, arguments="".join(texts[number])) for number, call in sorted(whole.items())]
