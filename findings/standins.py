"""Stand-ins for SGLang's prefill and decode servers, and a router in front of them, for the scripts
in this folder that test routers."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from random import randint
from typing import Any

Answer = Callable[[str, dict[str, Any]], tuple[int, dict[str, Any]]]
COMMANDS = {
    "sglang-router": (sys.executable, "-m", "sglang_router.launch_router"),
    "smg": (sys.executable, "-c", "from smg.cli import main; main()", "launch"),
}
"""These start smg by its module, since sglang-router also installs a command smg."""
REQUEST = {"input_ids": [1, 2], "sampling_params": {}}
MODEL = {"id": "m", "object": "model", "created": 0, "owned_by": "sglang"}
INFO = {
    "model_path": "m", "served_model_name": "m", "tp_size": 1, "dp_size": 1,
    "is_generation": True, "model_type": "llama", "version": "0.5.23",
}  # fmt: skip


def ok(path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """Generate a token for any endpoint."""
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    choice = {"index": 0, "message": {"role": "assistant", "content": "x"}, "text": "x"}
    made = {"id": "1", "object": "chat.completion", "created": 1, "model": "m", "usage": usage}
    meta = {"id": "1", "finish_reason": {"type": "stop"}, **usage}
    return 200, {**made, "choices": [choice], "text": "x", "output_ids": [1], "meta_info": meta}


def error(status: int, text: str = "the reason") -> Answer:
    return lambda path, body: (status, {"error": {"message": text}})


class Server(ThreadingHTTPServer):
    """A server that answers GETs as SGLang does, and POSTs with `answer`. `posts`: the paths and
    bodies of POSTs. `page`: the metrics page."""

    daemon_threads = True

    def __init__(self, answer: Answer = ok, page: str = "") -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answer, self.page = answer, page
        self.posts = list[tuple[str, dict[str, Any]]]()
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        threading.Thread(target=self.serve_forever, daemon=True).start()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_GET(self) -> None:
        path, models = self.path.partition("?")[0], {"object": "list", "data": [MODEL]}
        if path == "/metrics":
            self._send(200, "text/plain; version=0.0.4", self.server.page.encode())
        else:
            self._reply(200, models if path == "/v1/models" else INFO)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.posts.append((self.path, body))
        self._reply(*self.server.answer(self.path, body))

    def _reply(self, status: int, body: dict[str, Any]) -> None:
        self._send(status, "application/json", json.dumps(body).encode())

    def _send(self, status: int, kind: str, text: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(text)))
        with contextlib.suppress(OSError):  # the router has closed the connection
            self.end_headers()
            self.wfile.write(text)

    def log_message(self, *_: object) -> None: ...


def address() -> str:
    """Return a loopback address and port that nothing else on this machine is likely to use."""
    while True:
        host = f"127.{randint(1, 254)}.{randint(0, 255)}.{randint(1, 254)}"
        port = randint(20_000, 29_999)  # below the range of ephemeral ports
        with contextlib.suppress(OSError), socket.create_server((host, port)):
            return f"{host}:{port}"


class Router:
    """A router in front of the servers at these URLs, which runs during the context. `ready`: the
    path that must return 200 before the context begins."""

    def __init__(
        self, kind: str, prefill: str, decode: str, *flags: str, ready: str = "/readiness"
    ) -> None:
        (host, port), (_, metrics) = address().split(":"), address().split(":")
        self.url, self._ready = f"http://{host}:{port}", ready
        self.metrics = f"http://{host}:{metrics}/metrics"
        self._command = [
            *COMMANDS[kind], "--pd-disaggregation", "--host", host, "--port", port,
            "--prometheus-host", host, "--prometheus-port", metrics, "--policy", "round_robin",
            "--prefill", prefill, "8998", "--decode", decode, *flags,
        ]  # fmt: skip

    def __enter__(self) -> Router:
        self._process = subprocess.Popen(
            self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        until = time.monotonic() + 60
        while self.ask(self._ready)[0] != 200:
            if time.monotonic() > until or self._process.poll() is not None:
                self.__exit__()
                raise SystemExit("the router does not start")
            time.sleep(0.1)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()

    def ask(self, path: str, body: dict[str, Any] | None = None) -> tuple[int, bytes]:
        """Send a GET, or a POST if there is a body. Return the status (0 without an answer) and the
        answer's body."""
        request = urllib.request.Request(
            self.url + path, None if body is None else json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )  # fmt: skip
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as answer:
            return answer.code, answer.read()
        except OSError:
            return 0, b""
