"""A rank that serves a steady flow of requests (rig/flow.py), without waiting for its siblings.

The decode rank has `at_once` requests open at each prefill server, each opened as soon as one has
ended, and measures them. A prefill rank opens a request when the decode rank has. Every byte is
compared at the end: a cold request's draft rows are the truth's or zero.
"""

from __future__ import annotations

import os
import time
from collections import deque
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
from rig import model
from rig.flow_case import BEGUN, ENDED, UNKNOWN, Ended, Flow, FlowReport
from rig.model import Case
from rig.netns import enter
from rig.rank import Rank, left_behind, reason_of
from rig.resources import SLACK, leaks, resources
from rig.stages import Port, hold_in_decode, hold_in_prefill

from sglang_mixkv.decode import events as ev

STUCK_S = 60
DROPPED_S = 5
QUEUES = 16
WARM = 35  # requests, after which a rank has made all that it needs
OF_FORMER = {"fds": 12, "sockets": 8}  # of a server that was restarted since


@dataclass
class Sending:
    """A request on a prefill rank."""

    sender: Any
    chunks: list[np.ndarray]
    since: float = field(default_factory=time.monotonic)


class FlowRank(Rank):
    def __init__(self, case: Case, side: str, rank: int, ports: list[int], life: int) -> None:
        self.flow: Flow = case.shared.flow
        self._known_tables: dict[str, list[np.ndarray]] = {}
        server = rank // case.prefill_tp
        namespace, self.host = self.flow.hosts.get((side, rank), (0, self.host))
        self.server_host = self._host_of(server) if side == "prefill" else self.host
        os.environ["SGLANG_HOST_IP"] = self.host
        if side == "prefill" and (port := case.shared.channel_ports[rank]):
            os.environ["SGLANG_MIXKV_PORT"] = str(port)
        if namespace:
            enter(namespace)
        if self.flow.decodes > 1:
            self._have_a_queue_each(side, rank)
        super().__init__(case, side, rank, ports, life)
        self.report: FlowReport = FlowReport(side, rank)
        self.stage_of = case.shared.stages
        mine = [n for n in range(self.flow.requests) if self.mine(n)]
        # those that the process had which it takes the place of are lost with it
        self.numbers_of_life = [n for n in mine if not life or self.stage_of[n] == UNKNOWN]

    def _have_a_queue_each(self, side: str, rank: int) -> None:
        """SGLang's writes to decode ranks wait in some queues, by the number of a rank's Mooncake
        port (MooncakeKVManager.add_transfer_request). Two ranks share one here only where a test
        says that SGLang has no other. Mooncake heeds a range of ports below 32,768 alone."""
        os.environ.setdefault("SGLANG_DISAGGREGATION_QUEUE_SIZE", str(QUEUES))
        os.environ["SGLANG_DISAGGREGATION_THREAD_POOL_SIZE"] = str(QUEUES)
        if side == "decode":
            several = QUEUES // self.flow.decodes  # SGLang's engine takes two, the plugin's too
            first = 20_000 + os.getpid() % 500 * QUEUES + rank * several
            os.environ["MC_MIN_PRC_PORT"] = str(first)
            os.environ["MC_MAX_PRC_PORT"] = str(first + several - 1)

    def start_manager(self) -> None:
        super().start_manager()
        stop = self.case.shared.stop
        if (prefill := getattr(self.manager, "prefill_channel", None)) is not None:
            closed = self.case.shared.closed
            prefill._look = Port(prefill, lambda: bool(closed[self.rank]))
            if self.flow.held[0] == "decode" or self.flow.held == (self.side, self.rank):
                hold_in_prefill(prefill, stop, self._room_is_met)
        if (decode := getattr(self.manager, "decode_channel", None)) is not None:
            hold_in_decode(decode, stop, self._peer_is_met)

    def _room_is_met(self, room: int) -> bool:
        held = self.flow.held
        return held[0] == "prefill" or self._decode_of(room - self.rooms()[0]) == held[1]

    def _peer_is_met(self, peer: bytes) -> bool:
        side, rank = self.flow.held
        if side == "decode":
            return self.rank == rank
        link = self.manager.decode_channel._links._links.get(peer)
        met = self.address(0), rank
        return link is not None and (ev.server_of(peer), link.row.attn_tp_rank) == met

    def _host_of(self, server: int) -> str:
        return self.flow.hosts.get(("prefill", 2 * server), (0, Rank.host))[1]

    def address(self, number: int) -> str:
        server = self.case.prefill_of(number)
        return f"{self._host_of(server)}:{self.ports[server]}"

    def _tables(self, name: str) -> list[np.ndarray]:
        """Of thousands of requests: made once."""
        if name not in self._known_tables:
            self._known_tables[name] = super()._tables(name)
        return self._known_tables[name]

    def numbers(self) -> list[int]:
        """Pages of requests that have not begun are not written."""
        return [one.number for one in self.report.ended]

    def run(self) -> None:
        self.run_prefill() if self.side == "prefill" else self.run_decode()

    def _decode_of(self, number: int) -> int:
        return self.case.turn(number) % self.flow.decodes

    # -- what it holds

    def _note_warm(self, ended: int) -> None:
        if not self.report.resources and ended >= WARM:
            self.report.resources = self._held()

    def _held(self) -> dict[str, int]:
        """Slots as well: on prefill those whose ACK does not come are another thing, since they
        are free again after `slot_aside`."""
        slots = self.plugin.slots if self.plugin is not None else None
        taken = slots.count - slots.free_slots - slots.offered if slots is not None else 0
        return {**resources(), "slots": taken}

    def look_at_what_is_left(self) -> None:
        """Of an idle rank."""
        self.report.wrong += left_behind(self.manager, 10)
        if not self.report.resources:
            self.report.wrong.append("leaks: it was never warm")
            return
        warm = {**self.report.resources, "slots": 0}
        former = {name: self.flow.restarts * count for name, count in OF_FORMER.items()}
        slack = {name: count + former.get(name, 0) for name, count in SLACK.items()}
        self.report.wrong += [f"leaks: {line}" for line in leaks(warm, self._held, slack)]

    # -- prefill

    def run_prefill(self) -> None:
        tables = model.page_tables(self.case, "prefill")
        waiting = [deque[int]() for _ in range(self.flow.decodes)]
        for number in self.numbers_of_life:
            waiting[self._decode_of(number)].append(number)
        sending: dict[int, Sending] = {}
        over, ended = self.case.shared.over, 0
        while True:
            ends = over.is_set()
            for queue in waiting:
                while queue and self.stage_of[queue[0]] != UNKNOWN:
                    number = queue.popleft()
                    sender = self._sender(number, tables)
                    sending[number] = Sending(sender, self._chunks(number, tables))
            for number, one in list(sending.items()):
                if self._has_ended(one, ends):
                    del sending[number]
                    ended += 1
            self._note_warm(ended)
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
            deque(n for n in self.numbers_of_life if self.case.prefill_of(n) == server)
            for server in range(self.case.prefills)
        ]
        open_rooms: dict[int, tuple[Any, float]] = {}
        last, ends = [0.0] * len(queues), False
        over = self.case.shared.over  # before its time where another rank has an error
        acted, done = self.case.shared.acted, self.case.shared.done
        while (open_rooms or any(queues)) and not over.is_set():
            if acted.is_set() and not ends:
                ends, queues = True, [deque(islice(queue, self.flow.tail)) for queue in queues]
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
            self._note_warm(len(self.report.ended))
            self.releases.resolve()
            time.sleep(0.0005)
        self.releases.wait()
        done[self.rank] = 1
        while not over.is_set():
            time.sleep(0.005)
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
        handle = getattr(receiver, "handle", None)
        state = str(handle.state) if handle is not None and handle.state else ""
        reason = handle.reason if handle is not None else ""
        name = {KVPoll.Success: "success", KVPoll.Failed: "failed"}.get(status, f"stuck: {status}")
        if status == KVPoll.Success:
            receiver.clear()
        else:
            reason = reason_of(receiver)
            self.releases.hold(receiver)
        server = self.case.prefill_of(number)
        self.report.ended.append(
            Ended(number, server, self.rank, began, seconds, name, state, reason)
        )
        self.stage_of[number] = ENDED
        self.case.shared.counts[self.rank] += 1
        return True

    def _compare(self, before: dict[str, list[np.ndarray]], aux_before: list[np.ndarray]) -> None:
        done = [one.number for one in self.report.ended if one.status == "success"]
        self.report.cold = {one.number for one in self.report.ended if one.state == "cold"}
        self._excuse_failed(before, aux_before, done)
        self.compare(before, aux_before, done)
