"""A rank's threads that copy rows: several copies are in flight at once, and end in any order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang_mixkv.channel.gate import Gate

if TYPE_CHECKING:
    from tests.sim.decode import DecodeRank
    from tests.sim.prefill import PrefillRank


class Gated:
    """A request on one rank. `copies`: those in flight, by job. `then`: what SGLang's scheduler,
    which waits in `Gate.close`, does when that returns."""

    def __init__(self, gate: Gate) -> None:
        self.gate = gate
        self.copies: dict[int, Any] = {}
        self.then: tuple[Callable, tuple] | None = None


class Copiers:
    """Each copy passes the gate of its request, and is made in two pieces."""

    def __init__(self, rank: PrefillRank | DecodeRank) -> None:
        self._rank = rank
        self._idle = deque(("copier", number) for number in range(rank.world.spec.copiers))
        self._jobs: deque[Any] = deque()

    def put(self, job: Any) -> None:
        self._jobs.append(job)
        if self._idle:
            self._next(self._idle.popleft())

    def _next(self, thread: object) -> None:
        self._rank.later(thread, self._rank.rng.random() * 0.0004, self._begin, thread)

    def _begin(self, thread: object) -> None:
        if not self._jobs:  # another thread was quicker
            self._idle.append(thread)
            return
        job, rank = self._jobs.popleft(), self._rank
        owner = rank.owner_of(job)
        entered = owner.gate.enter()
        refused = rank.refusal(job, entered)
        if entered:
            owner.copies[job.job] = job
        if refused is not None:
            self._end(thread, owner, job, refused)
            return
        rank.begin_copy(owner, job)
        cut = rank.rng.randint(0, rank.count(job))
        rank.copy(owner, job, 0, cut)
        delay = rank.rng.random() ** 4 * rank.world.copying
        rank.later(thread, delay, self._rest, thread, owner, job, cut)

    def _rest(self, thread: object, owner: Gated, job: Any, cut: int) -> None:
        self._rank.copy(owner, job, cut, self._rank.count(job))
        self._end(thread, owner, job, self._rank.end_copy(owner, job))

    def _end(self, thread: object, owner: Gated, job: Any, event: object) -> None:
        if owner.copies.pop(job.job, None) is not None:
            owner.gate.leave()
        if owner.then is not None:
            self.close(owner, *owner.then)
        self._rank.left_gate(owner)
        self._rank.post(event)
        self._next(thread)

    def close(self, owner: Gated, call: Callable, args: tuple) -> None:
        """`Gate.close`, which waits for the copies in flight, and what follows it."""
        if owner.gate.shut():
            owner.then = None
            call(*args)
        else:
            owner.then = call, args
