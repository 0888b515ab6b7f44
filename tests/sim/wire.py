"""An independent model of whether a decode rank itself delayed the segments of a peer.

The model follows each stamp from the arrival of its READY through its read and its copy. It has no
requests, slots or shares.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_mixkv.decode.transfer import instance_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sglang_mixkv.channel.messages import Ready
    from tests.sim.decode import DecodeRank

NOW = 0.005  # seconds after which a thread has noticed an event
TICK = 0.1  # seconds between two checks for late rooms
FOREVER = float("inf")


class Part:
    """A peer's segments on this rank.

    `read`: when the read of a segment began, by stamp. `here`: segments that wait for a read, a
    forward or a copy. `times`: when `here` was first filled, then emptied, filled again and so on.
    """

    def __init__(self) -> None:
        self.here: dict[int, int] = {}  # generations, by stamp
        self.read: dict[int, float] = {}
        self.old_until = 0.0  # when the last long read ended
        self.times: list[float] = []

    def put(self, stamp: int, generation: int, now: float) -> None:
        self.here[stamp] = generation
        if len(self.times) % 2 == 0:
            self.times.append(now)

    def take(self, stamp: int, now: float) -> bool:
        found = self.here.pop(stamp, None) is not None
        if found and not self.here:
            self.times.append(now)
        return found

    def delayed(self, since: float, now: float) -> float:
        """Return the longest time between `since` and `now` for which segments waited on this rank
        without a gap. Shorter waits may begin and end between two of the rank's checks."""
        ends = [*self.times, now] if len(self.times) % 2 else self.times
        spans = zip(ends[::2], ends[1::2], strict=True)
        return max((end - max(since, begin) for begin, end in spans), default=0.0)


class Wire:
    def __init__(self, rank: DecodeRank) -> None:
        self._rank = rank
        self._parts: dict[bytes, Part] = {}
        self._known: set[int] = set()  # stamps whose READY has arrived
        self._read: set[int] = set()  # stamps of which a read has begun
        self._copied: set[int] = set()  # stamps that are being copied

    def _part(self, peer: bytes) -> Part:
        return self._parts.setdefault(peer, Part())

    def came(self, peer: bytes, ready: Ready) -> None:
        """Record a READY that has reached the process, even if the process is stopped."""
        for one in ready.segments:
            if one.stamp not in self._known:
                self._known.add(one.stamp)
                self._part(peer).put(one.stamp, ready.generation, self._rank.clock.now)

    def read_begun(self, peer: bytes, stamps: Iterable[int]) -> None:
        part, now = self._part(peer), self._rank.clock.now
        for stamp in stamps:
            self._read.add(stamp)
            part.take(stamp, now)
            part.read[stamp] = now

    def read_ended(self, peer: bytes, generation: int, stamps: Iterable[int]) -> None:
        """Record the end of a read, whose segments now wait for a forward or a copy."""
        part, now = self._part(peer), self._rank.clock.now
        for stamp in stamps:
            if part.read.pop(stamp, now) <= now - self._wait + NOW:  # liars repeat stamps
                part.old_until = now
            part.put(stamp, generation, now)

    def copies(self, stamps: Iterable[int]) -> None:
        self._copied.update(stamps)

    def acknowledged(self, stamps: Iterable[int]) -> None:
        """Record ACKs. A segment that was acknowledged before its read is never read."""
        self.gone(stamp for stamp in stamps if stamp not in self._read)

    def gone(self, stamps: Iterable[int]) -> None:
        """Record segments that were copied, dropped, or acknowledged without a read."""
        for stamp in stamps:
            self._copied.discard(stamp)
            for part in self._parts.values():
                part.take(stamp, self._rank.clock.now)

    def not_needed(self, generation: int) -> None:
        """Record that a request is cold or closed, so that only its copies in flight continue."""
        for part in self._parts.values():
            rest = [stamp for stamp, of in part.here.items() if of == generation]
            self.gone(stamp for stamp in rest if stamp not in self._copied)

    @property
    def _wait(self) -> float:
        return 0.3 * self._rank.place.times.patience

    def is_to_blame(self, peer: bytes) -> bool | None:
        """Return whether the peer is to blame for late segments.

        Return None if either answer is acceptable, for example if this rank was stopped meanwhile.
        """
        rank, part = self._rank, self._part(peer)
        now = rank.clock.now
        since = now - self._wait
        liar = rank.world.place_of[instance_of(peer)].server.number in rank.world.liars
        if liar or rank.ran_since > since - 2 * TICK:
            return None
        began = min(part.read.values(), default=FOREVER)
        if began <= since - NOW:
            return True
        if began <= since + NOW or part.old_until > now - NOW:
            return None
        if part.here and part.times[-1] <= now - NOW:
            return False
        if part.delayed(since + NOW, now - NOW) > TICK + NOW:
            return False
        is_calm = not part.read and part.delayed(since - NOW, now) <= 0
        return True if is_calm else None
