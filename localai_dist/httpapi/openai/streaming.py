"""A generation onto an event stream, at the client's pace."""

from __future__ import annotations

from localai_dist.catalog.model import ModelConfig
from localai_dist.httpapi.call import Answer, Call, Streamed
from localai_dist.httpapi.openai.answers import Shape
from localai_dist.httpapi.openai.text import Limits, Transcript
from localai_dist.httpapi.sse import EventStream
from localai_dist.rpc import backend_pb2 as pb
from localai_dist.serving.generation import Generation


async def stream_answer(
    call: Call, model: ModelConfig, options: pb.PredictOptions, shape: Shape, limits: Limits
) -> Answer:
    """
    Answer with chunks as the backend produces them.

    The next reply is pulled only when the client took the last chunk, so a client that stops reading stops the
    backend. Cancelling it (the client went away) cancels the call on the backend.
    """
    call.events = events = EventStream(call.request, clock=call.api.clock, headers={})
    generation = await call.api.inference.generate(model, options, deadline=call.deadline)
    try:
        await _chunks(generation, events, shape, Transcript(limits))
    finally:
        generation.close()
    events.done()
    return Streamed()


async def _chunks(generation: Generation, events: EventStream, shape: Shape, transcript: Transcript) -> None:
    opening = shape.first()
    if opening is not None:
        await events.send(opening)
    async for reply in generation:
        text = transcript.take(reply)
        if text:
            await events.send(shape.piece(text))
    rest = transcript.rest()
    if rest:
        await events.send(shape.piece(rest))
    await events.send(shape.last(transcript.finish_reason()))
    if shape.with_usage:
        await events.send(shape.trailer(transcript.usage()))
