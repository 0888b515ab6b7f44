"""Measure a process's resources, and find leaks."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

Held = Mapping[str, int]

SLACK = {"threads": 6, "fds": 24, "sockets": 24, "rss_mib": 64}
"""Allowance for resources created on first use: Mooncake has up to four sockets per peer."""


def resources() -> dict[str, int]:
    """Count the resources of this process."""
    fds = list(_existing_fds())
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "threads": len(os.listdir("/proc/self/task")),
        "fds": len(fds),
        "sockets": sum(fd.startswith("socket:") for fd in fds),
        "rss_mib": pages * os.sysconf("SC_PAGE_SIZE") >> 20,
    }


def _existing_fds() -> Iterable[str]:
    """Yield the targets of the open file descriptors. A descriptor may be closed while they are
    listed."""
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            yield os.readlink(f"/proc/self/fd/{fd}")


def grown(warm: Held, end: Held, slack: Held) -> list[str]:
    """Describe the resources that have grown by more than their slack."""
    return [
        f"{name} grew from {warm[name]} to {end[name]}"
        for name in warm
        if end[name] > warm[name] + slack.get(name, 0)
    ]


def leaks(warm: Held, now: Callable[[], Held], slack: Held, seconds: float = 5) -> list[str]:
    """Describe the resources that are still above their slack after `seconds`, since closing them
    takes time."""
    deadline = time.monotonic() + seconds
    while (found := grown(warm, now(), slack)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found
