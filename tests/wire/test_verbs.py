"""Control verbs to and from JSON."""

from __future__ import annotations

import json

from twisted.trial.unittest import SynchronousTestCase

from localai_dist.wire import verbs
from localai_dist.wire.file_verbs import FILE_VERBS
from localai_dist.wire.verbs import Empty, InstallProgress, InstallReply, InstallRequest, InvalidBody, StreamLine


class BodyTests(SynchronousTestCase):
    def test_every_verb_round_trips(self) -> None:
        """Every verb's request and answer survive being written and read."""
        for path, verb in {**verbs.VERBS, **FILE_VERBS}.items():
            self.assertTrue(path.startswith(verbs.CONTROL_PREFIX))
            request = verb.request()
            self.assertEqual(verb.decode_request(verb.encode_request(request)), request)
            required = {"success": True} if "success" in verb.reply.__struct_fields__ else {}
            reply = verb.reply(**required)
            self.assertEqual(verb.decode_reply(verb.encode_reply(reply)), reply)

    def test_field_names(self) -> None:
        """The names on the wire are the original's."""
        request = InstallRequest(
            "llama-cpp", "m", "[]", "file:///x", "n", "a", replica_index=1, force=True, op_id="op", attempt=2
        )
        self.assertEqual(
            json.loads(verbs.INSTALL.encode_request(request)),
            {
                "backend": "llama-cpp",
                "model_id": "m",
                "backend_galleries": "[]",
                "uri": "file:///x",
                "name": "n",
                "alias": "a",
                "replica_index": 1,
                "force": True,
                "op_id": "op",
                "attempt": 2,
            },
        )

    def test_empty_and_unknown(self) -> None:
        """An empty body is one without fields, and unknown fields are a newer peer's."""
        self.assertEqual(verbs.STOP.decode_request(b""), verbs.StopRequest())
        self.assertEqual(verbs.STOP.decode_request(b'{"backend":"x","new":1}'), verbs.StopRequest("x"))
        self.assertEqual(verbs.NODE_STOP.decode_reply(b""), Empty())

    def test_malformed(self) -> None:
        """A body that is not what it should be is an error that says so, never an empty request."""
        for body in (b"{", b"[]", b'"all"', b"null", b'{"backend":1}', b"\xff"):
            with self.assertRaises(InvalidBody):
                verbs.STOP.decode_request(body)
        with self.assertRaises(InvalidBody):
            verbs.INSTALL.decode_reply(b"{}")


class LineTests(SynchronousTestCase):
    def test_progress(self) -> None:
        """A progress line carries the step, and ends with a newline."""
        step = InstallProgress("downloading", op_id="1", backend="b", current=5, total=10, percentage=50.0)
        raw = verbs.INSTALL.encode_line(verbs.progress_line(step))
        self.assertTrue(raw.endswith(b"\n"))
        line = verbs.INSTALL.decode_line(raw)
        self.assertEqual(verbs.read_progress(line), step)
        self.assertIsNone(line.reply)

    def test_reply(self) -> None:
        """A reply line carries the verb's answer, typed."""
        reply = InstallReply(True, "127.0.0.1:20000", backend_token="t")
        self.assertEqual(
            verbs.INSTALL.decode_line(verbs.INSTALL.encode_line(StreamLine(reply=reply))), StreamLine(reply=reply)
        )

    def test_subject(self) -> None:
        """A line may ask to be broadcast."""
        line: StreamLine[InstallReply] = StreamLine("jobs.1.progress", {"a": 1})
        self.assertEqual(verbs.INSTALL.decode_line(verbs.INSTALL.encode_line(line)), line)

    def test_malformed(self) -> None:
        """A line with both, neither, or the wrong shape is an error."""
        for raw in (
            b"{}",
            b'{"subject":"x"}',
            b'{"progress":{},"reply":{"success":true}}',
            b'{"reply":{}}',
            b'{"reply":null}',
            b'{"progress":[1]}',
            b"oops",
        ):
            with self.assertRaises(InvalidBody, msg=raw):
                verbs.INSTALL.decode_line(raw)

    def test_foreign_progress(self) -> None:
        """Progress of another verb is no install step."""
        self.assertIsNone(verbs.read_progress(StreamLine(progress={"phase": 3})))
        self.assertIsNone(verbs.read_progress(StreamLine(reply=Empty())))


class UnknownVerbTests(SynchronousTestCase):
    def test_echo_is_cut(self) -> None:
        """An unknown verb's path is echoed, cut between characters."""
        self.assertIn("/v1/control/x", verbs.unknown_verb_text("/v1/control/x"))
        text = verbs.unknown_verb_text("é" * 1000)
        self.assertTrue(text.endswith("é…"))
        self.assertLess(len(text.encode()), 200)
