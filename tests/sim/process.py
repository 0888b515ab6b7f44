"""A process: its channel thread with the machine, and the faults that stop one or all threads.

Calls from inside the process come from one queue, in order. So if a copy runs after `end` was
called, the machine handles `end` before the copy's `copied`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from sglang_mixkv.channel.loop import Call
from sglang_mixkv.channel.messages import Fail, Open, Ready
from sglang_mixkv.channel.slots import SlotPool
from sglang_mixkv.decode import actions as decode
from sglang_mixkv.decode import machine as decode_machine
from sglang_mixkv.prefill import machine as prefill_machine
from tests.rig.channel.invariants import outstanding
from tests.sim import memory
from tests.sim.workers import Blocked, Simulated

if TYPE_CHECKING:
    from sglang_mixkv.draft.gate import Gate
    from tests.sim.sglang import Group
    from tests.sim.world import Place, World


FINE, COARSE = 0.1, 1.0  # seconds between ticks, with and without a deadline nearby
INTERRUPTS = 0.1  # probability that another thread runs at a point where it may
MEDIUM = 0.4  # seconds between ticks without a deadline nearby, for a rank with short time-outs
REFUSED = OverflowError, ValueError  # raised for a message that cannot be encoded
UNDONE = {decode.StartRead, decode.StartCopies, Open, Ready, Fail}
"""The actions, and the messages of a Send, whose failure a machine handles."""
EVENTS = {
    name: (None,) * (method.__code__.co_argcount - 1 - len(method.__defaults__ or ()))
    + (method.__defaults__ or ())
    for machine in (prefill_machine.Machine, decode_machine.Machine)
    for name, method in vars(machine).items()
    if name[0] != "_" and name not in ("advance", "actions", "on_action_failed")
}
"""The machines' methods that take events, with defaults for their arguments."""


class Injected(Exception): ...


class Process:
    """One rank's process.

    `local`: the time of the host's clock, which stands still while the host is suspended. `time`:
    the time that the process's threads read. `awaiting`: requests that wait only for the drafter,
    after their target was sent (prefill) or has arrived (decode). `stopped_for`: seconds for which
    the whole process was stopped. `hung_for`: seconds for which only the channel thread hung.
    `worker`: the worker's code.
    """

    judge: Any = None
    device: Any = None
    machine: Any
    worker: Simulated

    def __init__(self, world: World, place: Place, instance: bytes) -> None:
        self.world, self.clock, self.rng = world, world.clock, world.clock.rng
        self.place, self.instance = place, instance
        self.name = f"{place.server.side[0].upper()}{place.server.number}.{place.rank}"
        self.slots = SlotPool(place.server.slots, place.times)
        self.memory = memory.new_slots(self.slots.count)
        self.awaiting: set[int] = set()
        self.alive, self.stopped, self.broken = True, False, False
        self.stopped_for = self.hung_for = 0.0
        self.now = 0.0  # the machine's time at its last call
        self._was_called = False
        self._runs = 0  # nested calls of the channel thread
        self._at: float | None = None
        self._acts = False  # whether the machine's actions will be fetched
        self._first: list[tuple[Callable, tuple]] = []  # steps that a stop interrupted
        self.errors: dict[str, int] = {}  # number of copies that will fail, by kind
        self._parked: list[tuple[object, Callable, tuple]] = []
        self._last: dict[object, float] = {}
        self._tick_time: float | None = None
        is_decode = place.server.side == "decode"  # prefill does not count stops
        self._coarse = MEDIUM if is_decode and world.patience < 0.5 else COARSE
        self._stop: tuple[str, float, bool] | None = None  # where, seconds, whether suspended
        self.ran_since = 0.0  # when the channel thread last continued after a break
        self._asleep = 0.0  # seconds for which the host was suspended
        self._busy = self._slow_until = self.slow_step = 0.0  # see `slow`
        self._hang: tuple[str, float] | None = None  # action's type, or "" for any, and seconds
        self._hung: deque[tuple[Callable, tuple]] | None = None  # steps of the hung thread
        self._since = 0.0

    @property
    def group(self) -> Group:
        return self.world.groups[self.place.server.number]

    @property
    def time(self) -> float:
        return self.local if self._at is None else self._at

    @property
    def local(self) -> float:
        return self.clock.now - self._asleep

    @property
    def is_restored(self) -> bool:
        """Return whether the process was restored from a snapshot, so that no read succeeds."""
        return bool(self.worker._store.plane.dead)

    @property
    def hung(self) -> bool:
        return self._hung is not None

    def copiers_end(self) -> None:
        for one in (
            *getattr(self, "senders", {}).values(),
            *getattr(self, "receivers", {}).values(),
        ):
            one.copies.clear()
        self.worker._copies = self.device = None
        self._first, self._parked, self._hung = [], [], None

    # -- threads

    def later(self, thread: object, delay: float, call: Callable, *args: object) -> None:
        """Schedule a step of a thread, after the thread's earlier steps.

        The step waits while the process is stopped.
        """
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
        """Retain a call until the process continues.

        If the process dies instead, only the calls of the data plane are made.
        """
        self._parked.append((thread, call, args))

    def post(self, call: Call, delay: float = 0.0002) -> None:
        """Put a call on the channel thread's queue."""
        self.later("queue", self.rng.random() * delay, self.handle, call)

    # -- SGLang's scheduler

    def blocking(self, owner: Gated, call: Callable, *args: object) -> None:
        """Make a call that may wait for the owner's copies to end."""
        try:
            owner.then = None
            call(*args)
        except Blocked:
            owner.then = call, args
            if not owner.copies:  # a query returned False although the copies had ended
                self.later("scheduler", 0.001, self.unblocked, owner)

    def unblocked(self, owner: Gated) -> None:
        """Repeat the owner's waiting call, after one of the owner's copies has ended."""
        if owner.then is not None:
            call, args = owner.then
            self.blocking(owner, call, *args)

    # -- the channel thread

    def handle(self, call: Call) -> None:
        self.on_thread(self._take, call)

    def on_thread(self, call: Callable, *args: object) -> None:
        """Run a step of the channel thread, now or after the steps that still run."""
        now, self._busy = self.clock.now, max(self._busy, self.clock.now)
        if now < self._slow_until and not (self._runs or self.hung or self.broken):
            took = self.rng.random() * self.slow_step
            self._busy += took
            self.ran_since = self._busy
            self.hung_for += took
        if self._busy > now and not self._runs:
            self.later("channel", self._busy - now, self._on_thread, call, *args)
        else:
            self._on_thread(call, *args)

    def _on_thread(self, call: Callable, *args: object) -> None:
        """Run a step, or queue it if the thread hangs."""
        if self._hung is not None:
            self._hung.append((call, args))
        elif not self.broken:
            with self.undisturbed():
                call(*args)

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Keep the channel thread from running other steps.

        The thread is busy with this call, or the caller must first record the call's result.
        """
        self._runs += 1
        yield
        self._runs -= 1

    def interrupts(self) -> bool:
        """Return whether the channel thread now runs in the middle of another thread's call."""
        return self.rng.random() > 1 - INTERRUPTS and not (self._runs or self.stopped)

    @property
    def has_taken_all(self) -> bool:
        """True if the queue is empty, and was also empty when the process was last stopped."""
        return max(self._last.get("queue", 0.0), self.ran_since) < self.clock.now

    def _take(self, call: Call) -> None:
        if self.stopped:  # the previous call has stopped the process
            self._first.append((self._make, (call, self.local)))
        elif self._stop is not None and self._stop[0] == "sampled":
            self._first.append((self._make, (call, self.local)))
            self._halt()
        else:
            self._make(call, self.local)

    def _make(self, call: Call, now: float) -> None:
        self.now = self._at = now
        self._was_called, (method, args) = False, call
        self.machine.advance(now)
        method(*args)
        self._at = None
        if not self._was_called:
            if self.judge is not None:
                self.judge.after_call("", (), now)
            self._note(method.__name__, args)
        if self.worker._held:  # the thread polls for slots that it may release
            self.later("queue", self.rng.random() * 0.0005, self.on_thread, self.look)
        self._want_tick()
        if self._acts:
            return
        if self.rng.random() < self.world.spec.gathers:
            self._acts = True
            self.later("look", self.rng.random() * 0.0004, self.on_thread, self._act)
        else:
            self._act()

    def check_calls(self) -> None:
        """Check each call of the machine's methods, from any caller."""
        for name, defaults in EVENTS.items():
            if (method := getattr(self.machine, name, None)) is not None:
                setattr(self.machine, name, partial(self._checked_call, name, method, defaults))

    def _checked_call(self, name: str, method: Callable, defaults: tuple, *args: Any) -> None:
        self._was_called, checks = True, self.world.checks
        full = args + defaults[len(args) :]
        if name != "tick":
            checks.before_call(self, name, full)
        method(*args)
        self._note(name, args)
        if name != "tick":
            checks.after_call(self, name, full)
        elif self.judge is not None:
            self.judge.after_call(name, full, self.now)

    def _note(self, name: str, args: tuple) -> None:
        if self.world.log is not None:
            self.world.note(self.name, f"{name}{args!r}")

    def look(self) -> None:
        """Poll CUDA events and ended copies, which cause no call by themselves."""
        calls = [*self.worker._poll(())]  # may start copies, some of which end at once
        if (copies := self.worker._copies) is not None:
            calls += [(self.machine.copied, one) for one in copies.ended()]
        for call in calls:
            self.on_thread(self._take, call)

    def _act(self) -> None:
        """Perform the actions at the end of a pass, which may have taken several calls."""
        self._acts = False
        actions = self.machine.actions()
        if not actions:
            return
        if self.world.log is not None:
            self.world.note_actions(self.name, actions)
        self.world.checks.invariants(self)
        self.world.checks.after_pass(self, actions)
        if self._stop is not None and self._stop[0] == "emitted":
            cut = self.rng.randint(0, len(actions) - 1)
            self._first += [(self.perform, (action,)) for action in actions[cut:]]
            actions = actions[:cut]
            self._halt()
        for number, action in enumerate(actions):
            if self._hangs(action):
                self._hung = deque((self.perform, (rest,)) for rest in actions[number:])
                return
            self.perform(action)
        if self.worker._copies.done:  # copies that could not be started
            self.later("queue", 0.0, self.on_thread, self.look)

    def perform(self, action: object) -> None:
        """Perform an action, or raise if a fault is injected."""
        self.before(action)
        try:
            if self.errors.get("action") and type(getattr(action, "message", action)) in UNDONE:
                self.errors["action"] -= 1
                raise Injected
            self.worker._do(action)
        except (Injected, *REFUSED) as error:
            self.world.checks.on_action_failed(self, action)
            self.post((self.machine.on_action_failed, (action, error)))
        else:
            self.after(action)

    def before(self, action: Any) -> None: ...

    def after(self, action: Any) -> None: ...

    def slow(self, seconds: float, step: float) -> None:
        """Let each step of the channel thread take up to `step` seconds, for `seconds`.

        A single step is too short to count as a stall.
        """
        self._slow_until, self.slow_step = self.clock.now + seconds, step

    # -- faults of the channel thread alone

    def hang(self, what: str, seconds: float) -> None:
        self._hang = hang = what, seconds
        self.clock.after(1.0, self._no_hang, hang)

    def _no_hang(self, hang: tuple[str, float]) -> None:
        if self._hang is hang:
            self._hang = None

    def _hangs(self, action: object) -> bool:
        if self._hang is None or self._hang[0] not in ("", type(action).__name__):
            return False
        self.later("hung", self._hang[1], self._hangs_no_more, self.clock.now)
        self._hang = None
        return True

    def _hangs_no_more(self, since: float) -> None:
        waiting, self._hung, self.ran_since = self._hung, None, self.clock.now
        self.hung_for += self.clock.now - since
        with self.undisturbed():
            while waiting and self._hung is None and not self.stopped:
                call, args = waiting.popleft()
                call(*args)
        if waiting and self._hung is not None:
            self._hung += waiting
        elif waiting:
            self._first += waiting
        if self.worker._copies.done:  # from actions after the one that hung
            self.later("queue", 0.0, self.on_thread, self.look)

    def break_(self) -> None:
        """End the channel thread by an exception."""
        self.broken = self.worker.broken = True
        self.group.poll_all()

    def restore(self) -> None:
        """Restore the process from a snapshot, and notify its worker in one of SGLang's threads."""
        self.later("snapshot", 0.0, self.worker.restored)

    # -- stops

    def stop(self, where: str, seconds: float, suspended: bool = False) -> None:
        if not self.alive or self.stopped or self._stop is not None:
            return
        self._stop = stop = where, seconds, suspended
        if not where:
            self._halt()
        else:
            self.clock.after(1.0, self._no_stop, stop)

    def _no_stop(self, stop: tuple[str, float, bool]) -> None:
        """Cancel a stop, if no step has come that it could interrupt."""
        if self._stop is stop:
            self._stop = None

    def _halt(self) -> None:
        assert self._stop is not None
        self.stopped, self._since = True, self.clock.now
        self.clock.after(self._stop[1], self._go_on, self._stop[2])
        self._stop = None

    def _go_on(self, suspended: bool) -> None:
        """Run all parked steps, each thread's steps in order."""
        if not self.alive:
            return
        self.stopped, self.ran_since = False, self.clock.now
        if suspended:
            self._asleep += self.clock.now - self._since
        self.stopped_for += self.clock.now - self._since
        first, self._first = self._first, []
        for call, args in first:  # before steps that a slow thread has yet to begin
            self._on_thread(call, *args)
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
        """Return whether a deadline of a few tenths of a second may be running."""
        return bool(self.awaiting)

    def _want_tick(self) -> None:
        """Schedule a tick. `_on_tick` skips the tick if the machine has nothing outstanding."""
        if self._tick_time is not None and not self.is_urgent():
            return
        interval = (FINE if self.is_urgent() else self._coarse) * (0.9 + 0.1 * self.rng.random())
        when = self.clock.now + interval
        if self._tick_time is None or when < self._tick_time:
            self._tick_time = when
            self.clock.at(when, self.step, "tick", self.on_thread, (self._on_tick, when))

    def _on_tick(self, when: float) -> None:
        if when != self._tick_time:
            return
        self._tick_time = None
        if outstanding(self.machine):
            self._take((self.machine.tick, ()))


class Gated:
    """A request on one rank.

    `copies`: copies in flight, by job. `then`: SGLang's call that waits in `Gate.close`.
    `has_target`: whether SGLang's own status is Success. `target_at`: when it became Success.
    `slow_by`: the total seconds for which the rank was stopped before `target_at`. `held`: until
    when an earlier forward might still write the rows, less the seconds of all stops before.
    """

    def __init__(self, gate: Gate) -> None:
        self.gate = gate
        self.copies: dict[int, Any] = {}
        self.then: tuple[Callable, tuple] | None = None
        self.has_target, self.target_at, self.slow_by = False, 0.0, 0.0
        self.held = 0.0

    def note_target(self, rank: Process) -> None:
        self.has_target, self.target_at = True, rank.clock.now
        self.slow_by = rank.stopped_for
