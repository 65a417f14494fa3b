"""The worker's own server over real HTTP on loopback."""

from __future__ import annotations

import hashlib
import json
import socket
from pathlib import Path
from typing import Any

import msgspec
from twisted.internet.defer import Deferred
from twisted.trial.unittest import TestCase
from twisted.web.client import Agent, readBody
from twisted.web.http_headers import Headers

from localai_dist.errors import UserMistake
from localai_dist.ids import MAX_FILE_NAME_BYTES
from localai_dist.relay.body import BytesBody
from localai_dist.units import MiB
from localai_dist.wire import verbs as wire
from localai_dist.wire.file_verbs import FILE_VERBS
from localai_dist.wire.files import Target
from localai_dist.worker import sums, uploads
from localai_dist.worker.entry import Entry
from localai_dist.worker.server import Healthz, LoopbackServer
from localai_dist.worker.service import BackendWorkerConfig, WorkerServer, make_backend_worker
from tests.tunnel.sockets import no_connection_left
from tests.worker.support import FakeConnect, reactor, write_backend, write_index
from tests.worker.test_supervisor import free_range

TOKEN = "registration-token"


class ServerCase(TestCase):
    """A whole worker behind its loopback server, with a fake gRPC client."""

    timeout = 120
    token = TOKEN

    def setUp(self) -> None:
        self.folder = Path(self.mktemp()).absolute()
        write_backend(self.folder / "source", "plain")
        gallery = write_index(self.folder / "source", "plain")
        self.not_ready = ""
        self.stops: list[int] = []
        self.connect = FakeConnect()
        self.worker = make_backend_worker(
            BackendWorkerConfig(
                registration_token=self.token,
                models_path=self.folder / "models",
                backends_path=self.folder / "backends",
                data_path=self.folder / "data",
                ports=free_range(3),
                backend_galleries=json.dumps([msgspec.to_builtins(gallery)]),
            ),
            reactor=reactor,
            checks={"tunnel": lambda: self.not_ready},
            stop_node=lambda: self.stops.append(1),
            connect=self.connect,
        )
        self.worker.startService()
        self.addCleanup(no_connection_left)
        self.addCleanup(self.worker.stopService)

    async def ask(
        self, method: str, path: str, body: bytes | None = None, *, token: str | None = TOKEN, **headers: str
    ) -> tuple[int, dict[str, str], bytes]:
        """Status, headers by lower-case name, body."""
        sent = Headers({name.replace("_", "-"): [value] for name, value in headers.items()})
        if token is not None:
            sent.setRawHeaders("authorization", [f"Bearer {token}"])
        uri = f"http://127.0.0.1:{self.worker.http_port}{path}"
        producer = None if body is None else BytesBody(body)
        response = await Agent(reactor).request(method.encode(), uri.encode(), sent, producer)
        got = {name.decode().lower(): values[0].decode() for name, values in response.headers.getAllRawHeaders()}
        return response.code, got, await readBody(response)

    async def answer_with(self, path: str, wanted: bytes, what: str) -> bytes:
        """The first answer with these bytes in it, asked for 20 s at most."""
        gives_up = reactor.seconds() + 20
        while wanted not in (body := (await self.ask("GET", path))[2]):
            self.assertLess(reactor.seconds(), gives_up, f"never came: {what}")
        return body

    async def verb(self, verb: wire.Verb[Any, Any], request: Any) -> Any:
        """A verb's answer, the last line of a streaming one."""
        status, _headers, body = await self.ask("POST", verb.path, verb.encode_request(request))
        if verb.kind is wire.VerbKind.SILENT:
            self.assertEqual((status, body), (204, b""))
            return None
        self.assertEqual(status, 200, body)
        if verb.kind is wire.VerbKind.UNARY:
            return verb.decode_reply(body)
        lines = [verb.decode_line(line) for line in body.splitlines()]
        self.assertEqual([line.reply is None for line in lines], [True] * (len(lines) - 1) + [False])
        self.phases = [line.progress["phase"] for line in lines[:-1]]
        return lines[-1].reply


class ProbeTests(ServerCase):
    async def test_probes(self) -> None:
        """The probes need no credential; readiness follows what it is told, liveness doesn't (WALK-16)."""
        self.assertEqual((await self.ask("GET", "/healthz", token=None))[0], 200)
        self.assertEqual((await self.ask("GET", "/readyz", token=None))[0], 200)
        self.not_ready = "no tunnel"
        status, _headers, body = await self.ask("GET", "/readyz", token=None)
        self.assertEqual(status, 503)
        self.assertIn(b"no tunnel", body)
        self.assertEqual((await self.ask("GET", "/healthz", token=None))[0], 200)

    async def test_only_loopback(self) -> None:
        """The server is bound to 127.0.0.1 alone (WALK-8)."""
        listening = self.worker._http._listening
        self.assertEqual(listening.getHost().host, "127.0.0.1")

    async def test_port_taken(self) -> None:
        """A port that is taken is one clear line naming the knob."""
        with socket.create_server(("127.0.0.1", 0)) as held:
            server = LoopbackServer(Healthz(), reactor=reactor, port=held.getsockname()[1])
            error = self.assertRaises(UserMistake, server.start)
        self.assertIn("LOCALAI_HTTP_ADDR", str(error))
        await server.stop()

    async def test_token(self) -> None:
        """Everything else wants the registration token."""
        for path in ("/v1/control/models/running", "/v1/files/models/m/x", "/v1/files-list/models", "/v1/backend-logs"):
            for token in (None, "", "wrong"):
                status, headers, _body = await self.ask("POST", path, b"{}", token=token)
                self.assertEqual(status, 401)
                self.assertEqual(headers["www-authenticate"], "Bearer")

    async def test_two_tokens(self) -> None:
        """A good token beside another one is no good token, whichever comes first."""
        uri = f"http://127.0.0.1:{self.worker.http_port}/v1/backend-logs".encode()
        for tokens, status in (([TOKEN], 200), ([TOKEN, "x"], 401), (["x", TOKEN], 401)):
            sent = Headers({"authorization": [f"Bearer {token}" for token in tokens]})
            response = await Agent(reactor).request(b"GET", uri, sent)
            await readBody(response)
            self.assertEqual((tokens, response.code), (tokens, status))


class EmptyTokenTests(ServerCase):
    token = ""

    async def test_nobody(self) -> None:
        """With no registration token configured nobody is admitted."""
        for token in (None, "", "x"):
            self.assertEqual((await self.ask("GET", "/v1/backend-logs", token=token))[0], 401)


class ControlTests(ServerCase):
    async def test_rules(self) -> None:
        """POST only, JSON only, 404 naming an unknown verb."""
        self.assertEqual((await self.ask("GET", wire.MODELS_RUNNING.path))[0], 405)
        self.assertEqual((await self.ask("POST", wire.STOP.path, b"{oops"))[0], 400)
        status, _headers, body = await self.ask("POST", "/v1/control/files/ensure", b"{}")
        self.assertEqual(status, 404)
        self.assertIn(b"/v1/control/files/ensure", body)

    async def test_life_of_a_backend(self) -> None:
        """Install by verb, running, stop by verb: each says what is so (WALK-11)."""
        reply = await self.verb(wire.INSTALL, wire.InstallRequest("plain", "m", op_id="o"))
        self.assertEqual(self.phases, ["resolving", "downloading", "starting"])
        self.assertTrue(reply.success and reply.address.startswith("127.0.0.1:") and reply.backend_token)
        running = await self.verb(wire.MODELS_RUNNING, wire.Empty())
        self.assertEqual(running.models, [wire.RunningModel("m", 0, reply.address)])
        listed = await self.verb(wire.LIST, wire.Empty())
        self.assertEqual([entry.name for entry in listed.backends], ["plain"])
        unloaded = await self.verb(wire.MODEL_UNLOAD, wire.ModelUnloadRequest("m", reply.address))
        self.assertTrue(unloaded.success)
        stopped = await self.verb(wire.MODEL_STOP, wire.ModelStopRequest("m", "m#0", reply.address))
        self.assertEqual((stopped.matched, stopped.terminated, stopped.process_key), (True, True, "m#0"))
        self.assertEqual((await self.verb(wire.MODELS_RUNNING, wire.Empty())).models, [])
        absent = await self.verb(wire.MODEL_STOP, wire.ModelStopRequest("m", "m#0", reply.address))
        self.assertEqual((absent.matched, absent.terminated, absent.error), (False, True, ""))
        deleted = await self.verb(wire.DELETE, wire.DeleteRequest("plain"))
        self.assertTrue(deleted.success and deleted.reports_stopped_processes)

    async def test_logs(self) -> None:
        """What a backend wrote can be read by model and by process."""
        await self.verb(wire.INSTALL, wire.InstallRequest("plain", "org/m"))
        body = await self.answer_with("/v1/backend-logs/org/m", b'"up"', "what the backend wrote")
        line = json.loads(body)[0]
        self.assertEqual((line["stream"], line["text"], line["timestamp"][-1]), ("stdout", "up", "Z"))
        self.assertEqual(json.loads((await self.ask("GET", "/v1/backend-logs"))[2]), ["org/m"])
        self.assertEqual((await self.ask("GET", "/v1/backend-logs/other"))[0], 404)
        await self.verb(wire.STOP, wire.StopRequest())

    async def test_own_failure_is_an_answer(self) -> None:
        """A verb that fails says why in its answer, with status 200."""
        reply = await self.verb(wire.INSTALL, wire.InstallRequest("nothing", "m"))
        self.assertFalse(reply.success)
        self.assertIn("nothing", reply.error)
        for request in (wire.InstallRequest(), wire.InstallRequest("plain", backend_galleries="{")):
            self.assertFalse((await self.verb(wire.INSTALL, request)).success)
        self.assertFalse((await self.verb(wire.DELETE, wire.DeleteRequest(" "))).success)
        self.assertIn("process key", (await self.verb(wire.MODEL_STOP, wire.ModelStopRequest())).error)
        self.assertFalse((await self.verb(wire.MODEL_DELETE, wire.ModelDeleteRequest(".."))).success)
        self.assertFalse((await self.verb(wire.UPGRADE, wire.UpgradeRequest("nothing"))).success)

    async def test_install_only(self) -> None:
        """An install that names no model starts nothing."""
        reply = await self.verb(wire.INSTALL, wire.InstallRequest("plain"))
        self.assertEqual((reply.success, reply.address), (True, ""))
        self.assertEqual((await self.verb(wire.MODELS_RUNNING, wire.Empty())).models, [])
        self.assertTrue((await self.verb(wire.UPGRADE, wire.UpgradeRequest("plain"))).success)

    async def test_model_delete(self) -> None:
        """Deleting a model removes its staged files and nothing else; none there is fine."""
        for name in ("m", "other"):
            (self.folder / "models" / name).mkdir(parents=True)
            (self.folder / "models" / name / "x").write_text("x")
        for _ in range(2):
            self.assertTrue((await self.verb(wire.MODEL_DELETE, wire.ModelDeleteRequest("m"))).success)
        self.assertEqual([path.name for path in (self.folder / "models").iterdir()], ["other"])

    async def test_model_delete_of_what_is_unfinished(self) -> None:
        """Of a model that another frontend may serve only what is not whole is removed, and no other's (LOAD-16)."""
        folder = self.folder / "models" / "m" / "sub"
        for name in ("whole", "crashed", "partial"):
            path = folder / name
            sums.begin(path, Target("0" * 64, 9))
            path.write_bytes(b"x")
            if name != "partial":
                sums.finish(path, "0" * 64)
        sums.record(folder / "crashed", Target("0" * 64, 9))  # a crash between the last two steps
        (folder / "by hand").write_bytes(b"x")
        (folder / ("sent" + sums.DRAFT_SUFFIX)).write_bytes(b"x")
        sums.begin(self.folder / "models" / "other" / "x", Target("0" * 64, 9))
        for name in ("m", "absent"):
            reply = await self.verb(wire.MODEL_DELETE, wire.ModelDeleteRequest(name, unfinished_only=True))
            self.assertTrue(reply.success)
        left = {"by hand", "crashed", "crashed.sha256", "whole", "whole.sha256"}
        self.assertEqual({path.name for path in folder.iterdir()}, left)
        self.assertTrue((self.folder / "models" / "other" / "x").exists())
        refused = await self.verb(wire.MODEL_DELETE, wire.ModelDeleteRequest("..", unfinished_only=True))
        self.assertFalse(refused.success)

    async def test_node_stop(self) -> None:
        """A node that is asked to stop does what SIGTERM does."""
        await self.verb(wire.NODE_STOP, wire.Empty())
        self.assertEqual(self.stops, [1])


class FilesTests(ServerCase):
    def setUp(self) -> None:
        super().setUp()
        self.data = hashlib.shake_128(b"file").digest(3 * MiB + 11)
        self.sha256 = hashlib.sha256(self.data).hexdigest()
        self.path = "/v1/files/models/tiny/sub/a%20b.gguf"
        self.local = self.folder / "models" / "tiny" / "sub" / "a b.gguf"

    async def put(self, start: int, end: int, **headers: str) -> tuple[int, dict[str, str], bytes]:
        """One piece."""
        headers = {"X_Content_SHA256": self.sha256} | headers
        range_ = f"bytes {start}-{end - 1}/{len(self.data)}"
        return await self.ask("PUT", self.path, self.data[start:end], Content_Range=range_, **headers)

    async def test_pieces(self) -> None:
        """Pieces over HTTP: 308 with how much is there, 200 with the path; the file is byte-identical (WALK-10)."""
        self.assertEqual((await self.ask("HEAD", self.path))[0], 404)
        status, headers, _body = await self.put(0, MiB)
        self.assertEqual((status, headers["range"], headers["x-file-size"]), (308, f"bytes=0-{MiB - 1}", str(MiB)))
        status, headers, _body = await self.ask("HEAD", self.path)
        self.assertEqual(status, 200)
        self.assertEqual([headers["x-file-size"], headers["x-target-sha256"]], [str(MiB), self.sha256])
        self.assertNotIn("x-content-sha256", headers)
        status, _headers, body = await self.put(MiB, len(self.data))
        self.assertEqual((status, json.loads(body)), (200, {"local_path": str(self.local)}))
        self.assertEqual(self.local.read_bytes(), self.data)
        status, headers, _body = await self.ask("HEAD", self.path)
        self.assertEqual((status, headers["x-content-sha256"]), (200, self.sha256))
        self.assertEqual((headers["x-local-path"], headers["accept-ranges"]), (str(self.local), "bytes"))
        status, headers, body = await self.ask("GET", self.path)
        self.assertEqual((status, headers["content-type"], body), (200, "application/octet-stream", self.data))

    async def test_refusals(self) -> None:
        """The wrong offset is 416 with the right one, another file's beginning 409, nonsense 400."""
        await self.put(0, MiB)
        status, headers, _body = await self.put(2 * MiB, len(self.data))
        self.assertEqual((status, headers["x-file-size"]), (416, str(MiB)))
        self.assertEqual((await self.put(MiB, len(self.data), X_Content_SHA256="0" * 64))[0], 409)
        self.assertEqual((await self.ask("HEAD", self.path))[0], 404)
        self.assertEqual((await self.put(0, 10, X_Content_SHA256="zz"))[0], 400)
        self.assertEqual((await self.ask("PUT", self.path, b"x", Content_Range="bytes */5"))[0], 400)
        self.assertEqual((await self.ask("PUT", self.path, b"x", X_Content_SHA256="0" * 64))[0], 400)
        self.assertEqual((await self.ask("DELETE", self.path))[0], 405)

    async def test_keys_that_do_not_fit(self) -> None:
        """A key that is a folder, lies below a file, or is too deep or too long is a told refusal, never a fault."""
        self.assertEqual((await self.ask("PUT", self.path, self.data))[0], 200)
        deep = "/v1/files/models/" + "/".join(["d"] * 1000)
        sent = {"Content_Range": f"bytes 0-9/{len(self.data)}", "X_Content_SHA256": self.sha256}
        for path, head, get, put in (
            ("/v1/files/models/tiny", 409, 404, 409),
            (self.path + "/below", 404, 404, 409),
            (self.path + "/below/twice", 404, 404, 409),
            (deep, 400, 400, 400),
            ("/v1/files/models/" + "n" * 255, 400, 400, 400),
            ("/v1/files/ephemeral/r/" + "n" * 238, 400, 400, 400),
        ):
            self.assertEqual((await self.ask("HEAD", path))[::2], (head, b""), path)
            for method, status, headers in (("GET", get, {}), ("PUT", put, {}), ("PUT", put, sent)):
                got, _headers, answer = await self.ask(method, path, b"x" * 10, **headers)
                self.assertEqual((method, got), (method, status), path)
                self.assertIn("message", json.loads(answer)["error"])
        self.assertEqual((await self.ask("GET", "/v1/files-list" + deep.removeprefix("/v1/files")))[0], 400)
        self.assertEqual(self.local.read_bytes(), self.data)
        self.assertEqual(self.flushLoggedErrors(), [])

    async def test_the_longest_name(self) -> None:
        """
        A file with the longest name a key may have is staged in pieces and whole, and is there afterwards; what lies
        beside it has room for its own, longer name.
        """
        path = "/v1/files/models/tiny/" + "n" * MAX_FILE_NAME_BYTES
        half = len(self.data) // 2
        for start, end, status in ((0, half, 308), (half, len(self.data), 200)):
            sent = {
                "Content_Range": f"bytes {start}-{end - 1}/{len(self.data)}",
                "X_Content_SHA256": self.sha256,
            }
            self.assertEqual((await self.ask("PUT", path, self.data[start:end], **sent))[0], status)
        self.assertEqual((await self.ask("GET", path))[2], self.data)
        self.assertEqual((await self.ask("PUT", path, b"x"))[0], 200)
        self.assertEqual((await self.ask("GET", path))[2], b"x")

    async def test_headers_that_are_no_text(self) -> None:
        """Headers with bytes that are no UTF-8 are wrong, not a fault: 401 or 400, as JSON."""
        odd = b"\xff\xfe\xe9"
        good = b"Bearer " + TOKEN.encode()
        for path in (self.path, "/v1/files-list/models", "/v1/backend-logs", wire.MODELS_RUNNING.path):
            for method in ("GET", "PUT", "POST"):
                self.assertEqual(await self.send_raw(method, path, {"Authorization": b"Bearer " + odd}), 401)
        for name in ("Content-Range", "X-Content-SHA256"):
            self.assertEqual(await self.send_raw("PUT", self.path, {"Authorization": good, name: odd}), 400)
        everywhere = dict.fromkeys(("X-Request-ID", "X-Correlation-ID", "Expect", "Cookie", "Accept", "Range"), odd)
        self.assertEqual(await self.send_raw("GET", self.path, {"Authorization": good, **everywhere}), 404)
        self.assertEqual(self.flushLoggedErrors(), [])

    async def send_raw(self, method: str, path: str, headers: dict[str, bytes]) -> int:
        """The status of an answer that must be the JSON envelope."""
        sent = Headers({name: [value] for name, value in headers.items()})
        uri = f"http://127.0.0.1:{self.worker.http_port}{path}"
        response = await Agent(reactor).request(method.encode(), uri.encode(), sent, BytesBody(b"x"))
        self.assertIn("message", json.loads(await readBody(response))["error"], (method, path))
        return response.code

    async def test_keys_stay_inside(self) -> None:
        """A key that climbs, or leaves its folder through a link, is refused by every route, and writes nothing
        (LOAD-14)."""
        (self.folder / "models").mkdir()
        (self.folder / "models" / "link").symlink_to(self.folder / "data")
        (self.folder / "models-evil").mkdir()
        (self.folder / "models-evil" / "x").write_bytes(b"secret")
        (self.folder / "models" / "sibling").symlink_to(self.folder / "models-evil")
        for key in (
            "models/..%2f..%2fx",
            "models/%2e%2e/x",
            "..%2fnode.json",
            "models//x",
            "models/link/node.json",
            "models/sibling/x",
            "models/../models-evil/x",
            "models%2f..%2fmodels-evil%2fx",
            "models/a%00b",
            "%2fetc%2fpasswd",
            "/etc/passwd",
            "models/m%5c..%5cx",
            "models/%ff",
            "models/" + "x" * 300,
            "",
            "models",
        ):
            for method in ("PUT", "GET", "HEAD"):
                body = b"x" if method == "PUT" else None
                self.assertEqual((await self.ask(method, f"/v1/files/{key}", body))[0], 400, (method, key))
        for folder in ("models/link", "models/sibling", "models%2f..%2fmodels-evil", ".."):
            self.assertEqual((await self.ask("GET", f"/v1/files-list/{folder}"))[0], 400, folder)
        for name in ("link", "sibling", "../models-evil", ".."):
            self.assertTrue((await self.verb(wire.MODEL_DELETE, wire.ModelDeleteRequest(name))).error, name)
        self.assertFalse((self.folder / "data" / "node.json").exists())
        self.assertEqual((self.folder / "models-evil" / "x").read_bytes(), b"secret")

    async def test_a_models_folder_behind_a_link(self) -> None:
        """A models folder that is itself a link takes files, new folders in it too (LOAD-14)."""
        real = self.folder / "elsewhere"
        real.mkdir()
        (self.folder / "models").symlink_to(real)
        await self.put(0, MiB)
        self.assertEqual((await self.put(MiB, len(self.data)))[0], 200)
        self.assertEqual((real / "tiny" / "sub" / "a b.gguf").read_bytes(), self.data)

    async def test_hash_files_are_ours(self) -> None:
        """The hash file of a staged file can't be overwritten from outside, and is not listed."""
        await self.ask("PUT", self.path, self.data)
        self.assertEqual((await self.ask("PUT", self.path + ".sha256", b"0" * 64))[0], 400)
        self.assertEqual((await self.ask("PUT", "/v1/files/models/tiny/lone.sha256", b"theirs"))[0], 200)
        status, _headers, body = await self.ask("GET", "/v1/files-list/models/tiny")
        self.assertEqual((status, json.loads(body)), (200, {"files": ["lone.sha256", "sub/a b.gguf"]}))
        self.assertEqual((await self.ask("GET", "/v1/files-list/models/none"))[0], 404)
        self.assertEqual((await self.ask("GET", "/v1/files-list/.."))[0], 400)
        self.assertEqual((await self.ask("POST", "/v1/files-list/models"))[0], 405)

    async def test_verification_is_told(self) -> None:
        """A file that is being hashed says how far that is, not a hash."""
        self.patch(uploads, "HEAD_PATIENCE", 0.0)
        hashing: Deferred[None] = Deferred()
        self.local.parent.mkdir(parents=True)
        self.local.write_bytes(self.data)

        async def waiting(_entry: Any) -> str:
            await hashing
            return self.sha256

        patch = self.patch(Entry, "sha256", waiting)
        status, headers, _body = await self.ask("HEAD", self.path)
        self.assertEqual((status, headers["x-verified-bytes"], headers["x-file-size"]), (200, "0", str(len(self.data))))
        self.assertNotIn("x-content-sha256", headers)
        patch.restore()
        self.patch(uploads, "HEAD_PATIENCE", 10.0)
        hashing.callback(None)
        _status, headers, _body = await self.ask("HEAD", self.path)
        self.assertEqual(headers["x-content-sha256"], self.sha256)

    async def test_temp(self) -> None:
        """A temporary file has a path of its own each time."""
        made = [json.loads((await self.ask("POST", "/v1/files/temp"))[2])["local_path"] for _ in range(2)]
        self.assertNotEqual(*made)
        self.assertTrue(all(Path(path).is_file() for path in made))

    async def test_upload_cut_off(self) -> None:
        """A connection that breaks in the middle of a piece leaves what had arrived, ready to go on (WALK-10)."""
        head = (
            f"PUT {self.path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n"
            f"Content-Length: {len(self.data)}\r\nX-Content-SHA256: {self.sha256}\r\n"
            f"Content-Range: bytes 0-{len(self.data) - 1}/{len(self.data)}\r\n\r\n"
        )
        client = socket.create_connection(("127.0.0.1", self.worker.http_port))
        client.setblocking(False)
        left = head.encode() + self.data[: 2 * MiB]
        while left:
            try:
                left = left[client.send(left) :]
            except BlockingIOError:
                pass
            await _turn()
        client.close()
        gives_up, size = reactor.seconds() + 20, ""
        while size != str(2 * MiB):
            self.assertLess(reactor.seconds(), gives_up, f"never came: all that had arrived, only {size} bytes")
            size = (await self.ask("HEAD", self.path))[1].get("x-file-size", "0")
        self.assertEqual((await self.put(2 * MiB, len(self.data)))[0], 200)
        self.assertEqual(self.local.read_bytes(), self.data)


class AgentTests(TestCase):
    async def test_every_verb_is_unknown(self) -> None:
        """An agent worker answers every verb 404, and its probes (WALK-20)."""
        worker = WorkerServer(reactor=reactor, registration_token=TOKEN)
        self.addCleanup(no_connection_left)
        await worker.start()
        try:
            for path in [*wire.VERBS, *FILE_VERBS, "/v1/files/models/x"]:
                uri = f"http://127.0.0.1:{worker.http_port}{path}".encode()
                headers = Headers({"authorization": [f"Bearer {TOKEN}"]})
                response = await Agent(reactor).request(b"POST", uri, headers, BytesBody(b"{}"))
                await readBody(response)
                self.assertEqual(response.code, 404, path)
        finally:
            await worker.stop()


async def _turn() -> None:
    turn: Deferred[None] = Deferred()
    reactor.callLater(0, turn.callback, None)
    await turn
