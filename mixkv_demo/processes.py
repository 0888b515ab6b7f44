"""Groups of server processes that end together.

A :class:`Fleet` is a context manager. It starts servers and detects when one dies. On exit (normal,
exception, Ctrl-C, SIGTERM) it ends all of them and removes their folders. Start servers from the
thread that entered the context: when a thread ends, the kernel ends each leash that it started.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Self

from mixkv_demo import leash

TAIL_LINES = 30
"""The number of log lines in the error about a dead server."""

ERROR_LINE = re.compile(r"^[\w.]+(?:Error|Exception)\b.*$", re.MULTILINE)
"""The last line of a traceback. If a scheduler fails, SGLang prints much more below it."""


class ServerDied(RuntimeError):
    """A server ended unexpectedly; the message has its last log lines."""


@dataclass
class ServerProcess:
    """One running server: its leash, its log, and a temporary folder of its own."""

    name: str
    log: Path
    process: subprocess.Popen[bytes]

    def tail(self, lines: int = TAIL_LINES) -> str:
        """Return the last lines of the log."""
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return "\n".join(text.splitlines()[-lines:])

    def last_error(self) -> str:
        """Return the last line of the log's last traceback; "" if there is none."""
        found = ERROR_LINE.findall(self.log.read_text(errors="replace"))
        return f"its last error:\n{found[-1]}\n" if found else ""

    def check(self) -> None:
        """Raise :class:`ServerDied` unless the server runs."""
        status = self.process.poll()
        if status is not None:
            raise ServerDied(
                f"{self.name} ended with status {status}; {self.last_error()}"
                f"the end of its log:\n{self.tail()}"
            )

    def finish(self) -> None:
        """Wait for the leash to end after a SIGTERM, which takes at most 2 * GRACE_S."""
        try:
            self.process.wait(2 * leash.GRACE_S + 5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def leashed(server: ServerProcess) -> list[int]:
    """Return the processes below a server's leash, beginning with the server itself."""
    pid = server.process.pid
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _exit_on_sigterm(number: int, _frame: FrameType | None) -> None:
    """Turn SIGTERM into an exception, so that contexts unwind."""
    raise SystemExit(128 + number)


class Fleet:
    """Servers that end together. ``logs``: keep the log files in that folder."""

    def __init__(self, logs: Path | None = None) -> None:
        self._keep = logs
        self._servers: list[ServerProcess] = []
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self.root = Path(tempfile.mkdtemp(prefix="mixkv-"))
        self._stack.callback(shutil.rmtree, self.root, ignore_errors=True)
        self._handle(signal.SIGTERM, _exit_on_sigterm)
        return self

    def __exit__(self, *_exc: object) -> None:
        """End all servers; a second Ctrl-C or SIGTERM does not interrupt this."""
        for number in (signal.SIGINT, signal.SIGTERM):
            self._handle(number, signal.SIG_IGN)
        self._end_servers()
        self._stack.close()

    def _handle(self, number: signal.Signals, handler: signal._HANDLER) -> None:
        """Install a signal handler until the end of the context (main thread only)."""
        try:
            previous = signal.signal(number, handler)
        except ValueError:
            return
        self._stack.callback(signal.signal, number, previous)

    def _end_servers(self) -> None:
        """Send SIGTERM to all servers, then wait for them, so that they end concurrently."""
        for server in self._servers:
            server.process.terminate()
        for server in self._servers:
            server.finish()
        self._servers.clear()

    def folder(self, name: str) -> Path:
        """Make a folder that is removed with this fleet."""
        path = self.root / name
        path.mkdir(parents=True)
        return path

    def _log_path(self, name: str, home: Path) -> Path:
        """Return the path of a server's log: in its own folder, or in the folder for logs."""
        if self._keep is None:
            return home / "log"
        self._keep.mkdir(parents=True, exist_ok=True)
        return self._keep / f"{name}.log"

    def start(self, name: str, argv: Sequence[str], env: Mapping[str, str]) -> ServerProcess:
        """Start one server on a leash, with ``env`` on top of this process's environment.

        The server stays in this session: Linux first divides CPU time by session (autogroup), so
        the HTTP thread of a server with polling ranks would otherwise wait for seconds.
        """
        home = self.folder(name)
        scratch = self.folder(f"{name}/tmp")
        log = self._log_path(name, home)
        command = [sys.executable, "-m", leash.__name__, str(os.getpid()), str(self.root), *argv]
        with log.open("wb") as out:
            process = subprocess.Popen(
                command,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **env, "TMPDIR": str(scratch)},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                process_group=0,
            )
        self._servers.append(ServerProcess(name, log, process))
        return self._servers[-1]

    def kill(self, name: str) -> None:
        """Kill every process of one server, and drop it from the fleet."""
        (server,) = [one for one in self._servers if one.name == name]
        for pid in leashed(server):
            os.killpg(pid, signal.SIGKILL)
        self._servers.remove(server)
        server.finish()

    def pids(self) -> dict[str, int]:
        """Return the PID of each server's own process, by the server's name."""
        return {server.name: leashed(server)[0] for server in self._servers}

    def check(self) -> None:
        """Raise :class:`ServerDied` if any server of this fleet has ended."""
        for server in self._servers:
            server.check()
