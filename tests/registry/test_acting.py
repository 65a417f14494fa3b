"""The closed list of what deletes, demotes or evicts."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from localai_dist.registry.acting import ACTS, Ground, acts_on
from tests.registry import sites

CALLERS = {
    # one predicate of reach.py, asked inside
    "nodes.mark_unhealthy": {"health.monitor.HealthMonitor._act"},
    "replicas.remove": {"loads.retire.Retirement._stop", "loads.room.make_room", "loads.unload.unload_replicas"},
    # no outcome is in play: the heartbeat's age, a fence, an operator, the worker itself
    "nodes.mark_stale_offline": {"health.monitor.HealthMonitor.look"},
    "nodes.drain": {"httpapi.node_service.drain", "httpapi.nodes.drain"},
    "nodes.deregister": {"httpapi.node_service.deregister"},
    "nodes.remove": {"httpapi.nodes.remove"},
    "nodes.put_labels": {"httpapi.nodes.put_labels"},
    "nodes.delete_label": {"httpapi.nodes.delete_label"},
    "scheduling.delete": {"httpapi.scheduling.delete"},
    "instances.arrive": {"registry.membership.Membership.join"},
    "instances.beat": {"registry.membership.Membership.beat"},
    "instances.deregister": {"registry.membership.Membership._leave"},
    "ownership.release": {"tunnel.held.HeldTunnels._release"},
    "table.claim": {"loads.service.Loads._claim"},
    "table.claim_lacking": {"loads.service.Loads._last_resort"},
    "table.claim_cancelled": {"loads.lookout.Lookout._finish_cancelled"},
    "table.close_cancelled": {"loads.cancel.clear_away"},
    "table.drop": {"loads.service.Loads._run"},
    "table.finish": {"loads.job.LoadJob._finish"},
    "table.mark": {"loads.retire.Retirement._mark_old"},
    "table.mark_unserved": {"loads.retire.Retirement._mark_unserved"},
    "table.sweep": {"loads.lookout.Lookout._sweep"},
    "replicas.set_state": {"loads.room._drain"},
}
"""
Everything outside the registry that calls an acting function. A new caller belongs here and into the matrix of
``tests/db/test_matrix.py``.
"""

OTHER_NAMESAKES = {"ownership.claim", "table.beat"}
"""Same name as an acting function, but of another store, where it deletes nothing."""


class ActingTests(SynchronousTestCase):
    """Code, SQL and the list agree."""

    def setUp(self) -> None:
        """Every decorator has run."""
        sites.import_all()
        self.statements = sites.statements()

    def test_every_change_says_what_it_is(self) -> None:
        """Each statement of any table that changes or deletes rows states its ground, or that it has none (CLUS-12)."""
        changing = {name: each for name, each in self.statements.items() if sites.CHANGES.search(each.sql)}
        self.assertEqual([name for name, each in changing.items() if each.acts is None], [])
        self.assertGreater(len(changing), 30)
        for name in ("load_jobs.sweep", "load_jobs.finish", "nodes.remove", "instances.beat", "replicas.put"):
            self.assertIn(name, changing)  # a control: a delete in a WITH, a load's statement, and an upsert are seen
        self.assertNotIn("load_jobs.read", changing)

    def test_no_deletion_without_a_ground(self) -> None:
        """A statement with a DELETE in it never claims to act on nothing (CLUS-12)."""
        deleting = {name for name, each in self.statements.items() if sites.DELETES.search(each.sql)}
        self.assertEqual({name for name in deleting if self.statements[name].acts in (None, "none")}, set())
        self.assertGreater(len(deleting), 8)

    def test_every_acting_statement_is_registered_on_its_ground(self) -> None:
        """What the SQL says acts, and nothing else, is registered by one function, on the same ground (CLUS-12)."""
        stated = {name: each.acts for name, each in self.statements.items() if each.acts not in (None, "none")}
        self.assertEqual(stated, {name: act.ground.value for name, act in ACTS.items()})
        for ground in stated.values():
            self.assertIn(ground, {each.value for each in Ground})

    def test_only_the_registered_function_runs_its_statement(self) -> None:
        """No other function of any module names an acting statement, and the registered one does (CLUS-12)."""
        self.assertEqual(sites.runners(), {name: {act.function} for name, act in ACTS.items()})

    def test_every_caller_is_known(self) -> None:
        """Nobody outside the list calls what deletes, demotes or evicts (CLUS-12)."""
        found = {
            name: {caller for caller in callers if not caller.startswith("registry.nodes.")}
            for name, callers in sites.callers().items()
            if name not in OTHER_NAMESAKES
        }
        self.assertEqual(found, CALLERS)

    def test_no_python_file_changes_a_table_itself(self) -> None:
        """Outside ``store/sql`` and the migrations nobody writes SQL that changes rows (CLUS-12)."""
        allowed = {"localai_dist.store.schema"}  # the version of the schema itself
        found = sites.sql_in_python()
        self.assertEqual({module: found[module] for module in set(found) - allowed}, {})
        self.assertTrue(sites.IN_PYTHON.search("x UPDATE node_models SET y"))

    def test_a_statement_is_registered_once(self) -> None:
        """A second function for the same statement, or an unknown ground, is refused."""
        self.assertRaises(ValueError, acts_on("asked", "replicas.remove"), lambda: None)
        self.assertRaises(ValueError, acts_on, "whim", "x.y")
