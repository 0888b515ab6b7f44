"""A rank that serves traffic (rig/traffic.py).

Pages and metadata rows come from free lists. A decode rank compares a request's own with the truth
when it succeeds, and at the end all that no request has: there must be what was there before.
Memory of a failed request is used again by SGLang's rule for deferred release (rig/releases.py), or
never.
"""

from __future__ import annotations

import os
import random
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
from rig.memory import AUX_LENS, RankReport
from rig.netns import enter
from rig.rank import Rank, left_behind, reason_of
from rig.resources import SLACK, leaks, resources
from rig.stages import Port, hold_in_decode, hold_in_prefill
from rig.traffic_case import BEGUN, DONE, ENDED, UNKNOWN, Meeting, TrafficCase

from sglang_mixkv.channel.messages import Open
from sglang_mixkv.decode import events as ev
from sglang_mixkv.draft.rows import DraftRows

STUCK_S = 90  # more than all timeouts together
DROPPED_S = 5
QUEUES = 16
OF_FORMER = {"fds": 12, "sockets": 8}  # of a server that was restarted since
ROWS, COMPARE_EVERY = 64, 100
PAUSE_S = {"prefill": 2e-3, "decode": 5e-4}
"""Prefill sends a chunk as often as a scheduler may, so that a request takes long enough to be met
by what is done to it."""
TROUBLE = 0.01  # of so many copies, reads and messages each


@dataclass
class Ended:
    """One request, as a rank saw it. `state`: of its draft KV on decode, warm or cold; `reason`:
    why it is, or why the request failed."""

    number: int
    began: float
    seconds: float
    status: str
    state: str
    reason: str


@dataclass
class Report(RankReport):
    """`warm`: what the rank held once it had made all that it needs."""

    ended: list[Ended] = field(default_factory=list)
    warm: dict[str, int] = field(default_factory=dict)


@dataclass
class Request:
    """One that this rank works on."""

    number: int
    pages: np.ndarray
    row: int
    meeting: Meeting
    handle: Any = None
    chunks: list[np.ndarray] = field(default_factory=list)
    since: float = field(default_factory=time.monotonic)
    published: bool = False

    def meets(self, name: str, rank: int | None = None) -> bool:
        """On that rank of the side, or on whichever."""
        return self.meeting.name == name and rank in (None, self.meeting.rank)

    def where(self, name: str) -> Any:
        """In the memory of that name."""
        return self.row if name == "aux" else self.pages

    @property
    def age(self) -> float:
        return time.monotonic() - self.since


class TrafficRank(Rank):
    case: TrafficCase
    report: Report

    def __init__(
        self, case: TrafficCase, side: str, rank: int, ports: list[int], life: int
    ) -> None:
        traffic, shared = case.traffic, case.shared
        self.traffic, self.stages, self.over = traffic, shared.stages, shared.over
        namespace, self.host = traffic.hosts.get((side, rank), (0, self.host))
        self.server_host = self._host_of(rank // case.prefill_tp)
        if side == "decode":
            self.server_host = self.host
        elif port := shared.channel_ports[rank]:
            os.environ["SGLANG_MIXKV_PORT"] = str(port)
        os.environ["SGLANG_HOST_IP"] = self.host
        if namespace:
            enter(namespace)
        if traffic.decodes > 1:
            self._have_a_queue_each(side, rank)
        super().__init__(case, side, rank, ports, life)
        self.report = Report(side, rank)
        count = len(case.requests)
        order = np.random.default_rng([case.seed, rank]).permutation(case.pool_pages)
        self.free_pages = deque(order.tolist())  # what was freed last is used last
        self.free_rows = deque(range(min(ROWS, count) if traffic.is_random else count))
        self.memory = {**self.pools, "aux": self.aux}
        self.open: dict[int, Request] = {}
        # those that the process had which this one takes the place of are lost with it
        self.numbers_of_life = [
            n for n in range(count) if self.mine(n) and (not life or self.stages[n] == UNKNOWN)
        ]

    def _have_a_queue_each(self, side: str, rank: int) -> None:
        """SGLang's writes to decode ranks wait in some queues, by the number of a rank's Mooncake
        port (MooncakeKVManager.add_transfer_request). Two ranks share one here only where a test
        says that SGLang has no other. Mooncake heeds a range of ports below 32,768 alone."""
        os.environ.setdefault("SGLANG_DISAGGREGATION_QUEUE_SIZE", str(QUEUES))
        os.environ["SGLANG_DISAGGREGATION_THREAD_POOL_SIZE"] = str(QUEUES)
        if side == "decode":
            several = QUEUES // self.traffic.decodes  # SGLang's engine takes two, the plugin's too
            first = 20_000 + os.getpid() % 500 * QUEUES + rank * several
            os.environ["MC_MIN_PRC_PORT"] = str(first)
            os.environ["MC_MAX_PRC_PORT"] = str(first + several - 1)

    def _host_of(self, server: int) -> str:
        key = ("prefill", self.traffic.prefill_tp * server)
        return self.traffic.hosts.get(key, (0, Rank.host))[1]

    def address(self, number: int) -> str:
        server = self.case.prefill_of(number)
        return f"{self._host_of(server)}:{self.ports[server]}"

    def _write_truth(self, *_: Any) -> None:
        """Pages get a request's rows when it gets them."""

    def _rows(self, name: str, number: int) -> list[np.ndarray]:
        """A request's metadata as well: unlike for each prefill rank that sends it."""
        if name != "aux":
            return super()._rows(name, number)
        sender = self.rank if self.side == "prefill" else self._aux_sender(number)
        draw = np.random.default_rng([sender, number])
        return [draw.integers(0, 256, size, np.uint8) for size in AUX_LENS]

    # -- requests

    def begin(self, number: int) -> bool:
        """Whether there is memory for the request, so that it has begun."""
        count = self.case.pages(self.case.requests[number])
        if not self.free_rows or len(self.free_pages) < count:
            return False
        pages = np.array([self.free_pages.popleft() for _ in range(count)], np.int32)
        one = Request(number, pages, self.free_rows.popleft(), self.traffic.meeting(number))
        self.open[number] = one
        self._begin(one)
        return True

    def _give_back(self, one: Request) -> None:
        self.free_pages.extend(one.pages.tolist())
        self.free_rows.append(one.row)

    def step(self) -> None:
        """Go on with all requests."""
        for one in list(self.open.values()):
            self._step(one)
        # after so many it has made all that it needs
        warm = min(200, self.traffic.requests // 3) if self.traffic.is_random else 35
        if not self.report.warm and len(self.report.ended) >= warm:
            self.report.warm = self._held()

    def _step(self, one: Request) -> None:
        from sglang.srt.disaggregation.base.conn import KVPoll

        status, seconds = one.handle.poll(), one.age
        if self.traffic.is_random:  # the lowest counts, as with SGLang's poll_and_all_reduce
            of_ranks = self.case.shared.statuses[self.side][:, one.number]
            of_ranks[self.attn_rank] = status
            status = of_ranks.min()
        if status not in (KVPoll.Success, KVPoll.Failed) and seconds < STUCK_S:
            self._go_on(one, status >= KVPoll.WaitingForInput)
            return
        name = {KVPoll.Success: "success", KVPoll.Failed: "failed"}.get(status, f"stuck: {status}")
        handle = getattr(one.handle, "handle", None)
        state, reason = getattr(handle, "state", ""), getattr(handle, "reason", "")
        if name == "success":
            if self.side == "decode":
                self._compare(one, state)
            one.handle.clear()
        else:
            reason = reason_of(one.handle)
        if one.published and name != "success":  # it may be written until nothing can arrive
            self.releases.hold(one.handle, lambda: self._release(one))
        else:
            self._give_back(one)
        del self.open[one.number]
        self.report.ended.append(
            Ended(one.number, one.since, seconds, name, str(state or ""), reason)
        )
        if self.side == "decode":
            self.stages[one.number] = ENDED

    def trouble(self, of: Any, name: str, instead: Callable[..., Any]) -> None:
        """In random traffic, in the place of so many calls. No request may fail of it."""
        real, draw = getattr(of, name), random.Random(f"{self.case.seed} {self.rank} {name}")

        def call(*args: Any) -> Any:
            return instead(real, *args) if draw.random() < TROUBLE else real(*args)

        if self.traffic.is_random:
            setattr(of, name, call)

    # -- what it holds

    def _held(self) -> dict[str, int]:
        """Slots as well: on prefill those whose ACK does not come are another thing, since they
        are free again after `slot_aside`."""
        slots = self.plugin.slots if self.plugin is not None else None
        taken = slots.count - slots.free_slots - slots.offered if slots is not None else 0
        return {**resources(), "slots": taken}

    def look_at_what_is_left(self) -> None:
        """Of an idle rank."""
        self.report.wrong += left_behind(self.manager, 2 if self.traffic.is_random else 10)
        if not self.report.warm:
            self.report.wrong.append("leaks: it was never warm")
            return
        warm = {**self.report.warm, "slots": 0}
        former = {name: self.traffic.restarts * count for name, count in OF_FORMER.items()}
        slack = {name: count + former.get(name, 0) for name, count in SLACK.items()}
        self.report.wrong += [f"leaks: {line}" for line in leaks(warm, self._held, slack)]


def no_memory(_: Any, *args: Any) -> Any:
    raise MemoryError("no memory for a copy")


def twice(real: Any, *args: Any) -> Any:
    real(*args)
    return real(*args)


def lost_if_open(real: Any, peer: bytes, message: Any) -> Any:
    return isinstance(message, Open) or real(peer, message)


def astray(real: Any, tag: Any, peer: Any, extents: Any) -> Any:
    return real(tag, peer, [one._replace(remote=one.remote + (1 << 44)) for one in extents])


# ---------------------------------------------------------------- prefill


class PrefillRank(TrafficRank):
    def start_manager(self) -> None:
        super().start_manager()
        if (channel := getattr(self.manager, "prefill_channel", None)) is None:
            return
        shared, held = self.case.shared, self.traffic.held
        channel._look = Port(channel, lambda: bool(shared.closed[self.rank]))
        if held[0] == "decode" or held == (self.side, self.rank):
            hold_in_prefill(channel, shared.stop, self._room_is_met)
        self.trouble(DraftRows, "pack", no_memory)
        self.trouble(channel, "_send", twice)

    def _room_is_met(self, room: int) -> bool:
        side, rank = self.traffic.held
        return side == "prefill" or self.traffic.decode_of(room - self.case.room(0)) == rank

    def run(self) -> None:
        """In a flow a request begins when decode's has."""
        ahead, queues = self.traffic.is_random, [deque[int]() for _ in range(self.traffic.decodes)]
        for number in self.numbers_of_life:
            queues[self.traffic.decode_of(number)].append(number)
        while not self.over.value or self.open or (ahead and any(queues)):
            for queue in filter(None, queues):
                has_room = len(self.open) < self.traffic.at_once
                is_due = has_room if ahead else self.stages[queue[0]] != UNKNOWN
                if is_due and self.begin(queue[0]):
                    queue.popleft()
            self.step()
            time.sleep(PAUSE_S[self.side])

    def _begin(self, one: Request) -> None:
        """The sender comes first, as soon as decode has begun: SGLang loses a status that arrives
        while it is made (update_status, disaggregation/common/conn.py)."""
        one.handle = self.kv_class["sender"](
            self.manager, self.address(one.number), self.case.room(one.number),
            req_has_disagg_prefill_dp_rank=True,
        )  # fmt: skip
        one.handle.init(len(one.pages), one.row)
        for name, of in self.memory.items():
            for entry, rows in zip(of, self._rows(name, one.number), strict=True):
                entry[one.where(name)] = rows
        step = self.case.requests[one.number].chunk_pages or len(one.pages)
        one.chunks = [one.pages[at : at + step] for at in range(0, len(one.pages), step)]

    def _go_on(self, one: Request, may_send: bool) -> None:
        """At the end of a flow those that nobody asks for any more are dropped."""
        dropped = self.over.value and not self.traffic.is_random and one.age > DROPPED_S
        if one.meets("prefill aborts") and one.age > one.meeting.part / 10:
            one.handle.abort()
        elif one.chunks and may_send:
            one.handle.send(one.chunks.pop(0), None)
        elif dropped:
            one.handle.abort()


# ---------------------------------------------------------------- decode


class DecodeRank(TrafficRank):
    def start_manager(self) -> None:
        super().start_manager()
        self.shadow = {name: [one.copy() for one in of] for name, of in self.memory.items()}
        if (channel := getattr(self.manager, "decode_channel", None)) is None:
            return
        hold_in_decode(channel, self.case.shared.stop, self._peer_is_met)
        self.trouble(DraftRows, "unpack", no_memory)
        self.trouble(channel._links, "send", twice)
        self.trouble(channel._links, "send", lost_if_open)
        self.trouble(channel._store.plane, "start", astray)

    def _peer_is_met(self, peer: bytes) -> bool:
        side, rank = self.traffic.held
        if side == "decode":
            return self.rank == rank
        link = self.manager.decode_channel._links._links.get(peer)
        met = self.address(0), rank
        return link is not None and (ev.server_of(peer), link.row.attn_tp_rank) == met

    def run(self) -> None:
        traffic, shared, of = self.traffic, self.case.shared, self.traffic.server_of
        servers, compared, ends = range(traffic.prefills), 0, False
        queues = [deque(n for n in self.numbers_of_life if of(n) == s) for s in servers]
        due = [0.0] * len(servers)
        # over before its time: another rank has an error
        while (self.open or any(queues) or len(self.releases)) and not self.over.value:
            if shared.acted.value and not ends:
                ends, queues = True, [deque(islice(queue, traffic.tail)) for queue in queues]
            for server, queue in enumerate(queues):
                has_room = sum(of(n) == server for n in self.open) < traffic.at_once
                is_due = queue and has_room and time.monotonic() >= due[server]
                if is_due and self.begin(queue[0]):
                    due[server] = time.monotonic() + traffic.every
                    queue.popleft()
            self.step()
            self.releases.resolve()
            if traffic.is_random and len(self.report.ended) >= compared + COMPARE_EVERY:
                compared = len(self.report.ended)
                self.compare_idle()
            time.sleep(PAUSE_S[self.side])
        shared.states[self.side][self.rank] = DONE
        while not self.over.value:
            time.sleep(0.005)
        self.compare_idle()

    def begin(self, number: int) -> bool:
        """Once its prefill server is known: SGLang's scheduler asks again later as well."""
        known = self.manager.try_ensure_parallel_info(self.address(number))
        return bool(known) and super().begin(number)

    def _begin(self, one: Request) -> None:
        address, room = self.address(one.number), self.case.room(one.number)
        one.handle = self.kv_class["receiver"](self.manager, address, room)
        one.handle.init(0)
        self.stages[one.number] = BEGUN
        self._go_on(one, False)

    def _go_on(self, one: Request, _: bool) -> None:
        """Publish the metadata, unless the request has failed, or its fault is that this is late or
        never happens; then abort where that is its fault."""
        late = one.meets("metadata: late") and one.age < one.meeting.part
        if one.published:
            met = one.meets("abort after metadata", self.rank) and one.age > one.meeting.part / 20
            if met or one.meets("abort storm"):
                one.handle.abort()
        elif one.handle.conclude_state is None and not late:
            if one.meets("abort before metadata", self.rank):
                one.handle.abort()
            else:
                one.published = True
                one.handle.send_metadata(one.pages, one.row, None, decode_prefix_len=0)

    def _compare(self, one: Request, state: Any) -> None:
        """The request's own pages and row are the truth's. Of a cold drafter each token's row is
        that, or zeros."""
        for name, of in self.memory.items():
            where, truth = one.where(name), self._rows(name, one.number)
            for index, (want, rows) in enumerate(zip(self.shadow[name], truth, strict=True)):
                got = of[index][where]
                if name == "draft" and state is ev.State.COLD:
                    rows = np.where(got.any(axis=(2, 3), keepdims=True), rows, 0)
                if not np.array_equal(got, rows):
                    self.report.wrong.append(f"{name} {index} of {one.number}, {one.meeting}")
                want[where] = rows

    def _release(self, one: Request) -> None:
        """A failed request's memory may hold anything."""
        if not self.traffic.is_random:
            return  # SGLang may write it even later, after a rank that stood still
        for name, of in self.memory.items():
            where = one.where(name)
            for want, got in zip(self.shadow[name], of, strict=True):
                want[where] = got[where]
        self._give_back(one)

    def compare_idle(self) -> None:
        """Every byte of every page and row that no request has now."""
        for name, of in self.memory.items():
            where = np.array(self.free_rows if name == "aux" else self.free_pages, np.int64)
            for index, (want, got) in enumerate(zip(self.shadow[name], of, strict=True)):
                bad = where[(want[where] != got[where]).reshape(len(where), want[0].size).any(1)]
                if len(bad):
                    self.report.wrong.append(f"{name} {index}: idle {bad[:9]} were written")
                    want[bad] = got[bad]
