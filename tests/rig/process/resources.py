"""The resources that a process holds, and which of them have grown."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

Held = Mapping[str, int]

SLACK = {"threads": 6, "fds": 24, "sockets": 24, "rss_mib": 64}
"""For what is created on first use: Mooncake has up to four sockets to each peer."""


def resources() -> dict[str, int]:
    """Count what this process holds."""
    fds = list(_existing_fds())
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "threads": len(os.listdir("/proc/self/task")),
        "fds": len(fds),
        "sockets": sum(fd.startswith("socket:") for fd in fds),
        "rss_mib": pages * os.sysconf("SC_PAGE_SIZE") >> 20,
    }


def _existing_fds() -> Iterable[str]:
    """Yield what the open descriptors refer to; one may be closed during the listing."""
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            yield os.readlink(f"/proc/self/fd/{fd}")


def grown(warm: Held, end: Held, slack: Held) -> list[str]:
    """Describe what has grown by more than its slack."""
    return [
        f"{name} grew from {warm[name]} to {end[name]}"
        for name in warm
        if end[name] > warm[name] + slack.get(name, 0)
    ]


def leaks(warm: Held, now: Callable[[], Held], slack: Held, seconds: float = 5) -> list[str]:
    """Describe what has grown and stays so for `seconds`: closing takes time."""
    deadline = time.monotonic() + seconds
    while (found := grown(warm, now(), slack)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found
