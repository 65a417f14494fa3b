"""
One call to a backend over any endpoint: gRPC on HTTP/2 straight on a Twisted transport, no thread, no socket file.

Reading order: ``status.py`` (codes, RpcError and whose word it is), ``framing.py`` (bytes), ``verdict.py`` (what a
failed call says about a replica), all pure; then ``call.py`` (one call: flow control by reading), ``connection.py``
(HTTP/2) and ``channel.py`` (the typed calls)::

    await connect(endpoint) ──▶ BackendChannel ── predict_stream() ──▶ ReplyStream ── async for reply
                                     │                                     │ credit when read, RST_STREAM on cancel
                                GrpcConnection ◀──────────────────────── Call
                                     │ h2
                              TCP | unix socket | MuxStream

Why h2 and not grpcio: docs/decisions/0003-grpc-client.md.
"""

from localai_dist.grpcclient.channel import BackendChannel, ReplyStream, connect
from localai_dist.grpcclient.status import Origin, RpcError, StatusCode

__all__ = ["BackendChannel", "Origin", "ReplyStream", "RpcError", "StatusCode", "connect"]
