"""A process: the channel thread with its machine, threads that copy, and what stops all of them.

Events from inside the process come over one queue, in the order in which they were put there. So
an End is handled before the Packed of a copy that ran after it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from sglang_mixkv.channel.gate import Gate
from sglang_mixkv.channel.slots import SlotPool
from tests.sim import memory

if TYPE_CHECKING:
    from tests.sim.decode import DecodeRank
    from tests.sim.prefill import PrefillRank
    from tests.sim.sglang import Group
    from tests.sim.world import Place, World


FINE, COARSE = 0.1, 1.0  # between ticks, where a deadline is near and where none is


class Process:
    """`now`: the machine's, of the event whose actions are executed. `awaiting`: requests that
    wait for the drafter alone: on prefill those that were sent and are not settled, on decode those
    whose target is there."""

    tick: object
    undone: Callable[..., object]
    machine: object

    def __init__(self, world: World, place: Place, instance: bytes) -> None:
        self.world, self.clock, self.rng = world, world.clock, world.clock.rng
        self.place, self.instance = place, instance
        self.name = f"{place.server.side[0].upper()}{place.server.number}.{place.rank}"
        self.slots = SlotPool(place.server.slots, place.times)
        self.memory = memory.new_slots(self.slots.count)
        self.awaiting: set[int] = set()
        self.copiers = Copiers(self)
        self.alive, self.stopped = True, False
        self.stopped_for = 0.0  # in all
        self.now = 0.0
        self._acts = False  # there will be a look at what the machine asks for
        self._first: list[tuple[Callable, tuple]] = []  # what a stop came into
        self.errors: dict[str, int] = {}  # how many copies of a kind will fail
        self._parked: list[tuple[object, Callable, tuple]] = []
        self._last: dict[object, float] = {}
        self._tick_time: float | None = None
        self._stop: tuple[str, float] | None = None
        self._since = 0.0

    @property
    def group(self) -> Group:
        return self.world.groups[self.place.server.number]

    # -- threads

    def later(self, thread: object, delay: float, call: Callable, *args: object) -> None:
        """A step of a thread, behind its earlier ones; never while the process is stopped."""
        when = max(self._last.get(thread, 0.0), self.clock.now + delay)
        self._last[thread] = when
        self.clock.at(when, self.step, thread, call, args)

    def step(self, thread: object, call: Callable, args: tuple) -> None:
        if not self.alive:
            return
        if self.stopped:
            self.park(thread, call, args)
        else:
            call(*args)

    def park(self, thread: object, call: Callable, args: tuple) -> None:
        """For when the process goes on, or has died: the data plane's calls are made then too."""
        self._parked.append((thread, call, args))

    def post(self, event: object, delay: float = 0.0002) -> None:
        """Put an event on the channel thread's queue."""
        self.later("queue", self.rng.random() * delay, self.handle, event)

    # -- the channel thread

    def handle(self, event: object) -> None:
        if self._stop is not None and self._stop[0] == "sampled":
            self._first.append((self._handle, (event, self.clock.now)))
            self._halt()
        else:
            self._handle(event, self.clock.now)

    def _handle(self, event: object, now: float) -> None:
        self.now = now
        self.world.checks.event(self, event)
        self.machine.handle(event, now)
        if self.world.log is not None:
            self.world.note(self.name, event)
        self._want_tick()
        if self._acts:
            return
        if self.rng.random() < self.world.spec.gathers:
            self._acts = True
            self.later("look", self.rng.random() * 0.0004, self._act)
        else:
            self._act()

    def _act(self) -> None:
        """At the end of a look, which may have taken several events."""
        self._acts = False
        actions = self.machine.actions()
        if self.world.log is not None:
            self.world.note_actions(self.name, actions)
        self.world.checks.books(self)
        if actions and self._stop is not None and self._stop[0] == "emitted":
            cut = self.rng.randint(0, len(actions) - 1)
            self._first += [(self.perform, (action,)) for action in actions[cut:]]
            actions = actions[:cut]
            self._halt()
        for action in actions:
            self.perform(action)

    def perform(self, action: object) -> None:
        """Some raise in place of being done."""
        if type(action).__name__ == "Note":
            self.world.checks.noted(self, action.what)
        event = self.undone(action, "injected") if self.errors.get("action") else None
        if event is None:
            self.execute(action)
        else:
            self.errors["action"] -= 1
            self.world.checks.undone(self, action)
            self.post(event)

    # -- the threads that copy, of which a side may have nothing to say

    def begin_copy(self, owner: Gated, job: Any) -> None: ...

    def left_gate(self, owner: Gated) -> None: ...

    # -- stops

    def stop(self, where: str, seconds: float) -> None:
        if not self.alive or self.stopped or self._stop is not None:
            return
        self._stop = stop = where, seconds
        if not where:
            self._halt()
        else:
            self.clock.after(1.0, self._no_stop, stop)

    def _no_stop(self, stop: tuple[str, float]) -> None:
        """Nothing happened that it could have come into."""
        if self._stop is stop:
            self._stop = None

    def _halt(self) -> None:
        assert self._stop is not None
        self.stopped, self._since = True, self.clock.now
        self.clock.after(self._stop[1], self._go_on)
        self._stop = None

    def _go_on(self) -> None:
        """All that waited happens now, each thread's steps in their order."""
        if not self.alive:
            return
        self.stopped = False
        self.stopped_for += self.clock.now - self._since
        first, self._first = self._first, []
        for call, args in first:
            call(*args)
        parked, self._parked = self._interleaved(self._parked), []
        for number, (_, call, args) in enumerate(parked):
            if self.stopped or not self.alive:
                self._parked = parked[number:] + self._parked
                return
            call(*args)

    def _interleaved(self, parked: list[tuple]) -> list[tuple]:
        threads: dict[object, list[tuple]] = {}
        for item in parked:
            threads.setdefault(item[0], []).append(item)
        order = [thread for thread, items in threads.items() for _ in items]
        self.rng.shuffle(order)
        nexts = {thread: iter(items) for thread, items in threads.items()}
        return [next(nexts[thread]) for thread in order]

    def kill(self) -> None:
        self.alive = False
        for thread, call, args in self._parked:
            if thread == "plane":
                self.clock.after(0.0, call, *args)
        self._parked = []

    # -- ticks

    def is_urgent(self) -> bool:
        """Whether a deadline of some tenths of a second may run."""
        return bool(self.awaiting)

    def _want_tick(self) -> None:
        """Where nothing is under way a tick would do nothing, and is left out."""
        if self._tick_time is not None and not self.is_urgent():
            return
        interval = (FINE if self.is_urgent() else COARSE) * (0.9 + 0.1 * self.rng.random())
        when = self.clock.now + interval
        if self._tick_time is None or when < self._tick_time:
            self._tick_time = when
            self.clock.at(when, self.step, "tick", self._on_tick, (when,))

    def _on_tick(self, when: float) -> None:
        if when != self._tick_time:
            return
        self._tick_time = None
        if self.machine.left():
            self.handle(self.tick)


class Gated:
    """A request on one rank. `copies`: those in flight, by job. `then`: what SGLang's scheduler,
    which waits in `Gate.close`, does when that returns. `has_target`: stock's own Success is there,
    from `target_at` on; its rank was stopped for `slow_by` seconds before."""

    def __init__(self, gate: Gate) -> None:
        self.gate = gate
        self.copies: dict[int, Any] = {}
        self.then: tuple[Callable, tuple] | None = None
        self.has_target, self.target_at, self.slow_by = False, 0.0, 0.0

    def note_target(self, rank: Process) -> None:
        self.has_target, self.target_at = True, rank.clock.now
        self.slow_by = rank.stopped_for


class Copiers:
    """Each copy passes the gate of its request, and is made in two pieces. Those that have ended
    alike within one look are one event, in any order."""

    def __init__(self, rank: PrefillRank | DecodeRank) -> None:
        self._rank = rank
        self._idle = deque(("copier", number) for number in range(rank.world.spec.copiers))
        self._jobs: deque[Any] = deque()
        self._ended: dict[Any, list[int]] = {}  # by how: the jobs of one look

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

    def _end(self, thread: object, owner: Gated, job: Any, event: Any) -> None:
        if owner.copies.pop(job.job, None) is not None:
            owner.gate.leave()
        if owner.then is not None:
            self.close(owner, *owner.then)
        self._rank.left_gate(owner)
        rank = self._rank
        if not self._ended:
            rank.later("report", rank.rng.random() * 0.0004, self._report)
        self._ended.setdefault(replace(event, jobs=()), []).extend(event.jobs)
        self._next(thread)

    def _report(self) -> None:
        ended, self._ended = self._ended, {}
        for event, jobs in ended.items():
            self._rank.rng.shuffle(jobs)
            self._rank.post(replace(event, jobs=tuple(jobs)))

    def close(self, owner: Gated, call: Callable, args: tuple) -> None:
        """`Gate.close`, which waits for the copies in flight, and what follows it."""
        if owner.gate.shut():
            owner.then = None
            call(*args)
        else:
            owner.then = call, args
