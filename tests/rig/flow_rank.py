"""A rank that serves a steady flow of requests (rig/flow.py), without waiting for its siblings.

The decode rank has `at_once` requests open at each prefill server, each opened as soon as one has
ended, and measures them. A prefill rank opens a request when the decode rank has. Every byte is
compared at the end: a cold request's draft rows are the truth's or zero.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from rig import model
from rig.memory import RankReport
from rig.model import Cache, Case, Request
from rig.netns import enter
from rig.rank import Rank, reason_of
from rig.special import Key, Shared

UNKNOWN, BEGUN, ENDED = range(3)
STUCK_S = 60
DROPPED_S = 5


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
            2, 1, prefills=self.prefills,
            draft=Cache("mha", heads=4, k_bytes=64, v_bytes=64),
            requests=(Request(self.tokens, chunk_pages=8),) * self.requests,
        )  # fmt: skip


@dataclass
class Sending:
    """A request on a prefill rank."""

    sender: Any
    chunks: list[np.ndarray]
    since: float = field(default_factory=time.monotonic)


@dataclass
class OfFlow(Shared):
    """`stages`: of each request; `ready`: of each rank; `closed`: of each prefill rank's channel;
    `count`: requests that have ended; `over`: set at the end."""

    flow: Flow | None = None
    stages: Any = None
    ready: Any = None
    closed: Any = None
    count: Any = None
    over: Any = None


class FlowRank(Rank):
    def __init__(self, case: Case, side: str, rank: int, ports: list[int], life: int) -> None:
        self.flow: Flow = case.shared.flow
        server = rank // case.prefill_tp
        namespace, self.host = self.flow.hosts.get((side, rank), (0, self.host))
        self.server_host = self._host_of(server) if side == "prefill" else self.host
        os.environ["SGLANG_HOST_IP"] = self.host
        if namespace:
            enter(namespace)
        super().__init__(case, side, rank, ports, life)
        self.report: FlowReport = FlowReport(side, rank)
        self.stage_of = case.shared.stages
        known = [n for n in range(self.flow.requests) if self.stage_of[n] != UNKNOWN]
        self.lost = set(known) if life else set()  # with the process that it takes the place of

    def start_manager(self) -> None:
        super().start_manager()
        outbox = getattr(self.manager, "outbox", None)
        if outbox is not None:
            closed = self.case.shared.closed
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
        over = self.case.shared.over
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
        over = self.case.shared.over  # before its time where another rank has an error
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
        self.case.shared.count.value += 1
        return True

    def _compare(self, before: dict[str, list[np.ndarray]], aux_before: list[np.ndarray]) -> None:
        done = [one.number for one in self.report.ended if one.status == "success"]
        self.report.cold = {one.number for one in self.report.ended if one.state == "cold"}
        self._excuse_failed(before, aux_before, done)
        self.compare(before, aux_before, done)


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
