"""A steady flow of requests to several prefill servers, and what is done to them meanwhile.

    run(Flow(...), at={60: lambda ring: ring.stop(("prefill", 1))})  ->  Result

The decode rank has `at_once` requests open at each prefill server, each opened as soon as one has
ended, and measures them. A prefill rank opens a request when the decode rank has. Between the
requests the test acts on processes and links, by the number of requests that have ended.

Ranks of a server do not wait for each other, as SGLang's do: here the target goes on without a
rank that only sends draft KV. Every byte is compared at the end: a cold request's draft rows are
the truth's or zero.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing as mp
import os
import signal
import socket
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np
from rig import model
from rig.memory import RankReport
from rig.model import Cache, Case, Request
from rig.netns import enter
from rig.rank import LIMIT_S, Rank, free_port, left_behind, reason_of
from rig.ring import Key, Servers, ranks_of

UNKNOWN, BEGUN, ENDED = range(3)
RUN_S = 240
STUCK_S = 60
DROPPED_S = 5

TIMEOUTS = {
    "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": "30",
    "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": "30",
    "SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL": "2",
    "SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE": "1",
    "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT": "3",
}


@dataclass
class Ended:
    """One request, as decode saw it. `state`: of its draft KV, warm or cold, and `reason` why."""

    number: int
    server: int
    began: float
    seconds: float
    status: str
    state: str
    reason: str


@dataclass
class FlowReport(RankReport):
    ended: list[Ended] = field(default_factory=list)


@dataclass(frozen=True)
class Flow:
    """`prefills` servers of TP 2, a decode server of TP 1. A server gets a request at most each
    `every` seconds. `hosts`: namespaces and addresses of ranks that are not on this machine's
    loopback."""

    requests: int
    prefills: int = 1
    at_once: int = 4
    every: float = 0.0
    tokens: int = 96
    hosts: Mapping[Key, tuple[int, str]] = field(default_factory=dict)

    def case(self) -> Case:
        return Case(
            2, 1, prefills=self.prefills, channel=True,
            draft=Cache("mha", heads=4, k_bytes=64, v_bytes=64),
            requests=(Request(self.tokens, chunk_pages=8),) * self.requests,
            extra={"flow": self},
        )  # fmt: skip


@dataclass
class Sending:
    """A request on a prefill rank."""

    sender: Any
    chunks: list[np.ndarray]
    since: float = field(default_factory=time.monotonic)


class FlowRank(Rank):
    def __init__(self, case: Case, side: str, rank: int, ports: list[int], life: int) -> None:
        self.flow: Flow = case.extra["flow"]
        server = rank // case.prefill_tp
        namespace, self.host = self.flow.hosts.get((side, rank), (0, self.host))
        self.server_host = self._host_of(server) if side == "prefill" else self.host
        os.environ["SGLANG_HOST_IP"] = self.host
        if namespace:
            enter(namespace)
        super().__init__(case, side, rank, ports, life)
        self.report: FlowReport = FlowReport(side, rank)
        self.stage_of = case.extra["stages"]
        known = [n for n in range(self.flow.requests) if self.stage_of[n] != UNKNOWN]
        self.lost = set(known) if life else set()  # with the process that it takes the place of

    def start_manager(self) -> None:
        super().start_manager()
        outbox = getattr(self.manager, "outbox", None)
        if outbox is not None:
            closed = self.case.extra["closed"]
            outbox._query_events = Port(outbox, lambda: bool(closed[self.rank]))

    def _host_of(self, server: int) -> str:
        return self.flow.hosts.get(("prefill", 2 * server), (0, Rank.host))[1]

    def address(self, number: int) -> str:
        server = self.case.prefill_of(number)
        return f"{self._host_of(server)}:{self.ports[server]}"

    def run(self) -> None:
        self.run_prefill() if self.side == "prefill" else self.run_decode()

    # -- prefill

    def run_prefill(self) -> None:
        tables = model.page_tables(self.case, "prefill")
        waiting = deque(n for n in range(self.flow.requests) if self.mine(n) and n not in self.lost)
        sending: dict[int, Sending] = {}
        over = self.case.extra["over"]
        while True:
            ends = over.is_set()
            while waiting and self.stage_of[waiting[0]] != UNKNOWN:
                number = waiting.popleft()
                sender = self._sender(number, tables)
                sending[number] = Sending(sender, self._chunks(number, tables))
            for number, one in list(sending.items()):
                if self._has_ended(one, ends):
                    del sending[number]
            if ends and not sending:
                return
            time.sleep(0.002)

    def _has_ended(self, one: Sending, ends: bool) -> bool:
        """Go on with one request. At the end those that nobody asks for any more are dropped."""
        from sglang.srt.disaggregation.base.conn import KVPoll

        status = one.sender.poll()
        if status == KVPoll.Success:
            one.sender.clear()
        elif status == KVPoll.Failed:
            reason_of(one.sender)
        elif one.chunks and status >= KVPoll.WaitingForInput:
            one.sender.send(one.chunks.pop(0), None)
        elif ends and time.monotonic() > one.since + DROPPED_S:
            one.sender.abort()
        return status in (KVPoll.Success, KVPoll.Failed)

    # -- decode

    def run_decode(self) -> None:
        before = {name: [e.copy() for e in pool] for name, pool in self.pools.items()}
        aux_before = [a.copy() for a in self.aux]
        self.tables = model.page_tables(self.case, "decode")
        queues = [
            deque(n for n in range(self.flow.requests) if self.case.prefill_of(n) == server)
            for server in range(self.case.prefills)
        ]
        open_rooms: dict[int, tuple[Any, float]] = {}
        last = [0.0] * len(queues)
        over = self.case.extra["over"]  # before its time where another rank has an error
        while (open_rooms or any(queues)) and not over.is_set():
            for server, queue in enumerate(queues):
                at_server = sum(self.case.prefill_of(n) == server for n in open_rooms)
                due = time.monotonic() >= last[server] + self.flow.every
                if not queue or not due or at_server >= self.flow.at_once:
                    continue
                if self._begin(queue[0], open_rooms):
                    queue.popleft()
                    last[server] = time.monotonic()
            for number, (receiver, began) in list(open_rooms.items()):
                if self._ended(number, receiver, began):
                    del open_rooms[number]
            self.releases.resolve()
            time.sleep(0.0005)
        self.releases.wait()
        over.set()
        self._compare(before, aux_before)

    def _begin(self, number: int, open_rooms: dict[int, tuple[Any, float]]) -> bool:
        """Whether it has begun: SGLang's scheduler asks again later as well."""
        if not self.manager.try_ensure_parallel_info(self.address(number)):
            return False
        began = time.monotonic()
        receiver = self.kv_class["receiver"](
            self.manager, self.address(number), self.rooms()[number]
        )  # fmt: skip
        receiver.init(0)
        self.stage_of[number] = BEGUN
        if receiver.conclude_state is None:
            self.published.append(receiver)
            receiver.send_metadata(self.tables[number], number + 1, None, decode_prefix_len=0)
        open_rooms[number] = receiver, began
        return True

    def _ended(self, number: int, receiver: Any, began: float) -> bool:
        from sglang.srt.disaggregation.base.conn import KVPoll

        status, seconds = receiver.poll(), time.monotonic() - began
        if status not in (KVPoll.Success, KVPoll.Failed) and seconds < STUCK_S:
            return False
        entry = getattr(receiver, "entry", None)
        state = str(entry.state) if entry is not None and entry.state else ""
        reason = entry.reason if entry is not None else ""
        name = {KVPoll.Success: "success", KVPoll.Failed: "failed"}.get(status, f"stuck: {status}")
        if status == KVPoll.Success:
            receiver.clear()
        else:
            reason = reason_of(receiver)
            self.releases.hold(receiver)
        server = self.case.prefill_of(number)
        self.report.ended.append(Ended(number, server, began, seconds, name, state, reason))
        self.stage_of[number] = ENDED
        self.case.extra["count"].value += 1
        return True

    def _compare(self, before: dict[str, list[np.ndarray]], aux_before: list[np.ndarray]) -> None:
        done = [one.number for one in self.report.ended if one.status == "success"]
        failed = {one.number for one in self.report.ended} - set(done)
        for number in failed:
            for name, pool in before.items():
                for want, got in zip(pool, self.pools[name], strict=True):
                    want[self.tables[number]] = got[self.tables[number]]
            for want, got in zip(aux_before, self.aux, strict=True):
                want[number + 1] = got[number + 1]
        for one in self.report.ended:
            if one.state == "cold" and one.status == "success":
                self._truth_or_zero(one.number)
        self.compare(before, aux_before, done)

    def _truth_or_zero(self, number: int) -> None:
        """Each row of a cold request is one of the two; afterwards all are the truth's."""
        pages = self.tables[number]
        rows = zip(self.pools["draft"], self._rows("draft", number), strict=True)
        for index, (entry, truth) in enumerate(rows):
            found = entry[pages]
            right = (found == truth).all((2, 3)) | (found == 0).all((2, 3))
            if not right.all():
                self.report.wrong.append(f"cold request {number}, draft entry {index}: wrong rows")
            entry[pages] = truth


class Port:
    """Before an outbox's thread asks its events: closes the channel's port, or opens it again."""

    def __init__(self, outbox: Any, is_closed: Callable[[], bool]) -> None:
        self._outbox, self._real, self._is_closed = outbox, outbox._query_events, is_closed
        self._closed = False

    def __call__(self) -> None:
        address = self._outbox.address
        if self._is_closed() and not self._closed:
            self._closed = True
            self._outbox._socket.unbind(address)
            disconnect(int(address.rpartition(":")[2]))
        elif self._closed and not self._is_closed():
            self._closed = False
            self._outbox._socket.bind(address)
        self._real()


def disconnect(port: int) -> None:
    """End all TCP connections of this process from that port of its own."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as one:
            if one.family == socket.AF_INET and one.getsockname()[1] == port:
                one.shutdown(socket.SHUT_RDWR)


# ---------------------------------------------------------------- processes


def _main(
    case: Case, side: str, rank: int, ports: list[int], pipe: Any, go: Any, life: int
) -> None:
    report: RankReport = FlowReport(side, rank)
    try:
        one = FlowRank(case, side, rank, ports, life)
        report = one.report
        one.start_manager()
        case.extra["ready"][ranks_of(case).index((side, rank))] = 1
        one.run()
        report.wrong += left_behind(one.manager, 10)
        report.stats = one.plugin.stats.snapshot()
    except BaseException:
        report.error = traceback.format_exc()
        case.extra["over"].set()
    pipe.send(report)
    go.wait(LIMIT_S)
    os._exit(0)


class Ring(Servers):
    """What a test may do to the processes."""

    def __init__(self, case: Case, context: Any, ports: list[int]) -> None:
        self.away: set[Key] = set()
        super().__init__(case, context, ports, _main)

    def stop(self, *keys: Key) -> None:
        self._signal(signal.SIGSTOP, *keys)

    def go_on(self, *keys: Key) -> None:
        self._signal(signal.SIGCONT, *keys)

    def close_port(self, key: Key) -> None:
        """The draft channel's; everything else of the rank goes on."""
        self._case.extra["closed"][key[1]] = 1
        time.sleep(0.3)

    def open_port(self, key: Key) -> None:
        self._case.extra["closed"][key[1]] = 0

    def _signal(self, number: signal.Signals, *keys: Key) -> None:
        for key in keys:
            os.kill(self._processes[key].pid, number)

    def kill(self, *keys: Key) -> None:
        self.away.update(keys)
        for key in keys:
            self._processes[key].kill()
            self._processes[key].join()

    def start(self, *keys: Key) -> None:
        """Anew, where they were killed; all ranks of a server at once."""
        for _, rank in keys:
            self._case.extra["bootstrap_up"][rank // 2].clear()
        for key in keys:
            self._case.extra["ready"][self._keys.index(key)] = 0
            self._start(key, 1)
        self.away.difference_update(keys)
        self.wait_until_ready(keys)

    def wait_until_ready(self, keys: Any = ()) -> None:
        numbers = [self._keys.index(key) for key in keys or self._keys]
        deadline = time.monotonic() + LIMIT_S
        while not all(self._case.extra["ready"][n] for n in numbers):
            if time.monotonic() > deadline:
                raise TimeoutError("the ranks did not start")
            time.sleep(0.02)

    def all_reports(self) -> dict[Key, RankReport]:
        found: dict[Key, RankReport] = {}
        over, deadline = self._case.extra["over"], time.monotonic() + RUN_S
        while missing := [k for k in self._keys if k not in found and k not in self.away]:
            for key in missing:
                pipe = self._pipes[key]
                if pipe.poll(0.05):
                    report = self._take(key)
                    if report is not None:
                        found[key] = report
                    elif key not in self.away and self._pipes[key] is pipe:
                        found[key] = RankReport(*key, error=f"{key} did not report")
            if over.is_set():
                deadline = min(deadline, time.monotonic() + LIMIT_S)
            if time.monotonic() > deadline:
                return found | {k: RankReport(*k, error=f"{k} hangs") for k in missing}
        return found


Act = Callable[[Ring], None]


@dataclass
class Result:
    """`marks`: when each action was done, by its number of ended requests."""

    flow: Flow
    reports: dict[Key, RankReport]
    marks: dict[int, tuple[float, float]]
    problems: list[str]

    @property
    def ended(self) -> list[Ended]:
        """All requests, in the order in which they began."""
        report = self.reports[("decode", 0)]
        assert isinstance(report, FlowReport)
        return sorted(report.ended, key=lambda one: one.began)

    def of(self, server: int) -> list[Ended]:
        return [one for one in self.ended if one.server == server]

    def since(self, mark: int, server: int = 0) -> list[Ended]:
        """Requests to a server that began after an action was done."""
        return [one for one in self.of(server) if one.began > self.marks[mark][1]]

    def end_of(self, mark: int) -> float:
        """When the next action began; infinite after the last."""
        return min((start for start, _ in self.marks.values() if start > self.marks[mark][0]),
                   default=math.inf)  # fmt: skip

    def before(self, mark: int, server: int = 0) -> list[Ended]:
        """Requests to a server that ended before an action began."""
        start = self.marks[mark][0]
        return [one for one in self.of(server) if one.began + one.seconds < start]


def typical(requests: list[Ended]) -> float:
    return median(one.seconds for one in requests)


def run(flow: Flow, at: Mapping[int, Act]) -> Result:
    """`at`: what is done once so many requests have ended. Every process has ended on return."""
    context = mp.get_context("fork")
    case = flow.case()
    case.extra.update(
        bootstrap_up=[context.Event() for _ in range(flow.prefills)],
        stages=context.RawArray("b", flow.requests),
        ready=context.RawArray("b", len(ranks_of(case))),
        closed=context.RawArray("b", 2 * flow.prefills),
        count=context.Value("i", 0),
        over=context.Event(),
        struck=context.Value("d", 0.0),
    )
    marks: dict[int, tuple[float, float]] = {}
    problems: list[str] = []
    ring = Ring(case, context, [free_port() for _ in range(flow.prefills)])
    acting = threading.Thread(target=lambda: problems.extend(_act(ring, case, at, marks)))
    acting.start()
    try:
        reports = ring.all_reports()
    finally:
        case.extra["over"].set()
        acting.join()
        ring.go_on(*(key for key in ranks_of(case) if key not in ring.away))
        ring.end()
    for (side, rank), report in reports.items():
        lines = [*report.wrong, *filter(None, [report.error])]
        problems += [f"{side} {rank}: {line}" for line in lines]
    return Result(flow, reports, marks, problems)


def _act(
    ring: Ring, case: Case, at: Mapping[int, Act], marks: dict[int, tuple[float, float]]
) -> Iterator[str]:
    count, over = case.extra["count"], case.extra["over"]
    for number, act in sorted(at.items()):
        while count.value < number:
            if over.is_set():
                yield f"the flow ended before {number} requests had"
                return
            time.sleep(0.001)
        began = time.monotonic()
        try:
            act(ring)
        except Exception:
            yield traceback.format_exc()
        marks[number] = began, time.monotonic()
