"""The routes OpenAI's clients call, each with and without ``/v1``."""

from __future__ import annotations

import secrets
from dataclasses import replace

from localai_dist.catalog.model import ModelConfig
from localai_dist.httpapi.auth import Access
from localai_dist.httpapi.call import Answer, ApiRoute, Call, Json
from localai_dist.httpapi.errors import bad_request
from localai_dist.httpapi.openai.answers import (
    ChatShape,
    CompletionShape,
    Shape,
    embeddings,
    model_list,
    model_object,
)
from localai_dist.httpapi.openai.audio import transcribe
from localai_dist.httpapi.openai.requests import ChatRequest, CompletionRequest, EmbeddingRequest, SamplingFields
from localai_dist.httpapi.openai.streaming import stream_answer
from localai_dist.httpapi.openai.text import Limits, Transcript, Wanted
from localai_dist.httpapi.routing import Route
from localai_dist.rpc import backend_pb2 as pb
from localai_dist.serving.sampling import (
    PLAIN,
    Form,
    chat_options,
    completion_options,
    embedding_options,
    token_limit,
)


async def list_models(call: Call) -> Answer:
    """``GET /v1/models``."""
    return Json(model_list(call.api.catalog.all()))


async def show_model(call: Call) -> Answer:
    """``GET /v1/models/:model``."""
    return Json(model_object(call.listed_model(call.values["model"])))


async def chat(call: Call) -> Answer:
    """``POST /v1/chat/completions``."""
    wish = call.body(ChatRequest)
    said, form = wish.said(), wish.form()
    model = call.model(wish.model)
    _check_offer(model, form)
    options = chat_options(model, wish.sampling(), said, form, correlation=call.id)
    shape = ChatShape(_id("chatcmpl-"), int(call.api.clock.seconds()), wish.model, wish.wants_usage())
    return await _generate(call, model, options, shape, wish, form)


async def complete(call: Call) -> Answer:
    """``POST /v1/completions``."""
    wish = call.body(CompletionRequest)
    model = call.model(wish.model)
    options = completion_options(model, wish.sampling(), wish.text(), correlation=call.id)
    shape = CompletionShape(_id("cmpl-"), int(call.api.clock.seconds()), wish.model, wish.wants_usage())
    return await _generate(call, model, options, shape, wish)


async def embed(call: Call) -> Answer:
    """``POST /v1/embeddings``."""
    wish = call.body(EmbeddingRequest)
    texts, as_base64 = wish.texts(), wish.wants_base64()
    model = call.model(wish.model)
    inputs = [embedding_options(model, text, correlation=call.id) for text in texts]
    results = await call.api.inference.embed(model, inputs, deadline=call.deadline)
    return Json(embeddings(wish.model, results, as_base64=as_base64))


async def _generate(
    call: Call,
    model: ModelConfig,
    options: pb.PredictOptions,
    shape: Shape,
    wish: SamplingFields,
    form: Form = PLAIN,
) -> Answer:
    limits = Limits(token_limit(model, wish.sampling()), model.context_size)
    wanted = Wanted(limits, form.offer is not None and form.offer.single, form.likely)
    if wish.stream:
        return await stream_answer(call, model, options, shape, wanted)
    reply = await call.api.inference.predict(model, options, deadline=call.deadline)
    transcript = Transcript(wanted)
    said = transcript.take(reply)
    said = replace(said, text=said.text + transcript.rest())
    return Json(shape.whole(said, transcript.finish_reason(), transcript.usage()))


def _check_offer(model: ModelConfig, form: Form) -> None:
    """A prompt that is the messages' texts has no place for tools: nobody would tell the model of them."""
    if form.offer is not None and not model.template.use_tokenizer_template:
        text = f"tools: the model {model.name!r} has none: its file says template.use_tokenizer_template: false"
        raise bad_request(text, "tools")


def _id(prefix: str) -> str:
    return prefix + secrets.token_hex(12)


def _served(prefix: str) -> list[ApiRoute]:
    return [
        Route("GET", f"{prefix}/models", Access.KEY, list_models),
        Route("GET", f"{prefix}/models/:model", Access.KEY, show_model),
        Route("POST", f"{prefix}/chat/completions", Access.KEY, chat),
        Route("POST", f"{prefix}/completions", Access.KEY, complete),
        Route("POST", f"{prefix}/embeddings", Access.KEY, embed),
        Route("POST", f"{prefix}/audio/transcriptions", Access.KEY, transcribe, streams=True),
    ]


ROUTES: list[ApiRoute] = [*_served("/v1"), *_served("")]
