"""How long a frontend that is told to stop waits, and for what."""

from __future__ import annotations

from dataclasses import fields
from typing import Any
from unittest import mock

from twisted.internet.defer import Deferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from localai_dist.roles import frontend_service
from localai_dist.roles.frontend_service import FrontendService, Parts
from localai_dist.settings.frontend import FrontendSettings

DRAIN = 10.0


class DrainTests(SynchronousTestCase):
    def setUp(self) -> None:
        # The real one takes the test runner's own answer to SIGTERM away.
        self.patch(frontend_service, "next_sigterm_kills", lambda: None)
        self.clock = Clock()
        self.parts: Any = Parts(**{field.name: mock.MagicMock() for field in fields(Parts)})
        for closing in (self.parts.loads, self.parts.bus, self.parts.pool):
            closing.stop = mock.AsyncMock()
        self.parts.held.release_all = mock.AsyncMock()
        self.session = mock.MagicMock(stream_count=0)
        self.parts.held.sessions.return_value = {"node": self.session}
        self.parts.request_files.releasing = 0
        settings = FrontendSettings(lame_duck=0.0, drain_timeout=DRAIN)
        self.service = FrontendService(self.parts, settings, reactor=self.clock)
        self.service.site = mock.MagicMock()
        self.service.site.resource.running = 0

    def stopping(self) -> Deferred[None]:
        self.service.running = True
        stopping = self.service.stopService()
        self.clock.advance(0)
        return stopping

    def test_idle(self) -> None:
        """With nothing to wait for it is closed at once."""
        self.successResultOf(self.stopping())
        self.parts.pool.stop.assert_awaited_once()

    def test_what_is_waited_for(self) -> None:
        """Running requests, streams, and files of requests that are being released end first (LOAD-23)."""
        waits = (
            (self.service.site.resource, "running"),
            (self.session, "stream_count"),
            (self.parts.request_files, "releasing"),
        )
        for part, name in waits:
            setattr(part, name, 1)
            stopping = self.stopping()
            self.clock.pump([0.1] * 50)
            self.assertNoResult(stopping)
            setattr(part, name, 0)
            self.clock.advance(0.1)
            self.successResultOf(stopping)

    def test_not_for_ever(self) -> None:
        """What does not end is left when the drain time is over."""
        self.parts.request_files.releasing = 1
        stopping = self.stopping()
        self.clock.pump([0.1] * 110)
        self.successResultOf(stopping)
