"""The opening frames of a stream."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from localai_dist import reach
from localai_dist.ids import NodeId
from localai_dist.wire import preamble
from localai_dist.wire.preamble import (
    MalformedPreamble,
    RelayCode,
    RelayErr,
    RelayOk,
    RelayRequest,
    TunnelCode,
    TunnelErr,
    TunnelOk,
    TunnelRequest,
    Unknown,
)

words = st.text(st.characters(codec="utf-8", exclude_characters=" "), min_size=1, max_size=40)
texts = st.text(st.characters(codec="utf-8"), max_size=2000)


class FrameTests(SynchronousTestCase):
    """Two length bytes, then the payload."""

    @given(st.binary(max_size=preamble.MAX_PAYLOAD))
    def test_round_trip(self, payload: bytes) -> None:
        """The length bytes say exactly how much follows."""
        frame = preamble.encode_frame(payload)
        self.assertEqual((preamble.frame_length(frame[:2]), frame[2:]), (len(payload), payload))

    def test_exact_bytes(self) -> None:
        """A frame on the wire is the big-endian length and the text."""
        self.assertEqual(preamble.encode_frame(b"grpc 127.0.0.1:20001"), b"\x00\x14grpc 127.0.0.1:20001")

    def test_limit(self) -> None:
        """1024 bytes pass, 1025 are refused on both sides."""
        self.assertEqual(len(preamble.encode_frame(b"x" * 1024)), 1026)
        self.assertEqual(preamble.frame_length(b"\x04\x00"), 1024)
        with self.assertRaises(MalformedPreamble):
            preamble.encode_frame(b"x" * 1025)
        for head in (b"\x04\x01", b"\xff\xff", b"", b"\x00", b"\x00\x00\x00"):
            with self.assertRaises(MalformedPreamble):
                preamble.frame_length(head)


class TunnelRequestTests(SynchronousTestCase):
    """What a frontend asks a worker."""

    @given(words, texts.filter(lambda text: len(text.encode()) < 800))
    def test_round_trip(self, tag: str, target: str) -> None:
        """A request is read as it was written, spaces in the target included."""
        request = TunnelRequest(tag, target)
        self.assertEqual(preamble.parse_tunnel_request(preamble.encode_tunnel_request(request)), request)

    def test_exact_bytes(self) -> None:
        """The two requests in use, byte for byte."""
        self.assertEqual(
            preamble.encode_tunnel_request(TunnelRequest("grpc", "127.0.0.1:20001")), b"grpc 127.0.0.1:20001"
        )
        self.assertEqual(preamble.encode_tunnel_request(TunnelRequest("http", "b")), b"http b")
        self.assertEqual(preamble.encode_tunnel_request(TunnelRequest("http")), b"http ")

    def test_malformed(self) -> None:
        """No space, no tag or bytes that are no text are refused."""
        for payload in (b"", b"grpc", b" 127.0.0.1:1", b"\xff \xff"):
            with self.assertRaises(MalformedPreamble):
                preamble.parse_tunnel_request(payload)
        for request in (TunnelRequest(""), TunnelRequest("a b"), TunnelRequest("grpc", "x" * 1024)):
            with self.assertRaises(MalformedPreamble):
                preamble.encode_tunnel_request(request)

    def test_http_names_its_traffic(self) -> None:
        """Only an ``http`` request with a known letter names a traffic class."""
        self.assertEqual(TunnelRequest("http", "b").traffic, "b")
        for request in (TunnelRequest("http"), TunnelRequest("http", "z"), TunnelRequest("grpc", "b")):
            self.assertIsNone(request.traffic)


class RelayRequestTests(SynchronousTestCase):
    """What a frontend asks the owner of a tunnel."""

    @given(
        words,
        st.none() | st.integers(1, preamble.MAX_BUDGET_MS),
        st.none() | st.sampled_from(sorted(preamble.TRAFFIC_LETTERS)),
    )
    def test_round_trip(self, node: str, budget: int | None, traffic: str | None) -> None:
        """Node, budget and class are read as they were written."""
        request = RelayRequest(NodeId(node), budget, traffic)
        self.assertEqual(preamble.parse_relay_request(preamble.encode_relay_request(request)), request)

    def test_exact_bytes(self) -> None:
        """The four forms, byte for byte."""
        node = NodeId("n-1")
        for request, payload in [
            (RelayRequest(node), b"n-1"),
            (RelayRequest(node, 4200), b"n-1 4200"),
            (RelayRequest(node, 4200, "i"), b"n-1 4200 i"),
            (RelayRequest(node, None, "b"), b"n-1 - b"),
        ]:
            self.assertEqual(preamble.encode_relay_request(request), payload)

    def test_a_longer_budget_counts_as_a_day(self) -> None:
        """A budget of years is taken for a day."""
        self.assertEqual(preamble.parse_relay_request(b"n 99999999999999").budget_ms, 86_400_000)

    def test_a_class_of_a_newer_frontend_is_ignored(self) -> None:
        """A letter or a word this build does not know costs the hint, not the request."""
        self.assertEqual(preamble.parse_relay_request(b"n 5 z"), RelayRequest(NodeId("n"), 5))
        self.assertEqual(preamble.parse_relay_request(b"n 5 b more"), RelayRequest(NodeId("n"), 5, "b"))

    def test_malformed(self) -> None:
        """No node, or a budget that is not a positive number, is refused."""
        for payload in (b"", b" 5", b"n 0", b"n -1", b"n x", b"n ", b"n 1.5", "n ٣".encode(), b"\xff"):
            with self.assertRaises(MalformedPreamble):
                preamble.parse_relay_request(payload)
        for request in (
            RelayRequest(NodeId("")),
            RelayRequest(NodeId("a b")),
            RelayRequest(NodeId("n"), 0),
            RelayRequest(NodeId("n"), 1, "z"),
            RelayRequest(NodeId("n" * 1025)),
        ):
            with self.assertRaises(MalformedPreamble):
                preamble.encode_relay_request(request)


class ReplyTests(SynchronousTestCase):
    """What comes back."""

    def test_ok(self) -> None:
        """The two words of success, and neither is the other's."""
        self.assertEqual(preamble.parse_tunnel_reply(preamble.tunnel_ok()), TunnelOk())
        self.assertEqual(preamble.parse_relay_reply(preamble.relay_ok()), RelayOk())
        self.assertEqual(preamble.parse_tunnel_reply(preamble.relay_ok()), Unknown("relay-ok"))
        self.assertEqual(preamble.parse_relay_reply(preamble.tunnel_ok()), Unknown("ok"))

    @given(st.sampled_from(TunnelCode), texts)
    def test_tunnel_refusal_is_one_line_within_the_limit(self, code: TunnelCode, text: str) -> None:
        """However long and broken the reason, the refusal is one line that fits a frame and keeps its code."""
        payload = preamble.tunnel_err(code, text)
        preamble.encode_frame(payload)
        reply = preamble.parse_tunnel_reply(payload)
        assert isinstance(reply, TunnelErr)
        self.assertEqual(reply.code, code.value)
        self.assertNotRegex(reply.text, r"[\r\n]")
        self.assertTrue(text.replace("\r", " ").replace("\n", " ").startswith(reply.text))

    @given(st.sampled_from(RelayCode), texts)
    def test_relay_refusal_round_trip(self, code: RelayCode, text: str) -> None:
        """An owner's refusal keeps its code and fits a frame."""
        reply = preamble.parse_relay_reply(preamble.relay_err(code, text))
        assert isinstance(reply, RelayErr)
        self.assertEqual(reply.code, code)

    def test_cut_between_characters(self) -> None:
        """A reason is cut before the character that does not fit, never inside it."""
        payload = preamble.tunnel_err(TunnelCode.UNAVAILABLE, "é" * 1000)
        self.assertEqual(len(payload), 1024)
        self.assertLessEqual(len(preamble.tunnel_err(TunnelCode.UNAVAILABLE, "x" + "é" * 1000)), 1023)

    def test_the_vocabularies_are_disjoint(self) -> None:
        """No worker's word is an owner's word: a refusal can't be taken for the other's."""
        for code in TunnelCode:
            self.assertIsInstance(preamble.parse_relay_reply(preamble.tunnel_err(code, "x")), Unknown)
        for relay_code in RelayCode:
            self.assertIsInstance(preamble.parse_tunnel_reply(preamble.relay_err(relay_code, "x")), Unknown)

    @given(st.binary(max_size=60))
    def test_garbage_is_a_value(self, payload: bytes) -> None:
        """No reply, however broken, raises."""
        preamble.parse_tunnel_reply(payload)
        preamble.parse_relay_reply(payload)
        self.assertIsInstance(preamble.outcome_of_tunnel_reply(b"\xff" + payload), reach.NotServed)


class OutcomeTests(SynchronousTestCase):
    """What a worker's reply licenses."""

    def test_ok_is_no_outcome(self) -> None:
        """After ``ok`` the stream is the caller's."""
        self.assertIsNone(preamble.outcome_of_tunnel_reply(b"ok"))
        # The worker's own server is no backend: nobody may act on its absence.
        own = preamble.outcome_of_tunnel_reply(b"err unavailable refused", preamble.HTTP)
        self.assertEqual(own, reach.NotServed("unavailable: refused"))

    def test_each_code(self) -> None:
        """Only ``unavailable`` is an answer about the backend; refusals are ours; the rest says nothing."""
        for payload, outcome in [
            (b"err unavailable no listener", reach.Answered(reach.Answer.BACKEND_UNAVAILABLE, "no listener")),
            (b"err unknown-tag x", reach.Refused("unknown-tag", "x")),
            (b"err bad-request y", reach.Refused("bad-request", "y")),
            (b"err not-served z", reach.NotServed("not-served: z")),
            (b"err too-warm w", reach.NotServed("too-warm: w")),
            (b"err", reach.NotServed("a reply this build does not know: 'err'")),
            (b"err relay-not-owner z", reach.NotServed("a reply this build does not know: 'err relay-not-owner z'")),
        ]:
            self.assertEqual(preamble.outcome_of_tunnel_reply(payload), outcome)

    def test_only_unavailable_may_reap(self) -> None:
        """A row is deleted on the worker's word about its backend, and on no other reply."""
        for code in TunnelCode:
            outcome = preamble.outcome_of_tunnel_reply(preamble.tunnel_err(code, "x"))
            assert outcome is not None
            self.assertEqual(reach.may_reap(outcome), code is TunnelCode.UNAVAILABLE)
