"""The official OpenAI client for Node, installed once into ``build/peers``, and run as a process."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from localai_dist.testing.child import checkout
from localai_dist.testing.cluster import Cluster
from localai_dist.testing.members import Frontend

SOURCES = checkout() / "tests" / "interop" / "node-openai"
BUILD = checkout() / "build" / "peers" / "node-openai"
NPM = ("npm", "ci", "--no-audit", "--no-fund", "--ignore-scripts", "--fetch-retries=1", "--fetch-timeout=30000")


@cache
def client_missing() -> str | None:
    """Why the client can't run here, in words, or None once it is installed."""
    absent = [tool for tool in ("node", "npm") if shutil.which(tool) is None]
    if absent:
        return f"the OpenAI client for Node was not run: no {' and no '.join(absent)} on this machine"
    lock, done = (SOURCES / "package-lock.json").read_bytes(), BUILD / "installed-lock.json"
    if not done.exists() or done.read_bytes() != lock:
        BUILD.mkdir(parents=True, exist_ok=True)
        for name in ("package.json", "package-lock.json"):
            shutil.copy(SOURCES / name, BUILD / name)
        trouble = _install()
        if trouble:
            return f"the OpenAI client for Node was not run: npm can't install it ({trouble})"
        done.write_bytes(lock)
    shutil.copy(SOURCES / "stream.mjs", BUILD / "stream.mjs")
    return None


def _install() -> str:
    """Why npm did not install it; empty when it did."""
    try:
        done = subprocess.run(NPM, cwd=BUILD, env=dict(os.environ), capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired:
        return "not within 120 s"
    lines = [*done.stderr.split("\n"), "no reason given"]
    return " ".join(lines[0].split()) if done.returncode else ""


@contextmanager
def streaming(cluster: Cluster, frontend: Frontend, model: str) -> Iterator[Iterator[dict[str, Any]]]:
    """What the client sees of one streamed chat, event by event, as it happens."""
    script: list[str | Path] = ["node", BUILD / "stream.mjs"]
    # The key is this cluster's own, and both end with the test.
    words = [frontend.url + "/v1", cluster.secrets.api_key, model]
    with subprocess.Popen([*script, *words], cwd=BUILD, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield (json.loads(line) for line in process.stdout)
        finally:
            process.kill()
