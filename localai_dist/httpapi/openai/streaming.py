"""A generation onto an event stream, at the client's pace."""

from __future__ import annotations

from localai_dist.catalog.model import ModelConfig
from localai_dist.httpapi.call import Answer, Call, Streamed
from localai_dist.httpapi.openai.answers import Shape
from localai_dist.httpapi.openai.text import Said, Transcript, Wanted
from localai_dist.httpapi.sse import EventStream
from localai_dist.rpc import backend_pb2 as pb
from localai_dist.serving.generation import Generation


async def stream_answer(
    call: Call, model: ModelConfig, options: pb.PredictOptions, shape: Shape, wanted: Wanted
) -> Answer:
    """
    Answer with chunks as the backend produces them.

    The next reply is pulled only when the client took the last chunk, so a client that stops reading stops the
    backend. Cancelling it (the client went away) cancels the call on the backend.
    """
    call.events = events = EventStream(call.request, clock=call.api.clock, headers={})
    generation = await call.api.inference.generate(model, options, deadline=call.deadline)
    try:
        await _chunks(generation, events, shape, Transcript(wanted))
    finally:
        generation.close()
    events.done()
    return Streamed()


async def _chunks(generation: Generation, events: EventStream, shape: Shape, transcript: Transcript) -> None:
    opening = shape.first()
    if opening is not None:
        await events.send(opening)
    async for reply in generation:
        await _tell(events, shape, transcript.take(reply))
        if transcript.over:
            generation.close()  # the backend need not go on
            break
    await _tell(events, shape, Said(transcript.rest()))
    await events.send(shape.last(transcript.finish_reason()))
    if shape.with_usage:
        await events.send(shape.trailer(transcript.usage()))


async def _tell(events: EventStream, shape: Shape, said: Said) -> None:
    piece = shape.piece(said) if said else None
    if piece is not None:
        await events.send(piece)
