"""
A node's membership: register until a frontend takes it, then beat, and register again when it is no longer known.

The heartbeat has no view of the tunnel: it goes on without one, and after a failed post. A network failure or a 5xx is
retried for ever; a wrong token or a malformed request at the *first* registration ends the daemon with a clear message.

Source: design §5 items 13 and 15, wire contract §5, surface §5.1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from twisted.application.service import Service
from twisted.internet.defer import CancelledError, Deferred
from twisted.logger import Logger
from twisted.python.failure import Failure

from localai_dist.backoff import Backoff
from localai_dist.errors import InvalidName, UserMistake
from localai_dist.ids import NodeId, approval_of, parse_node_id
from localai_dist.worker.errors import NotReached, RegistrationRefused
from localai_dist.worker.frontends import FrontendAnswer, Frontends
from localai_dist.worker.identity import Identity, IdentityFile
from localai_dist.worker.readings import Readings, TakeReadings, no_readings
from localai_dist.worker.timing import TooLate, after, bounded

HEARTBEAT_INTERVAL = 10.0
"""Seconds between two beats. Source: design §7, ``LOCALAI_HEARTBEAT_INTERVAL``."""
LEAVE_POLL = 0.5
"""Seconds between two looks at what still runs here, while leaving."""

GOODBYE_WITHIN = 3.0
"""Seconds the goodbye itself may take, beyond the wait for what runs: a frozen frontend must not keep us."""

PENDING = "pending"
"""The status of a node that an operator has not admitted yet."""

_TOLD = 1000
"""Characters of a frontend's words that are repeated."""

_FATAL = frozenset({400, 401, 403, 422})
_FORGOTTEN = frozenset({401, 403, 404})


@dataclass(frozen=True, slots=True)
class Profile:
    """
    What a node says of itself.

    Attributes:
        name: unique in the cluster.
        node_type: ``backend`` or ``agent``.
        boot_id: a uuid of this process; another one tells the frontends that nothing is loaded here any more.
        labels: for placement rules.
        max_replicas_per_model: copies of one model this node may hold.
        vram_budget: like ``80%`` or ``12GB``; empty = all.
        capability: the worker's own, for meta backends.
    """

    name: str
    node_type: str
    boot_id: str
    labels: Mapping[str, str] = field(default_factory=dict)
    max_replicas_per_model: int = 1
    vram_budget: str = ""
    capability: str = ""

    def fields(self, token: str, readings: Readings) -> dict[str, Any]:
        """The body of a registration."""
        told: dict[str, Any] = {
            "name": self.name,
            "node_type": self.node_type,
            "boot_id": self.boot_id,
            "token": token,
        }
        if self.node_type == "agent":
            return told
        told |= {"labels": dict(self.labels), "max_replicas_per_model": self.max_replicas_per_model}
        told |= {name: value for name in ("vram_budget", "capability") if (value := getattr(self, name))}
        return told | readings.to_register()


class Registration(Service):
    """
    Keeps this node registered.

    Args:
        reactor: the clock.
        frontends: who is asked.
        registration_token: also sent in the body, as the original wants it.
        profile: what the node says of itself.
        identity_file: where id and token are kept.
        readings: taken for each registration and beat.
        interval: between two beats (s).
        backoff: between two attempts to register.
        chance: a random number from 0 to 1, for the backoff.
        on_refused: told when a frontend will never take this node; the daemon should end with its text.
        on_registered: told each time a frontend took this node, or answers again after none did; the tunnel should dial
            without waiting.
        on_tunnel_held: told with each beat whether some frontend owns this node's tunnel, as the registry knows it.

    Attributes:
        status: as the last registration answered: ``pending``, ``healthy`` …; empty before.
        api_token: an agent worker's key for the frontends' API, once approved.
    """

    _log = Logger()

    def __init__(
        self,
        *,
        reactor: Any,
        frontends: Frontends,
        registration_token: str,
        profile: Profile,
        identity_file: IdentityFile,
        readings: TakeReadings = no_readings,
        interval: float = HEARTBEAT_INTERVAL,
        backoff: Backoff = Backoff(first=1.0, cap=30.0),
        chance: Callable[[], float],
        on_refused: Callable[[RegistrationRefused], None],
        on_registered: Callable[[], None] = lambda: None,
        on_tunnel_held: Callable[[bool], None] = lambda held: None,
    ) -> None:
        self._reactor = reactor
        self._frontends = frontends
        self._token = registration_token
        self._profile = profile
        self._file = identity_file
        self._readings = readings
        self._interval = interval
        self._backoff = backoff
        self._chance = chance
        self._on_refused = on_refused
        self._on_registered = on_registered
        self._on_tunnel_held = on_tunnel_held
        self._identity: Identity | None = None
        self._registered = False
        self._trouble = ""
        self._stranger = False
        self._taken = ""
        self._running: Deferred[None] | None = None
        self._sleeping: Deferred[None] | None = None
        self._waiting: list[Deferred[None]] = []
        self.status = ""
        self.api_token: str | None = None

    def node_id(self) -> NodeId | None:
        """The node's id, once a frontend gave one."""
        return None if self._identity is None else self._identity.node_id

    def node_token(self) -> str | None:
        """The node's own token, likewise."""
        return None if self._identity is None else self._identity.node_token

    @property
    def is_registered(self) -> bool:
        """Whether a frontend took this node since the last time it was forgotten."""
        return self._registered

    def why_not(self) -> str:
        """For ``/readyz``: why the node is not registered, or an empty text."""
        if self._registered:
            return ""
        if self._trouble:
            return f"not registered: {self._trouble}"
        return self.waiting() if self.status == PENDING else "not registered with a frontend yet"

    def waiting(self) -> str:
        """The sentence about a node that an operator has to admit, or whose name another one has."""
        command = f"waits for approval: {approval_of(self._profile.name)}"
        return f"{command}; {self._taken}" if self._taken else command

    def when_registered(self) -> Deferred[None]:
        """Fires at the first registration; at once if that was. Each call its own."""
        waiter: Deferred[None] = Deferred(lambda cancelled: self._waiting.remove(cancelled))
        if self._registered:
            waiter.callback(None)
        else:
            self._waiting.append(waiter)
        return waiter

    def load_identity(self) -> None:
        """
        Read the identity from the disk; called by ``startService``, or before it to fail early.

        Raises:
            UserMistake: the file is damaged or can't be read.
        """
        self._identity = self._identity or self._file.load()

    def register_again(self) -> None:
        """Register at the next turn instead of the next beat: the tunnel's dial was answered 401."""
        self._registered = False
        if self._sleeping is not None:
            self._sleeping.cancel()

    def startService(self) -> None:
        """Start registering and beating."""
        super().startService()
        self.load_identity()
        self._running = Deferred.fromCoroutine(self._live())
        self._running.addErrback(self._broken)

    def stopService(self) -> Deferred[None] | None:
        """Stop beating; whoever wants to say goodbye calls ``leave`` first."""
        super().stopService()
        running, self._running = self._running, None
        if running is not None:
            running.cancel()
        return running

    async def leave(self, patience: float) -> None:
        """
        Tell the frontends that this node goes: drain, wait until nothing runs here, deregister.

        Never fails: a frontend that can't be asked finds out by itself.

        Args:
            patience: how long to wait for what runs (s).
        """
        self.stopService()
        if self._identity is None:
            return
        limit = patience + GOODBYE_WITHIN
        try:
            await bounded(self._goodbye(patience), limit, self._reactor, f"no frontend took it within {limit:.0f} s")
        except (NotReached, TooLate) as error:
            self._log.info("leaving without a goodbye: {error}", error=error)

    async def _goodbye(self, patience: float) -> None:
        give_up_at = self._reactor.seconds() + patience
        await self._post_own("drain")
        while await self._busy() and self._reactor.seconds() < give_up_at:
            await after(self._reactor, LEAVE_POLL)
        await self._post_own("deregister")

    async def _live(self) -> None:
        failures = 0
        while True:
            try:
                if not self._registered:
                    await self._register()
                else:
                    await self._beat()
                    if failures:
                        # A frontend answers again: the tunnel need not wait out a backoff of half a minute.
                        self._on_registered()
                failures, self._trouble = 0, ""
            except NotReached as error:
                failures, self._trouble = failures + 1, str(error)
                self._log.warn("{error}", error=error)
            pause = self._interval if self._registered else self._backoff.delay(max(failures, 1), self._chance())
            await self._sleep(min(pause, self._interval) if failures == 0 else pause)

    async def _sleep(self, seconds: float) -> None:
        self._sleeping = after(self._reactor, seconds)
        try:
            await self._sleeping
        except CancelledError:
            if self._registered or not self.running:
                raise
        finally:
            self._sleeping = None

    async def _register(self) -> None:
        first = self.status == ""
        fields = self._profile.fields(self._token, await self._readings())
        answer = await self._frontends.post("/api/node/register", fields, node_token=self.node_token())
        if answer.status in (200, 201):
            self._take(answer)
        elif answer.status in _FATAL and first:
            raise RegistrationRefused(
                f"{answer.url} refused to register node {self._profile.name} ({answer.status}): "
                f"{answer.text or 'no reason given'}{_remedy(answer)}"
            )
        else:
            raise NotReached(f"{answer.url} did not register this node ({answer.status}): {answer.text}")

    def _take(self, answer: FrontendAnswer) -> None:
        try:
            node_id = parse_node_id(str(answer.fields.get("id", "")))
        except InvalidName as error:
            raise NotReached(f"{answer.url} registered this node without a usable id: {error}") from error
        token = str(answer.fields.get("tunnel_token") or answer.fields.get("node_token") or self.node_token() or "")
        identity = Identity(node_id, token)
        if identity != self._identity:
            self._file.save(identity)
            self._identity = identity
        self.status = str(answer.fields.get("status", "")) or "healthy"
        self.api_token = answer.fields.get("api_token") or self.api_token
        self._registered = True
        self._tell(answer, node_id)
        waiting, self._waiting = self._waiting, []
        for waiter in waiting:
            waiter.callback(None)
        self._on_registered()

    def _tell(self, answer: FrontendAnswer, node_id: NodeId) -> None:
        """One line for each registration; for one that waits under a name that is taken, one for all of them."""
        told, taken = bool(self._taken), answer.fields.get("message")
        self._taken = _one_line(taken) if self.status == PENDING and isinstance(taken, str) else ""
        if self._taken and not told:
            text = "registered with {url}, but the name {name} is taken, and this worker waits: {why}"
            self._log.warn(text, url=answer.url, name=self._profile.name, why=self._taken)
        elif not self._taken:
            self._log.info(
                "registered with {url} as {name} ({node}): {status}",
                url=answer.url,
                name=self._profile.name,
                node=node_id,
                status=self.status,
            )

    async def _beat(self) -> None:
        readings = await self._readings()
        answer = await self._post_own("heartbeat", readings.to_beat())
        if answer.status in _FORGOTTEN:
            if not self._taken:  # else it is the other worker's row, and that was said
                text = "{url} does not know this node any more ({status})"
                self._log.warn(text, url=answer.url, status=answer.status)
            self._registered, self._stranger = False, True
        elif answer.status >= 400:
            self._log.warn("a heartbeat failed: {status} {text}", status=answer.status, text=answer.text)
        elif (self._stranger or self._taken) and self.status == PENDING:
            # A newcomer's beats are refused until an operator hands it the name, which may be before its first one; the
            # row still tells of the process before it, and registering again makes it tell of this one.
            self._registered = False
        elif isinstance(held := answer.fields.get("tunnel_held"), bool):  # an older frontend does not say
            self._on_tunnel_held(held)

    async def _busy(self) -> bool:
        answer = await self._frontends.get(f"/api/node/{self.node_id()}/models", node_token=self.node_token())
        rows = answer.body if answer.status == 200 and isinstance(answer.body, list) else []
        return any(isinstance(row, dict) and row.get("in_flight") for row in rows)

    async def _post_own(self, verb: str, fields: Mapping[str, Any] | None = None) -> FrontendAnswer:
        return await self._frontends.post(
            f"/api/node/{self.node_id()}/{verb}", fields or {}, node_token=self.node_token()
        )

    def _broken(self, failure: Failure) -> None:
        if failure.check(CancelledError):
            return
        if failure.check(RegistrationRefused, UserMistake):
            refused = failure.value
            self._on_refused(refused if isinstance(refused, RegistrationRefused) else RegistrationRefused(str(refused)))
            return
        self._log.failure("registering and beating ended", failure)
        self._on_refused(RegistrationRefused(f"registering failed: {failure.getErrorMessage()}"))


def _one_line(text: str) -> str:
    """A frontend's words, fit for a log."""
    return "".join(letter if letter.isprintable() else " " for letter in text)[:_TOLD]


def _remedy(answer: FrontendAnswer) -> str:
    if answer.status in (401, 403):
        return "; set LOCALAI_REGISTRATION_TOKEN to the cluster's"
    error = answer.fields.get("error")
    if isinstance(error, dict) and error.get("param") == "name":
        return "; set LOCALAI_NODE_NAME to another"
    return "; is the frontend older than this worker?"
