"""``/v1/backend-logs``: the names that have lines, and the last lines of one. Source: surface §5.5."""

from __future__ import annotations

from typing import Any

import msgspec

from localai_dist.net.request import StreamingRequest
from localai_dist.worker.logs import LogStore
from localai_dist.worker.resources import GuardedResource, refusal, rest_of_path


class BackendLogsResource(GuardedResource):
    """The lines backends wrote."""

    def __init__(self, token: str, logs: LogStore) -> None:
        super().__init__(token)
        self._logs = logs

    def answer(self, request: StreamingRequest) -> Any:
        """GET only."""
        if request.method != b"GET":
            return self.not_allowed(request, "GET")
        name = rest_of_path(request)
        found: Any = self._logs.lines(name) if name else self._logs.models()
        if found is None:
            return refusal(request, 404, "no backend of that name wrote anything")
        request.setHeader("content-type", "application/json")
        return msgspec.json.encode(found)
