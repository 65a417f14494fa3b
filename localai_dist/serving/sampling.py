"""
A request's wishes and the model's defaults, as the contract's ``PredictOptions``.

Source: reference/surface.md §4.5 for the fields; the defaults are LocalAI's (temperature 0.9, top_p 0.95, top_k 40).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from localai_dist.catalog.model import ModelConfig
from localai_dist.rpc import backend_pb2 as pb

TEMPERATURE = 0.9
TOP_P = 0.95
TOP_K = 40
RANDOM_SEED = -1
"""A backend told this draws a seed of its own."""

PARALLEL = "parallel_tool_calls"
"""Key in the contract's ``Metadata``: "false" asks for one tool call at most."""

_SEED_MASK = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the client wants its answer made; None is "the model's default"; ``logit_bias`` is JSON."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    max_tokens: int | None = None
    seed: int | None = None
    repeat_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logit_bias: str = ""


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a chat; ``tool_calls`` is JSON, ``images`` are base64."""

    role: str
    content: str
    name: str = ""
    tool_call_id: str = ""
    tool_calls: str = ""
    images: tuple[str, ...] = ()
    reasoning: str = ""


@dataclass(frozen=True, slots=True)
class Offer:
    """
    The tools a model may call.

    Attributes:
        tools: OpenAI's ``tools``, as JSON.
        choice: OpenAI's ``tool_choice``, as JSON.
        single: an answer holds one call at most; the contract has no field for it, so that it is a hint to the
            backend, and whoever reads the answer keeps to it.
    """

    tools: str
    choice: str
    single: bool = False


@dataclass(frozen=True, slots=True)
class Form:
    """
    What a chat's answer must look like.

    Attributes:
        offer: the tools it may call.
        grammar: what its text must match, in GBNF; empty for any text.
        likely: for each token, how likely it was and this many others; None is "don't tell".
    """

    offer: Offer | None = None
    grammar: str = ""
    likely: int | None = None


PLAIN = Form()


def token_limit(model: ModelConfig, sampling: Sampling) -> int:
    """Tokens the answer may have; 0 is "until the model stops"."""
    return sampling.max_tokens if sampling.max_tokens is not None else model.parameters.max_tokens or 0


def completion_options(model: ModelConfig, sampling: Sampling, prompt: str, *, correlation: str) -> pb.PredictOptions:
    """The call that continues ``prompt``."""
    options = _options(model, sampling, correlation)
    options.Prompt = prompt
    return options


def chat_options(
    model: ModelConfig, sampling: Sampling, messages: Sequence[Message], form: Form = PLAIN, *, correlation: str
) -> pb.PredictOptions:
    """
    The call that answers ``messages``, after the model's system prompt if the chat brings none of its own.

    The prompt is the messages' texts joined by line breaks: for a backend that applies no template. The contract has
    one list of pictures for the whole chat: they are in it in the order of the messages.
    """
    options = _options(model, sampling, correlation)
    said = list(messages)
    if model.system_prompt and not any(message.role in ("system", "developer") for message in said):
        said.insert(0, Message("system", model.system_prompt))
    options.Prompt = "\n".join(message.content for message in said)
    options.Images.extend(image for message in said for image in message.images)
    if model.template.use_tokenizer_template:
        options.UseTokenizerTemplate = True
        options.Messages.extend(_message(message) for message in said)
    _put_form(options, form)
    return options


def embedding_options(model: ModelConfig, text: str, *, correlation: str) -> pb.PredictOptions:
    """The call that embeds ``text``."""
    return pb.PredictOptions(Embeddings=text, ModelIdentity=model.identity, CorrelationId=correlation)


def _options(model: ModelConfig, sampling: Sampling, correlation: str) -> pb.PredictOptions:
    preset = model.parameters
    return pb.PredictOptions(
        Temperature=_first(sampling.temperature, preset.temperature, TEMPERATURE),
        TopP=_first(sampling.top_p, preset.top_p, TOP_P),
        TopK=int(_first(sampling.top_k, preset.top_k, TOP_K)),
        MinP=_first(sampling.min_p, preset.min_p, 0),
        Penalty=_first(sampling.repeat_penalty, preset.repeat_penalty, 0),
        FrequencyPenalty=_first(sampling.frequency_penalty, preset.frequency_penalty, 0),
        PresencePenalty=_first(sampling.presence_penalty, preset.presence_penalty, 0),
        Seed=_seed(sampling.seed if sampling.seed is not None else preset.seed),
        Tokens=token_limit(model, sampling),
        StopPrompts=dict.fromkeys((*sampling.stop, *preset.stop, *model.stopwords)),
        IgnoreEOS=sampling.ignore_eos,
        LogitBias=sampling.logit_bias,
        Threads=model.threads,
        ModelIdentity=model.identity,
        CorrelationId=correlation,
    )


def _put_form(options: pb.PredictOptions, form: Form) -> None:
    options.Grammar = form.grammar
    if form.offer is not None:
        options.Tools, options.ToolChoice = form.offer.tools, form.offer.choice
        if form.offer.single:
            options.Metadata[PARALLEL] = "false"
    if form.likely is not None:
        options.Logprobs, options.TopLogprobs = max(1, form.likely), form.likely


def _message(message: Message) -> pb.Message:
    return pb.Message(
        role=message.role,
        content=message.content,
        name=message.name,
        tool_call_id=message.tool_call_id,
        tool_calls=message.tool_calls,
        reasoning_content=message.reasoning,
    )


def _first(asked: float | None, preset: float | None, default: float) -> float:
    if asked is not None:
        return asked
    return default if preset is None else preset


def _seed(seed: int | None) -> int:
    """The contract's seed has 32 bits; clients send 64. Equal seeds stay equal."""
    if seed is None or seed == RANDOM_SEED:
        return RANDOM_SEED
    return seed & _SEED_MASK
