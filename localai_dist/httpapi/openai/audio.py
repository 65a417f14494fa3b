"""``POST /v1/audio/transcriptions``: the recording to this frontend's disk, from there to the node that answers."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from localai_dist.catalog.model import ModelConfig
from localai_dist.httpapi.call import Answer, Call
from localai_dist.httpapi.errors import bad_request
from localai_dist.httpapi.form import received_form
from localai_dist.httpapi.openai.requests import Name
from localai_dist.httpapi.openai.transcripts import FORMS, render
from localai_dist.httpapi.validation import from_form
from localai_dist.rpc import backend_pb2 as pb

FILE = "file"
_GRANULARITIES = "timestamp_granularities[]"


class TranscriptionRequest(msgspec.Struct, kw_only=True):
    """The fields beside the file; ``translate`` is LocalAI's."""

    model: Name
    language: Annotated[str, Meta(max_length=35, pattern=r"^[A-Za-z0-9_-]*$")] = ""
    prompt: str = ""
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    response_format: str = "json"
    granularities: list[str] = msgspec.field(name=_GRANULARITIES, default_factory=list)
    translate: bool = False
    stream: bool = False

    def check(self) -> None:
        """
        Refuse what is known and not served.

        Raises:
            ApiError: 400.
        """
        if self.response_format not in FORMS:
            raise bad_request(f"response_format: want one of {', '.join(FORMS)}", "response_format")
        if self.stream:
            raise bad_request("stream: transcriptions are not streamed here", "stream")
        if any(one != "segment" for one in self.granularities):
            raise bad_request(f"{_GRANULARITIES}: only segment is served here", _GRANULARITIES)

    def asked(self, model: ModelConfig) -> pb.TranscriptRequest:
        """The call, but for the path of the recording, which each node has its own of."""
        preset = model.parameters.temperature
        return pb.TranscriptRequest(
            language=self.language,
            threads=model.threads,
            translate=self.translate,
            prompt=self.prompt,
            temperature=self.temperature if self.temperature is not None else preset or 0.0,
            timestamp_granularities=self.granularities,
            ModelIdentity=model.identity,
        )


async def transcribe(call: Call) -> Answer:
    """``POST /v1/audio/transcriptions``."""
    async with received_form(call, file=FILE) as form:
        wish = from_form(form.fields, TranscriptionRequest)
        wish.check()
        model = call.model(wish.model)
        assert form.file is not None
        result = await call.api.inference.transcribe(model, wish.asked(model), form.file.path, deadline=call.deadline)
    return render(result, wish.response_format, translated=wish.translate)
