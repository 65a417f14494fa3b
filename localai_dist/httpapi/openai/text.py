"""Replies of a backend -> text, tool calls, counts: tokens may split a character, so bytes are decoded as they come."""

from __future__ import annotations

import codecs
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum

from localai_dist.httpapi.openai.calls import CallPiece, Calls
from localai_dist.httpapi.openai.likely import TokenLikely, tokens_of
from localai_dist.rpc import backend_pb2 as pb


@dataclass(frozen=True, slots=True)
class Limits:
    """What may have cut an answer short: tokens asked for at most, and the model's context (0 is no limit known)."""

    tokens: int = 0
    context: int = 0


@dataclass(frozen=True, slots=True)
class Wanted:
    """
    What the client asked of an answer.

    Attributes:
        limits: what may cut it short.
        single: one tool call at most.
        likely: for each token, how likely it was and this many others; None is "don't tell".
    """

    limits: Limits = field(default_factory=Limits)
    single: bool = False
    likely: int | None = None


@dataclass(frozen=True, slots=True)
class Said:
    """What a backend said: in one reply, or in all of them; false when that is nothing."""

    text: str = ""
    reasoning: str = ""
    calls: tuple[CallPiece, ...] = ()
    likely: tuple[TokenLikely, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.text or self.reasoning or self.calls or self.likely)


class _Source(Enum):
    """Where a backend says its text: as it is, or split by what it is."""

    MESSAGE = "message"
    DELTAS = "chat_deltas"


def new_call_id() -> str:
    """An id for a tool call that has none."""
    return "call_" + secrets.token_hex(12)


class Transcript:
    """
    What one answer came to so far.

    A backend's counts are cumulative over the replies of a stream, as LocalAI's are; one that sends none gets its
    replies with text counted. Backends that split their text into ``chat_deltas`` say it in ``message`` too, raw:
    where the first text comes from is where all of it is read, so that none is told twice. Tool calls and reasoning
    are in ``chat_deltas`` only.
    """

    def __init__(self, wanted: Wanted, new_id: Callable[[], str] = new_call_id) -> None:
        self._limits = wanted.limits
        self._wanted_likely = wanted.likely
        self._calls = Calls(single=wanted.single, new_id=new_id)
        self._source: _Source | None = None
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._completion = 0
        self._prompt = 0
        self._replies = 0

    def take(self, reply: pb.Reply) -> Said:
        """
        What ``reply`` adds; its text may be empty when it holds only part of a character.

        Raises:
            Unreached: it holds what the client asked for in a shape nobody can read.
        """
        self._completion = max(self._completion, reply.tokens)
        self._prompt = max(self._prompt, reply.prompt_tokens)
        message, deltas = reply.message, reply.chat_deltas
        if message or deltas:
            self._replies += 1
            self._source = self._source or (_Source.DELTAS if deltas else _Source.MESSAGE)
        likely = () if self._wanted_likely is None else tokens_of(reply.logprobs, self._wanted_likely)
        split = self._source is _Source.DELTAS
        if not deltas:
            return Said("" if split else self._decoder.decode(message), likely=likely)
        return Said(
            text="".join(delta.content for delta in deltas) if split else self._decoder.decode(message),
            reasoning="".join(delta.reasoning_content for delta in deltas),
            calls=tuple(self._called(deltas)),
            likely=likely,
        )

    def rest(self) -> str:
        """What is left when the answer is over: a replacement character for half a character."""
        return self._decoder.decode(b"", final=True)

    @property
    def completion_tokens(self) -> int:
        """Tokens generated."""
        return self._completion or self._replies

    def usage(self) -> dict[str, int]:
        """OpenAI's ``usage`` object."""
        return {
            "prompt_tokens": self._prompt,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self._prompt + self.completion_tokens,
        }

    @property
    def over(self) -> bool:
        """Whether the client has all that it wants, though the backend may have more to say."""
        return self._calls.enough

    def finish_reason(self) -> str:
        """``length`` when a limit was reached, else ``tool_calls`` or ``stop``; the contract has no field that says."""
        if self.over:
            return "tool_calls"
        limits = self._limits
        spent = self._completion
        if limits.tokens and spent >= limits.tokens:
            return "length"
        if limits.context and spent and self._prompt + spent >= limits.context:
            return "length"
        return "tool_calls" if self._calls.any else "stop"

    def _called(self, deltas: Iterable[pb.ChatDelta]) -> Iterable[CallPiece]:
        pieces = (self._calls.take(call) for delta in deltas for call in delta.tool_calls)
        return (piece for piece in pieces if piece is not None)
