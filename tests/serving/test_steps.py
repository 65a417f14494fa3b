"""What is done after each outcome: design §2's table, every outcome in every situation."""

from __future__ import annotations

import itertools

from twisted.trial.unittest import SynchronousTestCase

from localai_dist.reach import (
    Answer,
    Answered,
    Cancelled,
    DeadlineExceeded,
    NoRoute,
    NotServed,
    Outcome,
    PeerUnreachable,
    Reconnecting,
    Refused,
    RegistryUnknown,
    VerbNotServed,
    may_reap,
)
from localai_dist.serving.steps import (
    MAX_RELOADS,
    POLL,
    Attempts,
    DropRow,
    GiveUp,
    Step,
    TryAgain,
    TryOther,
    Wait,
    next_step,
)
from tests.support.outcomes import TABLE

OUTCOMES = [says.outcome for says in TABLE]


class StepTests(SynchronousTestCase):
    def after(
        self, outcome: Outcome, *, others: bool = False, now: float = 0.0, has_row: bool = True, **spent: object
    ) -> Step:
        attempts = Attempts(5.0, **spent)  # type: ignore[arg-type]
        return next_step(outcome, attempts, now=now, has_row=has_row, others=others)

    def test_a_row_is_dropped_only_when_it_may_be(self) -> None:
        """
        A replica's row goes only when the worker's own answer or a departed route says so, never otherwise (WALK-16).
        """
        for outcome, others, now in itertools.product(OUTCOMES, (False, True), (0.0, 9.0)):
            dropped = isinstance(self.after(outcome, others=others, now=now), DropRow)
            self.assertEqual(dropped, may_reap(outcome), outcome)

    def test_without_a_row_nothing_is_dropped(self) -> None:
        """
        A load that could not reach a node has no row to drop.
        """
        for outcome in OUTCOMES:
            self.assertNotIsInstance(self.after(outcome, has_row=False), DropRow)

    def test_reloads_end(self) -> None:
        """
        A backend that dies each time it is loaded does not keep a request for ever.
        """
        outcome = Answered(Answer.BACKEND_UNAVAILABLE, "gone")
        self.assertIsInstance(self.after(outcome, reloads=MAX_RELOADS - 1), DropRow)
        self.assertIsInstance(self.after(outcome, reloads=MAX_RELOADS), GiveUp)

    def test_waiting_for_the_way(self) -> None:
        """
        A reconnecting worker, an unreachable peer and a silent registry are waited for, until the route wait is over.
        """
        for outcome in (Reconnecting("n"), PeerUnreachable("p", ""), RegistryUnknown("")):
            self.assertEqual(self.after(outcome), Wait(POLL))
            self.assertEqual(self.after(outcome, now=4.9), Wait(5.0 - 4.9))
            self.assertIsInstance(self.after(outcome, now=5.0), GiveUp)

    def test_another_replica_first(self) -> None:
        """
        While another replica may answer, nobody waits for one that is out of reach.
        """
        for outcome in OUTCOMES:
            step = self.after(outcome, others=True, now=9.0)
            wanted = isinstance(
                outcome, Reconnecting | PeerUnreachable | RegistryUnknown | NotServed | NoRoute
            ) and not may_reap(outcome)
            self.assertEqual(isinstance(step, TryOther), wanted, outcome)

    def test_one_fresh_stream(self) -> None:
        """
        A stream that was not served is tried once more, on a fresh one, and not again.
        """
        self.assertIsInstance(self.after(NotServed("x")), TryAgain)
        self.assertIsInstance(self.after(NotServed("x"), fresh=True), GiveUp)

    def test_no_use_trying(self) -> None:
        """
        What can't get better by trying is told at once.
        """
        for outcome in (
            Answered(Answer.ERROR),
            Refused("bad-request", ""),
            VerbNotServed("x"),
            NoRoute("n", departed=False),
            DeadlineExceeded(),
            Cancelled(),
        ):
            self.assertIsInstance(self.after(outcome), GiveUp)

    def test_the_account(self) -> None:
        """
        Each step is paid for once.
        """
        spent = Attempts(5.0)
        for step in (DropRow(), TryAgain(), TryOther(), Wait(1.0), GiveUp()):
            spent = spent.after(step)
        self.assertEqual(spent, Attempts(5.0, fresh=True, reloads=1))
