"""The rows of load jobs on a real PostgreSQL: one holder, fenced, taken over, ended once."""

from __future__ import annotations

from typing import Any

from twisted.internet.defer import Deferred, gatherResults

from localai_dist.ids import InstanceId, NodeId
from localai_dist.loads.cause import encode_cause
from localai_dist.loads.endings import Endings
from localai_dist.loads.errors import LoadFailed
from localai_dist.loads.lack import Lack, Resort
from localai_dist.loads.rows import Claim, JobRow, Loaded, Measured
from localai_dist.loads.status import JobState
from localai_dist.loads.table import JobTable
from localai_dist.staging.progress import Progress
from localai_dist.store.errors import StatementFailed, StoreUnavailable
from localai_dist.store.pool import Pool
from tests.db.case import DatabaseTestCase
from tests.loads.doubles import make_model

NODE = NodeId("11111111-1111-1111-1111-111111111111")


class LoadJobCase(DatabaseTestCase):
    """Two frontends, ``one`` and ``two``, both live."""

    pool_: Pool

    async def begin(self) -> tuple[JobTable, JobTable]:
        """The tables of both frontends over an empty job table."""
        self.pool_ = await self.pool()
        for table in ("model_load_jobs", "node_models", "backend_nodes", "instances", "model_load_endings"):
            await self.pool_.execute(f"delete from {table}")
        await self.pool_.execute("insert into instances (id) values ('one'), ('two')")
        await self.pool_.execute(
            "insert into backend_nodes (id, name, status, approved_at) values (%(id)s, 'worker', 'healthy', now())",
            {"id": NODE},
        )
        return self.table("one"), self.table("two")

    def table(self, instance: str) -> JobTable:
        """The table as one frontend writes it."""
        return JobTable(self.pool_, InstanceId(instance), live_window=30.0, orphan_after=60.0)

    async def age(self, column: str, seconds: float, table: str = "model_load_jobs", where: str = "true") -> None:
        """Make a stamp older, as if that much time had passed."""
        await self.pool_.execute(
            f"update {table} set {column} = {column} - make_interval(secs => %(by)s) where {where}", {"by": seconds}
        )

    async def rows(self, table: str = "model_load_jobs") -> list[dict[str, Any]]:
        """What is in a table."""
        return await self.pool_.fetch(f"select * from {table}")

    async def claimed(self, table: JobTable, key: str = "tiny") -> Claim:
        """A claim that must succeed."""
        claim = await table.claim(make_model(key))
        assert claim is not None
        return claim

    async def advance(self, table: JobTable, claim: Claim, state: JobState = JobState.STAGING) -> bool:
        """Move a job on."""
        return await table.advance(claim, state, node=NODE, node_name="worker", replica_index=0)

    async def beat(self, table: JobTable, claim: Claim, **progress: int) -> str | None:
        """A heartbeat."""
        return await table.beat(claim, Progress(**progress), phase="waiting", rate=None)

    async def row(self, table: JobTable, key: str = "tiny") -> JobRow:
        """A job that must be there, as a frontend reads it."""
        row = await table.read(key)
        assert row is not None
        return row


class ClaimTests(LoadJobCase):
    """Who runs a load."""

    async def test_at_most_one_holder(self) -> None:
        """However many frontends claim one model at the same moment, one of them gets it (LOAD-5)."""
        one, two = await self.begin()
        tries = [Deferred.fromCoroutine(table.claim(make_model("tiny"))) for table in (one, two) * 10]
        claims = [claim for claim in await gatherResults(tries) if claim is not None]
        self.assertEqual(len(claims), 1)

    async def test_another_model_is_another_job(self) -> None:
        """A load that is slow keeps nobody from loading something else (LOAD-9)."""
        one, two = await self.begin()
        await self.claimed(one, "tiny")
        await self.claimed(two, "other")

    async def test_a_live_owner_that_beats_keeps_its_job(self) -> None:
        """A load may take for ever: as long as it beats, nobody takes it over."""
        one, two = await self.begin()
        claim = await self.claimed(one)
        await self.age("last_progress", 50)
        self.assertIsNone(await two.claim(make_model("tiny")))
        self.assertEqual(await self.beat(one, claim), "")
        await self.age("created_at", 86_000)
        self.assertIsNone(await two.claim(make_model("tiny")))

    async def test_silence_makes_it_anybodys(self) -> None:
        """An owner that was silent for the orphan time loses the job, its node is kept for the resume (LOAD-6)."""
        one, two = await self.begin()
        claim = await self.claimed(one)
        await self.advance(one, claim)
        await self.age("last_progress", 61)
        taken = await self.claimed(two)
        self.assertEqual(taken.node, NODE)
        self.assertNotEqual(taken.attempt, claim.attempt)

    async def test_a_dead_owner_loses_it_sooner(self) -> None:
        """An owner that is not live any more loses the job after a few missed beats (LOAD-6)."""
        one, two = await self.begin()
        await self.claimed(one)
        await self.pool_.execute("delete from instances where id = 'one'")
        self.assertIsNone(await two.claim(make_model("tiny")))
        await self.age("last_progress", 6)
        await self.claimed(two)

    async def test_an_owner_past_the_live_window_is_dead(self) -> None:
        """Liveness is the database's clock and the live window, nothing else."""
        one, two = await self.begin()
        await self.claimed(one)
        await self.age("last_progress", 6)
        self.assertIsNone(await two.claim(make_model("tiny")))
        await self.age("last_seen", 31, "instances", "id = 'one'")
        await self.claimed(two)

    async def test_a_restarted_frontend_takes_its_own_job_back(self) -> None:
        """A frontend that comes back under its old name goes on with the load its earlier process left (WALK-10)."""
        one, two = await self.begin()
        await self.claimed(one)
        self.assertIsNone(await one.claim(make_model("tiny")))
        await self.age("last_progress", 6)
        self.assertIsNone(await two.claim(make_model("tiny")))
        row = await one.read("tiny")
        assert row is not None
        self.assertTrue(row.orphaned)
        await self.claimed(one)

    async def test_only_one_takes_over(self) -> None:
        """An orphan that several frontends see at once goes to one of them."""
        one, _ = await self.begin()
        await self.claimed(one)
        await self.age("last_progress", 61)
        tries = [Deferred.fromCoroutine(self.table(f"fe-{n % 4}").claim(make_model("tiny"))) for n in range(12)]
        self.assertEqual(len([claim for claim in await gatherResults(tries) if claim is not None]), 1)


class FenceTests(LoadJobCase):
    """A job that was taken over is none of the old owner's business."""

    async def test_a_frozen_owner_that_wakes_changes_nothing(self) -> None:
        """After a take-over every write of the old attempt finds no row (LOAD-6)."""
        one, two = await self.begin()
        old = await self.claimed(one)
        await self.age("last_progress", 61)
        new = await self.claimed(two)
        before = await self.rows()
        self.assertFalse(await self.advance(one, old))
        self.assertIsNone(await self.beat(one, old, moved=5))
        self.assertFalse(await one.fail(old, "junk"))
        self.assertFalse(await one.finish(old, Loaded(NODE, 0, "127.0.0.1:1", "t", "b", "r"), Measured()))
        self.assertFalse(await one.abandon(old))
        self.assertFalse(await one.drop(old))
        self.assertEqual(await self.rows(), before)
        self.assertEqual(await self.rows("node_models"), [])
        self.assertTrue(await self.advance(two, new))

    async def test_the_same_frontend_is_fenced_by_the_attempt(self) -> None:
        """A frontend that lost a job and claimed it again does not take its old attempt for the new one."""
        one, _ = await self.begin()
        old = await self.claimed(one)
        await self.age("last_progress", 61)
        await self.claimed(one)
        self.assertFalse(await self.advance(one, old))

    async def test_an_attempt_is_never_used_twice(self) -> None:
        """Also after the row was deleted, an old attempt does not fit a new one."""
        one, _ = await self.begin()
        old = await self.claimed(one)
        self.assertTrue(await one.drop(old))
        await self.claimed(one)
        self.assertFalse(await self.advance(one, old))


class EndTests(LoadJobCase):
    """How a job ends."""

    async def test_success_trades_the_row_for_the_replicas(self) -> None:
        """A finished load leaves the replica's row and no job row, in one step."""
        one, _ = await self.begin()
        claim = await self.claimed(one)
        self.assertTrue(
            await one.finish(claim, Loaded(NODE, 0, "127.0.0.1:20000", "secret", "llama-cpp", "r1"), Measured())
        )
        self.assertEqual(await self.rows(), [])
        (row,) = await self.rows("node_models")
        self.assertEqual((row["node_id"], row["model_name"], row["replica_index"]), (NODE, "tiny", 0))
        self.assertEqual((row["address"], row["backend_token"]), ("127.0.0.1:20000", "secret"))
        self.assertEqual((row["state"], row["config_revision"]), ("loaded", "r1"))

    async def test_a_second_load_replaces_the_replicas_row(self) -> None:
        """A replica that was loaded again has its new address; counts of the old process are forgotten."""
        one, _ = await self.begin()
        await one.finish(await self.claimed(one), Loaded(NODE, 0, "127.0.0.1:1", "a", "b", "r1"), Measured())
        await self.pool_.execute("update node_models set in_flight = 3, state = 'unloading'")
        await one.finish(await self.claimed(one), Loaded(NODE, 0, "127.0.0.1:2", "c", "b", "r2"), Measured())
        (row,) = await self.rows("node_models")
        self.assertEqual((row["address"], row["in_flight"], row["state"]), ("127.0.0.1:2", 0, "loaded"))

    async def test_a_node_that_was_removed_takes_no_replica(self) -> None:
        """A load that ends on a node which was removed meanwhile is an error, and the job row stays."""
        one, _ = await self.begin()
        claim = await self.claimed(one)
        await self.pool_.execute("delete from backend_nodes")
        await self.assert_raises(StatementFailed, one.finish(claim, Loaded(NODE, 0, "a", "t", "b", "r"), Measured()))
        self.assertEqual(len(await self.rows()), 1)

    async def test_a_failure_is_told_to_the_others_and_the_next_starts_afresh(self) -> None:
        """Every frontend reads the cause; the next request claims anew, and late waiters still find the cause."""
        one, two = await self.begin()
        claim = await self.claimed(one)
        await self.advance(one, claim)
        self.assertTrue(await one.fail(claim, encode_cause(LoadFailed("the disk is full"))))
        row = await two.read("tiny")
        assert row is not None
        self.assertEqual((row.state, row.status.error, row.orphaned), (JobState.FAILED, "the disk is full", False))
        again = await self.claimed(two)
        self.assertEqual(again.node, "")
        late = await one.read("tiny")
        assert late is not None
        self.assertEqual((late.state, late.attempt), (JobState.PENDING, again.attempt))
        self.assertIn("the disk is full", late.error)

    async def test_failures_are_swept_after_a_while(self) -> None:
        """A failed row stays 15 s, an orphan that nobody can load stays longer; a running job is never swept."""
        one, _ = await self.begin()
        await one.fail(await self.claimed(one, "failed"), "x")
        await self.claimed(one, "orphan")
        await self.claimed(one, "running")
        self.assertEqual(await one.sweep(), 0)
        await self.age("updated_at", 16)
        await self.age("last_progress", 700, where="tracking_key = 'orphan'")
        self.assertEqual(await one.sweep(), 2)
        self.assertEqual([row["tracking_key"] for row in await self.rows()], ["running"])

    async def test_a_stopping_frontend_hands_over_at_once(self) -> None:
        """A frontend that stops gives its jobs up; another one takes them without waiting."""
        one, two = await self.begin()
        await one.abandon(await self.claimed(one))
        row = await two.read("tiny")
        assert row is not None
        self.assertTrue(row.orphaned)
        await self.claimed(two)


class StatusTests(LoadJobCase):
    """What every frontend can read of a load."""

    async def test_the_same_on_every_frontend(self) -> None:
        """State, node, bytes and files of a load are read alike everywhere (LOAD-7, LOAD-18)."""
        one, two = await self.begin()
        claim = await self.claimed(one)
        await self.advance(one, claim)
        progress = Progress(total_bytes=200, total_files=2, file_index=1, in_file=50, moved=50)
        await one.beat(claim, progress, phase="sending", rate=25.0)
        for table in (one, two):
            row = await table.read("tiny")
            assert row is not None
            shown = row.status.as_json()
            self.assertEqual(shown["state"], "staging")
            self.assertEqual(shown["node"], "worker")
            self.assertEqual((shown["bytes_sent"], shown["total_bytes"], shown["progress"]), (50, 200, 25.0))
            self.assertEqual((shown["file_index"], shown["total_files"]), (1, 2))
            self.assertEqual((shown["eta_seconds"], row.status.phase, row.status.rate), (6.0, "sending", 25.0))
        self.assertEqual([job.key for job in await two.all()], ["tiny"])
        self.assertIsNone(await two.read("other"))

    async def test_what_it_waits_for_is_read_everywhere(self) -> None:
        """Why a load waits is in its row with each beat, whole and for clients, and goes when it goes on."""
        one, two = await self.begin()
        claim = await self.claimed(one)
        await self.advance(one, claim)
        progress = Progress()
        progress.interrupted(StoreUnavailable("db.internal is away"))
        await one.beat(claim, progress, phase="waiting", rate=None)
        row = await two.read("tiny")
        assert row is not None
        self.assertEqual(row.status.waits, "db.internal is away")
        self.assertEqual(row.status.as_json()["waits"], StoreUnavailable("").told)
        progress.goes_on()
        await one.beat(claim, progress, phase="sending", rate=None)
        row = await two.read("tiny")
        assert row is not None
        self.assertEqual((row.status.waits, row.status.waits_told), ("", ""))

    async def test_started_is_the_first_byte(self) -> None:
        """The start of the transfer is stamped with the first byte that moves, once."""
        one, _ = await self.begin()
        claim = await self.claimed(one)
        await self.beat(one, claim)
        self.assertIsNone((await self.rows())[0]["started_at"])
        await self.beat(one, claim, moved=1)
        first = (await self.rows())[0]["started_at"]
        self.assertIsNotNone(first)
        await self.beat(one, claim, moved=2)
        self.assertEqual((await self.rows())[0]["started_at"], first)

    async def test_queued_is_there_before_anything_was_done(self) -> None:
        """The claim itself is what the other frontend sees as queued (LOAD-24)."""
        one, two = await self.begin()
        await self.claimed(one)
        (job,) = await two.all()
        self.assertEqual((job.state, job.status.phase, job.status.node), (JobState.PENDING, "waiting", ""))

    async def test_a_take_over_keeps_what_is_known(self) -> None:
        """Right after a take-over the bytes that were there are still told, and the new owner knows them (LOAD-18)."""
        one, two = await self.begin()
        claim = await self.claimed(one)
        await self.advance(one, claim)
        await self.beat(one, claim, total_bytes=200, in_file=150, moved=150)
        await self.age("last_progress", 61)
        taken = await self.claimed(two)
        self.assertEqual(taken.bytes, 150)
        self.assertEqual((await self.row(one)).status.bytes_sent, 150)


class CancelTests(LoadJobCase):
    """The mark in the row is the truth."""

    async def test_whoever_runs_it_reads_the_mark(self) -> None:
        """A cancel on one frontend is told with the next heartbeat of the other; every step is refused (LOAD-17)."""
        one, two = await self.begin()
        claim = await self.claimed(one)
        self.assertTrue(await two.cancel("tiny", "by ann"))
        self.assertEqual(await self.beat(one, claim), "by ann")
        self.assertFalse(await self.advance(one, claim))
        self.assertFalse(await one.fail(claim, "x"))
        self.assertFalse(await one.offer(claim, Lack("x")))
        self.assertFalse(await one.finish(claim, Loaded(NODE, 0, "127.0.0.1:1", "t", "b", "r"), Measured()))
        self.assertEqual(await self.rows("node_models"), [])
        self.assertTrue(await one.close_cancelled(claim))
        self.assertEqual(await self.rows(), [])
        self.assertEqual(await Endings(self.pool_).cancelled("tiny", claim.attempt), "by ann")
        self.assertIsNone(await Endings(self.pool_).cancelled("tiny", claim.attempt + 1))

    async def test_a_tick_never_clears_it(self) -> None:
        """Heartbeats after a cancel leave it cancelled, and a second cancel keeps the first reason (LOAD-24)."""
        one, two = await self.begin()
        claim = await self.claimed(one)
        await two.cancel("tiny", "first")
        await two.cancel("tiny", "second")
        for _ in range(3):
            self.assertEqual(await self.beat(one, claim, moved=1), "first")
        row = await self.row(two)
        self.assertEqual((row.cancelled, row.cancel_reason, row.status.cancelled), (True, "first", True))

    async def test_nothing_to_cancel(self) -> None:
        """Neither an unknown job nor a failed one can be cancelled."""
        one, two = await self.begin()
        self.assertFalse(await two.cancel("tiny", "x"))
        await one.fail(await self.claimed(one), encode_cause(LoadFailed("bad")))
        self.assertFalse(await two.cancel("tiny", "x"))
        await self.claimed(one)
        self.assertFalse((await self.row(two)).cancelled)

    async def test_a_cancelled_orphan_is_cleared_away_not_loaded(self) -> None:
        """Nobody takes a cancelled load over to go on; one frontend takes it to clear it away (LOAD-17)."""
        one, two = await self.begin()
        await self.advance(one, await self.claimed(one))
        await two.cancel("tiny", "x")
        self.assertIsNone(await two.claim_cancelled("tiny"))
        await self.age("last_progress", 61)
        self.assertIsNone(await two.claim(make_model("tiny")))
        self.assertIsNone(await one.claim_cancelled("other"))
        taken = await two.claim_cancelled("tiny")
        assert taken is not None
        self.assertEqual((taken[0].node, taken[1]), (NODE, 0))
        self.assertIsNone(await one.claim_cancelled("tiny"))
        self.assertTrue(await two.close_cancelled(taken[0]))


class OfferTests(LoadJobCase):
    """A job looks for a frontend that has its files."""

    async def test_who_lacks_the_files_does_not_claim_again(self) -> None:
        """An offered job goes to the other frontend at once, with its configuration (LOAD-22)."""
        one, two = await self.begin()
        self.assertTrue(await one.offer(await self.claimed(one), Lack("tiny.gguf is not in /one")))
        self.assertIsNone(await one.claim(make_model("tiny")))
        row = await self.row(two)
        self.assertEqual((row.owner, row.orphaned, row.unasked), ("", True, ("two",)))
        self.assertEqual(row.model(), make_model("tiny"))
        self.assertTrue(await self.advance(two, await self.claimed(two)))

    async def test_nobody_has_them(self) -> None:
        """When every live frontend lacks the files the job is refused, by the last attempt only (LOAD-22)."""
        one, two = await self.begin()
        await one.offer(await self.claimed(one), Lack("not in /one"))
        before = await self.row(two)
        await two.offer(await self.claimed(two), Lack("not in /two"))
        self.assertFalse(await one.refuse(before, encode_cause(LoadFailed("too early"))))
        row = await self.row(one)
        self.assertEqual((row.lacking, row.unasked), ({"one": Lack("not in /one"), "two": Lack("not in /two")}, ()))
        self.assertTrue(await one.refuse(row, encode_cause(LoadFailed("nobody"))))
        self.assertEqual((await self.row(two)).status.error, "nobody")
        again = await self.claimed(one)
        self.assertEqual((await self.row(one)).lacking, {})
        self.assertTrue(await self.advance(one, again))

    async def test_nobody_has_every_file(self) -> None:
        """What each lacks is told alike everywhere; one of them takes the job on, and only one (LOAD-22)."""
        one, two = await self.begin()
        await one.offer(await self.claimed(one), Lack("b not in /one", 1))
        await two.offer(await self.claimed(two), Lack("b, c not in /two", 2))
        seen = await self.row(two)
        self.assertEqual(seen.lacking, {"one": Lack("b not in /one", 1), "two": Lack("b, c not in /two", 2)})
        self.assertEqual([seen.resort(InstanceId(me), 15.0) for me in ("one", "two")], [Resort.RUN, Resort.WAIT])
        claim = await one.claim_lacking(make_model("tiny"), seen)
        assert claim is not None
        self.assertEqual(claim.lacking, seen.lacking)
        self.assertIsNone(await two.claim_lacking(make_model("tiny"), seen))
        self.assertFalse(await two.refuse(seen, encode_cause(LoadFailed("nobody"))))
        self.assertIsNone(await two.claim_lacking(make_model("tiny"), await self.row(two)))  # it is being run
        self.assertTrue(await self.advance(one, claim))

    async def test_a_dead_frontend_is_not_asked(self) -> None:
        """A frontend that is not live has no say; how long the job has looked is told by the database's clock."""
        one, _ = await self.begin()
        await self.age("last_seen", 31, "instances", "id = 'two'")
        await one.offer(await self.claimed(one), Lack("x"))
        await self.age("offered_at", 20)
        row = await self.row(one)
        self.assertEqual(row.unasked, ())
        self.assertGreaterEqual(row.offered_for, 20)

    async def test_junk_for_a_configuration(self) -> None:
        """A configuration that another version wrote is not used."""
        one, _ = await self.begin()
        await self.claimed(one)
        for junk in ("", "{}", "[1]"):
            await self.pool_.execute("update model_load_jobs set model_config = %(junk)s", {"junk": junk})
            self.assertIsNone((await self.row(one)).model())


class EndingsTests(LoadJobCase):
    """What finished loads leave."""

    async def test_history_of_a_node(self) -> None:
        """Measured loads of a node are remembered, the newest first; unmeasured ones tell no rate (LOAD-7)."""
        one, _ = await self.begin()
        for rate in (10.0, None, 30.0):
            claim = await self.claimed(one)
            loaded = Loaded(NODE, 0, "127.0.0.1:1", "t", "b", "r")
            await one.finish(claim, loaded, Measured(1000, 1000, rate, 2.0))
        past = await Endings(self.pool_).recent(NODE)
        self.assertEqual(
            [(one.rate, one.load_seconds, one.total_bytes) for one in past], [(30.0, 2.0, 1000), (10.0, 2.0, 1000)]
        )
        self.assertEqual(await Endings(self.pool_).recent(NodeId("other")), [])

    async def test_what_a_node_has_already(self) -> None:
        """A node that loaded the model has its bytes, until a cancel removed them (LOAD-15)."""
        one, two = await self.begin()
        endings = Endings(self.pool_)
        self.assertEqual(await endings.staged("tiny"), {})
        await one.finish(await self.claimed(one), Loaded(NODE, 0, "a", "t", "b", "r"), Measured(1000, 1000))
        self.assertEqual(await endings.staged("tiny"), {NODE: 1000})
        claim = await self.claimed(one)
        await self.advance(one, claim)
        await two.cancel("tiny", "x")
        await one.close_cancelled(claim)
        self.assertEqual(await endings.staged("tiny"), {NODE: 0})

    async def test_old_ones_are_forgotten(self) -> None:
        """Endings go after a month, but the newest of each model and node stays."""
        one, _ = await self.begin()
        for _ in range(2):
            await one.finish(await self.claimed(one), Loaded(NODE, 0, "a", "t", "b", "r"), Measured(1, 1))
        endings = Endings(self.pool_)
        self.assertEqual(await endings.sweep(), 0)
        await self.age("ended_at", 31 * 86_400, "model_load_endings")
        self.assertEqual(await endings.sweep(), 1)
        self.assertEqual(await endings.sweep(), 0)
