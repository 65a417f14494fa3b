"""The rows of load jobs on a real PostgreSQL: one holder, fenced, taken over, ended once."""

from __future__ import annotations

from typing import Any

from twisted.internet.defer import Deferred, gatherResults

from localai_dist.ids import InstanceId, NodeId
from localai_dist.loads.cause import encode_cause
from localai_dist.loads.errors import LoadFailed
from localai_dist.loads.status import JobState
from localai_dist.loads.table import Claim, JobTable, Loaded
from localai_dist.staging.progress import Progress
from localai_dist.store.errors import StatementFailed
from localai_dist.store.pool import Pool
from tests.db.case import DatabaseTestCase

NODE = NodeId("11111111-1111-1111-1111-111111111111")


class LoadJobCase(DatabaseTestCase):
    """Two frontends, ``one`` and ``two``, both live."""

    pool_: Pool

    async def begin(self) -> tuple[JobTable, JobTable]:
        """The tables of both frontends over an empty job table."""
        self.pool_ = await self.pool()
        for table in ("model_load_jobs", "node_models", "backend_nodes", "instances"):
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
        claim = await table.claim(key)
        assert claim is not None
        return claim

    async def advance(self, table: JobTable, claim: Claim, state: JobState = JobState.STAGING) -> bool:
        """Move a job on."""
        return await table.advance(claim, state, node=NODE, node_name="worker", replica_index=0)


class ClaimTests(LoadJobCase):
    """Who runs a load."""

    async def test_at_most_one_holder(self) -> None:
        """However many frontends claim one model at the same moment, one of them gets it (LOAD-5)."""
        one, two = await self.begin()
        tries = [Deferred.fromCoroutine(table.claim("tiny")) for table in (one, two) * 10]
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
        await self.age("last_progress", 59)
        self.assertIsNone(await two.claim("tiny"))
        self.assertTrue(await one.beat(claim, Progress()))
        await self.age("created_at", 86_000)
        self.assertIsNone(await two.claim("tiny"))

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
        self.assertIsNone(await two.claim("tiny"))
        await self.age("last_progress", 6)
        await self.claimed(two)

    async def test_an_owner_past_the_live_window_is_dead(self) -> None:
        """Liveness is the database's clock and the live window, nothing else."""
        one, two = await self.begin()
        await self.claimed(one)
        await self.age("last_progress", 6)
        self.assertIsNone(await two.claim("tiny"))
        await self.age("last_seen", 31, "instances", "id = 'one'")
        await self.claimed(two)

    async def test_a_restarted_frontend_takes_its_own_job_back(self) -> None:
        """A frontend that comes back under its old name goes on with the load its earlier process left (WALK-10)."""
        one, two = await self.begin()
        await self.claimed(one)
        self.assertIsNone(await one.claim("tiny"))
        await self.age("last_progress", 6)
        self.assertIsNone(await two.claim("tiny"))
        row = await one.read("tiny")
        assert row is not None
        self.assertTrue(row.orphaned)
        await self.claimed(one)

    async def test_only_one_takes_over(self) -> None:
        """An orphan that several frontends see at once goes to one of them."""
        one, _ = await self.begin()
        await self.claimed(one)
        await self.age("last_progress", 61)
        tries = [Deferred.fromCoroutine(self.table(f"fe-{n % 4}").claim("tiny")) for n in range(12)]
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
        self.assertFalse(await one.beat(old, Progress(moved=5)))
        self.assertFalse(await one.fail(old, "junk"))
        self.assertFalse(await one.finish(old, Loaded(NODE, 0, "127.0.0.1:1", "t", "b", "r")))
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
        self.assertTrue(await one.finish(claim, Loaded(NODE, 0, "127.0.0.1:20000", "secret", "llama-cpp", "r1")))
        self.assertEqual(await self.rows(), [])
        (row,) = await self.rows("node_models")
        self.assertEqual((row["node_id"], row["model_name"], row["replica_index"]), (NODE, "tiny", 0))
        self.assertEqual((row["address"], row["backend_token"]), ("127.0.0.1:20000", "secret"))
        self.assertEqual((row["state"], row["config_revision"]), ("loaded", "r1"))

    async def test_a_second_load_replaces_the_replicas_row(self) -> None:
        """A replica that was loaded again has its new address; counts of the old process are forgotten."""
        one, _ = await self.begin()
        await one.finish(await self.claimed(one), Loaded(NODE, 0, "127.0.0.1:1", "a", "b", "r1"))
        await self.pool_.execute("update node_models set in_flight = 3, state = 'unloading'")
        await one.finish(await self.claimed(one), Loaded(NODE, 0, "127.0.0.1:2", "c", "b", "r2"))
        (row,) = await self.rows("node_models")
        self.assertEqual((row["address"], row["in_flight"], row["state"]), ("127.0.0.1:2", 0, "loaded"))

    async def test_a_node_that_was_removed_takes_no_replica(self) -> None:
        """A load that ends on a node which was removed meanwhile is an error, and the job row stays."""
        one, _ = await self.begin()
        claim = await self.claimed(one)
        await self.pool_.execute("delete from backend_nodes")
        await self.assert_raises(StatementFailed, one.finish(claim, Loaded(NODE, 0, "a", "t", "b", "r")))
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
        await one.beat(claim, progress)
        for table in (one, two):
            row = await table.read("tiny")
            assert row is not None
            shown = row.status.as_json()
            self.assertEqual(shown["state"], "staging")
            self.assertEqual(shown["node"], "worker")
            self.assertEqual((shown["bytes_sent"], shown["total_bytes"], shown["progress"]), (50, 200, 25.0))
            self.assertEqual((shown["file_index"], shown["total_files"]), (1, 2))
        self.assertEqual([job.key for job in await two.all()], ["tiny"])
        self.assertIsNone(await two.read("other"))

    async def test_started_is_the_first_byte(self) -> None:
        """The start of the transfer is stamped with the first byte that moves, once."""
        one, _ = await self.begin()
        claim = await self.claimed(one)
        await one.beat(claim, Progress())
        self.assertIsNone((await self.rows())[0]["started_at"])
        await one.beat(claim, Progress(moved=1))
        first = (await self.rows())[0]["started_at"]
        self.assertIsNotNone(first)
        await one.beat(claim, Progress(moved=2))
        self.assertEqual((await self.rows())[0]["started_at"], first)
