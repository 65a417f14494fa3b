"""Routing, validation and error values."""

from __future__ import annotations

from typing import get_args

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from localai_dist import reach
from localai_dist.errors import InvalidName
from localai_dist.httpapi.auth import Access, refuse_token
from localai_dist.httpapi.errors import ApiError, api_error_of, of_unreached, type_of
from localai_dist.httpapi.routing import Found, Route, RouteTable, WrongMethod, segments_of
from localai_dist.httpapi.site import ROUTES
from localai_dist.httpapi.validation import decode
from localai_dist.reach import Answer, Outcome, Unreached
from localai_dist.registry.identity import TokenCheck
from localai_dist.scheduler.placement import NoPlace
from localai_dist.serving.errors import RequestRefused

TABLE = RouteTable(
    [
        Route("GET", "/a/:id", Access.OPEN, "one"),
        Route("GET", "/a/fixed", Access.OPEN, "fixed"),
        Route("PUT", "/a/:id", Access.OPEN, "put"),
        Route("GET", "/", Access.OPEN, "root"),
        Route("GET", "/a/:id/b/:key", Access.OPEN, "two"),
    ]
)


class RoutingTests(SynchronousTestCase):
    def found(self, method: str, path: str) -> tuple[str, dict[str, str]]:
        got = TABLE.find(method, path)
        assert isinstance(got, Found), got
        return got.route.run, dict(got.values)

    def test_find(self) -> None:
        """
        A fixed segment wins over a named one; values are decoded; a trailing slash makes no difference.
        """
        self.assertEqual(self.found("GET", "/a/fixed"), ("fixed", {}))
        self.assertEqual(self.found("GET", "/a/x%2Fy%20z/"), ("one", {"id": "x/y z"}))
        self.assertEqual(self.found("HEAD", "/a/x"), ("one", {"id": "x"}))
        self.assertEqual(self.found("PUT", "/a/fixed"), ("put", {"id": "fixed"}))
        self.assertEqual(self.found("GET", "/a/1/b/2"), ("two", {"id": "1", "key": "2"}))
        self.assertEqual(self.found("GET", "/"), ("root", {}))
        self.assertEqual(TABLE.find("DELETE", "/a/x"), WrongMethod(("GET", "PUT")))
        for path in ("/b", "/a", "/a//b/2", "/a/1/c/2", "/a/1/b/2/3"):
            self.assertIsNone(TABLE.find("GET", path))

    @given(st.text(max_size=40))
    def test_any_path(self, path: str) -> None:
        """
        Whatever path is asked for, finding its route ends in a route or in none.
        """
        TABLE.find("GET", path)
        self.assertGreaterEqual(len(segments_of(path)), 1)

    def test_routes_are_not_twice(self) -> None:
        """
        No two routes answer the same method and path.
        """
        named = [(route.method, route.pattern) for route in ROUTES]
        self.assertEqual(len(set(named)), len(named))

    def test_only_probes_are_open(self) -> None:
        """
        Nothing but the probes answers without any credential.
        """
        self.assertEqual({route.pattern for route in ROUTES if route.access is Access.OPEN}, {"/healthz", "/readyz"})


class Thing(msgspec.Struct):
    name: str
    count: int = 0
    inner: dict[str, int] | None = None


class ValidationTests(SynchronousTestCase):
    def refused(self, body: bytes) -> ApiError:
        with self.assertRaises(ApiError) as caught:
            decode(body, Thing)
        self.assertEqual((caught.exception.status, caught.exception.code), (400, "invalid_request"))
        return caught.exception

    def test_where(self) -> None:
        """
        The field at fault is named by its path, the missing one by its name.
        """
        self.assertEqual(self.refused(b'{"name": 1}').param, "name")
        self.assertEqual(self.refused(b"{}").param, "name")
        self.assertEqual(self.refused(b"").param, "name")
        self.assertEqual(self.refused(b'{"name": "x", "inner": {"a": "b"}}').param, "inner[...]")
        self.assertIsNone(self.refused(b"[]").param)
        self.assertIsNone(self.refused(b"{").param)
        self.assertNotIn("`", self.refused(b'{"name": 1}').message)
        self.assertEqual(decode(b'{"name": "x", "more": 1}', Thing), Thing("x"))

    @given(st.binary(max_size=60))
    def test_any_body(self, body: bytes) -> None:
        """
        Whatever a client sends, it is a request or a 400.
        """
        try:
            decode(body, Thing)
        except ApiError as error:
            self.assertEqual(error.status, 400)


class ErrorTests(SynchronousTestCase):
    def test_every_outcome_has_its_answer(self) -> None:
        """
        Each condition keeps its own code towards the client, in the body and in the header (WALK-16).
        """
        outcomes: list[Outcome] = [
            reach.Answered(Answer.ERROR, "said"),
            reach.Refused("unknown-tag", ""),
            reach.NotServed(""),
            reach.VerbNotServed("x"),
            reach.NoRoute("n", departed=True),
            reach.Reconnecting("n"),
            reach.PeerUnreachable("p", ""),
            reach.RegistryUnknown(""),
            reach.DeadlineExceeded(),
            reach.Cancelled(),
        ]
        self.assertEqual({type(outcome) for outcome in outcomes}, set(get_args(Outcome)))
        errors = [of_unreached(Unreached(outcome)) for outcome in outcomes]
        self.assertEqual(len({error.code for error in errors}), len(errors))
        for error in errors:
            self.assertEqual(error.headers, {"x-localai-condition": error.code})
            self.assertEqual(
                error.retry_after is not None,
                error.status == 503,
            )
        self.assertIn("no route", errors[4].message)

    def test_no_place(self) -> None:
        """
        No place because of lost tunnels is that condition; no place for want of room is capacity.
        """
        error = api_error_of(NoPlace("nobody", reach.NoRoute("n", departed=False)))
        assert error is not None
        self.assertEqual((error.status, error.code), (503, "no_route"))
        error = api_error_of(NoPlace("every slot is taken"))
        assert error is not None
        self.assertEqual((error.status, error.code, error.retry_after), (503, "capacity", 5))

    def test_others(self) -> None:
        """
        What an operator or client got wrong is told; what nobody foresaw is not dressed up.
        """
        for wrong in (InvalidName("x"), RequestRefused("too long")):
            error = api_error_of(wrong)
            assert error is not None
            self.assertEqual(error.status, 400)
        self.assertIsNone(api_error_of(ValueError("x")))
        self.assertIsNone(api_error_of(None))

    def test_types(self) -> None:
        """
        The envelope's type follows the status.
        """
        self.assertEqual(
            [type_of(status) for status in (400, 401, 403, 404, 413, 429, 500, 503)],
            [
                "invalid_request_error",
                "invalid_request_error",
                "permission_error",
                "invalid_request_error",
                "invalid_request_error",
                "rate_limit_error",
                "server_error",
                "server_error",
            ],
        )

    def test_every_token_check_is_decided(self) -> None:
        """
        Each answer of the registry about a node's token lets the caller pass or refuses it, the missing one with 401.
        """
        for check in TokenCheck:
            refusal = refuse_token(check, "some", "n")
            self.assertEqual(refusal is None, check in (TokenCheck.OK, TokenCheck.PENDING))
        missing = refuse_token(TokenCheck.WRONG, None, "n")
        assert missing is not None
        self.assertEqual(missing.status, 401)
