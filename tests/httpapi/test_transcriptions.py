"""``POST /v1/audio/transcriptions`` over a raw connection, byte by byte if need be."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any
from unittest import mock

from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.internet.defer import Deferred
from twisted.trial.unittest import SynchronousTestCase

from localai_dist.httpapi.errors import ApiError
from localai_dist.httpapi.form import FIELD_SIZE, FIELDS, safe_suffix
from localai_dist.httpapi.multipart import HEAD_SIZE, FormReader, PartBegun, PartBytes, PartEnded
from localai_dist.httpapi.openai.transcripts import FORMS, render
from localai_dist.loads.errors import StillLoading
from localai_dist.loads.status import LoadStatus
from localai_dist.net.request import DISCARD_MAX, DISCARD_TIME
from localai_dist.reach import Reconnecting, Unreached
from localai_dist.rpc import backend_pb2 as pb
from localai_dist.serving.errors import DiskFull
from localai_dist.serving.received import ReceivedFile
from localai_dist.staging.errors import NoSpace
from tests.httpapi.doubles import KEY, NODE, Exchange, World
from tests.serving.doubles import FakeChannel

PATH = "/v1/audio/transcriptions"
BOUNDARY = "7e57b0undary"
SOUND = bytes(range(256)) * 8
"""Has line breaks and dashes in it, as sound does."""
HEARD = pb.TranscriptResult(
    text="Hello. World --> you",
    language="en",
    duration=3661.5,
    segments=[
        pb.TranscriptSegment(id=0, start=0, end=1_250_000_000, text=" Hello.", tokens=[1, 2]),
        pb.TranscriptSegment(id=1, start=1_250_000_000, end=3_661_500_000_000, text="World --> you\n"),
    ],
)


def form(
    fields: Mapping[str, str] | Sequence[tuple[str, str]] = (("model", "tiny"),),
    file: bytes | None = SOUND,
    *,
    filename: str = "talk.WAV",
    whole: bool = True,
) -> bytes:
    """A form as clients send it: the file last, as official clients do."""
    pairs = fields.items() if isinstance(fields, Mapping) else fields
    parts = [f'Content-Disposition: form-data; name="{name}"\r\n\r\n{value}'.encode() for name, value in pairs]
    if file is not None:
        head = f'Content-Disposition: form-data; name="file"; filename="{filename}"\r\nContent-Type: audio/wav\r\n\r\n'
        parts.append(head.encode() + file)
    body = b"".join(b"--%s\r\n%s\r\n" % (BOUNDARY.encode(), part) for part in parts)
    return body + (b"--%s--\r\n" % BOUNDARY.encode() if whole else b"")


TYPE = f"multipart/form-data; boundary={BOUNDARY}"


class TranscriptionCase(SynchronousTestCase):
    def send(self, world: World, body: bytes, **headers: str) -> Exchange:
        return world.send("POST", PATH, body, **{"content-type": TYPE, **headers})

    def begin(self, world: World, length: int | None, *lines: str) -> Exchange:
        """Only the head of a request; None: chunked."""
        exchange = Exchange(world.site)
        size = "transfer-encoding: chunked" if length is None else f"content-length: {length}"
        head = [f"POST {PATH} HTTP/1.1", "host: f", f"authorization: Bearer {KEY}", f"content-type: {TYPE}", size]
        exchange.receive("\r\n".join([*head, *lines]).encode() + b"\r\n\r\n")
        return exchange

    def assert_nothing_left(self, world: World) -> None:
        """No file here, none on a node, no call counted, no timer."""
        self.assertEqual([str(path) for path in world.received.rglob("*")], [])
        self.assertEqual((world.files.here, world.replicas.running, world.timers), (set(), 0, []))


class AnswerTests(TranscriptionCase):
    def test_the_bytes_arrive(self) -> None:
        """
        What the client sent is what the node got, under a name with its kind at the end; nothing stays (LOAD-23).
        """
        for path in (PATH, "/audio/transcriptions"):
            world = World()
            got = world.send("POST", path, form(), **{"content-type": TYPE})
            self.assertEqual((got.status, got.json), (200, {"text": "hello"}))
            ((node, _, content),) = world.files.staged
            self.assertEqual((node, content), (NODE, SOUND))
            self.assertTrue(world.channel.heard[0].dst.endswith(".wav"))
            self.assert_nothing_left(world)

    def test_wishes_reach_the_backend(self) -> None:
        """
        Language, prompt, temperature and translation are the client's; unknown fields are ignored (LOAD-23).
        """
        world = World()
        fields = {
            "language": "de",
            "model": "tiny",
            "prompt": "Grüße",
            "temperature": "0.25",
            "translate": "true",
            "timestamp_granularities[]": "segment",
            "a_field_of_next_year": "1",
        }
        self.assertEqual(self.send(world, form(fields)).status, 200)
        told = world.channel.heard[0]
        self.assertEqual((told.language, told.prompt, told.temperature, told.translate), ("de", "Grüße", 0.25, True))
        self.assertEqual((told.ModelIdentity, list(told.timestamp_granularities)), ("tiny.gguf", ["segment"]))

    def test_every_form(self) -> None:
        """
        Each response_format is what players and clients read; text that would break subtitles does not (LOAD-23).
        """
        told = {}
        for name in FORMS:
            world = World(FakeChannel(transcript=HEARD))
            got = self.send(world, form({"model": "tiny", "response_format": name}))
            self.assertEqual(got.headers["content-type"].partition(";")[0], _type_of(name))
            told[name] = got.body.decode()
        self.assertEqual(json.loads(told["json"]), {"text": HEARD.text})
        verbose = json.loads(told["verbose_json"])
        self.assertEqual((verbose["task"], verbose["language"], verbose["duration"]), ("transcribe", "en", 3661.5))
        self.assertEqual(
            verbose["segments"][0], {"id": 0, "start": 0.0, "end": 1.25, "text": " Hello.", "tokens": [1, 2]}
        )
        self.assertEqual(told["text"], HEARD.text + "\n")
        self.assertEqual(told["txt"], told["text"])
        self.assertEqual(
            told["srt"],
            "1\n00:00:00,000 --> 00:00:01,250\nHello.\n\n2\n00:00:01,250 --> 01:01:01,500\nWorld -> you\n",
        )
        self.assertEqual(
            told["vtt"],
            "WEBVTT\n\n00:00:00.000 --> 00:00:01.250\nHello.\n\n00:00:01.250 --> 01:01:01.500\nWorld -> you\n",
        )
        self.assertEqual(told["lrc"], "[00:00.00]Hello.\n[00:01.25]World -> you\n")

    def test_a_backend_without_segments(self) -> None:
        """
        A backend that tells no segments has one line over all of it; one that heard nothing has none (LOAD-23).
        """
        one: Any = render(pb.TranscriptResult(text="Hi", duration=2), "srt", translated=False)
        self.assertEqual(one.value, "1\n00:00:00,000 --> 00:00:02,000\nHi\n")
        none: Any = render(pb.TranscriptResult(), "srt", translated=False)
        self.assertEqual(none.value, "")
        told: Any = render(
            pb.TranscriptResult(segments=[pb.TranscriptSegment(end=2_000_000_000)]), "verbose_json", translated=True
        )
        self.assertEqual((told.value["task"], told.value["duration"]), ("translate", 2.0))

    def test_byte_by_byte(self) -> None:
        """
        However the form is cut up on its way, the same arrives (LOAD-23).
        """
        world = World()
        body = form()
        got = self.begin(world, len(body))
        for index in range(len(body)):
            got.receive(body[index : index + 1])
        self.assertEqual(got.status, 200)
        self.assertEqual(world.files.staged[0][2], SOUND)

    def test_a_client_that_asks_first(self) -> None:
        """
        A client that waits to be told to go on is told so, and its recording is taken (LOAD-23).
        """
        world = World()
        body = form()
        got = self.begin(world, len(body), "expect: 100-continue")
        self.assertEqual(got.raw, b"HTTP/1.1 100 Continue\r\n\r\n")
        got.transport.clear()
        got.receive(body)
        self.assertEqual((got.status, world.files.staged[0][2]), (200, SOUND))

    def test_a_model_that_loads(self) -> None:
        """
        A cold model is told as for a chat: 503 with the loading object; the recording does not wait here (LOAD-23).
        """
        status = LoadStatus("tiny", "staging", "box", 41, 100, 1, 1, eta_seconds=30.0)
        world = World()
        world.replicas.rows.clear()
        world.loads.result = StillLoading(status)
        got = self.send(world, form())
        self.assertEqual((got.status, got.error["code"], got.headers["retry-after"]), (503, "model_loading", "30"))
        self.assertEqual(got.json["loading"]["model"], "tiny")
        self.assert_nothing_left(world)


class RefusalTests(TranscriptionCase):
    def refused(self, fields: Any, file: bytes | None = SOUND, **more: Any) -> dict[str, Any]:
        world = World()
        got = self.send(world, form(fields, file, **more))
        self.assertEqual((got.status, got.error["code"]), (400, "invalid_request"), got.body)
        self.assertEqual(world.files.staged, [])
        self.assert_nothing_left(world)
        return got.error

    def test_wrong_fields(self) -> None:
        """
        A field that is missing, wrong, or asks for what is not served is a 400 that names it (LOAD-23).
        """
        for fields, param in (
            ({}, "model"),
            ({"model": "tiny", "temperature": "hot"}, "temperature"),
            ({"model": "tiny", "temperature": "2"}, "temperature"),
            ({"model": "tiny", "response_format": "mp3"}, "response_format"),
            ({"model": "tiny", "language": "a b"}, "language"),
            ({"model": "tiny", "stream": "true"}, "stream"),
            ({"model": "tiny", "timestamp_granularities[]": "word"}, "timestamp_granularities[]"),
            ({"model": "tiny", "prompt": "x" * (FIELD_SIZE + 1)}, "prompt"),
            ([("model", "tiny"), ("model", "words")], "model"),
            ([("model", "tiny"), *((f"f{n}", "") for n in range(FIELDS))], None),
        ):
            with mock.patch.object(World, "MAX_BODY", FIELD_SIZE * 2):
                self.assertEqual(self.refused(fields)["param"], param)

    def test_no_file_or_two(self) -> None:
        """
        A form without a recording, or with two, is refused (LOAD-23).
        """
        self.assertEqual(self.refused({"model": "tiny"}, None)["param"], "file")
        twice = form(file=b"a", whole=False) + form((), file=b"b")
        got = self.send(world := World(), twice)
        self.assertEqual((got.status, got.error["param"]), (400, "file"))
        self.assert_nothing_left(world)

    def test_no_form(self) -> None:
        """
        JSON, a form without boundary, one that breaks off, and none at all are refused in words (LOAD-23).
        """
        cases: list[tuple[bytes, str]] = [
            (b'{"model":"tiny"}', "application/json"),
            (form(), "multipart/form-data"),
            (form(), "multipart/form-data; boundary=" + "x" * 300),
            (form(), "multipart/form-data; boundary=ሴ"),
            (form(), "multipart/form-data; boundary=\xff"),
            (form(whole=False), TYPE),
            (b"garbage", TYPE),
            (b"", TYPE),
            (f"--{BOUNDARY}\r\nX: y\r\n\r\nno name\r\n--{BOUNDARY}--".encode(), TYPE),
        ]
        for body, kind in cases:
            got = self.send(world := World(), body, **{"content-type": kind})
            self.assertEqual((got.status, got.error["code"]), (400, "invalid_request"), (body[:40], kind))
            self.assertIn("form", got.error["message"] + kind)
            self.assert_nothing_left(world)

    def test_an_unknown_model(self) -> None:
        """
        A model nobody serves is a 404, as everywhere (LOAD-23).
        """
        got = self.send(world := World(), form({"model": "nope"}))
        self.assertEqual((got.status, got.error["code"]), (404, "model_not_found"))
        self.assert_nothing_left(world)

    def test_too_long_is_told_before_it_is_read(self) -> None:
        """
        Over the limit is 413 while not a byte was read, also for a client that asks first (LOAD-23).
        """
        for lines in ((), ("expect: 100-continue",)):
            world = World()
            got = self.begin(world, World.MAX_BODY + 1, *lines)
            self.assertEqual((got.status, got.error["code"]), (413, "request_too_large"))
            self.assertNotIn(b"100 Continue", got.raw)
            self.assertEqual(got.headers["connection"], "close")
            got.receive(b"x" * 5000)
            self.assertFalse(got.transport.disconnecting)
            world.clock.advance(DISCARD_TIME)
            self.assertTrue(got.transport.disconnecting)
            self.assert_nothing_left(world)

    def test_a_refused_body_is_not_read_for_ever(self) -> None:
        """
        Of what nobody wants a few MiB are read so that the client sees why, then the connection closes (LOAD-23).
        """
        world = World()
        got = self.begin(world, 100 * DISCARD_MAX)
        for _ in range(DISCARD_MAX // 65536 + 1):
            got.receive(b"x" * 65536)
        self.assertTrue(got.transport.disconnecting)
        self.assert_nothing_left(world)

    def test_too_much_of_an_untold_length(self) -> None:
        """
        A chunked body is counted as it comes: 413 once it is too much, and what was written is gone (LOAD-23).
        """
        world = World()
        got = self.begin(world, None)
        body = form(whole=False)
        got.receive(b"%x\r\n%s\r\n" % (len(body), body))
        self.assertFalse(got.answered)
        self.assertNotEqual(list(world.received.rglob("*.wav")), [])
        more = b"x" * World.MAX_BODY
        got.receive(b"%x\r\n%s\r\n" % (len(more), more))
        self.assertEqual(got.status, 413)
        got.leave()
        self.assert_nothing_left(world)

    def test_a_stranger_is_refused_before_it_is_read(self) -> None:
        """
        Without the key nothing of the body is taken (LOAD-23, WALK-17).
        """
        world = World()
        got = world.send("POST", PATH, form(), key="wrong", **{"content-type": TYPE})
        self.assertEqual(got.status, 401)
        self.assertFalse(world.received.exists())

    def test_no_room(self) -> None:
        """
        A node without room, and a frontend without room, are 503 capacity in words, with a time to come back (LOAD-23).
        """
        world = World()
        world.files.troubles = [NoSpace("3 MiB for request r is too much")]
        got = self.send(world, form())
        self.assertEqual((got.status, got.error["code"], got.headers["retry-after"]), (503, "capacity", "5"))
        self.assertIn("too much", got.error["message"])
        self.assert_nothing_left(world)
        world = World()
        with mock.patch.object(ReceivedFile, "close", side_effect=DiskFull("the disk is full")):
            got = self.send(world, form())
        self.assertEqual((got.status, got.error["code"]), (503, "capacity"))
        self.assert_nothing_left(world)


class EndingTests(TranscriptionCase):
    """Whatever ends a request, its file is gone on both sides."""

    def test_the_client_leaves_in_the_middle_of_its_upload(self) -> None:
        """
        A client that leaves while it sends leaves no file, no log of a failure, and no call (LOAD-23).
        """
        world = World()
        body = form()
        got = self.begin(world, len(body))
        got.receive(body[:-100])
        self.assertEqual(len(list(world.received.rglob("*.wav"))), 1)
        got.leave()
        self.assertEqual(world.files.staged, [])
        self.assert_nothing_left(world)

    def test_the_client_leaves_later(self) -> None:
        """
        A client that leaves while its file is staged, or while the backend works, leaves nothing either (LOAD-23).
        """
        staging = World()
        staging.files.hold = Deferred()
        working = World(channel := FakeChannel(hold=Deferred()))
        for world in (staging, working):
            got = self.send(world, form())
            self.assertFalse(got.answered)
            self.assertEqual((len(world.files.here), len(list(world.received.rglob("*.wav")))), (1, 1))
            got.leave()
            self.assert_nothing_left(world)
        self.assertTrue(channel.cancelled)

    def test_the_deadline_passes(self) -> None:
        """
        Past the client's own deadline it is 504, wherever its recording is by then (LOAD-23).
        """
        staging = World()
        staging.files.hold = Deferred()
        for world in (staging, World(FakeChannel(hold=Deferred()))):
            got = self.send(world, form(), x_localai_timeout="5s")
            world.clock.advance(5)
            self.assertEqual((got.status, got.error["code"]), (504, "deadline_exceeded"))
            self.assert_nothing_left(world)
        world = World()
        got = self.begin(world, 5000, "x-localai-timeout: 5s")
        got.receive(form(whole=False)[:1000])
        world.clock.advance(5)
        self.assertEqual((got.status, got.error["code"]), (504, "deadline_exceeded"))
        world.clock.advance(DISCARD_TIME)
        self.assert_nothing_left(world)

    def test_a_condition(self) -> None:
        """
        A worker that reconnects is told as such, after the route wait, and the file does not stay here (LOAD-23).
        """
        world = World(Unreached(Reconnecting(NODE)))
        got = self.send(world, form())
        world.clock.pump([0.25] * 30)
        self.assertEqual((got.status, got.headers["x-localai-condition"]), (503, "worker_reconnecting"))
        self.assert_nothing_left(world)

    def test_the_connection_serves_on(self) -> None:
        """
        After an answer the same connection takes the next request (LOAD-23).
        """
        world = World()
        body = form()
        got = self.begin(world, len(body))
        got.receive(body)
        got.transport.clear()
        got.receive(f"GET /v1/models HTTP/1.1\r\nhost: f\r\nauthorization: Bearer {KEY}\r\n\r\n".encode())
        self.assertEqual(got.status, 200)


class FormTests(SynchronousTestCase):
    @given(
        st.lists(st.tuples(st.text("abc[]", min_size=1, max_size=5), st.binary(max_size=60)), max_size=4),
        st.lists(st.integers(1, 40), max_size=60),
    )
    @settings(max_examples=60)
    def test_chunking_is_invisible(self, parts: list[tuple[str, bytes]], cuts: list[int]) -> None:
        """
        However a form's bytes are cut up, the same parts come out.
        """
        body = b"".join(
            b'--%s\r\nContent-Disposition: form-data; name="%s"\r\n\r\n%s\r\n'
            % (BOUNDARY.encode(), name.encode(), content)
            for name, content in parts
        ) + (b"--%s--\r\n" % BOUNDARY.encode())
        reader, found = FormReader(TYPE), []
        for size in [*cuts, len(body)]:
            piece, body = body[:size], body[size:]
            found += reader.feed(piece)
        names = [event.name for event in found if isinstance(event, PartBegun)]
        whole = b"".join(event.data for event in found if isinstance(event, PartBytes))
        self.assertEqual((names, whole), ([name for name, _ in parts], b"".join(content for _, content in parts)))
        self.assertEqual(sum(isinstance(event, PartEnded) for event in found), len(parts))
        self.assertTrue(reader.ended)

    def test_suffixes(self) -> None:
        """
        Of a client's file name only a short, plain ending is used.
        """
        for name, suffix in (
            ("a.WAV", ".wav"),
            ("../../etc/passwd", ""),
            ("a.b/c", ""),
            ("x.tar.gz", ".gz"),
            ("x." + "y" * 9, ""),
            ("x.sha256", ""),
            ("x.sha256.target", ".target"),
            ("a.m\n4", ""),
            ("", ""),
            ("a.\x00wav", ""),
        ):
            self.assertEqual(safe_suffix(name), suffix)

    def test_long_headers(self) -> None:
        """
        A part whose headers never end, in one line or in many, is refused and not gathered.
        """
        for line in (b"y", b"y: z\r\n"):
            reader = FormReader(TYPE)
            reader.feed(b"--" + BOUNDARY.encode() + b"\r\nX: y\r\n")
            with self.assertRaises(ApiError):
                for _ in range(HEAD_SIZE):
                    reader.feed(line)


def _type_of(name: str) -> str:
    return "application/json" if "json" in name else "text/plain"
