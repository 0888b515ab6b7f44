"""The doctor's transfer in processes of their own, started, heard and ended."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

from sglang_mixkv import cpu
from sglang_mixkv.tools import doctor_transfer as transfer
from sglang_mixkv.tools.doctor_memory import TransferFailed
from sglang_mixkv.tools.doctor_transfer import Wire


def _environment(wire: Wire) -> dict[str, str]:
    """As a server would have it; where it would use TCP what Mooncake's TCP needs."""
    extra = {}
    if wire.way == "tcp":
        names = ("MC_FORCE_TCP", "MC_TCP_ENABLE_CONNECTION_POOL")
        extra = {name: cpu.launch_env()[name] for name in names}
    return {**os.environ, **extra, "PYTHONUNBUFFERED": "1"}


class Child:
    """A process of doctor_transfer: what the transport aborts is not this one. It has so long, and
    ends with this process, as its standard input does; its notes are passed on at once."""

    def __init__(self, role: str, host: str, port: int, wire: Wire, limit_s: float) -> None:
        words = [role, host, str(port), wire.backend, *wire.names]
        self._process = subprocess.Popen(
            [sys.executable, "-m", transfer.__name__, *words], env=_environment(wire),
            text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        self._lines: list[str] = []
        self._limit_s, self._is_late = limit_s, False
        self._timer = threading.Timer(limit_s, self._end_late)

    def __enter__(self) -> Child:
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        self._process.kill()
        self._process.communicate()

    def _end_late(self) -> None:
        self._is_late = True
        self._process.kill()

    def _hear(self) -> Iterator[str]:
        """Each line until its end."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(transfer.NOTE):
                print(line.removeprefix(transfer.NOTE), end="", file=sys.stderr, flush=True)
            else:
                self._lines.append(line.rstrip())
                yield line

    def port(self) -> int:
        """On which it listens. Raises TransferFailed."""
        for line in self._hear():
            if line.startswith(transfer.LISTENING):
                return int(line.removeprefix(transfer.LISTENING))
        self.result()
        raise TransferFailed("the listening process ended before it listened")

    def result(self) -> Any:
        """What it says at its end. Raises TransferFailed."""
        for _ in self._hear():
            pass
        status = self._process.wait()
        if self._is_late:
            raise TransferFailed(f"no end after {self._limit_s:.0f} s")
        said = [
            line.removeprefix(transfer.PREFIX)
            for line in self._lines
            if line.startswith(transfer.PREFIX)
        ]
        if not said:
            last = " | ".join(line for line in self._lines[-3:] if line)
            raise TransferFailed(f"a child process ended with status {status}: {last}")
        found = json.loads(said[-1])
        if "failed" in found:
            raise TransferFailed(found["failed"])
        return found["result"]


def run_sender(host: str, port: int, wire: Wire) -> list[dict[str, Any]]:
    """The sender in a child process."""
    with Child("send", host, port, wire, 2 * transfer.SETUP_S) as child:
        blocks: list[dict[str, Any]] = child.result()
    return blocks


def run_listener(port: int, wire: Wire) -> int:
    """The listener on all addresses, in a child process: how many blocks arrived right."""
    with Child("listen", "", port, wire, transfer.LISTEN_S + 2 * transfer.SETUP_S) as child:
        print(f"{transfer.LISTENING}{child.port()} for one --peer", file=sys.stderr, flush=True)
        return int(child.result())


def loopback(wire: Wire) -> list[dict[str, Any]]:
    """A transfer between two child processes of this host."""
    with Child("listen", "127.0.0.1", 0, wire, 2 * transfer.SETUP_S) as child:
        return run_sender("127.0.0.1", child.port(), wire)
