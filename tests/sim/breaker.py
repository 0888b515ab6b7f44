"""A rank's breaker, and what it may say by its rules alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from sglang_mixkv.decode.breaker import Breaker
from tests.sim.checks import Finding


class Watched(Breaker):
    """Three rooms in a row open it. From then on one room after 1, 2, 4, ... 30 s is a probe, and
    strikes of other rooms don't count."""

    def __init__(self) -> None:
        super().__init__()
        self.struck: set[tuple[bytes, int]] = set()  # peer, generation
        self.probes: dict[bytes, int] = {}  # generation, by peer
        self._strikes: Counter[bytes] = Counter()
        self._until: dict[bytes, float] = {}

    def blocked(self, peers: Iterable[bytes], generation: int, now: float) -> bool:
        peers = list(peers)
        found = super().blocked(peers, generation, now)
        opened = [peer for peer in peers if self._strikes[peer] >= 3]
        right = any(peer in self.probes or now < self._until[peer] for peer in opened)
        if found != right:
            raise Finding("breaker", f"at {now}, blocked: {found}; {self._strikes}, {self._until}")
        if not found:
            self.probes.update(dict.fromkeys(opened, generation))
        return found

    def strike(self, peer: bytes, generation: int, now: float) -> bool:
        self.struck.add((peer, generation))
        if self._strikes[peer] < 3 or self.probes.get(peer) == generation:
            self.probes.pop(peer, None)
            self._strikes[peer] += 1
            self._until[peer] = now + min(2.0 ** (self._strikes[peer] - 3), 30.0)
        return super().strike(peer, generation, now)

    def warm(self, peer: bytes) -> None:
        super().warm(peer)
        self.probes.pop(peer, None)
        del self._strikes[peer]

    def withdraw(self, generation: int) -> None:
        super().withdraw(generation)
        self.probes = {p: g for p, g in self.probes.items() if g != generation}
