"""The processes of the doctor's read (doctor_read.py): started, listened to and ended."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import time
from collections import deque
from contextlib import ExitStack
from threading import Thread
from typing import Any

import msgspec

from sglang_mixkv.config import Config

PROGRAM = "sglang_mixkv.tools.doctor_read"  # not imported here, where a package may be missing
PREFIX = "mixkv-doctor "
READ = 8
"""How many slots are read, all at once; twice, and the faster counts."""
LIMIT_S, LISTEN_S = 120.0, 600.0


class ReadFailed(RuntimeError):
    """It did not work; the text says where."""


class Wire(msgspec.Struct, frozen=True):
    """What the flags and variables of a server decide: SGLang's transfer backend, RDMA devices, and
    the plugin's settings."""

    backend: str = "mooncake"
    devices: str = ""
    config: Config = Config()


class Children(ExitStack):
    """They end with this block, and with this process, as their standard input does."""

    def __init__(self) -> None:
        super().__init__()
        self._reports: queue.Queue[tuple[str, dict[str, Any]]] = queue.Queue()

    def start(self, role: str, host: str, port: int, wire: Wire) -> None:
        words = [role, host, str(port), msgspec.json.encode(wire).decode()]
        process = self.enter_context(
            subprocess.Popen(
                [sys.executable, "-m", PROGRAM, *words],
                env={**os.environ, "PYTHONUNBUFFERED": "1"}, text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )
        )  # fmt: skip
        thread = Thread(target=self._queue_reports, args=(role, process))
        thread.start()
        self.callback(thread.join)
        self.callback(process.kill)

    def _queue_reports(self, role: str, process: subprocess.Popen[str]) -> None:
        last: deque[str] = deque(maxlen=3)
        report: dict[str, Any] = {}
        for line in process.stdout or ():
            if line.startswith(PREFIX):
                report = json.loads(line.removeprefix(PREFIX))
                self._reports.put((role, report))
            elif line.strip():
                last.append(line.strip())
        if "result" not in report:
            text = f"its process ended with status {process.wait()}: {' | '.join(last)}"
            self._reports.put((role, {"failed": text}))

    def wait(self, role: str, key: str, limit_s: float = LIMIT_S) -> Any:
        """What this role reports by that name. ReadFailed where one fails first, or time is up."""
        until = time.monotonic() + limit_s
        while True:
            try:
                who, report = self._reports.get(timeout=max(0, until - time.monotonic()))
            except queue.Empty:
                raise ReadFailed(f"no end after {limit_s:.0f} s") from None
            if "failed" in report:
                raise ReadFailed(report["failed"])
            if who == role and key in report:
                return report[key]


def result(wire: Wire, listen: int | None = None, peer: tuple[str, int] | None = None) -> Any:
    """What a process here read from a peer, a peer from one here, or else one here from another."""
    with Children() as children:
        if peer is None:
            children.start("serve", "127.0.0.1" if listen is None else "*", listen or 0, wire)
            peer = "127.0.0.1", children.wait("serve", "port")
            if listen is not None:
                print(f"listening on port {peer[1]} for one --peer", file=sys.stderr, flush=True)
                return children.wait("serve", "result", LISTEN_S)
        children.start("read", *peer, wire)
        return children.wait("read", "result")
