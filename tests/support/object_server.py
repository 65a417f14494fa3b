"""A real S3-compatible server, moto's, as a child process; it keeps its objects in memory."""

from __future__ import annotations

import atexit
import functools
import socket
import subprocess
import sys
import tempfile
import time
from typing import Any

import boto3

from localai_dist.testing.ports import Ports

BUCKET = "localai"
ACCESS_KEY, SECRET_KEY = "AKIDEXAMPLE", "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY"


def environment(url: str) -> dict[str, str]:
    """What a daemon is told of the store at ``url``."""
    return {
        "LOCALAI_STORAGE_URL": url,
        "LOCALAI_STORAGE_BUCKET": BUCKET,
        "LOCALAI_STORAGE_ACCESS_KEY": ACCESS_KEY,
        "LOCALAI_STORAGE_SECRET_KEY": SECRET_KEY,
    }


class ObjectServer:
    """
    Runs from ``start`` to ``stop``.

    Attributes:
        url: its address.
    """

    def __init__(self) -> None:
        self._port = Ports().one()
        self.url = f"http://127.0.0.1:{self._port}"
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by stop()
        self._child: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Serve, with one empty bucket; blocks until it does."""
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self._port)]
        self._child = subprocess.Popen(command, stdout=self._log, stderr=self._log, stdin=subprocess.DEVNULL)
        ends = time.monotonic() + 30
        while True:
            try:
                socket.create_connection(("127.0.0.1", self._port), timeout=1).close()
                break
            except ConnectionError:
                if self._child.poll() is not None or time.monotonic() > ends:
                    self._log.seek(0)
                    raise RuntimeError(f"moto did not start: {self._log.read()!r}") from None
                time.sleep(0.05)
        self._client.create_bucket(Bucket=BUCKET)

    def stop(self) -> None:
        """End it."""
        if self._child is not None:
            self._child.kill()
            self._child.wait()
        self._log.close()

    @property
    def _client(self) -> Any:
        return boto3.client(
            "s3",
            endpoint_url=self.url,
            region_name="us-east-1",
            aws_access_key_id=ACCESS_KEY,
            aws_secret_access_key=SECRET_KEY,
        )

    def get(self, key: str) -> bytes:
        """An object's bytes."""
        content: bytes = self._client.get_object(Bucket=BUCKET, Key=key)["Body"].read()
        return content

    def put(self, key: str, content: bytes) -> None:
        """Make or replace an object."""
        self._client.put_object(Bucket=BUCKET, Key=key, Body=content)

    def delete(self, key: str) -> None:
        """Remove an object."""
        self._client.delete_object(Bucket=BUCKET, Key=key)

    def keys(self) -> list[str]:
        """The objects in the bucket."""
        return [entry["Key"] for entry in self._client.list_objects_v2(Bucket=BUCKET).get("Contents", [])]

    def uploads(self) -> list[str]:
        """The objects whose parts nobody has put together yet."""
        return [entry["Key"] for entry in self._client.list_multipart_uploads(Bucket=BUCKET).get("Uploads", [])]


@functools.cache
def shared_server() -> ObjectServer:
    """One for all tests of this process; it ends with it."""
    server = ObjectServer()
    server.start()
    atexit.register(server.stop)
    return server
