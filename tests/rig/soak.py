"""Many requests with random faults on the protocol ring: nothing lost, leaked or wrong.

    plan(seed)  ->  every rank derives the same requests, rooms and faults from it
    each rank   ->  16 requests open at a time, as a scheduler has them; pages and metadata rows
                    from free lists, so that each is used many times. Ranks of a server agree on
                    each request's status, as SGLang's do (Board)
    judge()     ->  what the ranks say, put side by side

A decode rank compares a request's pages and row with the truth when it succeeds, and all of its
memory with what it should hold every COMPARE_EVERY requests and at the end. Pages of a failed
request are used again by SGLang's rule for deferred release (rig/releases.py).
"""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
import random
import re
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq
from rig import model
from rig.faults import METADATA, NOISE, REGISTRATIONS
from rig.memory import AUX_LENS, RankReport
from rig.model import Case, Request
from rig.rank import Rank, free_port, left_behind, reason_of, stock_class
from rig.ring import Key, Servers

TIMEOUTS = {
    "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": "25",
    "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": "15",
    "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT": "3",
    "SGLANG_MIXKV_PATIENCE": "3",
}
MEMORY_S = 3.0  # of the prefill's gate, instead of a minute
STUCK_S = 90.0  # more than all timeouts together
COMPARE_EVERY = 100
ROOM_AGAIN_AFTER = 400
STORM = 12
MAX_WRONG = 20
UNNAMED = "unknown reason"  # that of a rank which only knows that another one has failed

# Mooncake turns such writes down four a second, and all others of the peer wait behind them.
WRONG_POINTERS, WRONG_POINTERS_EVERY = "registration: wrong pointers", 900

AT_DECODE = (
    *(f"metadata: {name}" for name in METADATA),
    "metadata: doubled", "metadata: late",
    *(f"registration: {name}" for name in REGISTRATIONS if name not in WRONG_POINTERS),
    "registration: doubled", "noise to decode", "noise to prefill", "abort before metadata",
    *["abort after metadata"] * 6,
)  # fmt: skip
AT_PREFILL = (
    "code -1", "code -1, bytes written", "stall", "stall", "prefill aborts", "short chunk",
)  # fmt: skip


@dataclass(frozen=True)
class Soak:
    """`faulty`: share of the requests that meet a fault. `reuse`: times each page is used."""

    requests: int
    seed: int = 0
    faulty: float = 0.2
    prefill_tp: int = 2
    decode_tp: int = 1
    max_tokens: int = 4000
    page_size: int = 16
    in_flight: int = 16
    reuse: int = 20

    def __str__(self) -> str:
        return f"P{self.prefill_tp}-D{self.decode_tp}, {self.requests} requests, seed {self.seed}"

    def case(self) -> SoakCase:
        draw = random.Random(self.seed)
        requests = tuple(
            Request(draw.randint(1, self.max_tokens), chunk_pages=draw.choice([0, 0, 16, 64]))
            for _ in range(self.requests)
        )
        most = -(-self.max_tokens // self.page_size)
        uses = sum(-(-r.tokens // self.page_size) for r in requests)
        return SoakCase(
            self.prefill_tp, self.decode_tp, requests=requests, page_size=self.page_size,
            seed=self.seed, extra={"config": {"staging_mb": 1}, "small_rounds": True},
            soak=self, pages_in_pool=max(uses // self.reuse, 2 * most),
        )  # fmt: skip


@dataclass(frozen=True)
class SoakCase(Case):
    """A case whose pages are handed out while it runs."""

    soak: Soak = Soak(0)
    pages_in_pool: int = 0

    @property
    def pool_pages(self) -> int:
        return self.pages_in_pool

    def room(self, number: int) -> int:
        """Room numbers are used again now and then, long after they have ended."""
        again = number % 25 == 24 and number >= ROOM_AGAIN_AFTER
        return 1000 + number - ROOM_AGAIN_AFTER * again

    @property
    def remains(self) -> tuple[str, ...]:
        """What may be left behind: SGLang's own entries of aborted requests, and rooms that no
        request came for, which are known for a minute."""
        if not self.channel:
            return ()
        return "request_status", "transfer_infos", "prefix_len", "waiting left", "parts left"

    @property
    def _faults(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """That a request meets on decode, and on prefill."""
        if self.channel:
            from rig import channel_soak

            return channel_soak.AT_DECODE, channel_soak.AT_PREFILL
        return AT_DECODE, AT_PREFILL

    def alone(self, number: int) -> bool:
        """Whether this request must be the only one: a decode rank that registers itself wrongly
        is, until it does so rightly, wrong for every request to it."""
        meeting = self.fault(number) if number >= 0 else None
        kind, _, what = meeting.name.partition(": ") if meeting is not None else ("", "", "")
        return kind == "registration" and what != "doubled"

    def fault(self, number: int) -> Meeting | None:
        """What this request meets; a storm of aborts hits STORM requests in a row."""
        at_decode, at_prefill = self._faults
        draw = random.Random(f"{self.soak.seed} {number}")
        if random.Random(f"{self.soak.seed} storm {number // STORM}").random() < 0.02:
            return Meeting("abort storm", 0, 0.0)
        if not self.channel and number % WRONG_POINTERS_EVERY == WRONG_POINTERS_EVERY // 2:
            return Meeting(WRONG_POINTERS, 0, 0.0)
        if draw.random() >= self.soak.faulty:
            return None
        name = draw.choice((*at_decode, *at_prefill * 3))
        ranks = self.decode_tp if name in at_decode else self.prefill_tp
        return Meeting(name, draw.randrange(ranks), draw.random())


@dataclass(frozen=True)
class Meeting:
    """A fault's name, the rank (of the side that it happens on) and a number in [0, 1)."""

    name: str
    rank: int
    part: float


@dataclass
class Report(RankReport):
    """`ended`: request -> (status, reason). `resources`: warm, then at the end."""

    ended: dict[int, tuple[str, str]] = field(default_factory=dict)
    resources: list[dict[str, int]] = field(default_factory=list)
    page_uses: float = 0.0


def resources(plugin: Any) -> dict[str, int]:
    """What this process holds. `engines`: Mooncake's that were replaced."""
    engines = getattr(getattr(plugin, "transport", None), "_engines", None)
    fds = list(_existing_fds())
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "engines": len(engines._replaced) if engines is not None else 0,
        "threads": len(os.listdir("/proc/self/task")),
        "fds": len(fds),
        "sockets": sum(fd.startswith("socket:") for fd in fds),
        "rss_mib": pages * os.sysconf("SC_PAGE_SIZE") >> 20,
    }


def _existing_fds() -> Iterable[str]:
    """What the open descriptors are; one may be closed while they are listed."""
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            yield os.readlink(f"/proc/self/fd/{fd}")


class Board:
    """Each rank's status of each request, of one server: it is the lowest of them that counts, as
    with SGLang's poll_and_all_reduce, so that a request ends on all ranks or on none."""

    def __init__(self, context: Any, ranks: int, requests: int) -> None:
        self._ranks, begun = ranks, 1  # KVPoll.Bootstrapping
        self._cells = context.RawArray("b", [begun] * (ranks * requests))

    def agree(self, rank: int, number: int, status: Any) -> int:
        first = number * self._ranks
        self._cells[first + rank] = int(status)
        return min(self._cells[first : first + self._ranks])


class FreeList:
    """First in, first out: what was freed last is used last."""

    def __init__(self, items: Iterable[int]) -> None:
        self._free = deque(items)
        self.size, self.taken = len(self._free), 0

    def take(self, count: int) -> np.ndarray | None:
        if len(self._free) < count:
            return None
        self.taken += count
        return np.array([self._free.popleft() for _ in range(count)], np.int32)

    def give(self, items: Iterable[int]) -> None:
        self._free.extend(items)

    @property
    def free(self) -> np.ndarray:
        return np.array(self._free, np.int64)


@dataclass
class Open:
    """A request that this rank works on."""

    number: int
    handle: Any
    pages: np.ndarray
    row: np.ndarray
    meeting: Meeting | None
    chunks: list[np.ndarray] = field(default_factory=list)
    since: float = field(default_factory=time.monotonic)
    published: bool = False

    def is_to(self, name: str) -> bool:
        """Whether this request meets that fault, on whichever rank."""
        return self.meeting is not None and self.meeting.name == name

    def meets(self, name: str, rank: int) -> bool:
        return self.is_to(name) and self.meeting is not None and self.meeting.rank == rank

    @property
    def part(self) -> float:
        return self.meeting.part if self.meeting is not None else 0.0

    @property
    def age(self) -> float:
        return time.monotonic() - self.since


class SoakRank(Rank):
    """A rank that works through all requests, `in_flight` at a time."""

    case: SoakCase

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        case = self.case
        self.report: Report = Report(self.side, self.rank)
        order = np.random.default_rng([case.seed, self.rank]).permutation(case.pool_pages)
        self.pages = FreeList(order.tolist())
        self.rows = FreeList(range(min(64, len(case.requests))))
        self.open: dict[int, Open] = {}
        self.board: Board = case.extra["boards"][self.side]

    def _write_truth(self, *_: Any) -> None:
        """Pages get a request's rows when it gets them."""

    def rooms(self) -> list[int]:
        return [self.case.room(n) for n in range(len(self.case.requests))]

    @cached_property
    def number_of_room(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for number, room in enumerate(self.rooms()):
            found.setdefault(room, []).append(number)
        return found

    def meeting_in(self, room: int) -> tuple[int, Meeting | None]:
        """The open request with this room number, and what it meets."""
        for number in self.number_of_room.get(room, ()):
            if number in self.open:
                return number, self.open[number].meeting
        return -1, None

    def truth(self, name: str, number: int) -> list[np.ndarray]:
        cache = self.case.target if name == "target" else self.case.draft
        assert cache is not None
        return model.cut(
            cache, model.whole(self.case, name, cache, number), self.tp, self.attn_rank
        )

    def aux_truth(self, sender: int, number: int, index: int) -> np.ndarray:
        rng = np.random.default_rng([sender, number, index])
        return rng.integers(0, 256, AUX_LENS[index], np.uint8)

    def wrong(self, line: str) -> None:
        if len(self.report.wrong) < MAX_WRONG:
            self.report.wrong.append(line)

    def run(self) -> None:
        """All requests, in order; each ends as a success or as a failure with a reason."""
        total, following = len(self.case.requests), 0
        warm = min(200, total // 3)
        while following < total or self.open or len(self.releases):
            while following < total and self._fits(following) and self._admit(following):
                following += 1
            for one in list(self.open.values()):
                self._step(one)
            self.releases.resolve()
            if not self.report.resources and len(self.report.ended) >= warm:
                self.report.resources.append(resources(self.plugin))
            time.sleep(0.0005)
        self.report.page_uses = self.pages.taken / self.pages.size

    def _fits(self, number: int) -> bool:
        if any(self.case.alone(n) for n in (number, *self.open)):
            return not self.open
        return len(self.open) < self.case.soak.in_flight

    def _admit(self, number: int) -> bool:
        """Open the request if there is memory for it."""
        row = self.rows.take(1)
        if row is None:
            return False
        pages = self.pages.take(self.case.pages(self.case.requests[number]))
        if pages is None:
            self.rows.give(row.tolist())
            return False
        self.open[number] = self._begin(number, pages, row, self.case.fault(number))
        return True

    def _step(self, one: Open) -> None:
        from sglang.srt.disaggregation.base.conn import KVPoll

        status = self._status(one, one.handle.poll())
        if status == KVPoll.Success:
            self._succeeded(one)
            self._end(one, "success", "")
        elif status == KVPoll.Failed:
            reason = reason_of(one.handle)
            self._end(one, "failed", reason)
            self._failed(one)
        elif one.age > STUCK_S:
            self.wrong(f"request {one.number} is stuck in {status}, {one.meeting}")
            self._end(one, "stuck", "")
        else:
            self._go_on(one, status)

    def _status(self, one: Open, own: Any) -> Any:
        return self.board.agree(self.rank, one.number, own)

    def _end(self, one: Open, status: str, reason: str) -> None:
        del self.open[one.number]
        self.report.ended[one.number] = (status, reason)

    def _give_back(self, one: Open) -> None:
        self.pages.give(one.pages.tolist())
        self.rows.give(one.row.tolist())

    def _begin(
        self, number: int, pages: np.ndarray, row: np.ndarray, meeting: Meeting | None
    ) -> Open:
        raise NotImplementedError

    def _go_on(self, one: Open, status: Any) -> None:
        raise NotImplementedError

    def _succeeded(self, one: Open) -> None:
        raise NotImplementedError

    def _failed(self, one: Open) -> None:
        raise NotImplementedError


class SoakPrefill(SoakRank):
    def inject(self) -> None:
        """Codes and stalls happen in the transport, in SGLang's transfer threads."""
        done = set()

        def meddled(real: Callable[..., int], *args: Any) -> int:
            worker = self.manager._worker
            task = worker.task if worker is not None else None
            number, meeting = self.meeting_in(task.room.number) if task is not None else (-1, None)
            if meeting is None or meeting.rank != self.rank or number in done:
                return int(real(*args))
            done.add(number)
            if meeting.name == "stall":
                time.sleep(meeting.part)
            if meeting.name != "code -1":
                code = int(real(*args))
            return -1 if meeting.name.startswith("code -1") else code

        self.on_transfer(lambda real: partial(meddled, real))

    def _begin(
        self, number: int, pages: np.ndarray, row: np.ndarray, meeting: Meeting | None
    ) -> Open:
        for name, pool in self.pools.items():
            for entry, rows in zip(pool, self.truth(name, number), strict=True):
                entry[pages] = rows
        for index, aux in enumerate(self.aux):
            aux[row[0]] = self.aux_truth(self.rank, number, index)
        sender = self.kv_class["sender"](
            self.manager, f"127.0.0.1:{self.ports[0]}", self.case.room(number),
            req_has_disagg_prefill_dp_rank=True,
        )  # fmt: skip
        sender.init(len(pages), int(row[0]))
        step = self.case.requests[number].chunk_pages or len(pages)
        chunks = [pages[i : i + step] for i in range(0, len(pages), step)]
        return Open(number, sender, pages, row, meeting, chunks)

    def _go_on(self, one: Open, status: Any) -> None:
        from sglang.srt.disaggregation.base.conn import KVPoll

        if one.is_to("prefill aborts") and one.age > one.part / 10:
            one.handle.abort()
            return
        if status >= KVPoll.WaitingForInput and one.chunks:
            chunk, tokens = one.chunks.pop(0), None
            if one.meets("short chunk", self.rank) and not one.chunks:
                chunk, one.handle.num_kv_indices = chunk[:-1], one.handle.num_kv_indices - 1
                tokens = len(chunk) * self.case.page_size
            one.handle.send(chunk, None, num_kv_tokens=tokens)

    def _succeeded(self, one: Open) -> None:
        one.handle.clear()
        self._give_back(one)

    def _failed(self, one: Open) -> None:
        self._give_back(one)


class SoakDecode(SoakRank):
    def inject(self) -> None:
        """Messages change on their way, in the scheduler's thread."""
        cls = stock_class(self, "receiver")
        real, done = cls._send_bootstrap_message, set()
        self.shout = zmq.Context.instance().socket(zmq.PUSH)
        self.shout.connect(f"tcp://127.0.0.1:{self.manager.rank_port}")
        self.compared = 0
        self.shadow = {name: [e.copy() for e in pool] for name, pool in self.pools.items()}
        self.shadow_aux = [aux.copy() for aux in self.aux]

        def meddled(receiver: Any, *, bootstrap_info: Any, message: Any, operation: str) -> bool:
            number, meeting = self.number_of(receiver), self.meeting_of(receiver)
            messages = [message]
            if meeting is not None and (number, operation) not in done:
                messages = _changed(meeting.name, operation, list(message))
                if messages != [message]:
                    done.add((number, operation))
            return all(
                real(receiver, bootstrap_info=bootstrap_info, message=m, operation=operation)
                for m in messages
            )

        cls._send_bootstrap_message = meddled

    def number_of(self, receiver: Any) -> int:
        return int(getattr(receiver, "soak_number", -1))

    def meeting_of(self, receiver: Any) -> Meeting | None:
        number = self.number_of(receiver)
        meeting = self.case.fault(number) if number >= 0 else None
        return meeting if meeting is not None and meeting.rank == self.rank else None

    def _begin(
        self, number: int, pages: np.ndarray, row: np.ndarray, meeting: Meeting | None
    ) -> Open:
        address = f"127.0.0.1:{self.ports[0]}"
        while not self.manager.try_ensure_parallel_info(address):
            time.sleep(0.02)
        wrongly = meeting is not None and meeting.name.startswith("registration")
        if wrongly:
            self._register_again()
        receiver = self.kv_class["receiver"](self.manager, address, self.case.room(number))
        receiver.soak_number = number
        receiver.init(0)
        one = Open(number, receiver, pages, row, meeting)
        if receiver.conclude_state is None:
            self._say(one)
        return one

    def _status(self, one: Open, own: Any) -> Any:
        """A rank that registered itself wrongly goes on when prefill has said so, not when another
        rank of its server knows it: what it begins in between fails as well."""
        from sglang.srt.disaggregation.base.conn import KVPoll

        status = super()._status(one, own)
        wrongly = self.case.alone(one.number) and self.meeting_of(one.handle) is not None
        return own if wrongly and KVPoll.Failed < own < KVPoll.Success else status

    def _say(self, one: Open) -> None:
        """Send the metadata, unless this request's fault is that it is late or never sent."""
        if one.is_to("metadata: late") and one.age < one.part:
            return
        if one.meets("abort before metadata", self.rank):
            one.handle.abort()
            return
        if one.is_to("noise to decode") or one.is_to("noise to prefill"):
            self._make_noise(one)
        one.published = True
        one.handle.send_metadata(one.pages, int(one.row[0]), None, decode_prefix_len=0)

    def _make_noise(self, one: Open) -> None:
        for message in NOISE:
            if one.is_to("noise to decode"):
                self.shout.send_multipart(message)
                continue
            for info in one.handle.bootstrap_infos:
                socket, lock = one.handle._connect_to_bootstrap_server(info)
                with lock:
                    socket.send_multipart(message)

    def _go_on(self, one: Open, status: Any) -> None:
        if not one.published and one.handle.conclude_state is None:
            self._say(one)
        aborts = one.meets("abort after metadata", self.rank) and one.age > one.part / 20
        if one.published and (aborts or one.is_to("abort storm")):
            one.handle.abort()

    def _succeeded(self, one: Open) -> None:
        """The request's own pages and row are the truth's; they are freed at once."""
        for name, pool in self.pools.items():
            for index, rows in enumerate(self.expected(name, one)):
                self.shadow[name][index][one.pages] = rows
                if not np.array_equal(pool[index][one.pages], rows):
                    self.wrong(f"request {one.number}: {name} entry {index}, {one.meeting}")
        sender = self._aux_sender(one.number)
        for index, aux in enumerate(self.aux):
            row = self.aux_truth(sender, one.number, index)
            self.shadow_aux[index][one.row[0]] = row
            if not np.array_equal(aux[one.row[0]], row):
                self.wrong(f"request {one.number}: aux {index}, {one.meeting}")
        one.handle.clear()
        self._give_back(one)
        if len(self.report.ended) // COMPARE_EVERY > self.compared:
            self.compared = len(self.report.ended) // COMPARE_EVERY
            self.compare_idle()

    def expected(self, name: str, one: Open) -> list[np.ndarray]:
        """What the pool's entries hold of a request that has succeeded."""
        return self.truth(name, one.number)

    def _failed(self, one: Open) -> None:
        """Its memory may hold anything, and is used again when nothing can arrive any more."""
        if one.meets(WRONG_POINTERS, self.rank):
            self._register_again()
        if one.published:
            self.releases.hold(one.handle, lambda: self._release(one))
        else:
            self._give_back(one)

    def _register_again(self) -> None:
        """With the next request. After wrong pointers the plugin does so by itself, but not when
        another request failed in the last 30 s and none succeeded since (Registrations)."""
        self.manager.connection_pool.clear()

    def _release(self, one: Open) -> None:
        for name, pool in self.pools.items():
            for want, got in zip(self.shadow[name], pool, strict=True):
                want[one.pages] = got[one.pages]
        for want, got in zip(self.shadow_aux, self.aux, strict=True):
            want[one.row[0]] = got[one.row[0]]
        self._give_back(one)

    def compare_idle(self) -> None:
        """Every byte of every page and row that no request has now."""
        pages, rows = self.pages.free, self.rows.free
        for name, pool in self.pools.items():
            for index, (want, got) in enumerate(zip(self.shadow[name], pool, strict=True)):
                self._same(f"{name} entry {index}", want, got, pages)
        for index, (want, got) in enumerate(zip(self.shadow_aux, self.aux, strict=True)):
            self._same(f"aux {index}", want, got, rows)

    def _same(self, what: str, want: np.ndarray, got: np.ndarray, where: np.ndarray) -> None:
        if not np.array_equal(want[where], got[where]):
            bad = [int(p) for p in where if not np.array_equal(want[p], got[p])]
            self.wrong(f"{what}: idle pages or rows {bad[:9]} were written")
            want[where] = got[where]


def _changed(name: str, operation: str, message: list[bytes]) -> list[list[bytes]]:
    """The messages that go out instead of this one."""
    kind, _, what = name.partition(": ")
    if kind != {"_register_kv_args": "registration", "send_metadata": "metadata"}.get(operation):
        return [message]
    if what == "doubled":
        return [message, message]
    table = REGISTRATIONS if kind == "registration" else METADATA
    if what not in table or (kind == "metadata" and len(message) < 6):
        return [message]
    return table[what][1](message)


# ---------------------------------------------------------------- processes


def _rank_class(case: SoakCase, side: str) -> type[SoakRank]:
    if case.channel:
        from rig import channel_soak

        return channel_soak.rank_class(side)
    return SoakPrefill if side == "prefill" else SoakDecode


def _rank_main(
    case: SoakCase, side: str, rank: int, ports: list[int], pipe: Any, go: Any, life: int
) -> None:
    from sglang_mixkv.prefill import gate, rooms

    gate.MEMORY_S = rooms.MEMORY_S = MEMORY_S
    report: RankReport = RankReport(side, rank)
    try:
        one = _rank_class(case, side)(case, side, rank, ports, life)
        report = one.report
        one.start_manager()
        one.inject()
        case.extra["idle"].wait(60)
        one.run()
        case.extra["idle"].wait(10 * STUCK_S)  # nobody sends any more
        report.wrong += left_behind(one.manager, 2 if case.channel else 30)
        if side == "decode":
            one.compare_idle()
            one.shout.close(linger=0)
        report.resources.append(resources(one.plugin))
        report.stats = one.plugin.stats.snapshot()
    except BaseException:
        report.error = traceback.format_exc()
        case.extra["idle"].abort()
    pipe.send(report)
    go.wait(60)
    os._exit(0)


@dataclass(frozen=True)
class Verdict:
    """`problems`: empty when nothing was lost, leaked or wrong. `met`: requests by the fault that
    they met. `others`: why requests without a fault of their own failed."""

    soak: Soak
    seconds: float
    problems: list[str]
    counts: Counter[str]
    met: Counter[str]
    others: Counter[str]
    page_uses: float
    resources: dict[str, tuple[dict[str, int], dict[str, int]]]


class Running:
    """The servers of one soak."""

    def __init__(self, soak: Soak) -> None:
        context = mp.get_context("fork")
        self.case, self._began = soak.case(), time.monotonic()
        self.case.extra.update(
            bootstrap_up=[context.Event()],
            all_sent=context.Event(),
            struck=context.Value("d", 0.0),
            idle=context.Barrier(soak.prefill_tp + soak.decode_tp),
            boards={
                "prefill": Board(context, soak.prefill_tp, soak.requests),
                "decode": Board(context, soak.decode_tp, soak.requests),
            },
        )
        self.servers = Servers(self.case, context, [free_port()], _rank_main)

    def verdict(self) -> Verdict:
        """Once its last rank has reported."""
        reports = self.servers.reports(120 + self.case.soak.requests)
        return judge(self.case, reports, time.monotonic() - self._began)


def run(*soaks: Soak) -> list[Verdict]:
    """All at once, since they mostly wait for timeouts; every process has ended when this
    returns."""
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        for name, seconds in TIMEOUTS.items():
            patch.setenv(name, seconds)
        running = []
        for soak in soaks:
            running.append(Running(soak))
            stack.callback(running[-1].servers.end)
        with ThreadPoolExecutor(len(running)) as pool:
            return list(pool.map(Running.verdict, running))


def judge(case: SoakCase, reports: dict[Key, RankReport], seconds: float) -> Verdict:
    """Put side by side what the ranks say."""
    problems: list[str] = []
    counts: Counter[str] = Counter()
    met: Counter[str] = Counter()
    others: Counter[str] = Counter()
    for (side, rank), report in reports.items():
        lines = [*report.wrong, *filter(None, [report.error])]
        lines = [line for line in lines if not any(what in line for what in case.remains)]
        problems += [f"{side} {rank}: {line}" for line in lines]
    complete = [r for r in reports.values() if isinstance(r, Report)]
    if len(complete) == len(reports):
        counts["cold"] = len(set().union(*(r.cold for r in complete if r.side == "decode")))
        for number in range(len(case.requests)):
            problems += _one_request(case, number, complete, counts, met, others)
        problems += [line for report in complete for line in _leaks(report, met[WRONG_POINTERS])]
    uses = [r.page_uses for r in complete if r.side == "decode"]
    return Verdict(
        case.soak, seconds, problems, counts, met, others, min(uses, default=0.0),
        {f"{r.side} {r.rank}": (r.resources[0], r.resources[-1]) for r in complete if r.resources},
    )  # fmt: skip


def _one_request(
    case: SoakCase, number: int, reports: list[Report], counts: Counter[str], met: Counter[str],
    others: Counter[str],
) -> list[str]:  # fmt: skip
    meeting = case.fault(number)
    name = meeting.name if meeting is not None else "none"
    ends = {(r.side, r.rank): r.ended.get(number, ("lost", "")) for r in reports}
    decode = {status for (side, _), (status, _) in ends.items() if side == "decode"}
    prefill = {status for (side, _), (status, _) in ends.items() if side == "prefill"}
    succeeded = decode == {"success"}
    met[name] += 1
    counts["succeeded" if succeeded else "failed"] += 1
    if not succeeded and meeting is None:
        counts["failed without a fault of its own"] += 1
        texts = [r for (side, _), (_, r) in ends.items() if side == "decode" and r]
        reasons = sorted(texts, key=lambda text: UNNAMED in text)
        others[re.sub(r"\d+", "N", (reasons or ["?"])[0])[:120]] += 1
    where = f"request {number} ({name})"
    named = {side for (side, _), (_, reason) in ends.items() if reason and UNNAMED not in reason}
    found = [
        f"{where}: {side} {rank} says {status}, {reason!r}"
        for (side, rank), (status, reason) in ends.items()
        if status not in ("success", "failed")
        or (status == "failed" and side not in named and (side, case.channel) != ("prefill", True))
    ]
    if succeeded and prefill != {"success"} and name not in ("prefill aborts", "abort storm"):
        found.append(f"{where}: succeeded on decode, on prefill {ends}")
    return found


SLACK = {"engines": 0, "threads": 6, "fds": 24, "sockets": 24, "rss_mib": 64}

# What a Mooncake engine holds that was replaced and is kept: 3 threads, 5 to 9 descriptors, 2 to 6
# of them sockets.
ENGINE = {"engines": 1, "threads": 3, "fds": 9, "sockets": 6, "rss_mib": 2}


def _leaks(report: Report, wrong_pointers: int) -> list[str]:
    """What has grown since the first requests. A request with wrong pointers may replace one
    engine: to the plugin such writes look as if it were stuck."""
    if len(report.resources) != 2:
        return [f"{report.side} {report.rank}: resources were not counted"]
    warm, end = report.resources
    engines = min(end["engines"] - warm["engines"], wrong_pointers)
    return [
        f"{report.side} {report.rank}: {name} grew from {warm[name]} to {end[name]}"
        for name, slack in SLACK.items()
        if end[name] > warm[name] + slack + engines * ENGINE[name]
    ]
