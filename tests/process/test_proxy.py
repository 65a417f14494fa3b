"""A worker in a closed network: an HTTP proxy is its only way to the frontend."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import urlsplit

import pytest

from localai_dist.testing.cluster import Cluster
from localai_dist.testing.waiting import until
from localai_dist.testing.web import ask
from tests.process.kit import command_line, open_folder, quick_plan, running
from tests.process.outside import backends_of, environment_of, sockets_of
from tests.process.scripted import add_model, chat, galleries
from tests.support.connect_proxy import ConnectProxy

USER, PASSWORD, WRONG = "worker", "s3cret-of-the-proxy", "wr0ng-for-the-proxy"


@dataclass(frozen=True)
class Closed:
    """A cluster of one and one, and the proxy between them."""

    cluster: Cluster
    proxy: ConnectProxy

    def address(self, password: str) -> str:
        """What ``HTTP_PROXY`` says."""
        return f"http://{USER}:{password}@127.0.0.1:{self.proxy.port}"


@pytest.fixture(scope="module")
def closed() -> Iterator[Closed]:
    """The worker is told a name of the frontend that only the proxy knows."""
    leads: dict[str, int] = {}
    with open_folder("proxy") as folder, ConnectProxy(leads, f"{USER}:{PASSWORD}") as proxy:

        def way(worker: int, frontend: int, url: str) -> str:
            port = urlsplit(url).port or 0
            leads[f"front-{frontend}.invalid:{port}"] = port
            return f"http://front-{frontend}.invalid:{port}"

        env = {"HTTP_PROXY": f"http://{USER}:{PASSWORD}@127.0.0.1:{proxy.port}", "NO_PROXY": "elsewhere.example"}
        plan = quick_plan(
            folder / "state", frontends=1, workers=1, way=way, worker_env=env, frontend_env=galleries(folder), models=[]
        )
        with running(plan) as cluster:
            yield Closed(cluster, proxy)


def test_a_worker_reaches_its_frontend_by_the_proxy_alone(closed: Closed) -> None:
    """
    Registration, heartbeats, tunnel, staging and answers go by the proxy, by the frontend's name; the worker has no
    other connection, and neither a log, a command line nor a backend's environment has the proxy's password.
    """
    cluster, worker = closed.cluster, closed.cluster.workers[0]
    add_model(cluster, "scripted", "test:answer=here we are")
    reply = chat(cluster, cluster.frontends[0], "scripted")
    assert (reply.status, reply.json()["choices"][0]["message"]["content"]) == (200, "here we are")
    [name] = {target.rpartition(":")[0] for target in closed.proxy.asked}
    assert name == "front-0.invalid"
    assert closed.proxy.refused == 0 and closed.proxy.carried >= 1
    backends = backends_of(worker)
    mine = [it for it in sockets_of(worker.pid) if not it.listening]
    own = {it.port for pid in (worker.pid, *backends) for it in sockets_of(pid) if it.listening}
    out = [it for it in mine if it.port not in own and it.remote_port not in own]
    assert out and {it.remote_port for it in out} == {closed.proxy.port}
    log = worker.log.read_text()
    assert f"is reached by way of the proxy 127.0.0.1:{closed.proxy.port} of HTTP_PROXY" in log
    assert PASSWORD not in log
    for pid in backends:
        assert PASSWORD not in command_line(pid) + repr(environment_of(pid))


def test_a_proxy_that_refuses_is_named(closed: Closed) -> None:
    """With the wrong password ``/readyz`` and the log name the proxy and what to do, and not the password."""
    cluster, worker = closed.cluster, closed.cluster.workers[0]
    before = len(worker.log.read_text())
    try:
        worker.env["HTTP_PROXY"] = closed.address(WRONG)
        cluster.restart(worker)
        until("a refusal", lambda: closed.proxy.refused >= 2, 20)
        told = f"the proxy 127.0.0.1:{closed.proxy.port} of HTTP_PROXY wants credentials"
        until("the cause in /readyz", lambda: told in ask(worker.probe_url + "/readyz").text, 10)
        until("the cause in the log", lambda: told in worker.log.read_text()[before:], 10)
        assert WRONG not in worker.log.read_text() + ask(worker.probe_url + "/readyz").text
    finally:
        worker.env["HTTP_PROXY"] = closed.address(PASSWORD)
        cluster.restart(worker)
    cluster.wait_for("the worker's tunnel", worker.is_ready, 40)


def test_what_is_no_proxy_ends_the_start(closed: Closed) -> None:
    """A variable that names no HTTP proxy is one line on stderr and exit code 1, without what it holds."""
    cluster, worker = closed.cluster, closed.cluster.workers[0]
    before = worker.log.stat().st_size
    worker.kill()
    try:
        worker.env["HTTP_PROXY"] = f"socks5://{USER}:{WRONG}@127.0.0.1:1"
        worker.start()
        assert worker.wait_ended(20) == 1
    finally:
        worker.env["HTTP_PROXY"] = closed.address(PASSWORD)
        cluster.restart(worker)
    with worker.log.open() as log:
        log.seek(before)
        said = log.read()
    assert "localai-worker: HTTP_PROXY: only http:// proxies are spoken to" in said
    assert WRONG not in said
