"""HTTP servers in threads: one with the test's answers, and one that never answers completely."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

STEP_S = 0.05


@contextmanager
def serving(
    answer: Callable[..., tuple[int, bytes]], host: str = "127.0.0.1", port: int = 0
) -> Iterator[str]:
    """Yield a server's address. `answer`: takes a path with its query, and returns a status and a
    body; it may block. For a POST it also takes the JSON and the Authorization header. `host`: ""
    listens on all addresses."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            text = self.rfile.read(int(self.headers["Content-Length"]))
            self.do_GET(json.loads(text), self.headers["Authorization"])

        def do_GET(self, *sent: Any) -> None:
            status, body = answer(self.path, *sent)
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            with contextlib.suppress(OSError):  # the client has closed the connection
                self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer((host, port), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def many(address: str, count: int) -> list[str]:
    """Return `count` loopback addresses of a server that listens on all addresses."""
    return [f"127.0.1.{number}:{address.rpartition(':')[2]}" for number in range(1, count + 1)]


@contextmanager
def silent(begin: bytes = b"", drip: bytes = b"") -> Iterator[str]:
    """Yield the address of a server that accepts each connection and sends `begin`, then `drip`
    repeatedly, but never a complete answer. It listens on all addresses."""
    stop, listener = threading.Event(), socket.create_server(("", 0), backlog=256)

    def run() -> None:
        listener.setblocking(False)
        taken: list[socket.socket] = []
        while not stop.wait(STEP_S):
            with contextlib.suppress(BlockingIOError):
                while True:
                    taken.append(listener.accept()[0])
                    taken[-1].sendall(begin)
            for one in taken if drip else ():
                with contextlib.suppress(OSError):
                    one.sendall(drip)
        for one in taken:
            one.close()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        stop.set()
        thread.join()
        listener.close()
