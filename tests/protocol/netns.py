"""Unnamed network namespaces, one per host, connected by a bridge.

A namespace exists as long as a process runs in it. `Network` runs a sleeping process in each, which
the kernel ends together with this process, so no namespace is left behind.

    with Network(3) as network:
        network.hosts            [(pid, "10.77.0.1"), ...]: a rank calls enter(pid)
        network.cut(1)           take down the bridge's port to this host
        network.slow(1, "1mbit") limit the rate in both directions
        network.mend(1)          restore the link
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
import time
from contextlib import ExitStack
from typing import Self

from rig.process.forks import die_with_parent

TOOLS = ("ip", "nsenter", "tc", "unshare")
CLONE_NEWNET = 0x40000000


def why_not() -> str:
    """Return why network namespaces cannot be created here, or ""."""
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        return f"without {', '.join(missing)} no network namespaces"
    try:
        with Network(1):
            return ""
    except subprocess.CalledProcessError as error:
        return f"no network namespaces with veth and bridge: {error.stderr.strip()}"


def enter(pid: int) -> None:
    """Move this thread, and the threads and processes that it starts later, into the namespace of
    process `pid`."""
    libc = ctypes.CDLL(None, use_errno=True)
    fd = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
    try:
        if libc.setns(fd, CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
    finally:
        os.close(fd)


class Network:
    """A network of `size` hosts. Raises CalledProcessError if the kernel or the user's rights do
    not allow it."""

    def __init__(self, size: int) -> None:
        self._size, self._stack = size, ExitStack()
        self.hosts: list[tuple[int, str]] = []
        self._slow: set[int] = set()

    def __enter__(self) -> Self:
        with self._stack:
            self._bridge = self._namespace()
            self._ip(self._bridge, "link add bridge type bridge")
            self._ip(self._bridge, "link set bridge up")
            for number in range(self._size):
                self._add_host(number)
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def cut(self, number: int) -> None:
        self._ip(self._bridge, f"link set port{number} down")

    def slow(self, number: int, rate: str) -> None:
        """Limit a link's rate, with a short queue, so that TCP loses packets."""
        self._slow.add(number)
        self._shape(number, f"replace dev {{}} root tbf rate {rate} burst 16kb limit 64kb")

    def mend(self, number: int) -> None:
        self._ip(self._bridge, f"link set port{number} up")
        if number in self._slow:
            self._slow.remove(number)
            self._shape(number, "del dev {} root")

    def _shape(self, number: int, words: str) -> None:
        for pid, device in ((self._bridge, f"port{number}"), (self.hosts[number][0], "eth0")):
            self._run(pid, f"tc qdisc {words.format(device)}")

    def _add_host(self, number: int) -> None:
        pid, address = self._namespace(), f"10.77.0.{number + 1}"
        self._ip(self._bridge, f"link add port{number} type veth peer name eth0 netns {pid}")
        self._ip(self._bridge, f"link set port{number} master bridge up")
        self._ip(pid, f"addr add {address}/24 dev eth0")
        for device in ("lo", "eth0"):
            self._ip(pid, f"link set {device} up")
        self.hosts.append((pid, address))

    def _namespace(self) -> int:
        """Start a sleeping process in a new namespace, and return its process id."""
        own = os.readlink("/proc/self/ns/net")
        sleeper = subprocess.Popen(
            ["unshare", "--net", "sleep", "infinity"], stderr=subprocess.PIPE, text=True,
            preexec_fn=die_with_parent,
        )  # fmt: skip
        self._stack.callback(_end, sleeper)
        while (code := sleeper.poll()) is None:
            with contextlib.suppress(FileNotFoundError):  # the process has just ended
                if os.readlink(f"/proc/{sleeper.pid}/ns/net") != own:
                    return sleeper.pid
            time.sleep(0.005)
        assert sleeper.stderr is not None
        raise subprocess.CalledProcessError(code, sleeper.args, stderr=sleeper.stderr.read())

    def _ip(self, pid: int, words: str) -> None:
        self._run(pid, f"ip {words}")

    def _run(self, pid: int, words: str) -> None:
        command = ["nsenter", "--target", str(pid), "--net", *words.split()]
        subprocess.run(command, check=True, capture_output=True, text=True)


def _end(sleeper: subprocess.Popen[str]) -> None:
    sleeper.kill()
    sleeper.communicate()
