"""What a backend heard, in the forms that clients ask for (pure)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from localai_dist.httpapi.call import Answer, Json, Text
from localai_dist.rpc import backend_pb2 as pb

_NANOSECONDS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Cue:
    """A line of text and when it is said, in milliseconds."""

    start: int
    end: int
    text: str


def render(result: pb.TranscriptResult, form: str, *, translated: bool) -> Answer:
    """
    ``result`` as the answer.

    Args:
        form: one of ``FORMS``.
        translated: whether the client asked for English.
    """
    if form == "json":
        return Json({"text": result.text})
    if form == "verbose_json":
        return Json(_verbose(result, "translate" if translated else "transcribe"))
    return Text(_TEXTS[form](result))


def _verbose(result: pb.TranscriptResult, task: str) -> dict[str, object]:
    segments = [
        {
            "id": segment.id,
            "start": segment.start / _NANOSECONDS,
            "end": segment.end / _NANOSECONDS,
            "text": segment.text,
            "tokens": list(segment.tokens),
        }
        for segment in result.segments
    ]
    return {
        "task": task,
        "language": result.language,
        "duration": _duration(result),
        "text": result.text,
        "segments": segments,
    }


def _duration(result: pb.TranscriptResult) -> float:
    """Seconds; a backend that does not tell has its last segment's end."""
    ends = [segment.end / _NANOSECONDS for segment in result.segments]
    return round(result.duration, 3) or max(ends, default=0.0)


def _cues(result: pb.TranscriptResult) -> Sequence[Cue]:
    """A backend that tells no segments has one, over all of it."""
    found = [
        Cue(segment.start // 1_000_000, segment.end // 1_000_000, _one_line(segment.text))
        for segment in result.segments
    ]
    whole = Cue(0, round(_duration(result) * 1000), _one_line(result.text))
    return found or ([whole] if whole.text else [])


def _one_line(text: str) -> str:
    """Subtitles separate their cues by empty lines, and times by an arrow."""
    return " ".join(text.split()).replace("-->", "->")


def _srt(result: pb.TranscriptResult) -> str:
    return "\n".join(
        f"{number}\n{_clock(cue.start, ',')} --> {_clock(cue.end, ',')}\n{cue.text}\n"
        for number, cue in enumerate(_cues(result), 1)
    )


def _vtt(result: pb.TranscriptResult) -> str:
    cues = [f"{_clock(cue.start, '.')} --> {_clock(cue.end, '.')}\n{cue.text}\n" for cue in _cues(result)]
    return "\n".join(["WEBVTT\n", *cues])


def _lrc(result: pb.TranscriptResult) -> str:
    return "".join(
        f"[{cue.start // 60_000:02}:{cue.start // 1000 % 60:02}.{cue.start // 10 % 100:02}]{cue.text}\n"
        for cue in _cues(result)
    )


def _text(result: pb.TranscriptResult) -> str:
    return result.text + "\n"


def _clock(milliseconds: int, point: str) -> str:
    seconds, rest = divmod(milliseconds, 1000)
    return f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}{point}{rest:03}"


_TEXTS: dict[str, Callable[[pb.TranscriptResult], str]] = {
    "text": _text,
    "txt": _text,
    "srt": _srt,
    "vtt": _vtt,
    "lrc": _lrc,
}

FORMS = ("json", "verbose_json", *_TEXTS)
"""The values of ``response_format``; ``txt`` is LocalAI's name of ``text``."""
