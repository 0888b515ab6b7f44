"""Circuit breakers of prefill ranks: they decide which requests start cold without waiting.

If a rank's draft KV does not arrive, each request waits until its deadline. After three such
requests (strikes) in a row, the rank's breaker opens: requests start cold, except a probe after 1,
2, 4, ... 30 s. The probe's first segment half-closes the breaker: requests are let through, but one
more strike reopens it. A warm request closes it. A probe without a result allows another after 2 s.
"""

from __future__ import annotations

from collections.abc import Iterable

STRIKES = 3
FIRST_WAIT, LONGEST_WAIT, PROBE = 1.0, 30.0, 2.0


class _PeerState:
    def __init__(self) -> None:
        self.strikes, self.wait, self.until = 0, 0.0, 0.0
        self.probes: set[int] = set()  # generations of the probes

    @property
    def is_open(self) -> bool:
        return self.strikes >= STRIKES


class Breaker:
    """The state of each peer with strikes, until it is forgotten. Callers pass the time."""

    def __init__(self) -> None:
        self._states: dict[bytes, _PeerState] = {}

    def blocked(self, peers: Iterable[bytes], generation: int, now: float) -> bool:
        """Return whether a request that needs all these peers starts cold; else it may probe."""
        states = [s for peer in peers if (s := self._states.get(peer)) is not None and s.is_open]
        if any(now < state.until for state in states):
            return True
        for state in states:
            state.probes.add(generation)
            state.until = now + PROBE
        return False

    def came(self, peer: bytes) -> None:
        """Record the arrival of a segment of the peer's draft KV."""
        if (state := self._states.get(peer)) is not None and state.is_open:
            state.strikes = STRIKES - 1

    def forget(self, peer: bytes) -> None:
        """Forget a peer: all its draft KV for a request arrived, or its server is gone."""
        self._states.pop(peer, None)

    def record_failure(self, peer: bytes, generation: int, now: float) -> bool:
        """Count a request without its KV from this peer; return whether that opens the breaker."""
        state = self._states.setdefault(peer, _PeerState())
        was_open = state.is_open
        if was_open and generation not in state.probes:
            return False  # this request began before the breaker opened
        state.strikes += 1
        if state.is_open:
            state.wait = min(2 * state.wait, LONGEST_WAIT) or FIRST_WAIT
            state.until = now + state.wait
            state.probes.clear()
        return state.is_open and not was_open

    def release_probe(self, generation: int) -> None:
        """End a request. If it was a probe without a result, another may start."""
        for state in self._states.values():
            if state.probes == {generation}:
                state.until = 0.0
            state.probes.discard(generation)

    def open_peers(self) -> list[bytes]:
        """Return the peers whose breakers are open. For any thread."""
        return [peer for peer, state in list(self._states.items()) if state.is_open]
