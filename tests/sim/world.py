"""Builds a cluster from a schedule, runs it on a virtual clock, and checks it."""

from __future__ import annotations

import logging
import random
import re
from collections import Counter
from collections.abc import Callable, Hashable
from heapq import heappop, heappush
from itertools import count
from typing import TYPE_CHECKING

from sglang_mixkv.channel.times import Times
from tests.sim.checks import Checks
from tests.sim.decode import DecodeRank
from tests.sim.prefill import PrefillRank
from tests.sim.process import Process
from tests.sim.sglang import DecodeGroup, Group, PrefillGroup, layout_of, slot_bytes
from tests.sim.spec import Request

if TYPE_CHECKING:
    from tests.sim.faults import Fault
    from tests.sim.network import Link
    from tests.sim.spec import Server, Spec


class Clock:
    """Makes calls in order of time. Calls with equal times keep the order of the calls of `at`."""

    def __init__(self, rng: random.Random) -> None:
        self.now, self.rng = 0.0, rng
        self._heap: list[tuple] = []
        self._made = self.calls = 0

    def at(self, when: float, call: Callable, *args: object) -> None:
        self._made += 1
        heappush(self._heap, (when, self._made, call, args))

    def after(self, delay: float, call: Callable, *args: object) -> None:
        self.at(self.now + delay, call, *args)

    def run(self, limit: float, most: int = 1 << 60) -> bool:
        """Make up to `most` calls. Return whether none is left."""
        heap = self._heap
        while heap and most and heap[0][0] <= limit:
            self.now, _, call, args = heappop(heap)
            most -= 1
            self.calls += 1
            call(*args)
        return not heap


class Life:
    """The outcome of a request.

    `reason`: why it failed. `by`: which part failed it. `queued`: seconds for which its forwards
    waited for those of other requests, whose order may change with a fault.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        self.begun: float | None = None
        self.ended, self.queued = 0.0, 0.0  # on decode; on prefill
        self.outcome = self.reason = self.by = ""
        self.prefill_over = self.written = self.target_begun = False
        self.metadata: int | None = None  # number of SGLang's metadata messages still in flight

    @property
    def decode_over(self) -> bool:
        return bool(self.outcome)

    @property
    def took(self) -> float:
        assert self.begun is not None
        return self.ended - self.begun - self.queued


def _short(line: str) -> str:
    """Remove addresses, which differ between runs."""
    return re.sub(r"<[\w.]*?(\w+) object at 0x\w+>", r"\1", line)


LIMIT = 5000.0  # seconds after which a world must be idle


class Place:
    """A rank's address. `process`: the instance that currently runs there."""

    def __init__(self, server: Server, rank: int, heads: int) -> None:
        self.server, self.rank, self.where = server, rank, (server.number, rank)
        self.layout = layout_of(heads, server.tp, rank)
        self.slot_bytes = slot_bytes(heads, server.tp, server.tokens)
        self.times = Times(server.patience)
        self.process: Process | None = None


class World:
    """A cluster. `rng`: a generator to use instead of one from the schedule's seed."""

    def __init__(
        self, spec: Spec, log: list[str] | None = None, rng: random.Random | None = None
    ) -> None:
        self.spec, self.log, self.times = spec, log, Times()
        self.copying = spec.copying
        self.patience = min(server.patience for server in spec.servers)
        self.clock = Clock(rng or random.Random(spec.seed))
        self.checks = Checks(self)
        self._numbers = count(1)
        self.connections: dict[bytes, Link] = {}
        self.processes: list[Process] = []  # all processes, including dead ones
        self.links: list[Link] = []  # all links, including closed ones
        self.unnoticed: dict[bytes, float] = {}  # when prefill notices that a connection is gone
        self.place_of: dict[bytes, Place] = {}  # by instance, including dead ones
        self.places: dict[tuple[int, int], Place] = {}
        self.groups: list[Group] = []
        self.lives = {request.id: Life(request) for request in spec.requests}
        self.hangs = any(fault.halts for fault in spec.faults)
        self.liars: set[int] = set()  # prefill servers that have sent false messages
        self.seen: Counter[Hashable] = Counter()  # scenes that a test counts
        self.untouched: list[Life] = []  # at the end, the requests that no fault affected
        self._build()

    def _build(self) -> None:
        for server in self.spec.servers:
            for rank in range(server.tp):
                place = Place(server, rank, self.spec.heads)
                self.places[server.number, rank] = place
                self.start(place)
        for server in self.spec.servers:
            kind = PrefillGroup if server.side == "prefill" else DecodeGroup
            self.groups.append(kind(self, server))
        for request in self.spec.requests:
            comes = self._arrive if request.after < 0 else self._follow
            self.clock.at(request.arrival, comes, request)
        for fault in self.spec.faults:
            self.clock.at(fault.time, self.befall, fault)

    def befall(self, fault: Fault) -> None:
        self.note_fault(str(fault))
        fault.begin(self)

    def next_number(self) -> int:
        return next(self._numbers)

    def start(self, place: Place) -> None:
        kind = PrefillRank if place.server.side == "prefill" else DecodeRank
        instance = b"%08d" % self.next_number()
        place.process = kind(self, place, instance)
        self.processes.append(place.process)
        self.place_of[instance] = place

    # -- requests

    def _arrive(self, request: Request) -> None:
        """Send a request to both sides, as the router does, if both are alive."""
        life = self.lives[request.id]
        prefill, decode = self.groups[request.prefill], self.groups[request.decode]
        if not (prefill.is_alive and decode.is_alive):
            life.outcome, life.by, life.prefill_over = "failed", "stock", True
            return
        life.begun = self.clock.now
        prefill.step(request.prefill_delay, prefill.arrive, request)
        decode.step(request.decode_delay, decode.arrive, request)
        if request.abort is not None:
            side, seconds, both = request.abort
            self.clock.after(seconds, self.abort, request, side, both)

    def _follow(self, request: Request) -> None:
        """Send a request with the room number of an earlier one, once SGLang has ended that one.

        guards/room_reuse.py enforces this order. Decode has closed the earlier request. Prefill has
        either ended the request, or sent its whole target to readers that are alive. That
        happens before decode sends a retracted request to prefill again (true retraction).
        """
        former = self.lives[request.after]
        receivers = self.groups[request.decode].handles.get(request.after, ())
        senders = self.groups[request.prefill].handles.get(request.after, ())
        closed = all(one.closed or not one.rank.alive for one in receivers)
        alive = all(one.rank.alive for one in receivers)
        free = all(one.ended or not one.rank.alive or (one.has_target and alive) for one in senders)
        if former.outcome and closed and free and (former.prefill_over or senders):
            self.clock.after(self.clock.rng.random() * 0.002, self._arrive, request)
        elif self.clock.now < request.arrival + 120:
            again = 0.02 if self.clock.now < request.arrival + 5 else 2.0
            self.clock.after(again, self._follow, request)

    def abort(self, request: Request, side: str, both: bool) -> None:
        """Abort a request on one side. `both`: whether the other side also aborts it."""
        other = "decode" if side == "prefill" else "prefill"
        self.groups[getattr(request, side)].fail(request, "aborted")
        if both:
            group = self.groups[getattr(request, other)]
            self.clock.after(self.clock.rng.random() * 0.05, group.fail, request, "aborted")

    # -- the log

    def note(self, name: str, call: str) -> None:
        self.log.append(_short(f"{self.clock.now:10.4f} {name:6} {call}"))

    def note_actions(self, name: str, actions: list[object]) -> None:
        self.log.extend(_short(f"{'':10} {name:6} -> {action!r}") for action in actions)

    def note_fault(self, text: str) -> None:
        if self.log is not None:
            self.log.append(f"{self.clock.now:10.4f} ***    {text}")

    def run(self) -> None:
        """Run the schedule, without the package's logs. Raise Finding if an invariant is broken."""
        level = logging.root.manager.disable
        logging.disable()
        try:
            self.clock.run(LIMIT)
            self.checks.at_the_end()
        finally:
            logging.disable(level)
            self._forget_jobs()

    def _forget_jobs(self) -> None:
        """Drop all jobs, since the garbage collector does not track them.

        Otherwise everything that they refer to would stay in memory.
        """
        self.clock._heap.clear()
        for process in self.processes:
            process.copiers_end()
