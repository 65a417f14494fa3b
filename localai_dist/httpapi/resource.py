"""The API as one twisted.web resource: find the route, check the caller, run it, answer; never anything but JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from twisted.internet.defer import CancelledError, Deferred
from twisted.logger import Logger
from twisted.python.failure import Failure
from twisted.web.resource import IResource, Resource
from twisted.web.server import NOT_DONE_YET, Request

from localai_dist.httpapi.api import FrontendApi
from localai_dist.httpapi.auth import Access, check_key, check_registration
from localai_dist.httpapi.call import ApiRoute, Call, Run
from localai_dist.httpapi.discard import discard
from localai_dist.httpapi.errors import ApiError, api_error_of, not_found
from localai_dist.httpapi.render import send, send_error, write_error
from localai_dist.httpapi.routing import Found, RouteTable, WrongMethod
from localai_dist.net.answers import request_id
from localai_dist.net.request import StreamingRequest
from localai_dist.serving.deadline import within

LOG_AGAIN = 10.0
"""How long the same cause, withheld from clients, is not logged again (s)."""


class ApiResource(Resource):
    """
    Every route of a frontend.

    Args:
        mounted: resources that answer a whole path themselves (the two WebSocket dials).

    Attributes:
        running: requests not answered to the end yet; a draining frontend waits for them.
    """

    isLeaf = False
    log = Logger()

    def __init__(self, api: FrontendApi, routes: RouteTable[Run], mounted: Mapping[str, IResource]) -> None:
        super().__init__()
        self._api = api
        self._routes = routes
        self._mounted = dict(mounted)
        self.running = 0
        self._logged, self._logged_until = "", 0.0

    def getChildWithDefault(self, path: bytes, request: Request) -> IResource:
        """A mounted resource by its whole path; everything else is answered here."""
        whole = request.path.decode("utf-8", "replace").rstrip("/")
        request.prepath = [*(request.prepath or []), *(request.postpath or [])]
        request.postpath = []
        return self._mounted.get(whole, self)

    def streams_body_for(self, request: Request) -> bool:
        """Whether the request's route reads its body as it arrives."""
        method = request.method.decode("ascii", "replace")
        found = self._routes.find(method, request.path.decode("utf-8", "replace"))
        return isinstance(found, Found) and found.route.streams

    def render(self, request: Request) -> int:
        """Start answering; the route goes on by itself until it answered or the client went away."""
        call = Call(self._api, request, {}, request_id(request))
        self.running += 1
        request.notifyFinish().addBoth(self._ended)
        running = Deferred.fromCoroutine(self._answer(call))
        request.notifyFinish().addErrback(self._gone, call, running)
        running.addErrback(self._refuse, call)
        running.addErrback(self._broken, call)
        return NOT_DONE_YET

    def _ended(self, _result: object) -> None:
        self.running -= 1

    async def _answer(self, call: Call) -> None:
        route = self._route(call)
        call.access = route.access
        self._admit(call, route.access)
        call.read_deadline()
        send(call, await within(self._api.clock, call.deadline, route.run(call), granted=call.granted))

    def _route(self, call: Call) -> ApiRoute:
        request = call.request
        method = request.method.decode("ascii", "replace")
        found = self._routes.find(method, request.path.decode("utf-8", "replace"))
        match found:
            case Found(route, values):
                call.values = values
                return route
            case WrongMethod(allowed):
                text = f"{method} is not served here: want {' or '.join(allowed)}"
                raise ApiError(405, "method_not_allowed", text, headers={"Allow": ", ".join(allowed)})
            case None:
                raise not_found("there is nothing here; the API's routes begin with /v1/ and /api/")

    def _admit(self, call: Call, access: Access) -> None:
        if access is Access.NODE:
            check_registration(self._api.registration_token, call.header("Authorization"))
        elif access is not Access.OPEN:
            check_key(self._api.keys, call.presented_key(), always=access is Access.ADMIN)

    def _gone(self, _failure: Failure, call: Call, running: Deferred[None]) -> None:
        call.gone = True
        if call.events is not None:
            call.events.stop()
        running.cancel()

    def _refuse(self, failure: Failure, call: Call) -> Deferred[None] | None:
        request = cast(StreamingRequest, call.request)
        if call.gone or request.gone:
            # Nobody is left to tell. What the cancelled work raised on its way out is of no use either, unless it is
            # something nobody foresaw.
            if not failure.check(CancelledError) and api_error_of(failure.value) is None:
                failure.raiseException()
            return None
        error = api_error_of(failure.value)
        if error is None:
            self.log.failure("request {id} failed: {what}", failure, id=call.id, what=_named(call))
            error = ApiError(500, "internal_error", f"something went wrong here; the log has it as request {call.id}")
        self._withhold(call, error)
        if call.events is not None and call.events.is_open:
            # The status was 200: without this line a log that counts statuses would call it a whole answer.
            text = "request {id}: {what} broke off after its answer had begun: {code}: {why}"
            self.log.warn(text, id=call.id, what=_named(call), code=error.code, why=error.detail)
        if not request.body.ended:
            return Deferred.fromCoroutine(self._refuse_unread(call, error, request))
        send_error(call, error)
        return None

    def _withhold(self, call: Call, error: ApiError) -> None:
        """An operator is told everything; what a client is not told is in the log, once a while if it goes on."""
        if call.access is Access.ADMIN:
            error.message = error.detail
        now = self._api.clock.seconds()
        if error.message == error.detail or (self._logged == error.detail and now < self._logged_until):
            return
        self._logged, self._logged_until = error.detail, now + LOG_AGAIN
        text = "request {id}: {what} was answered {status} {code}: {why}"
        self.log.warn(text, id=call.id, what=_named(call), status=error.status, code=error.code, why=error.detail)

    async def _refuse_unread(self, call: Call, error: ApiError, request: StreamingRequest) -> None:
        """An answer before its request was read: the client is still sending, and would see a reset instead of it."""
        request.requestHeaders.removeHeader(b"expect")  # a client that asked first must not be told to go on
        request.setHeader("connection", "close")
        write_error(call, error)
        await discard(request.body, clock=self._api.clock)
        if not request.gone:
            request.channel.persistent = False
            request.finish()

    def _broken(self, failure: Failure, call: Call) -> None:
        """The last resort, so that no request ever hangs: even telling the error failed."""
        self.log.failure("request {id} could not be answered: {what}", failure, id=call.id, what=_named(call))
        if not call.gone:
            call.request.loseConnection()


def _named(call: Call) -> str:
    """Method and path of a request for the log; never the query, which may hold a secret."""
    request = call.request
    return f"{request.method.decode('ascii', 'replace')} {request.path.decode('utf-8', 'replace')}"
