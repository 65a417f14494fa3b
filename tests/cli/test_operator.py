"""The operator's command."""

import json
import os
import threading
import time
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from localai_dist.cli.operator import main, models
from localai_dist.cli.operator.api import Answer, Api, ApiFailure
from localai_dist.cli.operator.doctor import node_finding

ALPHA = {
    "id": "id-a",
    "name": "alpha",
    "node_type": "backend",
    "status": "healthy",
    "approved": True,
    "last_heartbeat": "2020-01-01T00:00:00Z",
    "total_vram": 8 * 2**30,
    "available_vram": 3 * 2**30,
    "model_count": 1,
    "in_flight_count": 2,
    "labels": {"zone": "x"},
    "tunnel": {"state": "connected", "owner": "f-1", "epoch": 7, "since": None, "grace_ends_at": None},
}
BETA = {"id": "id-b", "name": "beta/1", "node_type": "backend", "status": "pending", "approved": False}


class OperatorCase(SynchronousTestCase):
    """A frontend that answers from a table; what it was asked is kept."""

    def setUp(self) -> None:
        self.answers: dict[tuple[str, str], Answer | list[Answer]] = {}
        self.asked: list[tuple[str, str, Any]] = []
        self.answer("GET", "/api/nodes", [ALPHA, BETA])

        def ask(api: Api, method: str, path: str, body: Any = None, *, timeout: float = 30.0) -> Answer:
            self.asked.append((method, path, body))
            found = self.answers.get((method, path), Answer(404, b'{"error": {"message": "nothing there"}}'))
            return found.pop(0) if isinstance(found, list) else found

        self.patch(Api, "ask", ask)
        self.patch(time, "sleep", lambda seconds: None)

    def answer(self, method: str, path: str, body: Any, status: int = 200) -> None:
        """Have the frontend answer that."""
        self.answers[method, path] = Answer(status, json.dumps(body).encode())

    def run_command(self, *words: str) -> tuple[int, str, str]:
        """Exit code, stdout, stderr."""
        out, err = StringIO(), StringIO()
        with redirect_stdout(out), redirect_stderr(err):
            code = main.run(words)
        return code, out.getvalue(), err.getvalue()


class NodesTests(OperatorCase):
    """``localai-dist nodes``."""

    def test_list(self) -> None:
        """One line per node tells status, tunnel and who holds it."""
        code, out, _ = self.run_command("nodes", "ls")
        self.assertEqual(code, 0)
        header, alpha, beta = out.splitlines()
        self.assertRegex(header, r"^NAME +TYPE +STATUS +TUNNEL")
        self.assertRegex(alpha, r"^alpha +backend +healthy +connected at f-1 +\S+ ago +1 +2 +3.0 GiB of 8.0 GiB$")
        self.assertRegex(beta, r"^beta/1 +backend +pending")

    def test_json_is_the_api_s_own(self) -> None:
        """-o json prints what the API answered, unchanged."""
        _, out, _ = self.run_command("-o", "json", "nodes", "ls")
        self.assertEqual(json.loads(out), [ALPHA, BETA])

    def test_none(self) -> None:
        """An empty cluster says how to get a node."""
        self.answer("GET", "/api/nodes", [])
        self.assertIn("LOCALAI_REGISTER_TO", self.run_command("nodes", "ls")[1])

    def test_show(self) -> None:
        """A node is shown with its models."""
        replica = {"model_name": "tiny", "replica_index": 0, "state": "loaded", "in_flight": 1, "last_used": None}
        self.answer("GET", "/api/nodes/id-a/models", [replica])
        code, out, _ = self.run_command("nodes", "show", "alpha")
        self.assertEqual(code, 0)
        self.assertIn("zone=x", out)
        self.assertRegex(out, r"tiny#0 +loaded +1 +-")

    def test_a_newcomer(self) -> None:
        """List, show and approve say who waits under a node's name, and what approving does or did (CLUS-8)."""
        told = "another worker waits under this name from 10.0.0.7; 'localai-dist nodes approve alpha' replaces it"
        node = {**ALPHA, "newcomer_waiting": True, "registered_from": "10.0.0.5", "newcomer": told}
        self.answer("GET", "/api/nodes", [node, BETA])
        self.answer("GET", "/api/nodes/id-a/models", [])
        self.assertEqual(self.run_command("nodes", "ls")[1].splitlines()[-1], f"alpha: {told}")
        shown = self.run_command("nodes", "show", "alpha")[1]
        self.assertRegex(shown, r"registered from +10\.0\.0\.5\n")
        self.assertRegex(shown, r"newcomer +another worker waits")
        replaced = {"message": "node approved", "replaced": True, "notice": "it replaces the node of that name"}
        self.answer("POST", "/api/nodes/id-a/approve", replaced)
        said = self.run_command("nodes", "approve", "alpha")[1]
        self.assertEqual(said, "alpha approved\nalpha: it replaces the node of that name\n")
        self.assertIn(told, node_finding(node).text)

    def test_verbs(self) -> None:
        """Approve, drain, resume and rm take the name or the id, and ask for exactly that node."""
        for words, request in (
            (("approve", "alpha"), ("POST", "/api/nodes/id-a/approve")),
            (("approve", "id-b"), ("POST", "/api/nodes/id-b/approve")),
            (("drain", "alpha"), ("POST", "/api/nodes/id-a/drain")),
            (("resume", "alpha"), ("POST", "/api/nodes/id-a/resume")),
            (("rm", "alpha"), ("DELETE", "/api/nodes/id-a")),
        ):
            self.answer(*request, {"message": "done"})
            code, _, _ = self.run_command("nodes", *words)
            self.assertEqual((code, self.asked[-1][:2]), (0, request))

    def test_a_name_that_is_another_ones_id(self) -> None:
        """Of two nodes, one with the id and one that calls itself like it, the first is meant."""
        self.answer("GET", "/api/nodes", [{**BETA, "name": "id-a"}, ALPHA])
        self.answer("DELETE", "/api/nodes/id-a", {"message": "removed"})
        self.run_command("nodes", "rm", "id-a")
        self.assertEqual(self.asked[-1][:2], ("DELETE", "/api/nodes/id-a"))

    def test_unknown_node(self) -> None:
        """A node that is not there is exit code 4 and one line that names those that are."""
        code, out, err = self.run_command("nodes", "approve", "gamma")
        self.assertEqual((code, out), (4, ""))
        self.assertEqual(err, "localai-dist: no node 'gamma'; the cluster has: alpha, beta/1\n")

    def test_refused(self) -> None:
        """A refusal is exit code 1 and the frontend's own words."""
        self.answer("POST", "/api/nodes/id-a/approve", {"error": {"message": "not pending", "code": "conflict"}}, 400)
        self.assertEqual(
            self.run_command("nodes", "approve", "alpha"), (1, "", "localai-dist: not pending (400 conflict)\n")
        )

    def test_key(self) -> None:
        """Without a key the operator is told which variable to set, never shown one (WALK-23)."""
        self.answer("GET", "/api/nodes", {"error": {"message": "no"}}, 401)
        self.patch(os, "environ", {})
        self.assertIn("set LOCALAI_CLI_API_KEY", self.run_command("nodes", "ls")[2])
        self.patch(os, "environ", {"LOCALAI_CLI_API_KEY": "sk-hunter2"})
        _, _, err = self.run_command("nodes", "ls")
        self.assertIn("is not known there", err)
        self.assertNotIn("hunter2", err)

    def test_a_key_no_header_can_hold(self) -> None:
        """What surrounds a key is not the key; one with more in it is refused with its place, never shown (WALK-23)."""
        self.patch(os, "environ", {"LOCALAI_CLI_API_KEY": "sk-hunter2\n"})
        self.assertEqual(self.run_command("nodes", "ls")[0], 0)
        for key in ("sk-hunter2\nsk-hunter3", "sk-hunter2 x", "sk-hünter2"):
            self.patch(os, "environ", {"LOCALAI_CLI_API_KEY": key})
            code, _, err = self.run_command("nodes", "ls")
            self.assertEqual(code, 1)
            self.assertIn("the key in LOCALAI_CLI_API_KEY has", err)
            self.assertNotIn("nter", err)
        path = self.mktemp()
        Path(path).write_text("\n")
        self.patch(os, "environ", {"LOCALAI_CLI_API_KEY_FILE": path})
        self.assertIn(f"there is no key in {path}", self.run_command("nodes", "ls")[2])

    def test_nothing_asked(self) -> None:
        """Without a verb the help is shown as it is, line by line."""
        for words in ((), ("nodes",)):
            code, _, err = self.run_command(*words)
            self.assertEqual(code, 2)
            self.assertGreater(len(err.splitlines()), 5)

    def test_no_key_at_the_frontend(self) -> None:
        """Where the frontend has no key at all the operator is told to set one there, not to look for theirs."""
        said = "no API key is configured here, so the routes for operators are closed: set LOCALAI_API_KEY"
        self.answer("GET", "/api/nodes", {"error": {"message": said}}, 401)
        self.assertEqual(
            self.run_command("nodes", "ls"), (1, "", f"localai-dist: the frontend admits no operator: {said}\n")
        )


class ModelsTests(OperatorCase):
    """``localai-dist models``."""

    def test_list(self) -> None:
        """Every model that can be asked for, and the nodes it is loaded on."""
        self.answer("GET", "/v1/models", {"data": [{"id": "tiny"}, {"id": "other"}]})
        self.answer("GET", "/api/nodes/models", [{"model_name": "tiny", "node_id": "id-a"}])
        _, out, _ = self.run_command("models", "ls")
        self.assertRegex(out, r"other +- +-")
        self.assertRegex(out, r"tiny +loaded +alpha")

    def test_broken_files(self) -> None:
        """A model file that can't be served is listed with the reason, and the doctor reports it."""
        self.answer("GET", "/v1/models", {"data": [{"id": "tiny"}]})
        self.answer("GET", "/api/nodes", [ALPHA])
        self.answer("GET", "/api/nodes/models", [])
        self.answer("GET", "/healthz", {})
        self.answer("GET", "/readyz", {"status": "ready"})
        broken = {"file": "m.yaml", "model": "mine", "reason": "context_size: want a number, got text", "served": False}
        odd = {"file": "t.yaml", "model": "tiny", "reason": "unknown key thread", "served": True}
        self.answer("GET", "/api/models/problems", {"problems": [odd]})
        self.assertEqual(self.run_command("doctor")[0], 0)
        self.assertIn("served, but unknown key thread", self.run_command("doctor")[1])
        self.answer("GET", "/api/models/problems", {"problems": [broken, odd]})
        _, out, _ = self.run_command("models", "ls")
        self.assertRegex(out, r"mine +broken +m.yaml: context_size: want a number")
        self.assertNotIn("thread", out)
        code, out, _ = self.run_command("doctor")
        self.assertEqual(code, 1)
        self.assertIn("not served: context_size: want a number, got text", out)

    def test_load_waits_and_tells(self) -> None:
        """A load that takes longer than one request is followed to its end, with its progress."""
        self.patch(models, "SHOW_EVERY", 60.0)  # no look in between, however slow the thread that asks is
        loading = {"state": "staging", "node": "alpha", "bytes_sent": 2**20, "total_bytes": 2**22, "eta_seconds": 90}
        body = {"error": {"message": "loading", "code": "model_loading", "loading": loading}}
        self.answers["POST", "/backend/load"] = [
            Answer(503, json.dumps(body).encode(), "1"),
            Answer(200, b'{"message": "model loaded"}'),
        ]
        code, out, err = self.run_command("models", "load", "tiny")
        self.assertEqual((code, out), (0, "tiny is loaded\n"))
        self.assertEqual(err, "tiny: staging, on alpha, 1.0 MiB of 4.0 MiB, about 1m30s left\n")
        self.assertEqual(self.asked, [("POST", "/backend/load", {"model": "tiny"})] * 2)

    def test_load_shows_progress_while_the_frontend_waits(self) -> None:
        """While the request waits, the load's own progress is shown, in plain lines without a terminal (LOAD-18)."""
        self.patch(models, "SHOW_EVERY", 0.0)
        shown = threading.Event()
        operation = {"id": "staging:tiny", "name": "tiny", "state": "installing", "phase": "waiting"}

        def ask(api: Api, method: str, path: str, body: Any = None, *, timeout: float = 30.0) -> Answer:
            if method == "GET":
                shown.set()
                return Answer(200, json.dumps({"operations": [operation]}).encode())
            self.assertTrue(shown.wait(10))
            return Answer(200, b'{"message": "model loaded"}')

        self.patch(Api, "ask", ask)
        code, out, err = self.run_command("models", "load", "tiny")
        self.assertEqual((code, out), (0, "tiny is loaded\n"))
        self.assertIn("tiny: installing", err.splitlines())

    def test_load_without_waiting(self) -> None:
        """--no-wait says where the load stands and returns; a refusal is still one."""
        release = threading.Event()
        self.addCleanup(release.set)
        self.patch(models, "START_WAIT", 0.01)
        operation = {"id": "staging:tiny", "name": "tiny", "state": "pending", "phase": "waiting"}

        def ask(api: Api, method: str, path: str, body: Any = None, *, timeout: float = 30.0) -> Answer:
            if method == "GET":
                return Answer(200, json.dumps({"operations": [operation]}).encode())
            release.wait(10)
            return Answer(200, b"{}")

        self.patch(Api, "ask", ask)
        self.assertEqual(self.run_command("models", "load", "tiny", "--no-wait")[:2], (0, "tiny: pending\n"))

    def test_load_of_unknown_model(self) -> None:
        """A model that does not exist is exit code 4."""
        self.assertEqual(self.run_command("models", "load", "nope"), (4, "", "localai-dist: nothing there\n"))

    def test_unload(self) -> None:
        """A model is unloaded everywhere, or from one node; a failure is told with its cause (WALK-21)."""
        self.answer("POST", "/backend/shutdown", {"message": "model stopped"})
        self.assertEqual(self.run_command("models", "unload", "tiny")[:2], (0, "tiny is unloaded\n"))
        failure = {"error": {"message": "Free failed: busy", "code": 500}}
        self.answer("POST", "/api/nodes/id-a/models/unload", failure, 500)
        code, _, err = self.run_command("models", "unload", "tiny", "--node", "alpha")
        self.assertEqual(self.asked[-1][2], {"model_name": "tiny"})
        self.assertEqual((code, err), (1, "localai-dist: Free failed: busy (500)\n"))

    def test_progress_line_with_little_known(self) -> None:
        """A load that says little is still one readable line."""
        self.assertEqual(models.progress_line("m", {}), "m: loading")


class OtherCommandsTests(OperatorCase):
    """The rest."""

    def test_operations(self) -> None:
        """Running operations are listed with node, file, bytes, rate, phase and what is left (LOAD-18)."""
        operation = {
            "id": "staging:tiny",
            "name": "tiny",
            "taskType": "staging",
            "state": "staging",
            "phase": "sending",
            "progress": 25,
            "fileIndex": 1,
            "totalFiles": 3,
            "bytesPerSecond": 2**19,
            "etaSeconds": 6.0,
            "nodeName": "alpha",
            "currentBytes": 2**20,
            "totalBytes": 2**22,
            "message": "copying",
        }
        self.answer("GET", "/api/operations", {"operations": [operation]})
        self.assertRegex(
            self.run_command("ops", "ls")[1],
            r"tiny +staging +sending +25% +alpha +1/3 +1.0 MiB of 4.0 MiB +512.0 KiB/s +about 6s left +copying",
        )
        self.answer("GET", "/api/operations", {"operations": []})
        self.assertEqual(self.run_command("ops", "ls")[1], "nothing is going on\n")

    def test_watch(self) -> None:
        """Watched without a terminal, operations are plain lines until nothing is going on (LOAD-18)."""
        running = {"id": "staging:tiny", "name": "tiny", "state": "staging", "phase": "hashing", "nodeName": "alpha"}
        answers = [{"operations": [running]}, {"operations": [{**running, "phase": "sending"}]}, {"operations": []}]
        self.answers["GET", "/api/operations"] = [Answer(200, json.dumps(answer).encode()) for answer in answers]
        code, out, _ = self.run_command("ops", "ls", "--watch")
        self.assertEqual(
            (code, out.splitlines()),
            (0, ["tiny: hashing, on alpha", "tiny: sending, on alpha", "nothing is going on"]),
        )

    def test_cancel(self) -> None:
        """A load is cancelled by its id or by its model's name; what does not run is exit code 4 (LOAD-17)."""
        self.answer("POST", "/api/operations/staging%3Atiny/cancel", {"success": True, "message": "cancelling tiny"})
        for word in ("tiny", "staging:tiny"):
            self.assertEqual(self.run_command("ops", "cancel", word)[:2], (0, "cancelling tiny\n"))
        self.assertEqual(self.run_command("ops", "cancel", "nope")[0], 4)

    def test_doctor(self) -> None:
        """The doctor names what is wrong and what to do, and its exit code says whether something is."""
        self.answer("GET", "/healthz", {"status": "ok"})
        self.answer("GET", "/readyz", {"status": "ready", "checks": {"database": {"ok": True}}})
        code, out, _ = self.run_command("doctor")
        self.assertEqual(code, 1)
        self.assertIn("localai-dist nodes approve beta/1", out)
        told = "another worker waits under this name from 10.0.0.7"
        self.answer("GET", "/api/nodes", [{**BETA, "newcomer_waiting": True, "newcomer": told}])
        self.assertIn(f"localai-dist nodes approve beta/1; {told}", self.run_command("doctor")[1])
        self.answer("GET", "/api/nodes", [ALPHA])
        self.assertEqual(self.run_command("doctor")[0], 0)
        down = {"status": "degraded", "checks": {"database": {"ok": False, "reason": "can't reach it"}}}
        self.answer("GET", "/readyz", down, 503)
        code, out, _ = self.run_command("doctor")
        self.assertEqual(code, 1)
        self.assertIn("database: can't reach it", out)

    def test_doctor_names_each_condition(self) -> None:
        """Each state of a tunnel has its own words; none is reported as another."""
        texts = {}
        for state in ("connected", "reconnecting", "departed", "never_dialled", "registry_unavailable"):
            finding = node_finding({**ALPHA, "tunnel": {"state": state}})
            self.assertEqual(finding.ok, state == "connected")
            self.assertIn(state, finding.text)
            texts[state] = finding.text
        self.assertEqual(len(set(texts.values())), len(texts))

    def test_nobody_there(self) -> None:
        """A frontend that can't be reached is one line that names it."""

        def refuse(*_words: Any, **_more: Any) -> Answer:
            raise ApiFailure("can't ask http://127.0.0.1:1: Connection refused")

        self.patch(Api, "ask", refuse)
        code, _, err = self.run_command("nodes", "ls")
        self.assertEqual((code, err.count("\n")), (1, 1))

    def test_an_address_without_a_scheme(self) -> None:
        """LOCALAI_SERVER=host:port is refused with the form that is wanted."""
        code, _, err = self.run_command("--server", "127.0.0.1:8080", "nodes", "ls")
        self.assertEqual((code, err.count("\n")), (2, 1))
        self.assertIn("'127.0.0.1:8080': want http://host:port", err)

    def test_doctor_on_a_newcomer(self) -> None:
        """The command that hands a node's name over is there to be copied."""
        finding = node_finding({**ALPHA, "newcomer_waiting": True})
        self.assertEqual((finding.ok, finding.text.endswith("localai-dist nodes approve alpha")), (False, True))

    def test_usage(self) -> None:
        """A bad option, a missing word or an unknown verb is one line and exit code 2 (WALK-2)."""
        for words in (
            ["nodes", "approve"],
            ["nodes", "fly"],
            ["--no-such"],
            ["demo", "--frontends", "0"],
            ["demo", "--model", "nope"],
            ["demo", "--worker-env", "novalue"],
            ["demo", "--postgres", "mysql://x"],
            ["-o", "yaml", "nodes", "ls"],
        ):
            code, out, err = self.run_command(*words)
            self.assertEqual((code, out, err.count("\n")), (2, "", 1), words)
            self.assertTrue(err.startswith("localai-dist: "))

    def test_help(self) -> None:
        """The command lists its nouns, and the demo every option of the design (WALK-2)."""
        code, out, _ = self.run_command("--help")
        self.assertEqual(code, 0)
        for noun in ("demo", "nodes", "models", "ops", "doctor"):
            self.assertRegex(out, rf"(?m)^  {noun} ")
        _, out, _ = self.run_command("demo", "--help")
        for flag in [
            "state",
            "http-port",
            "frontends",
            "workers",
            "model",
            "postgres",
            "frontend-env",
            "worker-env",
            "ready-file",
        ]:
            self.assertIn(f"--{flag} ", out)
        self.assertIn("--auto-approve / --no-auto-approve", out)
