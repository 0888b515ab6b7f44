"""All threads of the plugin have ended when the interpreter exits, even during traffic.

A thread that the exiting interpreter ends inside a C++ call aborts the process.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

TESTS = Path(__file__).parent.parent
ROOMS = 20  # rooms to complete before the exit


def left() -> None:
    print("left:", *(one.name for one in threading.enumerate() if one.name.startswith("mixkv-")))


def run(plane: str, hangs: str) -> None:
    atexit.register(left)  # registered before the plugin's exit hooks, to run after them
    from rig.channel import threads

    from sglang_mixkv.background import Background, in_thread
    from sglang_mixkv.channel.mooncake import Mooncake
    from sglang_mixkv.channel.nixl import Nixl
    from sglang_mixkv.channel.times import Times
    from sglang_mixkv.draft import copier

    makes: dict[str, Any] = {"mooncake": lambda: Mooncake("127.0.0.1"), "nixl": Nixl}
    planes = [makes[plane]() if plane in makes else None for _ in range(2)]
    copier.AT_ONCE = 0 if plane == "copies" else copier.AT_ONCE  # 0: copy in separate threads
    prefill = threads.Prefill(Times(), plane=planes[0])
    decode = threads.Decode(Times(), plane=planes[1])
    peer, background, done = decode.reach(prefill.row), Background("mixkv-ask", 2), list[int]()
    if hangs:
        in_thread("mixkv-name", time.sleep, 600)

    def traffic(first: int) -> None:
        for room in range(first, first + 1_000_000):
            sent, handle = prefill.send(room, 20), decode.open(room, 20, peer)
            while handle.state is None:
                time.sleep(1e-4)
            prefill.channel.end(sent)
            decode.channel.close(handle)
            done.append(room)

    for number in range(2):
        threading.Thread(target=traffic, args=(number * 1_000_000,), daemon=True).start()
    assert threads.wait_for(lambda: len(done) >= ROOMS)
    background.run(asyncio.sleep(600))
    assert threads.wait_for(lambda: background.running)


@pytest.mark.parametrize(
    ("plane", "hangs"),
    [("fake", ""), ("copies", ""), ("fake", "hangs"), ("mooncake", ""), ("nixl", "")],
)
def test_no_thread_is_left_at_exit(plane: str, hangs: str) -> None:
    """At exit, no thread of the plugin is alive except a hung one.

    The exit does not wait for a hung thread.
    """
    env = os.environ | {
        "PYTHONPATH": f"{TESTS.parent}:{TESTS}", "MC_FORCE_TCP": "1", "MOONCAKE_PROTOCOL": "tcp",
    }  # fmt: skip
    command = [sys.executable, __file__, plane, hangs]
    ended = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=100, check=False
    )
    (line,) = (line for line in ended.stdout.splitlines() if line.startswith("left:"))
    assert line.split()[1:] == ["mixkv-name"] * bool(hangs)
    assert ended.returncode == 0, ended.stderr[-500:]
    assert "pending" not in ended.stderr


def test_several_hung_threads_share_the_exit_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All threads together get END_S seconds to end."""
    from sglang_mixkv import background

    takes, given = {"mixkv-a": 0.2, "mixkv-b": 60, "mixkv-c": 60, "other": 60}, dict[str, float]()

    def join(self: threading.Thread, seconds: float) -> None:
        given[self.name] = seconds
        now[0] += min(seconds, takes[self.name])

    now, threads = [1000.0], [threading.Thread(name=name) for name in takes]
    monkeypatch.setattr(background, "stoppable", ())
    monkeypatch.setattr(background, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(background.threading, "enumerate", lambda: threads)
    monkeypatch.setattr(threading.Thread, "join", join)
    background.end_threads()
    expected = {"mixkv-a": background.END_S, "mixkv-b": background.END_S - 0.2, "mixkv-c": 0.0}
    assert given == pytest.approx(expected)
    assert 0.1 <= background.END_S <= 1.0


if __name__ == "__main__":
    run(*sys.argv[1:])
