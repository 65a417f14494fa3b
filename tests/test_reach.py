"""What came of trying to reach a node: every outcome against every predicate."""

from __future__ import annotations

from typing import NamedTuple

from twisted.trial.unittest import SynchronousTestCase

from localai_dist import reach
from localai_dist.reach import (
    Answer,
    Answered,
    Cancelled,
    ClientAnswer,
    DeadlineExceeded,
    NoRoute,
    NotServed,
    Outcome,
    PeerUnreachable,
    Reconnecting,
    Refused,
    RegistryUnknown,
    Retry,
    Unreached,
    VerbNotServed,
)


class Row(NamedTuple):
    """One line of the table in design §2."""

    outcome: Outcome
    may_reap: bool
    may_demote: bool
    may_retry: Retry
    client: ClientAnswer
    says: str


TABLE = [
    Row(Answered(Answer.SUCCESS), False, False, Retry.NEVER, ClientAnswer(500, "worker_error"), "success"),
    Row(Answered(Answer.ERROR, "boom"), False, False, Retry.NEVER, ClientAnswer(500, "worker_error"), "boom"),
    Row(
        Answered(Answer.BACKEND_UNAVAILABLE),
        True,
        False,
        Retry.NEVER,
        ClientAnswer(500, "worker_error"),
        "backend unavailable",
    ),
    Row(Answered(Answer.MODEL_NOT_LOADED), True, False, Retry.NEVER, ClientAnswer(500, "worker_error"), "not loaded"),
    Row(Answered(Answer.PROCESS_ABSENT), True, False, Retry.NEVER, ClientAnswer(500, "worker_error"), "absent"),
    Row(
        Refused("unknown-tag", "what is grpc"),
        False,
        False,
        Retry.NEVER,
        ClientAnswer(502, "worker_refused"),
        "unknown-tag",
    ),
    Row(NotServed("late"), False, False, Retry.ONCE_FRESH, ClientAnswer(503, "worker_unavailable", 1), "late"),
    Row(
        VerbNotServed("/v1/control/x"),
        False,
        False,
        Retry.NEVER,
        ClientAnswer(501, "verb_not_served"),
        "upgrade the worker",
    ),
    Row(NoRoute("n-1", departed=False), False, False, Retry.NEVER, ClientAnswer(503, "no_route", 10), "never opened"),
    Row(NoRoute("n-1", departed=True), True, True, Retry.NEVER, ClientAnswer(503, "no_route", 10), "did not come back"),
    Row(
        Reconnecting("n-1", 12.0),
        False,
        False,
        Retry.ROUTE_WAIT,
        ClientAnswer(503, "worker_reconnecting", 2),
        "expected back",
    ),
    Row(
        PeerUnreachable("f-2", "refused"),
        False,
        False,
        Retry.ROUTE_WAIT,
        ClientAnswer(503, "peer_unreachable", 2),
        "can't be reached",
    ),
    Row(
        PeerUnreachable("f-2", "401", rejected=True),
        False,
        False,
        Retry.ROUTE_WAIT,
        ClientAnswer(503, "peer_unreachable", 2),
        "refused our credentials",
    ),
    Row(
        RegistryUnknown("gone"),
        False,
        False,
        Retry.FREELY,
        ClientAnswer(503, "registry_unavailable", 2),
        "database did not answer",
    ),
    Row(DeadlineExceeded(), False, False, Retry.NEVER, ClientAnswer(504, "deadline_exceeded"), "deadline passed"),
    Row(Cancelled(), False, False, Retry.NEVER, ClientAnswer(499, "cancelled"), "went away"),
]


class OutcomeTests(SynchronousTestCase):
    """Each outcome against each predicate."""

    def test_the_table_is_whole(self) -> None:
        """Every outcome and every answer has its line: none is decided by accident."""
        self.assertEqual({type(row.outcome) for row in TABLE}, set(Outcome.__args__))
        answers = {row.outcome.answer for row in TABLE if isinstance(row.outcome, Answered)}
        self.assertEqual(answers, set(Answer))

    def test_every_predicate_of_every_outcome(self) -> None:
        """What may be deleted, demoted, retried and told is exactly the table of the design (WALK-16)."""
        for row in TABLE:
            with self.subTest(outcome=row.outcome):
                self.assertIs(reach.may_reap(row.outcome), row.may_reap)
                self.assertIs(reach.may_demote(row.outcome), row.may_demote)
                self.assertIs(reach.may_retry(row.outcome), row.may_retry)
                self.assertEqual(reach.client_answer(row.outcome), row.client)
                self.assertIn(row.says, reach.describe(row.outcome))

    def test_a_value_outside_the_sum_is_an_error(self) -> None:
        """Something that is no outcome is never quietly decided."""
        for predicate in (
            reach.may_reap,
            reach.may_demote,
            reach.may_retry,
            reach.client_answer,
            reach.describe,
            reach.tell,
        ):
            with self.assertRaises(AssertionError):
                predicate("no outcome")  # type: ignore[operator]

    def test_no_route_says_so(self) -> None:
        """Both forms of a missing route contain the words "no route" and the node (WALK-16)."""
        for departed in (False, True):
            text = reach.describe(NoRoute("n-7", departed))
            self.assertIn("no route", text)
            self.assertIn("n-7", text)

    def test_the_four_conditions_are_told_apart(self) -> None:
        """No two conditions give the client the same code."""
        codes = [
            reach.client_answer(outcome).code
            for outcome in (
                NoRoute("n", True),
                Reconnecting("n"),
                PeerUnreachable("p", ""),
                Answered(Answer.ERROR),
                RegistryUnknown(""),
            )
        ]
        self.assertEqual(len(set(codes)), len(codes))

    def test_every_temporary_condition_says_when_to_come_back(self) -> None:
        """Whatever may be retried, and every 503, carries Retry-After (CLUS-13)."""
        for row in TABLE:
            if row.may_retry is not Retry.NEVER or reach.client_answer(row.outcome).status == 503:
                self.assertIsNotNone(reach.client_answer(row.outcome).retry_after, row.outcome)

    def test_unreached_carries_its_outcome_and_says_it(self) -> None:
        """The exception is the outcome, in words."""
        outcome = Reconnecting("n-1")
        error = Unreached(outcome)
        self.assertIs(error.outcome, outcome)
        self.assertEqual(str(error), reach.describe(outcome))

    def test_clients_are_told_the_cause_without_the_whereabouts(self) -> None:
        """The database and the frontends have no address in a client's text; what a backend answered stays as it is."""
        for row in TABLE:
            self.assertIn(reach.tell(row.outcome), (reach.describe(row.outcome), Unreached(row.outcome).told))
        for outcome, told in (
            (Answered(Answer.ERROR, "no 10.0.0.7:80"), "no 10.0.0.7:80"),
            (PeerUnreachable("front-1", "refused", address="10.0.0.7:80"), "(front-1) can't be reached from here"),
            (PeerUnreachable("front-1", "401", rejected=True), "(front-1) refused our credentials"),
            (RegistryUnknown("the database at 10.0.0.7:5432 is away"), "the registry database can't be reached"),
            (NotServed("could not connect to 10.0.0.7:80"), "could not connect to (address)"),
        ):
            self.assertIn(told, Unreached(outcome).told)
