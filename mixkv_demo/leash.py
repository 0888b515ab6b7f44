"""Run one server so that none of its processes outlives the program that started it.

``python -m mixkv_demo.leash PARENT_PID FOLDER COMMAND...`` is a process between starter and server:

    starter --SIGTERM, or its death--> leash --SIGTERM--> server
                                             --SIGKILL, after GRACE_S--> server's group

The server gets a process group of its own, and the leash adopts processes that the server orphans
(a scheduler after its parent has crashed, for example), so all are gone once the leash has no
child. The leash ends when the server exits (with its exit status), on SIGTERM, or when its starter
is gone. It removes FOLDER only in the last case, since the starter no longer can.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

GRACE_S = float(os.environ.get("MIXKV_LEASH_GRACE_S", "15"))
"""Seconds between SIGTERM and SIGKILL."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def _prctl(option: int, value: int) -> None:
    """Set one attribute of this process; on a kernel that lacks it, do nothing."""
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _die_with_parent() -> None:
    """Make the kernel kill this process, which becomes the server, when the leash dies."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _signal_group(group: int, number: signal.Signals) -> None:
    """Signal every process of the group, if any is left."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


def _reap(seconds: float) -> bool:
    """Collect ended children for at most `seconds`; True if none is left."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return True
        if pid == 0:
            time.sleep(0.05)
    return False


def _end(server: subprocess.Popen[bytes]) -> None:
    """End the server and its whole group, with SIGTERM and, if processes remain, SIGKILL.

    SIGTERM goes to the server alone: SGLang would treat its schedulers' exits as a crash, and leave
    shared memory behind. If the server is dead, the rest of its group gets SIGTERM.
    """
    if server.poll() is None:
        server.terminate()
    else:
        _signal_group(server.pid, signal.SIGTERM)
    if not _reap(GRACE_S):
        _signal_group(server.pid, signal.SIGKILL)
        _reap(GRACE_S)


def _serve(command: list[str]) -> int:
    """Run the server until it ends or SIGTERM arrives; leave none of its processes behind."""
    server = subprocess.Popen(command, process_group=0, preexec_fn=_die_with_parent)
    try:
        status = server.wait()
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        _end(server)
    return status if status >= 0 else 128 - status


def main(argv: list[str]) -> int:
    """Tie this process to its parent, run the command, and remove FOLDER if the parent has died."""
    parent, folder, command = int(argv[0]), Path(argv[1]), argv[2:]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        return _serve(command) if os.getppid() == parent else 1
    finally:
        if os.getppid() != parent:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
