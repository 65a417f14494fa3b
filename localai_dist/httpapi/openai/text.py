"""Replies of a backend -> text and counts: tokens may split a character, so bytes are decoded as they come."""

from __future__ import annotations

import codecs
from dataclasses import dataclass

from localai_dist.rpc import backend_pb2 as pb


@dataclass(frozen=True, slots=True)
class Limits:
    """What may have cut an answer short: tokens asked for at most, and the model's context (0 is no limit known)."""

    tokens: int = 0
    context: int = 0


class Transcript:
    """
    What one answer came to so far.

    A backend's counts are cumulative over the replies of a stream, as LocalAI's are; one that sends none gets its
    replies with text counted.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._completion = 0
        self._prompt = 0
        self._replies = 0

    def take(self, reply: pb.Reply) -> str:
        """The text that ``reply`` completes; empty when it holds only part of a character."""
        self._completion = max(self._completion, reply.tokens)
        self._prompt = max(self._prompt, reply.prompt_tokens)
        self._replies += bool(reply.message)
        return self._decoder.decode(reply.message)

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

    def finish_reason(self) -> str:
        """``length`` when a limit was reached, else ``stop``; the contract has no field that says."""
        limits = self._limits
        spent = self._completion
        if limits.tokens and spent >= limits.tokens:
            return "length"
        if limits.context and spent and self._prompt + spent >= limits.context:
            return "length"
        return "stop"
