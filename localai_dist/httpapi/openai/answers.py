"""OpenAI's answers as JSON values (pure)."""

from __future__ import annotations

import base64
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from localai_dist.catalog.model import ModelConfig
from localai_dist.httpapi.openai.calls import CallPiece, joined
from localai_dist.httpapi.openai.likely import TokenLikely
from localai_dist.httpapi.openai.text import Said
from localai_dist.rpc import backend_pb2 as pb

OWNER = "localai-dist"


@dataclass(frozen=True, slots=True)
class ChatShape:
    """
    The objects of one chat answer; all chunks share id, time and the *requested* model name.

    Attributes:
        with_usage: the client asked for usage in the stream: a trailer has it, every other chunk says null.
    """

    id: str
    created: int
    model: str
    with_usage: bool = False

    def whole(self, said: Said, finish_reason: str, usage: dict[str, int]) -> dict[str, object]:
        """The answer in one piece; one that only calls tools has no content."""
        content = said.text if said.text or not said.calls else None
        message: dict[str, object] = {"role": "assistant", "content": content, "refusal": None}
        if said.reasoning:
            message["reasoning_content"] = said.reasoning
        if said.calls:
            message["tool_calls"] = [_call(call) for call in joined(said.calls)]
        choice = {"index": 0, "message": message, "logprobs": _likely(said.likely), "finish_reason": finish_reason}
        return {**self._head("chat.completion"), "choices": [choice], "usage": usage}

    def first(self) -> dict[str, object] | None:
        """The chunk that opens a stream: who speaks."""
        return self._chunk({"role": "assistant", "content": ""}, None)

    def piece(self, said: Said) -> dict[str, object] | None:
        """A chunk of what was said."""
        delta: dict[str, object] = {}
        if said.reasoning:
            delta["reasoning_content"] = said.reasoning
        if said.text or said.likely:
            delta["content"] = said.text
        if said.calls:
            delta["tool_calls"] = [_call_piece(piece) for piece in said.calls]
        return self._chunk(delta, None, said.likely)

    def last(self, finish_reason: str) -> dict[str, object]:
        """The chunk that says why the answer ended."""
        return self._chunk({}, finish_reason)

    def trailer(self, usage: dict[str, int]) -> dict[str, object]:
        """The chunk with the usage, after the last."""
        return {**self._head("chat.completion.chunk"), "choices": [], "usage": usage}

    def _chunk(
        self, delta: dict[str, object], finish_reason: str | None, likely: Sequence[TokenLikely] = ()
    ) -> dict[str, object]:
        choice = {"index": 0, "delta": delta, "logprobs": _likely(likely), "finish_reason": finish_reason}
        chunk = {**self._head("chat.completion.chunk"), "choices": [choice]}
        return {**chunk, "usage": None} if self.with_usage else chunk

    def _head(self, kind: str) -> dict[str, object]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


@dataclass(frozen=True, slots=True)
class CompletionShape:
    """The objects of one completion; as ``ChatShape``, but text stands in ``choices[].text`` and nobody opens."""

    id: str
    created: int
    model: str
    with_usage: bool = False

    def whole(self, said: Said, finish_reason: str, usage: dict[str, int]) -> dict[str, object]:
        """The answer in one piece."""
        return {**self._head(), "choices": [_choice(said.text, finish_reason)], "usage": usage}

    def first(self) -> dict[str, object] | None:
        """Completions open without a chunk of their own."""
        return None

    def piece(self, said: Said) -> dict[str, object] | None:
        """A chunk of text; nothing else of what was said has a place here."""
        return self._chunk(said.text, None) if said.text else None

    def last(self, finish_reason: str) -> dict[str, object]:
        """The chunk that says why the answer ended."""
        return self._chunk("", finish_reason)

    def trailer(self, usage: dict[str, int]) -> dict[str, object]:
        """The chunk with the usage, after the last."""
        return {**self._head(), "choices": [], "usage": usage}

    def _chunk(self, text: str, finish_reason: str | None) -> dict[str, object]:
        chunk = {**self._head(), "choices": [_choice(text, finish_reason)]}
        return {**chunk, "usage": None} if self.with_usage else chunk

    def _head(self) -> dict[str, object]:
        return {"id": self.id, "object": "text_completion", "created": self.created, "model": self.model}


Shape = ChatShape | CompletionShape


def embeddings(model: str, results: Sequence[pb.EmbeddingResult], *, as_base64: bool) -> dict[str, object]:
    """The answer of ``/v1/embeddings``."""
    prompt = sum(result.prompt_tokens or result.tokens for result in results)
    vectors = [
        {"object": "embedding", "index": index, "embedding": _vector(result.embeddings, as_base64)}
        for index, result in enumerate(results)
    ]
    usage = {"prompt_tokens": prompt, "total_tokens": prompt}
    return {"object": "list", "data": vectors, "model": model, "usage": usage}


def model_object(model: ModelConfig) -> dict[str, object]:
    """One entry of ``/v1/models``; a model file has no date that means anything, so ``created`` is 0."""
    return {"id": model.name, "object": "model", "created": 0, "owned_by": OWNER}


def model_list(models: Sequence[ModelConfig]) -> dict[str, object]:
    """The answer of ``/v1/models``."""
    return {"object": "list", "data": [model_object(model) for model in models if not model.disabled]}


def _call(call: CallPiece) -> dict[str, object]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _call_piece(piece: CallPiece) -> dict[str, object]:
    """Id and type go with the first piece alone."""
    function = {"name": piece.name, "arguments": piece.arguments} if piece.name else {"arguments": piece.arguments}
    if not piece.id:
        return {"index": piece.number, "function": function}
    return {"index": piece.number, "id": piece.id, "type": "function", "function": function}


def _likely(tokens: Sequence[TokenLikely]) -> dict[str, object] | None:
    return {"content": list(tokens), "refusal": None} if tokens else None


def _choice(text: str, finish_reason: str | None) -> dict[str, object]:
    return {"text": text, "index": 0, "logprobs": None, "finish_reason": finish_reason}


def _vector(numbers: Sequence[float], as_base64: bool) -> object:
    if not as_base64:
        return list(numbers)
    return base64.b64encode(struct.pack(f"<{len(numbers)}f", *numbers)).decode("ascii")
