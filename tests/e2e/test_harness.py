"""However a test or the demo ends, its servers and their child processes end too."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from rig.channel.threads import wait_for

from mixkv_demo.processes import Fleet, ServerDied

# A server with a child that ignores SIGTERM. Both write their process ids to files.
STUBBORN = """
import os, signal, sys, time
if os.fork() == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    open(sys.argv[1] + "/child", "w").write(str(os.getpid()))
else:
    open(sys.argv[1] + "/server", "w").write(str(os.getpid()))
time.sleep(600)
"""

# A program with a fleet of one such server.
STARTER = """
import sys, time
from mixkv_demo.processes import Fleet
with Fleet() as fleet:
    fleet.start("stubborn", [sys.executable, "-c", sys.argv[2], sys.argv[1]], {})
    open(sys.argv[1] + "/root", "w").write(str(fleet.root))
    time.sleep(600)
"""


@pytest.fixture(autouse=True)
def _short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MIXKV_LEASH_GRACE_S", "1")


def read(folder: Path, name: str) -> str:
    path = folder / name
    assert wait_for(lambda: path.exists() and bool(path.read_text())), path
    return path.read_text()


def gone(pid: int) -> bool:
    """Return True if the process has ended, even if its parent has not waited for it yet."""
    try:
        os.kill(pid, 0)
        state = Path(f"/proc/{pid}/stat").read_text()
    except (ProcessLookupError, FileNotFoundError):
        return True
    return state.rpartition(")")[2].split()[0] == "Z"


def ids(folder: Path) -> list[int]:
    return [int(read(folder, name)) for name in ("server", "child")]


def test_leaving_the_context_ends_all_processes(tmp_path: Path) -> None:
    """A server's children also end when the server itself is killed."""
    with Fleet() as fleet:
        for name in ("killed", "left"):
            (folder := tmp_path / name).mkdir()
            fleet.start(name, [sys.executable, "-c", STUBBORN, str(folder)], {})
            pids = ids(folder)
            assert not any(map(gone, pids))
            assert {os.getsid(pid) for pid in pids} == {os.getsid(0)}
            assert os.getpgrp() not in map(
                os.getpgid, pids
            )  # so that Ctrl-C reaches only their starter
            if name == "killed":
                os.kill(pids[0], signal.SIGKILL)
                assert wait_for(lambda child=pids[1]: gone(child))
    assert all(map(gone, pids))
    assert not fleet.root.exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_killed_starter_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    starter = subprocess.Popen(
        [sys.executable, "-c", STARTER, str(tmp_path), STUBBORN], stderr=subprocess.DEVNULL
    )
    pids, root = ids(tmp_path), Path(read(tmp_path, "root"))
    starter.send_signal(number)
    assert starter.wait(15) != 0
    assert wait_for(lambda: all(map(gone, pids)))
    assert wait_for(lambda: not root.exists())


def test_the_death_of_a_server_is_reported(tmp_path: Path) -> None:
    """The report includes the server's last error, even if many log lines follow it."""
    script = "print('x.OperatorError: no cheese\\n' + 'dump\\n' * 99); raise SystemExit(7)"
    with Fleet(tmp_path / "logs") as fleet:
        server = fleet.start("brief", [sys.executable, "-c", script], {})
        assert server.process.wait(15) == 7
        words = r"(?s)brief ended with status 7.*its last error:\nx\.OperatorError: no cheese\n"
        with pytest.raises(ServerDied, match=words):
            fleet.check()
    assert "no cheese" in (tmp_path / "logs" / "brief.log").read_text()


def test_ctrl_c_ends_a_child() -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        child.send_signal(signal.SIGINT)
    assert child.returncode == -signal.SIGINT


def test_ctrl_c_ends_a_child_of_a_background_job() -> None:
    """A shell's background job ignores SIGINT, and its children inherit that, unless
    tests/conftest.py restores the handler."""
    script = 'trap "" INT; exec "$0" -m pytest -q -p no:cacheprovider "$1"'
    test = f"{__file__}::{test_ctrl_c_ends_a_child.__name__}"
    subprocess.run(["bash", "-c", script, sys.executable, test], check=True, timeout=120)
