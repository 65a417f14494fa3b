"""Which port a backend gets."""

from __future__ import annotations

import re
import socket
import subprocess
import sys

from twisted.trial.unittest import SynchronousTestCase

from localai_dist.ids import ProcessKey
from localai_dist.worker.errors import PortsExhausted
from localai_dist.worker.ports import AFFINITY, QUARANTINE, PortRange, PortTable, bind_probe

A, B, C, D = (ProcessKey(name) for name in "abcd")


class Probes:
    """Says no for the ports another program holds, and remembers what it was asked."""

    def __init__(self, *busy: int) -> None:
        self.busy = set(busy)
        self.asked: list[int] = []

    def __call__(self, port: int) -> bool:
        self.asked.append(port)
        return port not in self.busy


def table(top: int = 20003) -> PortTable:
    return PortTable(PortRange(20000, top))


class BranchTests(SynchronousTestCase):
    """The four branches, and that each probes its candidate (WALK-22)."""

    def test_grown(self) -> None:
        """Ports are given from the bottom of the range up, each probed; a busy one is passed over (WALK-22)."""
        ports, probe = table(), Probes(20001)
        self.assertEqual(ports.allocate(A, now=0, probe=probe), 20000)
        self.assertEqual(ports.allocate(B, now=0, probe=probe), 20002)
        self.assertEqual(probe.asked, [20000, 20001, 20002])

    def test_own(self) -> None:
        """A key gets the port it had last time, once its quarantine is over (WALK-22)."""
        ports, probe = table(), Probes()
        for key in (A, B):
            ports.allocate(key, now=0, probe=probe)
        ports.release(20000, A, now=0)
        ports.release(20001, B, now=0)
        probe.asked.clear()
        self.assertEqual(ports.allocate(B, now=QUARANTINE, probe=probe), 20001)
        self.assertEqual(probe.asked, [20001])

    def test_own_is_quarantined_first(self) -> None:
        """Even its own old port is not given again before the quarantine is over."""
        ports, probe = table(), Probes()
        ports.allocate(A, now=0, probe=probe)
        ports.release(20000, A, now=0)
        self.assertEqual(ports.allocate(A, now=QUARANTINE - 0.1, probe=probe), 20001)

    def test_own_busy(self) -> None:
        """A key whose old port another program took meanwhile gets another one (WALK-22)."""
        ports = table()
        ports.allocate(A, now=0, probe=Probes())
        ports.release(20000, A, now=0)
        probe = Probes(20000)
        self.assertEqual(ports.allocate(A, now=QUARANTINE, probe=probe), 20001)
        self.assertEqual(probe.asked, [20000, 20001])

    def test_free(self) -> None:
        """A port nobody claims any more is given before the range grows, and is probed (WALK-22)."""
        ports, probe = table(), Probes()
        ports.allocate(A, now=0, probe=probe)
        ports.release(20000, A, now=0)
        later = QUARANTINE + AFFINITY + 1
        probe.asked.clear()
        self.assertEqual(ports.allocate(B, now=later, probe=probe), 20000)
        self.assertEqual(probe.asked, [20000])
        ports.release(20000, B, now=later)
        busy = Probes(20000)
        self.assertEqual(ports.allocate(C, now=2 * later, probe=busy), 20001)
        self.assertEqual(busy.asked, [20000, 20001])

    def test_a_claim_is_respected_while_there_are_others(self) -> None:
        """A port that waits for its old key is left to it while the range still has others."""
        ports, probe = table(), Probes()
        ports.allocate(A, now=0, probe=probe)
        ports.release(20000, A, now=0)
        self.assertEqual(ports.allocate(B, now=QUARANTINE, probe=probe), 20001)

    def test_taken_over(self) -> None:
        """With nothing else left, the port that waited longest for another key is taken over, probed (WALK-22)."""
        ports, probe = table(top=20001), Probes()
        for now, key in ((0, A), (0, B)):
            ports.allocate(key, now=now, probe=probe)
        ports.release(20001, B, now=0)
        ports.release(20000, A, now=1)
        probe.asked.clear()
        self.assertEqual(ports.allocate(C, now=QUARANTINE + 1, probe=probe), 20001)
        self.assertEqual(probe.asked, [20001])
        busy = Probes(20000)
        with self.assertRaises(PortsExhausted):
            ports.allocate(D, now=QUARANTINE + 1, probe=busy)
        self.assertEqual(busy.asked, [20000])

    def test_a_failed_candidate_is_quarantined_and_its_claim_dropped(self) -> None:
        """A port that can't be bound is left alone for the quarantine, and its old key loses it (WALK-22)."""
        ports = table(top=20001)
        ports.allocate(A, now=0, probe=Probes())
        ports.release(20000, A, now=0)
        self.assertEqual(ports.allocate(A, now=QUARANTINE, probe=Probes(20000)), 20001)
        with self.assertRaises(PortsExhausted):
            ports.allocate(B, now=QUARANTINE + 14.9, probe=Probes())
        self.assertEqual(ports.allocate(B, now=2 * QUARANTINE, probe=Probes()), 20000)

    def test_release_by_somebody_else(self) -> None:
        """Only who holds a port can give it back, and only once."""
        ports = table()
        ports.allocate(A, now=0, probe=Probes())
        ports.release(20000, B, now=0)
        self.assertEqual(ports.holder(20000), A)
        ports.release(20000, A, now=0)
        ports.release(20000, A, now=10)
        self.assertIsNone(ports.holder(20000))
        self.assertEqual(ports.allocate(A, now=QUARANTINE, probe=Probes()), 20000)


class ExhaustedTests(SynchronousTestCase):
    def test_text(self) -> None:
        """Exhaustion names the range, who has its ports, and the knob (WALK-22)."""
        ports = table(top=20003)
        ports.allocate(A, now=0, probe=Probes())
        ports.allocate(B, now=0, probe=Probes())
        ports.release(20001, B, now=0)
        with self.assertRaises(PortsExhausted) as caught:
            ports.allocate(C, now=1, probe=Probes(20002, 20003))
        text = str(caught.exception)
        for part in (
            "20000-20003",
            "1 running",
            "1 quarantined",
            "2 skipped",
            "LOCALAI_GRPC_MAX_PORT",
            "LOCALAI_SERVE_ADDR",
        ):
            self.assertIn(part, text)


class BindProbeTests(SynchronousTestCase):
    """The probe, against ports another process holds (WALK-22)."""

    def hold(self, code: str) -> int:
        script = (
            f"import socket,sys,time\ns=socket.socket()\n{code}\nprint(s.getsockname()[1],flush=True)\nsys.stdin.read()"
        )
        child = subprocess.Popen(
            [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.addCleanup(child.communicate)
        assert child.stdout is not None
        found = re.match(r"\d+", child.stdout.readline())
        assert found is not None
        return int(found[0])

    def test_held_in_every_way(self) -> None:
        """A port that another process listens on, has bound, or shares with SO_REUSEPORT is seen as taken (WALK-22)."""
        for code in (
            "s.bind(('127.0.0.1',0));s.listen()",
            "s.bind(('0.0.0.0',0));s.listen()",
            "s.bind(('127.0.0.1',0))",
            "s.setsockopt(1,2,1);s.setsockopt(1,15,1);s.bind(('127.0.0.1',0));s.listen()",
            "s=socket.socket(10);s.bind(('::',0));s.listen()",
            "s=socket.socket(10);s.setsockopt(1,2,1);s.setsockopt(1,15,1);s.bind(('::ffff:127.0.0.1',0));s.listen()",
        ):
            self.assertFalse(bind_probe(self.hold(code)), code)

    def test_free_and_in_time_wait(self) -> None:
        """A port with nothing but closing connections on it can be used."""
        with socket.create_server(("127.0.0.1", 0)) as listening:
            port = listening.getsockname()[1]
            with socket.create_connection(("127.0.0.1", port)) as client:
                accepted, _ = listening.accept()
                accepted.close()
                client.recv(1)
        self.assertTrue(bind_probe(port))
        self.assertTrue(bind_probe(port))
