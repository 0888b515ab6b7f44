"""The leak check reports resources that stay open, but not those that are closed a bit later."""

from __future__ import annotations

import socket
import threading
from contextlib import ExitStack

from rig.process.resources import grown, leaks, resources


def test_open_resources_are_reported() -> None:
    warm, end = resources(), threading.Event()
    with ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(socket.socket())
        thread = threading.Thread(target=end.wait, daemon=True)
        thread.start()
        now = resources()
        found = {line.partition(" ")[0] for line in grown(warm, now, {"rss_mib": 64})}
        assert found == {"threads", "fds", "sockets"}
        assert leaks(warm, resources, {"threads": 1, "fds": 3, "sockets": 3, "rss_mib": 64}) == []
        assert len(leaks(warm, resources, {"sockets": 3, "rss_mib": 64}, seconds=0.1)) == 2
        closing = threading.Timer(0.3, stack.close)
        closing.start()
        end.set()
        assert leaks({**warm, "threads": now["threads"]}, resources, {"rss_mib": 64}) == []
    closing.join()
    thread.join()
