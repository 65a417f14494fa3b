"""NOTIFY that fails on a real PostgreSQL, as it does when its queue is full: what was written stays written."""

from __future__ import annotations

import re
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

import localai_dist
from localai_dist.ids import ModelName
from localai_dist.registry.identity import TokenCheck
from localai_dist.registry.records import Registration
from localai_dist.registry.replicas import Replicas
from localai_dist.store.errors import StatementFailed
from localai_dist.testing.databases import shared
from tests.db.case import until
from tests.db.test_notices import BusFrontendCase, Frontend
from tests.loads.doubles import Workers, make_model

BREAK = """
create schema broken;
create function broken.pg_notify(text, text) returns void language plpgsql as $$
begin raise exception 'too many notifications in the NOTIFY queue' using errcode = '54000'; end $$;
do $$ begin execute format('alter database %I set search_path = broken, pg_catalog, public', current_database()); end $$
"""
"""New connections find this function where PostgreSQL's own was."""


class FailingNotifyTests(BusFrontendCase):
    """Two frontends on a database where every NOTIFY fails."""

    async def begin(self) -> tuple[Frontend, Frontend]:
        """Both on the bus, no node known."""
        self.url = shared().fresh()
        first = await self.pool()
        await first.execute(BREAK)
        self.pool_ = await self.pool(size=4)
        self.workers = Workers()
        return await self.frontend("one"), await self.frontend("two")

    async def test_no_state_change_is_lost(self) -> None:
        """
        A claim, a hand-over and a load are in the database though no notice of them could be sent; each is counted as
        not sent, and what the other frontend was not told it finds when it looks (BR-029).
        """
        one, two = await self.begin()
        old = await two.nodes.register(Registration("a"), auto_approve=True, presented_token=None)
        assert old.token
        tunnel = await two.hold(old.node.id, old.token)
        await until(lambda: two.bus.publisher.published.dropped == 1, "the claim can't be told")
        await self.quiet()
        fact = await one.ownership.route(old.node.id, grace=90.0)
        self.assertEqual((fact.owner, tunnel.closed_here), ("two", False))

        newcomer = await one.nodes.register(Registration("a"), auto_approve=True, presented_token=None)
        await one.nodes.approve(old.node.id)
        one.notices.identity_changed(old.node.id)
        await until(lambda: one.bus.publisher.published.dropped == 1, "the hand-over can't be told")
        self.assertIs(await two.nodes.authenticate(old.node.id, newcomer.token), TokenCheck.OK)
        self.assertFalse(tunnel.closed_here)
        await two.identities.check()
        self.assertTrue(tunnel.closed_here)

        assert newcomer.token
        await one.hold(old.node.id, newcomer.token)
        loaded = await one.loads.ensure(make_model(), wait=None)
        await until(lambda: one.bus.publisher.published.dropped == 3, "claim and load can't be told")
        replicas = await Replicas(self.pool_).loaded(ModelName("tiny"))
        self.assertEqual([replica.address for replica in replicas], [loaded.address])
        self.assertEqual((one.bus.publisher.published.inline, two.bus.publisher.published.inline), (0, 0))

    async def test_a_long_message_leaves_no_row(self) -> None:
        """A spilled payload and its notification are one statement: without the one there is not the other (BR-029)."""
        one, _ = await self.begin()
        await self.assert_raises(StatementFailed, one.bus.publisher.publish("cache.models", "x" * 9000))
        self.assertEqual(await self.pool_.fetch("select id from bus_messages"), [])
        self.assertEqual((one.bus.publisher.published.spilled, self.pool_.healthy), (0, True))


class StatementTests(SynchronousTestCase):
    """Where this program says NOTIFY."""

    def test_no_state_shares_its_fate(self) -> None:
        """
        Only the bus's two statements notify, each outside any transaction and none with a write but the message's own
        row: no failing NOTIFY can take a state change with it (BR-029).
        """
        package = Path(localai_dist.__file__).parent
        saying = re.compile(r"pg_notify|\bnotify\s+\w+\s*,", re.IGNORECASE)
        sources = [path for kind in ("*.sql", "*.py") for path in package.rglob(kind)]
        found = {str(path.relative_to(package)) for path in sources if saying.search(path.read_text(encoding="utf-8"))}
        self.assertEqual(found, {"store/sql/bus.sql"})
        statements = (package / "store/sql/bus.sql").read_text(encoding="utf-8").split("-- name: ")[1:]
        notifying = [statement for statement in statements if "pg_notify(" in statement]
        self.assertEqual([statement.split()[0] for statement in notifying], ["notify", "spill"])
        written = re.findall(r"insert into (\w+)|update (\w+)|delete from (\w+)", "".join(notifying))
        self.assertEqual(written, [("bus_messages", "", "")])
        self.assertNotIn("transaction", (package / "bus/publisher.py").read_text(encoding="utf-8"))
