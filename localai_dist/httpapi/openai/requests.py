"""
The bodies of OpenAI's requests, as far as this build understands them; unknown fields are ignored.

Source: reference/surface.md §3, design §8 (a known field of a wrong type or range is a 400 naming it).
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from localai_dist.catalog.parse import FLOAT32_MAX
from localai_dist.httpapi.errors import bad_request
from localai_dist.httpapi.openai.formats import ResponseFormat, grammar_of
from localai_dist.httpapi.openai.pictures import image_of
from localai_dist.httpapi.openai.tools import Choice, Tools, encoded, offer_of
from localai_dist.serving.sampling import Form, Message, Sampling

Name = Annotated[str, Meta(min_length=1, max_length=255)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Limit = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
"""OpenAI's range; ``serving.sampling`` folds it into the 32 bits of the contract with backends."""
LogitBias = Annotated[dict[str, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=1024)]
"""OpenAI's: a token's number -> what is added to its score."""
StopList = Annotated[list[str], Meta(max_length=16)]

ROLES = ("system", "developer", "user", "assistant", "tool", "function")


class StreamOptions(msgspec.Struct):
    """How a stream ends: with the usage, if asked for."""

    include_usage: bool | None = None


class SamplingFields(msgspec.Struct, kw_only=True):
    """What chat and completion requests have in common."""

    model: Name
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    max_tokens: Limit | None = None
    seed: Seed | None = None
    stop: str | StopList | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repeat_penalty: Annotated[float, Meta(ge=0, le=FLOAT32_MAX)] | None = None
    ignore_eos: bool | None = None
    logit_bias: LogitBias | None = None
    n: Annotated[int, Meta(ge=1, le=1)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    def limit(self) -> int | None:
        """Tokens the client wants at most."""
        return self.max_tokens

    def wants_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def sampling(self) -> Sampling:
        """The request's wishes, apart from OpenAI's names."""
        return Sampling(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            max_tokens=self.limit(),
            seed=self.seed,
            repeat_penalty=self.repeat_penalty,
            frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            ignore_eos=bool(self.ignore_eos),
            logit_bias=encoded(self.logit_bias, "logit_bias") if self.logit_bias else "",
        )


class ImageUrl(msgspec.Struct):
    """Where a picture is; only ``data:`` is served."""

    url: str


class ContentPart(msgspec.Struct):
    """One piece of a message's content."""

    type: str
    text: str | None = None
    image_url: ImageUrl | None = None


class ChatMessage(msgspec.Struct, kw_only=True):
    """One message of a chat."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[dict[str, object]] | None = None
    reasoning_content: str | None = None


class ChatRequest(SamplingFields, kw_only=True):
    """``POST /v1/chat/completions``; ``functions`` and ``function_call`` are what ``tools`` were called once."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_completion_tokens: Limit | None = None
    tools: Tools | None = None
    tool_choice: Choice | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    modalities: list[str] | None = None
    functions: object = None
    function_call: object = None

    def limit(self) -> int | None:
        """Tokens the client wants at most; the newer name wins."""
        return self.max_completion_tokens or self.max_tokens

    def said(self) -> list[Message]:
        """
        The messages, with their pictures.

        Raises:
            ApiError: 400; an unknown role, or content that is neither text nor a picture in the request itself.
        """
        return [_message(message, f"messages[{index}]") for index, message in enumerate(self.messages)]

    def form(self) -> Form:
        """
        What the answer must look like.

        Raises:
            ApiError: 400; what is not served, or not together.
        """
        if self.functions or self.function_call:
            param = "functions" if self.functions else "function_call"
            raise bad_request(f"{param}: not served here: say it with tools and tool_choice", param)
        if self.modalities and self.modalities != ["text"]:
            raise bad_request("modalities: only text is served here", "modalities")
        if self.top_logprobs is not None and not self.logprobs:
            raise bad_request("top_logprobs: only together with logprobs: true", "top_logprobs")
        offer = offer_of(self.tools or (), self.tool_choice, parallel=self.parallel_tool_calls is not False)
        grammar = "" if self.response_format is None else grammar_of(self.response_format)
        if offer and grammar:
            text = "response_format: not together with tools: a backend takes one grammar for an answer"
            raise bad_request(text, "response_format")
        return Form(offer, grammar, (self.top_logprobs or 0) if self.logprobs else None)


class CompletionRequest(SamplingFields, kw_only=True):
    """``POST /v1/completions``; one prompt, as text."""

    prompt: str | Annotated[list[str], Meta(min_length=1, max_length=1)]
    logprobs: Annotated[int, Meta(ge=0, le=5)] | None = None

    def text(self) -> str:
        """
        The prompt.

        Raises:
            ApiError: 400; more is asked than is served.
        """
        if self.logprobs is not None:
            raise bad_request("logprobs: not served for completions: ask /v1/chat/completions", "logprobs")
        return self.prompt if isinstance(self.prompt, str) else self.prompt[0]


class EmbeddingRequest(msgspec.Struct, kw_only=True):
    """``POST /v1/embeddings``."""

    model: Name
    input: str | Annotated[list[str], Meta(min_length=1, max_length=2048)]
    encoding_format: str | None = None

    def texts(self) -> list[str]:
        """
        What to embed, in order.

        Raises:
            ApiError: 400; an empty text.
        """
        texts = [self.input] if isinstance(self.input, str) else self.input
        if not all(texts):
            raise bad_request("input: want text that is not empty", "input")
        return texts

    def wants_base64(self) -> bool:
        """
        Whether vectors travel as base64 of little-endian floats (what OpenAI's own client asks for).

        Raises:
            ApiError: 400; an unknown format.
        """
        if self.encoding_format not in (None, "float", "base64"):
            raise bad_request("encoding_format: want float or base64", "encoding_format")
        return self.encoding_format == "base64"


def _message(message: ChatMessage, where: str) -> Message:
    if message.role not in ROLES:
        raise bad_request(f"{where}.role: want one of {', '.join(ROLES)}", f"{where}.role")
    parts = _parts(message.content)
    return Message(
        role=message.role,
        content="".join(_text(part, f"{where}.content[{index}]") for index, part in enumerate(parts)),
        images=tuple(
            image_of(part.image_url.url, f"{where}.content[{index}].image_url.url")
            for index, part in enumerate(parts)
            if part.image_url is not None
        ),
        name=message.name or "",
        tool_call_id=message.tool_call_id or "",
        tool_calls=encoded(message.tool_calls, f"{where}.tool_calls") if message.tool_calls else "",
        reasoning=message.reasoning_content or "",
    )


def _parts(content: str | list[ContentPart] | None) -> list[ContentPart]:
    if content is None or isinstance(content, str):
        return [ContentPart("text", content or "")]
    return content


def _text(part: ContentPart, where: str) -> str:
    """What ``part`` adds to the text: a picture adds nothing."""
    if part.type == "text" and part.text is not None:
        return part.text
    if part.type == "image_url" and part.image_url is not None:
        return ""
    raise bad_request(
        f"{where}.type: only text and image_url parts are served here, not {part.type[:40]!r}", f"{where}.type"
    )
