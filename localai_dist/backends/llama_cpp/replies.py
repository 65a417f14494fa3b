"""What the engine says, as the contract's replies (pure)."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from localai_dist.rpc import backend_pb2 as pb


def reply_of(chunk: dict[str, Any]) -> pb.Reply | None:
    """
    The reply a streamed chunk makes, or None if it says nothing (the role, a bare finish reason).

    Token numbers are the engine's own: so far in each chunk, in all in the last.
    """
    reply = pb.Reply()
    choice = chunk["choices"][0] if chunk.get("choices") else {}
    delta = choice.get("delta") or {"content": choice.get("text")}
    _put_text(reply, delta)
    if choice.get("logprobs"):
        reply.logprobs = json.dumps(choice["logprobs"]).encode()
    _put_numbers(reply, chunk)
    told = reply.message or reply.chat_deltas or reply.logprobs or "usage" in chunk
    return reply if told else None


def _put_text(reply: pb.Reply, delta: dict[str, Any]) -> None:
    content = delta.get("content") or ""
    reply.message = content.encode()
    if not content and not delta.get("reasoning_content") and not delta.get("tool_calls"):
        return
    split = reply.chat_deltas.add(content=content, reasoning_content=delta.get("reasoning_content") or "")
    for call in delta.get("tool_calls") or ():
        function = call.get("function") or {}
        split.tool_calls.add(
            index=call.get("index") or 0,
            id=call.get("id") or "",
            name=function.get("name") or "",
            arguments=function.get("arguments") or "",
        )


def _put_numbers(reply: pb.Reply, chunk: dict[str, Any]) -> None:
    timings = chunk.get("timings") or {}
    usage = chunk.get("usage") or {}
    reply.tokens = usage.get("completion_tokens", timings.get("predicted_n", 0))
    reply.prompt_tokens = usage.get("prompt_tokens", timings.get("prompt_n", 0) + timings.get("cache_n", 0))
    reply.timing_prompt_processing = timings.get("prompt_ms", 0.0)
    reply.timing_token_generation = timings.get("predicted_ms", 0.0)


def _append(whole: pb.Reply, delta: pb.ChatDelta) -> None:
    """Add ``delta``, run together with the one before where neither holds a tool call."""
    if whole.chat_deltas and not delta.tool_calls and not whole.chat_deltas[-1].tool_calls:
        whole.chat_deltas[-1].content += delta.content
        whole.chat_deltas[-1].reasoning_content += delta.reasoning_content
    else:
        whole.chat_deltas.append(delta)


def joined(replies: Iterable[pb.Reply]) -> pb.Reply:
    """One reply that says what ``replies`` said in turn; numbers are those of the last."""
    replies = list(replies)
    whole = pb.Reply(message=b"".join(reply.message for reply in replies))
    if replies:
        last = replies[-1]
        whole.tokens, whole.prompt_tokens = last.tokens, last.prompt_tokens
        whole.timing_prompt_processing = last.timing_prompt_processing
        whole.timing_token_generation = last.timing_token_generation
    for reply in replies:
        for delta in reply.chat_deltas:
            _append(whole, delta)
    logprobs = [json.loads(reply.logprobs) for reply in replies if reply.logprobs]
    if logprobs:
        content = [token for part in logprobs for token in part.get("content") or ()]
        whole.logprobs = json.dumps({"content": content}).encode()
    return whole
