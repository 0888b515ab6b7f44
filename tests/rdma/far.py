"""The server on the second machine of scripts/rdma.sh, which runs functions for the first machine.
Each connection runs one function in a forked process; its module is imported before the fork."""

from __future__ import annotations

import os
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from rig.channel.planes import FORK

ADDRESS = "10.9.1.2", 7009
KEY = b"of a test"
START_S = 600.0
"""Time limit for the start of an emulated machine."""


@dataclass
class Failure:
    """The traceback of an error that a function raised on the second machine."""

    text: str


class Call:
    """A running call of function `module:name` on the second machine, with a Connection and these
    arguments."""

    def __init__(self, name: str, *arguments: Any) -> None:
        until = time.monotonic() + START_S
        while True:
            try:
                self._pipe: Any = Client(ADDRESS, authkey=KEY)
                break
            except (OSError, EOFError):
                if time.monotonic() > until:
                    raise
                time.sleep(1)
        self.send((name, arguments))

    def send(self, what: Any) -> None:
        self._pipe.send(what)

    def recv(self) -> Any:
        found = self._pipe.recv()
        assert not isinstance(found, Failure), found.text
        return found

    def close(self) -> None:
        self._pipe.close()


def restart(pipe: Connection) -> None:
    """Receive a number of seconds, wait, and restart the machine as if its power had failed."""
    time.sleep(pipe.recv())
    Path("/proc/sysrq-trigger").write_text("b")


def serve() -> None:
    with Listener(ADDRESS, backlog=8, authkey=KEY) as listener:
        while True:
            with listener.accept() as pipe:
                name, arguments = pipe.recv()
                process = FORK.Process(target=answer, args=(pipe, name, arguments))
                with suppress(Exception):  # `answer` reports the error
                    resolve_name(name)
                process.start()


def answer(pipe: Connection, name: str, arguments: tuple[Any, ...]) -> None:
    try:
        with suppress(EOFError):
            resolve_name(name)(pipe, *arguments)
    except BaseException:
        pipe.send(Failure(traceback.format_exc()))
    os._exit(0)


if __name__ == "__main__":
    serve()
