"""Traffic on the protocol ring: a schedule of requests, faults, and a check.

    run(Traffic(...), at={60: lambda ring: ring.stop(("prefill", 1))})  ->  Result

Schedule: a steady flow of requests to several prefill servers. Each request has its own pages and
metadata row, so that late writes of SGLang to a failed request's pages are not mistaken for a
fault.
Faults: the test stops, kills or disconnects processes after given numbers of ended requests.
Check: Rank compares a request's bytes when it succeeds, and all memory and resources at the end.
Result and the functions after it examine how each request ended.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import re
import signal
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import numpy as np
from rig.process.resources import SLACK, leaks, resources
from rig.ring.memory import Ended, RankReport
from rig.ring.model import Cache, Case, Request
from rig.ring.rank import LIMIT_S, OpenRequest, Rank
from rig.ring.run import Servers, ranks_of
from rig.ring.special import Key, Shared

from mixkv_demo.ports import free_port
from sglang_mixkv.decode.transfer import server_of

from .netns import enter
from .stages import Stop, hold_in_decode, hold_in_prefill

RUN_S, STUCK_S, DROPPED_S = 240, 90, 5
"""Time limits for the whole run, for a request (longer than all its timeouts together), and for a
request on prefill that decode no longer needs."""
SLACK_S = 3.0
"""Time that a request may take on a busy machine in addition to the plugin's wait. The sum of this
and `Times.longest_wait` is less than `Times.whole_wait`, for every patience in the tests."""
LATE = re.compile(
    r"prefill \d+: left behind: "
    ".*(waiting left|transfers left|request_status|transfer_infos|prefix_len)"
)
"""Entries that SGLang retains for aborted requests, and OPENs without a request, which the plugin
retains for a minute."""
QUEUES = 16
OF_FORMER = {"fds": 12, "sockets": 8}  # left from a server before its restart
AT_ONCE = 4
AT = 80
"""The number of ended requests after which most tests begin their fault."""
WARM_AFTER = 35  # requests after which a rank has allocated all its resources
ENOUGH = WARM_AFTER + 5
"""After all faults, this many consecutive warm requests to each server end the traffic."""
UNKNOWN, BEGUN, ENDED = range(3)  # stages of a request, as decode sees it
STARTS, READY, DONE = range(3)  # stages of a rank


# ---------------------------------------------------------------- the schedule


@dataclass(frozen=True)
class Traffic:
    """At most `requests` requests of `tokens` tokens each. After all faults, each server gets
    `tail` more requests, or fewer if ENOUGH consecutive requests are warm.

    There are `prefills` servers of TP 2, and `decodes` decode DP ranks of TP 1. A decode rank has
    at most AT_ONCE requests in flight per server, and sends each server one every `every` seconds.
    `touched`: the prefill server or decode rank with the fault. `hosts`: namespaces and addresses
    of ranks that do not use the loopback. `held`: the rank whose rooms are paused at a stage
    (stages.py). `same_ports`: a restarted rank uses its former channel port. `restarts`: the number
    of servers or ranks that are restarted."""

    requests: int
    tail: int
    every: float
    prefills: int = 1
    decodes: int = 1
    tokens: int = 96
    touched: Key = ("prefill", 0)
    held: Key = ("prefill", 1)
    hosts: Mapping[Key, tuple[int, str]] = field(default_factory=dict)
    same_ports: bool = False
    restarts: int = 0

    def server_of(self, number: int) -> int:
        return number % self.prefills

    def decode_of(self, number: int) -> int:
        """Return the request's DP rank on decode."""
        return number // self.prefills % self.decodes

    def case(self) -> Case:
        return Case(
            2, 1, prefills=self.prefills, decode_dp=self.decodes,
            draft=Cache("mha", heads=4, k_bytes=64, v_bytes=64),
            requests=(Request(self.tokens, chunk_pages=8),) * self.requests,
        )  # fmt: skip


@dataclass
class OfTraffic(Shared):
    """Memory shared by processes that may be killed, and therefore without locks.

    `stages`: one per request; `states`: one per rank, by side; `channel_ports`: of prefill ranks, 0
    for any; `acted`: whether all faults are done; `over`: whether no more requests start; `stop`:
    pauses a room at a stage."""

    traffic: Traffic = field(default_factory=lambda: Traffic(0, 0, 0))
    stages: Any = None
    states: Mapping[str, Any] = field(default_factory=dict)
    channel_ports: Any = ()
    acted: Any = None
    over: Any = None
    stop: Stop | None = None


# ---------------------------------------------------------------- a rank


class TrafficRank(Rank):
    slack_s = 10.0

    def __init__(self, case: Case, side: str, rank: int, ports: list[int], life: int) -> None:
        self.shared: Any = case.shared
        self.traffic: Traffic = self.shared.traffic
        namespace, self.host = self.traffic.hosts.get((side, rank), (0, self.host))
        self.server_host = self._host_of(rank // case.prefill_tp)
        if side == "decode":
            self.server_host = self.host
        elif port := self.shared.channel_ports[rank]:
            os.environ["SGLANG_MIXKV_PORT"] = str(port)
        os.environ["SGLANG_HOST_IP"] = self.host
        if namespace:
            enter(namespace)
        if self.traffic.decodes > 1:
            self._have_a_queue_each(side, rank)
        super().__init__(case, side, rank, ports, life)
        # requests of the killed process that this one replaces are lost
        stages, every = self.shared.stages, range(len(case.requests))
        self._numbers = [n for n in every if self.mine(n) and (not life or stages[n] == UNKNOWN)]
        self._warm = [
            0
        ] * self.traffic.prefills  # consecutive requests per server, after all faults

    def _have_a_queue_each(self, side: str, rank: int) -> None:
        """Give each decode rank its own queue of SGLang's writes on prefill. SGLang chooses the
        queue by the rank's Mooncake port (MooncakeKVManager.add_transfer_request), so each rank
        gets its own range of ports. Mooncake accepts only ranges below 32,768."""
        os.environ.setdefault("SGLANG_DISAGGREGATION_QUEUE_SIZE", str(QUEUES))
        os.environ["SGLANG_DISAGGREGATION_THREAD_POOL_SIZE"] = str(QUEUES)
        if side == "decode":
            several = QUEUES // self.traffic.decodes  # each of the two engines takes two ports
            first = 20_000 + os.getpid() % 500 * QUEUES + rank * several
            os.environ["MC_MIN_PRC_PORT"] = str(first)
            os.environ["MC_MAX_PRC_PORT"] = str(first + several - 1)

    def _host_of(self, server: int) -> str:
        return self.traffic.hosts.get(("prefill", 2 * server), (0, Rank.host))[1]

    def address(self, number: int) -> str:
        server = self.case.prefill_of(number)
        return f"{self._host_of(server)}:{self.ports[server]}"

    def start_manager(self) -> None:
        super().start_manager()
        held = self.traffic.held
        if self.side == "decode":
            hold_in_decode(self.manager.decode_channel, self.shared.stop, self._peer_is_met)
        elif held[0] == "decode" or held == (self.side, self.rank):
            hold_in_prefill(self.manager.prefill_channel, self.shared.stop, self._room_is_met)
        self.shared.states[self.side][self.rank] = READY

    def _room_is_met(self, room: int) -> bool:
        side, rank = self.traffic.held
        return side == "prefill" or self.traffic.decode_of(room - self.rooms()[0]) == rank

    def _peer_is_met(self, peer: bytes) -> bool:
        side, rank = self.traffic.held
        if side == "decode":
            return self.rank == rank
        link = self.manager.decode_channel._links._links.get(peer)
        met = self.address(0), rank
        return link is not None and (server_of(peer), link.row.attn_tp_rank) == met

    def run(self) -> None:
        if self.side == "prefill":
            self._serve()
            return
        self.watch()
        self._ask()
        self.shared.states[self.side][self.rank] = DONE
        while not self.shared.over.value:
            time.sleep(0.005)
        self.compare()

    def _serve(self) -> None:
        """Begin a request on prefill as soon as decode has begun it, since SGLang loses a status
        that arrives while the sender is made (update_status, disaggregation/common/conn.py). At the
        end, abort requests that decode no longer wants."""
        over = self.shared.over
        queues = [
            deque(n for n in self._numbers if self.traffic.decode_of(n) == rank)
            for rank in range(self.traffic.decodes)
        ]
        while not over.value or self.open:
            for queue in filter(None, queues):
                if self.shared.stages[queue[0]] != UNKNOWN:
                    self.begin(queue.popleft())
            for one in self.open.values() if over.value else ():
                if one.age > DROPPED_S:
                    one.handle.abort()
            self.step(STUCK_S)
            time.sleep(2e-3)  # so that requests are still in flight when a fault begins

    def _ask(self) -> None:
        """Start requests on decode until all have ended, or another rank has an error."""
        traffic, shared, of = self.traffic, self.shared, self.traffic.server_of
        servers, ends = range(traffic.prefills), False
        queues = [deque(n for n in self._numbers if of(n) == server) for server in servers]
        due = [0.0] * len(servers)
        while (self.open or any(queues) or len(self.releases)) and not shared.over.value:
            if shared.acted.value and not ends:
                ends, queues = True, [deque(islice(queue, traffic.tail)) for queue in queues]
            if min(self._warm) >= ENOUGH:
                queues = [deque() for _ in queues]
            for server, queue in enumerate(queues):
                has_room = sum(of(n) == server for n in self.open) < AT_ONCE
                is_due = queue and has_room and time.monotonic() >= due[server]
                if is_due and self.is_known(queue[0]):
                    due[server] = time.monotonic() + traffic.every
                    shared.stages[queue[0]] = BEGUN
                    self.begin(queue.popleft())
            self.step(STUCK_S)
            time.sleep(5e-4)

    def _conclude(self, number: int, one: OpenRequest, status: str) -> None:
        super()._conclude(number, one, status)
        if not self.report.warm and len(self.report.ended) >= WARM_AFTER:
            self.report.warm = self._held()
        if self.side == "decode":
            self.shared.stages[number] = ENDED
            server, is_warm = self.traffic.server_of(number), self.report.ended[-1].state == "warm"
            self._warm[server] = (self._warm[server] + 1) * (is_warm and self.shared.acted.value)

    def _held(self) -> dict[str, int]:
        """Return the resources that this rank holds, and its slots. Prefill's slots without an ACK
        are not counted: they become free after `slot_aside`."""
        slots = self.plugin.slots
        return {**resources(), "slots": slots.count - len(slots.free_slots) - len(slots._published)}

    def left_behind(self) -> list[str]:
        if not self.report.warm:
            return ["leaks: this rank ended too few requests to measure leaks"]
        warm = {**self.report.warm, "slots": 0}
        former = {name: self.traffic.restarts * count for name, count in OF_FORMER.items()}
        slack = {name: count + former.get(name, 0) for name, count in SLACK.items()}
        found = super().left_behind()
        return [*found, *(f"leaks: {line}" for line in leaks(warm, self._held, slack))]


# ---------------------------------------------------------------- the faults


Act = Callable[["Ring"], None]


class Ring(Servers):
    """The processes of one traffic run, and the faults that a test can cause in them."""

    def __init__(self, traffic: Traffic) -> None:
        context, case = mp.get_context("fork"), traffic.case()

        def cells(count: int) -> np.ndarray[Any, Any]:
            """Allocate memory that the forked processes share."""
            return np.frombuffer(context.RawArray("b", count), np.int8)

        ranks = [side for side, _ in ranks_of(case)]
        self.traffic = traffic
        self.shared = OfTraffic(
            bootstrap_up=[context.Event() for _ in range(traffic.prefills)], traffic=traffic,
            stages=cells(traffic.requests), stop=Stop(context),
            states={side: cells(ranks.count(side)) for side in ("prefill", "decode")},
            channel_ports=[free_port() * traffic.same_ports for _ in ranks],
            acted=context.RawValue("b", 0), over=context.RawValue("b", 0),
        )  # fmt: skip
        ports = [free_port() for _ in range(traffic.prefills)]
        super().__init__(replace(case, shared=self.shared), context, ports, TrafficRank)

    def stop(self, *keys: Key) -> None:
        self._signal(signal.SIGSTOP, *keys)

    def go_on(self, *keys: Key) -> None:
        self._signal(signal.SIGCONT, *keys)

    def _signal(self, number: signal.Signals, *keys: Key) -> None:
        for key in keys:
            os.kill(self._processes[key].pid, number)

    def at_stage(self, stage: str, act: Callable[[], object]) -> None:
        """Call `act` while a room of the `held` rank is paused at this stage (stages.py)."""
        self.shared.stop.act(stage, act)

    def kill(self, *keys: Key) -> None:
        self.away.update(keys)
        for side, rank in keys:
            self._processes[side, rank].kill()
            self._processes[side, rank].join()
            self.shared.states[side][rank] = DONE

    def start(self, *keys: Key) -> None:
        """Start killed ranks again, all ranks of a server at once."""
        states = self.shared.states
        for side, rank in keys:
            states[side][rank] = STARTS
            if side == "prefill":
                self.shared.bootstrap_up[rank // 2].clear()
        for key in keys:
            self._start(key, 1)
        self.away.difference_update(keys)
        deadline = time.monotonic() + LIMIT_S
        while any(states[side][rank] == STARTS for side, rank in keys):
            if time.monotonic() > deadline:
                raise TimeoutError("the ranks did not start")
            time.sleep(0.02)

    def result(self, at: Mapping[int, Act]) -> Result:
        """Run the traffic and its faults, and return once every process has ended."""
        marks: dict[int, tuple[float, float]] = {}
        problems: list[str] = []
        acting = threading.Thread(target=self._act, args=(at, marks, problems))
        acting.start()
        try:
            reports = self.reports(RUN_S)
        finally:
            self.shared.over.value = 1
            acting.join()
            self.go_on(*(key for key in self._keys if key not in self.away))
            self.end()
        for (side, rank), report in reports.items():
            lines = [*report.wrong, *filter(None, [report.error])]
            problems += [f"{side} {rank}: {line}" for line in lines]
        return Result(self.traffic, reports, marks, problems)

    def _look(self, found: dict[Key, RankReport]) -> None:
        if (self.shared.acted.value and self._is_done()) or any(r.error for r in found.values()):
            self.shared.over.value = 1

    def _is_done(self) -> bool:
        """Return True if each decode rank has ended its requests, or was killed and not
        restarted."""
        return bool((self.shared.states["decode"] == DONE).all())

    def _act(self, at: Mapping[int, Act], marks: dict[int, Any], problems: list[str]) -> None:
        for number, act in sorted(at.items()):
            while np.count_nonzero(self.shared.stages == ENDED) < number:
                if self.shared.over.value or self._is_done():
                    problems.append(f"the traffic ended before {number} requests had ended")
                    self.shared.over.value = 1
                    return
                time.sleep(0.001)
            began = time.monotonic()
            try:
                act(self)
            except Exception:
                problems.append(traceback.format_exc())
            marks[number] = began, time.monotonic()
        self.shared.acted.value = 1


def run(traffic: Traffic, at: Mapping[int, Act]) -> Result:
    """Run this traffic. `at`: the action for each number of ended requests."""
    return Ring(traffic).result(at)


# ---------------------------------------------------------------- the check


@dataclass
class Result:
    """`marks`: when each action began and ended, by the number of ended requests in `at`."""

    traffic: Traffic
    reports: dict[Key, RankReport]
    marks: dict[int, tuple[float, float]]
    problems: list[str]

    @property
    def ended(self) -> list[Ended]:
        """Return decode's requests in the order in which they began."""
        of_decode = [report for (side, _), report in self.reports.items() if side == "decode"]
        found = [one for report in of_decode for one in report.ended]
        return sorted(found, key=lambda one: one.began)

    def of(self, touched: bool) -> list[Ended]:
        """Return the requests to the server or decode rank with the fault, or all others."""
        side, rank = self.traffic.touched
        of = self.traffic.server_of if side == "prefill" else self.traffic.decode_of
        return [one for one in self.ended if (of(one.number) == rank) is touched]

    def since(self, mark: int, touched: bool = True) -> list[Ended]:
        """Return the requests that began after an action had ended."""
        return [one for one in self.of(touched) if one.began > self.marks[mark][1]]

    def during(self, mark: int, touched: bool = True) -> list[Ended]:
        """Return the requests that began and ended during an action. A request still in flight when
        the fault ends may be served."""
        began, ended = self.marks[mark]
        of = self.of(touched)
        return [one for one in of if began < one.began and one.began + one.seconds < ended]

    def before(self, mark: int, touched: bool = True) -> list[Ended]:
        """Return the requests that ended before an action began."""
        start = self.marks[mark][0]
        return [one for one in self.of(touched) if one.began + one.seconds < start]

    def found(self, *, late: bool = True) -> list[str]:
        """Return all errors and leaks. Without `late`, omit the entries that late messages leave
        for some time if their request has ended before they arrive."""
        return [line for line in self.problems if late or not LATE.match(line)]


def states(requests: list[Ended]) -> set[str]:
    return {one.state for one in requests}


def failed(requests: list[Ended]) -> list[Ended]:
    return [one for one in requests if one.status != "success"]


def nobody_waited(requests: list[Ended], bound: float) -> None:
    assert [one for one in requests if one.seconds > bound + SLACK_S] == []


def untouched(result: Result, bound: float, mark: int = AT) -> None:
    """Check that requests to other ranks are warm and within `bound`, and that they continued
    during the fault at no less than a fifth of the earlier rate."""
    others = result.of(False)
    assert [one for one in others if (one.status, one.state) != ("success", "warm")] == []
    nobody_waited(others, bound)
    began, ended = result.marks[mark]
    earlier = result.before(mark, False)
    pace = len(earlier) / (began - earlier[0].began)
    assert len(result.during(mark, False)) > pace / 5 * (ended - began)
