"""Backend processes, with real children: started, reused, ended until really gone, gone with their worker."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from twisted.internet.defer import CancelledError, Deferred, gatherResults
from twisted.internet.task import deferLater
from twisted.trial.unittest import TestCase

from localai_dist.ids import ProcessKey
from localai_dist.worker import groups, guard, process
from localai_dist.worker.errors import InstallFailed, NotWanted, PortsExhausted, StartFailed, StillRunning
from localai_dist.worker.install import Installed, Wanted
from localai_dist.worker.lifecycle import State
from localai_dist.worker.offload import ThreadOffload
from localai_dist.worker.ports import PortRange, PortTable
from tests.worker.support import Answer, World, reactor, write_backend, write_index

M0, M1 = ProcessKey("m", 0), ProcessKey("m", 1)


def free_range(count: int) -> PortRange:
    """Ports nobody listens on right now, below the ephemeral range."""
    base = 21000
    while True:
        try:
            held = [socket.create_server(("127.0.0.1", base + offset)) for offset in range(count)]
        except OSError:
            base += 17
            continue
        for one in held:
            one.close()
        return PortRange(base, base + count - 1)


class ProcessCase(TestCase):
    """A world with three backends: an obedient one, one that ignores SIGTERM, one with a child of its own."""

    timeout = 120

    def setUp(self) -> None:
        folder = Path(self.mktemp()).absolute()
        source = folder / "source"
        write_backend(source, "plain")
        ignoring = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"
        write_backend(source, "stubborn", setup=ignoring)
        write_backend(source, "parent", run='"$LOCALAI_BACKEND_PYTHON" -S "$(dirname "$0")/main.py" "$@" & wait')
        write_backend(source, "dying", run='echo "no such model" >&2; echo "bye" >&2; exit 3')
        write_backend(source, "silent", run="exec sleep 600")
        gallery = write_index(source, "plain", "stubborn", "parent", "dying", "silent")
        self.source = source
        self.world = World(folder, gallery, free_range(4))
        self.supervisor = self.world.supervisor
        self.phases: list[str] = []

    async def tearDown(self) -> None:
        self.world.connect.free = Answer(True)
        stopped = await self.supervisor.close()
        self.assertEqual(stopped.error, "")

    async def begin(self, name: str, key: ProcessKey = M0, *, force: bool = False) -> Any:
        return await self.supervisor.start(key, Wanted(name), force=force, phase=self.phases.append)

    def process(self, key: ProcessKey = M0) -> process.BackendProcess:
        return self.supervisor._processes[key]

    async def until(self, fact: Any, what: str) -> None:
        for _ in range(200):
            if fact():
                return
            await deferLater(reactor, 0.05)
        self.fail(f"waited 10 s for: {what}")


class StartTests(ProcessCase):
    async def test_start_and_reuse(self) -> None:
        """A backend is installed, started on loopback, awaited, and the same process is given again (WALK-11)."""
        launch = await self.begin("plain")
        self.assertEqual(self.phases, ["resolving", "downloading", "starting"])
        self.assertTrue((launch.folder / "run.sh").is_file() and (launch.folder / "metadata.json").is_file())
        self.assertEqual(launch.address, f"127.0.0.1:{launch.port}")
        self.assertTrue(self.supervisor.serves(launch.port))
        self.assertEqual(self.supervisor.running(), [launch])
        self.assertIs(await self.begin("plain"), launch)
        self.assertNotIn(launch.token, repr(launch))

    async def test_two_requests_start_one_process(self) -> None:
        """Two requests for one replica at the same moment get the same process; another replica gets its own."""
        first, second, other = await gatherResults(
            [Deferred.fromCoroutine(self.begin("plain", key)) for key in (M0, M0, M1)]
        )
        self.assertIs(first, second)
        self.assertNotEqual(first.port, other.port)
        self.assertNotEqual(first.token, other.token)

    async def test_another_backend_replaces_it(self) -> None:
        """A replica that is asked for with another backend is ended first."""
        first = await self.begin("plain")
        second = await self.begin("parent")
        self.assertEqual(second.backend, "parent")
        self.assertNotEqual(first.port, second.port)
        self.assertEqual(self.supervisor.running(), [second])

    async def test_reinstall_replaces_it(self) -> None:
        """A forced install ends what runs from the old files and starts the new ones."""
        first = await self.begin("plain")
        self.world.installer.install(Wanted("plain"))
        second = await self.begin("plain")
        self.assertIsNot(first, second)
        third = await self.begin("plain", force=True)
        self.assertIsNot(second, third)
        self.assertEqual(self.supervisor.running(), [third])

    async def test_early_end_tells_the_last_words(self) -> None:
        """A backend that ends instead of serving fails the start with its status and its last words."""
        error = await self.assertFailure(Deferred.fromCoroutine(self.begin("dying")), StartFailed)
        self.assertIn("exited with status 3", str(error))
        self.assertIn("no such model\nbye", str(error))
        self.assertEqual(self.supervisor.running(), [])

    async def test_never_healthy(self) -> None:
        """A backend that doesn't answer Health in time is ended, and its port given back (WALK-22)."""
        self.patch(process, "HEALTH_WITHIN", 0.3)
        error = await self.assertFailure(Deferred.fromCoroutine(self.begin("silent")), StartFailed)
        self.assertIn("did not answer Health", str(error))
        self.assertEqual(self.supervisor._processes, {})

    async def test_unknown_backend(self) -> None:
        """A backend in no gallery is an error that names it and where it was looked for."""
        error = await self.assertFailure(Deferred.fromCoroutine(self.begin("nothing")), InstallFailed)
        self.assertIn("nothing", str(error))
        self.assertIn("test", str(error))

    async def test_ports_taken_by_others(self) -> None:
        """Ports that another program listens on are passed over, and named when none is left (WALK-22)."""
        range_ = self.supervisor._ports.range
        held = [socket.create_server(("127.0.0.1", port)) for port in range(range_.base, range_.top)]
        try:
            launch = await self.begin("plain")
            self.assertEqual(launch.port, range_.top)
            error = await self.assertFailure(Deferred.fromCoroutine(self.begin("plain", M1)), PortsExhausted)
        finally:
            for one in held:
                one.close()
        self.assertIn("1 running", str(error))
        self.assertIn(str(range_), str(error))

    async def test_nothing_starts_after_close(self) -> None:
        """A worker that shuts down starts nothing any more."""
        await self.supervisor.close()
        await self.assertFailure(Deferred.fromCoroutine(self.begin("plain")), StartFailed)


class LeaveTests(ProcessCase):
    """Whoever asked for a backend leaves while it is copied; the copying waits for the test."""

    def setUp(self) -> None:
        super().setUp()
        self.supervisor._offload = ThreadOffload(reactor)
        self.go_on = threading.Event()
        self.copying = 0
        real = self.world.installer.install

        def install(wanted: Wanted, check: Callable[[], None] = lambda: None) -> Installed:
            self.copying += 1
            while not self.go_on.wait(0.01):
                check()
            return real(wanted, check)

        self.patch(self.world.installer, "install", install)

    async def tearDown(self) -> None:
        self.go_on.set()  # a thread that still waits would keep the test run from ending
        await super().tearDown()

    async def begun(self, key: ProcessKey = M0) -> Deferred[Any]:
        before = self.copying
        asked = Deferred.fromCoroutine(self.begin("plain", key))
        await self.until(lambda: self.copying > before or before, "the copying")
        return asked

    async def test_an_install_that_nobody_wants_stops(self) -> None:
        """The only one who asked leaves: the copying stops, nothing is left of it, the next one installs (LOAD-17)."""
        asked = await self.begun()
        asked.cancel()
        await self.assertFailure(asked, CancelledError)
        lock = self.supervisor._backend_lock("plain")
        await self.until(lambda: not lock.locked, "the copying to stop")
        self.assertEqual((self.copying, self.supervisor._installs), (1, {}))
        self.assertIsNone(self.world.installer.find("plain"))
        self.go_on.set()
        self.assertEqual((await self.begin("plain")).backend, "plain")
        self.assertEqual(self.copying, 2)

    async def test_a_shared_install_goes_on(self) -> None:
        """Two ask for one backend and one of them leaves: the other gets it, and it was copied once (LOAD-17)."""
        first, second = await self.begun(M0), await self.begun(M1)
        first.cancel()
        await self.assertFailure(first, CancelledError)
        self.go_on.set()
        launch = await second
        self.assertEqual((self.copying, launch.key), (1, M1))
        self.assertEqual(self.supervisor.running(), [launch])

    async def test_one_that_leaves_while_another_stops(self) -> None:
        """Who asks while an unwanted install ends is not told of that one's end, and gets his own."""
        first = await self.begun()
        first.cancel()
        second = Deferred.fromCoroutine(self.begin("plain"))
        await self.assertFailure(first, CancelledError)
        self.go_on.set()
        self.assertEqual((await second).backend, "plain")

    async def test_a_shutdown_waits_for_no_install(self) -> None:
        """A worker that shuts down stops its installs, and says so to whoever waits for them."""
        asked = await self.begun()
        await self.supervisor.close()
        await self.assertFailure(asked, NotWanted)

    async def test_a_process_that_starts_is_left_to_the_next(self) -> None:
        """Who leaves while the process starts leaves it behind: the next one who asks gets that process (LOAD-6)."""
        self.go_on.set()
        asked = Deferred.fromCoroutine(self.begin("plain"))
        await self.until(lambda: "starting" in self.phases and self.supervisor._processes, "the start")
        before = self.process()
        asked.cancel()
        await self.assertFailure(asked, CancelledError)
        self.assertEqual(await self.begin("plain"), before.launch)

    async def test_nothing_is_started_for_one_who_left(self) -> None:
        """Who waited for its turn at a replica, and left, gets no process when the turn comes."""
        self.go_on.set()
        slow = Deferred.fromCoroutine(self.begin("silent"))
        await self.until(lambda: self.supervisor._processes, "the first one's process")
        waiting = Deferred.fromCoroutine(self.begin("plain"))
        await self.until(lambda: self.supervisor._key_locks[M0].waiting, "the other one's turn to come next")
        waiting.cancel()
        await self.assertFailure(waiting, CancelledError)
        await self.supervisor.stop_exact(M0, expected_address="", force=True)
        await self.assertFailure(slow, StartFailed)
        await self.until(lambda: not self.supervisor._key_locks, "everybody's turn")
        self.assertEqual(self.supervisor._processes, {})


class StopTests(ProcessCase):
    async def test_exact_stop(self) -> None:
        """One process is ended by key and address; it is gone when the answer comes (WALK-21)."""
        launch = await self.begin("plain")
        group = self.process().pid
        assert group is not None
        wrong = await self.supervisor.stop_exact(M0, expected_address="127.0.0.1:1", force=False)
        self.assertEqual((wrong.matched, wrong.terminated), (False, False))
        self.assertIn(launch.address, wrong.error)
        done = await self.supervisor.stop_exact(M0, expected_address=launch.address, force=False)
        self.assertEqual((done.matched, done.freed, done.terminated, done.error), (True, True, True, ""))
        self.assertEqual(groups.members(group), [])
        self.assertEqual(self.supervisor.running(), [])

    async def test_absent_process_is_ended_already(self) -> None:
        """Ending or unloading a process that is not there succeeds (WALK-21)."""
        done = await self.supervisor.stop_exact(M0, expected_address="", force=False)
        self.assertEqual((done.matched, done.terminated, done.error), (False, True, ""))
        self.assertEqual(await self.supervisor.unload("m", ""), "")

    async def test_free_fails(self) -> None:
        """Unloading a backend whose Free fails says so and with what cause; the process stays (WALK-21)."""
        launch = await self.begin("plain")
        self.world.connect.free = Answer(False, "out of luck")
        trouble = await self.supervisor.unload("m", launch.address)
        self.assertIn(launch.address, trouble)
        self.assertIn("out of luck", trouble)
        self.assertEqual(self.supervisor.running(), [launch])
        self.assertEqual(await self.supervisor.unload("m", "127.0.0.1:1"), "", "another address is another process")

    async def test_free_hangs(self) -> None:
        """A Free that never answers ends the unload with that cause, and a stop all the same (WALK-21)."""
        self.patch(process, "FREE_WITHIN", 0.2)
        launch = await self.begin("plain")
        self.world.connect.free = None
        self.assertIn("longer than", await self.supervisor.unload("m", launch.address))
        done = await self.supervisor.stop_exact(M0, expected_address="", force=False)
        self.assertEqual((done.freed, done.terminated), (False, True))

    async def test_sigterm_survivor_is_killed(self) -> None:
        """A process that ignores SIGTERM is killed with its whole group (WALK-21)."""
        self.patch(process, "TERM_WITHIN", 0.2)
        await self.begin("stubborn")
        group = self.process().pid
        assert group is not None
        done = await self.supervisor.stop_exact(M0, expected_address="", force=True)
        self.assertTrue(done.terminated)
        self.assertEqual(groups.members(group), [])
        self.assertEqual(self.world.connect.freed, 0, "force skips Free")

    async def test_unkillable_process_keeps_its_place(self) -> None:
        """What can't be ended keeps entry and port and is reported; once it is really gone they are free (WALK-21)."""
        launch = await self.begin("plain")
        unkillable = [
            self.patch(process, "TERM_WITHIN", 0.1),
            self.patch(process, "KILL_WITHIN", 0.1),
            self.patch(groups, "signal_group", lambda _leader, _number: None),
        ]
        done = await self.supervisor.stop_exact(M0, expected_address="", force=True)
        self.assertEqual((done.matched, done.terminated), (True, False))
        self.assertIn("survived", done.error)
        self.assertIs(self.process().state, State.SURVIVING)
        self.assertEqual(self.supervisor.running(), [launch])
        self.assertTrue(self.supervisor.serves(launch.port))
        await self.assertFailure(Deferred.fromCoroutine(self.begin("parent")), StillRunning)
        deleted = await self.supervisor.delete("plain")
        self.assertIn("survived", deleted.error)
        self.assertIsNotNone(self.world.installer.find("plain"))
        for patch in unkillable:
            patch.restore()
        again = await self.supervisor.stop_exact(M0, expected_address="", force=True)
        self.assertTrue(again.terminated)
        self.assertFalse(self.supervisor.serves(launch.port))

    async def test_concurrent_stops_share_one_end(self) -> None:
        """Two stops of one process both end when it is gone; Free is asked once."""
        await self.begin("plain")
        both = [
            Deferred.fromCoroutine(self.supervisor.stop_exact(M0, expected_address="", force=False)) for _ in range(2)
        ]
        done = await gatherResults(both)
        self.assertEqual([one.terminated for one in done], [True, True])
        self.assertEqual(self.world.connect.freed, 1)

    async def test_stop_by_name(self) -> None:
        """A stop names one replica, a model, a backend, or with a blank name everything."""
        for name, left in (("m#1", 1), ("m", 0), ("plain", 0), ("", 0), ("other", 2)):
            await self.begin("plain", M0)
            await self.begin("plain", M1)
            stopped = await self.supervisor.stop(name, force=True)
            self.assertEqual(len(stopped.keys), 2 - left, name)
            self.assertEqual(len(self.supervisor.running()), left, name)
            await self.supervisor.stop("", force=True)
            self.supervisor._ports = PortTable(self.supervisor._ports.range)

    async def test_upgrade_and_delete_report_what_they_ended(self) -> None:
        """An upgrade and a delete end every process of a backend and name them."""
        await self.begin("plain")
        upgraded = await self.supervisor.upgrade(Wanted("plain"), phase=self.phases.append)
        self.assertEqual((upgraded.keys, upgraded.error), ((M0,), ""))
        self.assertEqual(self.supervisor.running(), [])
        await self.begin("plain")
        (self.source / "plain" / "run.sh").unlink()
        failed = await self.supervisor.upgrade(Wanted("plain"), phase=self.phases.append)
        self.assertEqual(failed.keys, (M0,))
        self.assertIn("run.sh", failed.error)
        await self.begin("plain")
        deleted = await self.supervisor.delete("plain")
        self.assertEqual(deleted.keys, (M0,))
        self.assertIsNone(self.world.installer.find("plain"))


class DeathTests(ProcessCase):
    async def test_killed_backend_is_noticed(self) -> None:
        """A backend that is killed is noticed at once, and the next request starts it anew (WALK-11)."""
        first = await self.begin("plain")
        group = self.process().pid
        assert group is not None
        victim = next(pid for pid in groups.members(group) if pid != group)
        os.kill(victim, signal.SIGKILL)
        await self.until(lambda: self.supervisor.running() == [], "the backend's end to be noticed")
        self.assertFalse(self.supervisor.serves(first.port))
        second = await self.begin("plain")
        self.assertIsNot(first, second)

    async def test_killed_guard_takes_the_backend_along(self) -> None:
        """If the guard itself is killed, nothing of its group is left behind (WALK-11)."""
        await self.begin("parent")
        group = self.process().pid
        assert group is not None
        self.assertEqual(len(groups.members(group)), 3)
        os.kill(group, signal.SIGKILL)
        await self.until(lambda: self.supervisor.running() == [], "the group's end")
        self.assertEqual(groups.members(group), [])

    async def test_killed_worker_takes_its_backends_along(self) -> None:
        """When the worker is killed with SIGKILL its backends end by themselves, stubborn ones too (WALK-11)."""
        for name in ("parent", "stubborn"):
            port = free_range(1).base
            worker = subprocess.Popen(
                [sys.executable, "-c", _TINY_WORKER, guard.__file__, str(self.source / name / "run.sh"), str(port)],
                stdout=subprocess.PIPE,
                text=True,
                env=os.environ | {"LOCALAI_BACKEND_PYTHON": sys.executable},
            )
            assert worker.stdout is not None
            (self.source / name / "run.sh").chmod(0o755)
            group = int(worker.stdout.readline())
            await self.until(lambda port=port: _listens(port), "the backend to listen")
            worker.kill()
            worker.wait()
            worker.stdout.close()
            started = reactor.seconds()
            await self.until(lambda group=group: not groups.members(group), "the backends to end")
            self.assertLess(reactor.seconds() - started, 5.0)


_TINY_WORKER = """
import os, subprocess, sys, time
guard = subprocess.Popen([sys.executable, "-I", "-S", sys.argv[1], sys.argv[2], "--addr", "127.0.0.1:" + sys.argv[3]],
    stdin=subprocess.PIPE)
print(guard.pid, flush=True)
time.sleep(600)
"""


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
