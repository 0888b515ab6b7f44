"""Free TCP ports for servers that bind them only after a minute of imports."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterable, Iterator
from itertools import cycle, islice

LOWEST, HIGHEST = 20_000, 32_000
"""Below the kernel's range of ephemeral ports, so no socket gets one of these by chance."""

_DERIVED = (0, *range(233, 246))
"""With DP attention, SGLang derives a dozen ports from its API port, at these offsets."""


def shuffled(ports: range) -> Iterator[int]:
    """Repeat these ports in a random order. Neighbours differ by multiples of 28, so that SGLang
    derives neither port from the other, nor a third port from both."""
    turn = random.randrange(28)
    return cycle(sorted(random.sample(ports, len(ports)), key=lambda port: (port + turn) % 28))


candidates = shuffled(range(LOWEST, HIGHEST))


def _is_free(port: int) -> bool:
    """Return whether this port is free now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _all_free(ports: Iterable[int]) -> bool:
    return all(_is_free(port) for port in ports)


def free_port() -> int:
    """Return an API port that is free now, as are the ports that SGLang derives from it.

    It is drawn at random, and not drawn again, so that programs that search at the same time, and
    servers that have not bound theirs yet, do not collide.
    """
    for port in islice(candidates, 200):
        if _all_free(port + distance for distance in _DERIVED):
            return port
    raise RuntimeError("no free port in 200 tries")
