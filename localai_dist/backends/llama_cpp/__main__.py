"""The program: ``python -m localai_dist.backends.llama_cpp --addr 127.0.0.1:PORT``."""

from __future__ import annotations

import argparse
import asyncio
import ipaddress
import os
import signal
import sys
from typing import Final

import grpc
import grpc.aio

from localai_dist.backends.llama_cpp.guard import end_with_parent
from localai_dist.rpc import backend_pb2_grpc

MESSAGE_LIMIT: Final = 50 * 1024 * 1024
_TOKEN: Final = "LOCALAI_GRPC_AUTH_TOKEN"
_GRACE: Final = 1.0


def main() -> None:
    """Serve until SIGTERM or until the parent ends; exits 1 with one line when it can't start."""
    parser = argparse.ArgumentParser(prog="llama-cpp backend", description="llama.cpp behind backend.proto")
    parser.add_argument(
        "--addr", required=True, metavar="HOST:PORT", help="loopback address to serve on; port 0 = free"
    )
    address = parser.parse_args().addr
    token = os.environ.pop(_TOKEN, "")
    host = address.rpartition(":")[0]
    if not _is_loopback(host):
        sys.exit(f"llama-cpp: {host!r} is no loopback address; a backend is reached through its worker only")
    if not token:
        sys.exit(f"llama-cpp: {_TOKEN} is not set; without a token anybody on this machine could call it")
    end_with_parent()
    asyncio.run(serve(address, token))
    # Threads of the engine may still wait for it: leave without joining them.
    sys.stdout.flush()
    os._exit(0)


async def serve(address: str, token: str) -> None:
    """Serve on ``address``; the port taken is printed to stdout."""
    try:
        from localai_dist.backends.llama_cpp.service import LlamaService, TokenCheck
    except ImportError as error:
        sys.exit(f"llama-cpp: {error}; install the engine with: pip install 'localai-dist[llama]'")
    options = [
        ("grpc.max_receive_message_length", MESSAGE_LIMIT),
        ("grpc.max_send_message_length", MESSAGE_LIMIT),
        ("grpc.so_reuseport", 0),  # a port somebody holds must be an error, not shared
    ]
    server = grpc.aio.server(interceptors=[TokenCheck(token)], options=options)
    backend_pb2_grpc.add_BackendServicer_to_server(LlamaService(), server)
    try:
        port = server.add_insecure_port(address)
    except RuntimeError:
        sys.exit(f"llama-cpp: can't listen on {address}")
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    await server.start()
    sys.stdout.write(f"listening on {address.rpartition(':')[0]}:{port}\n")
    sys.stdout.flush()
    await ended.wait()
    await server.stop(_GRACE)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


if __name__ == "__main__":
    main()
