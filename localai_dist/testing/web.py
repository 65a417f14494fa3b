"""Small blocking HTTP questions to a daemon on this machine; a proxy of the environment is never asked."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any

_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(frozen=True, slots=True)
class Reply:
    """
    What came back.

    Attributes:
        status: 0 when nobody answered.
        text: the body, or why nobody answered.
    """

    status: int
    text: str

    def json(self) -> Any:
        """The body, decoded; None when it isn't JSON."""
        try:
            return json.loads(self.text)
        except ValueError:
            return None


def ask(url: str, *, key: str = "", method: str = "GET", body: Any = None, timeout: float = 5.0) -> Reply:
    """
    The reply to one request; a refused connection is a reply with status 0.

    Args:
        url: the whole address.
        key: sent as ``Authorization: Bearer``; empty: none.
        method: HTTP method.
        body: sent as JSON; None: no body.
        timeout: of each wait on the socket (s).
    """
    request = urllib.request.Request(url, method=method)
    if key:
        request.add_header("Authorization", "Bearer " + key)
    if body is not None:
        request.data = json.dumps(body).encode()
        request.add_header("Content-Type", "application/json")
    try:
        with _direct.open(request, timeout=timeout) as response:
            return Reply(response.status, response.read().decode("utf-8", "replace"))
    except urllib.error.HTTPError as refusal:
        with refusal:
            return Reply(refusal.code, refusal.read().decode("utf-8", "replace"))
    except (OSError, http.client.HTTPException) as problem:
        return Reply(0, str(problem))
