"""
HTTP to a worker's own server, over a stream: Twisted's ``Agent`` on a tunnel endpoint.

Each request has a stream of its own: opening one is cheap, and a kept one could be dead without anybody noticing.

Source: wire contract §6.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from twisted.internet.interfaces import IReactorTime, IStreamClientEndpoint
from twisted.web.client import URI, Agent, RequestGenerationFailed, ResponseFailed, ResponseNeverReceived
from twisted.web.client import RequestTransmissionFailed as TransmissionFailed
from twisted.web.http_headers import Headers
from twisted.web.iweb import IAgentEndpointFactory, IBodyProducer, IResponse
from zope.interface import implementer

from localai_dist.ids import NodeId
from localai_dist.mux.classes import TrafficClass
from localai_dist.reach import NotServed, Unreached
from localai_dist.relay.deadline import before
from localai_dist.relay.forward import Forwarder, HttpTarget
from localai_dist.wire.credentials import AUTHORIZATION, authorization


@implementer(IAgentEndpointFactory)
class _OneEndpoint:
    """The endpoint of the node that is asked, whatever the URI says."""

    def __init__(self, endpoint: IStreamClientEndpoint) -> None:
        self._endpoint = endpoint

    def endpointForURI(self, uri: URI) -> IStreamClientEndpoint:
        """That one."""
        return self._endpoint


class NodeHttp:
    """
    HTTP requests to nodes.

    Args:
        forwarder: opens the streams.
        reactor: for the Agent's timers.
        token: the registration token, which a worker's server asks for.
    """

    def __init__(self, forwarder: Forwarder, *, reactor: Any, token: str) -> None:
        self._forwarder = forwarder
        self._reactor = reactor
        self._clock: IReactorTime = reactor
        self._token = token

    async def request(
        self,
        node: NodeId,
        method: str,
        path: str,
        *,
        headers: Mapping[str, str] | None = None,
        body: IBodyProducer | None = None,
        traffic: TrafficClass = TrafficClass.INFERENCE,
        deadline: float | None = None,
    ) -> IResponse:
        """
        The response's head; its body is the caller's to read, at its own pace.

        Cancelling it drops the stream.

        Args:
            path: absolute, with its query.
            body: read as fast as the worker takes it.
            traffic: the class of the stream on every leg.
            deadline: until the head is here, an instant on the clock (s).

        Raises:
            Unreached: any outcome but an answer; ``NotServed`` when the stream ended before the head.
            Exception: whatever ``body`` itself failed with.
        """
        return await before(
            deadline, self._request(node, method, path, headers or {}, body, traffic, deadline), clock=self._clock
        )

    async def _request(
        self,
        node: NodeId,
        method: str,
        path: str,
        headers: Mapping[str, str],
        body: IBodyProducer | None,
        traffic: TrafficClass,
        deadline: float | None,
    ) -> IResponse:
        endpoint = self._forwarder.endpoint(node, HttpTarget(), traffic=traffic, deadline=deadline)
        agent = Agent.usingEndpointFactory(self._reactor, _OneEndpoint(endpoint))
        sent = {**headers, "Host": f"{node}.worker.invalid", AUTHORIZATION: authorization(self._token)}
        try:
            return await agent.request(
                method.encode("ascii"),
                b"http://worker.invalid" + path.encode("utf-8"),
                Headers({name: [value] for name, value in sent.items()}),
                body,
            )
        except RequestGenerationFailed as error:
            raise error.reasons[0].value from error
        except (TransmissionFailed, ResponseNeverReceived, ResponseFailed) as error:
            raise Unreached(NotServed(_reasons(error))) from error


def _reasons(error: Any) -> str:
    causes = "; ".join(reason.getErrorMessage() for reason in error.reasons)
    return f"the stream ended before the answer: {causes}"
