"""
A slow link in user space: ``python -m bench.link PORT MBITS DELAY_MS`` (each way); ends TCP like an ingress.

It prints the port it listens on. One thread for each direction reads no faster than the rate, another one writes each
piece when it is due; the queue stands in the kernel's buffers in front of the reader, as it would in an ingress.
"""

from __future__ import annotations

import socket
import sys
import threading
import time
from queue import SimpleQueue

PIECE = 16 * 1024
CATCH_UP = 0.003
"""A reader that slept too long makes so much of it good (s): without it the link passed 91 % of its rate."""


def pass_on(source: socket.socket, sink: socket.socket, rate: float, delay: float) -> None:
    """Read ``source`` at ``rate`` (bytes/s), write to ``sink`` ``delay`` (s) later, until it ends."""
    due: SimpleQueue[tuple[float, bytes]] = SimpleQueue()

    def write() -> None:
        while True:
            at, piece = due.get()
            time.sleep(max(0.0, at - time.perf_counter()))
            if not piece:
                sink.close()
                return
            sink.sendall(piece)

    threading.Thread(target=write, daemon=True).start()
    free = time.perf_counter()
    while True:
        piece = source.recv(PIECE)
        now = time.perf_counter()
        free = max(free, now - CATCH_UP) + len(piece) / rate
        due.put((max(free, now) + delay, piece))
        if not piece:
            return
        wait = free - time.perf_counter()
        if wait > 0.001:
            time.sleep(wait)


def main(port: int, mbits: float, delay_ms: float) -> None:
    """Serve until killed."""
    listener = socket.create_server(("127.0.0.1", 0))
    sys.stdout.write(f"{listener.getsockname()[1]}\n")
    sys.stdout.flush()
    while True:
        near, _ = listener.accept()
        far = socket.create_connection(("127.0.0.1", port))
        for source, sink in ((near, far), (far, near)):
            source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            way = (source, sink, mbits * 1e6 / 8, delay_ms / 1000)
            threading.Thread(target=pass_on, args=way, daemon=True).start()


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]))
