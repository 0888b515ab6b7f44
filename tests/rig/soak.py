"""Many requests with random faults on the protocol ring: nothing lost, leaked or wrong.

    plan(seed)  ->  every rank derives the same requests, rooms and faults from it
    each rank   ->  16 requests open at a time, as a scheduler has them; pages and metadata rows
                    from free lists, so that each is used many times. Ranks of a server agree on
                    each request's status, as SGLang's do (Board)
    judge()     ->  what the ranks say, put side by side

Of requests, some are aborted, at any moment and by either side. Beside that copies and reads fail,
and messages come twice or, of a connection that is lost, not at all: of these troubles no request
may fail.

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
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from rig.memory import AUX_LENS, RankReport
from rig.model import Case, Request
from rig.rank import Rank, free_port, is_cold, left_behind, reason_of
from rig.resources import SLACK, grown, resources
from rig.ring import Servers
from rig.special import Key, Shared, Special

from sglang_mixkv.channel.messages import Open as OpenMessage
from sglang_mixkv.draft.rows import DraftRows

TIMEOUTS = {
    "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": "25",
    "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": "15",
    "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT": "3",
    "SGLANG_MIXKV_PATIENCE": "3",
}
STUCK_S = 90.0  # more than all timeouts together
COMPARE_EVERY = 100
ROOM_AGAIN_AFTER = 400
STORM = 12
MAX_WRONG = 20
UNNAMED = "unknown reason"  # that of a rank which only knows that another one has failed

AT_DECODE = ("abort before metadata", *["abort after metadata"] * 4, "metadata: late")
AT_PREFILL = ("prefill aborts",)
TROUBLE = 0.01
"""Of so many copies, reads and messages each."""
# Left behind: SGLang's own entries of aborted requests, and rooms that no request came for, which
# are known for a minute.
REMAINS = ("request_status", "transfer_infos", "prefix_len", "waiting left", "parts left")


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
            seed=self.seed, special=Special(config={"staging_mb": 1}),
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

    def fault(self, number: int) -> Meeting | None:
        """What this request meets; a storm of aborts hits STORM requests in a row."""
        draw = random.Random(f"{self.soak.seed} {number}")
        if random.Random(f"{self.soak.seed} storm {number // STORM}").random() < 0.02:
            return Meeting("abort storm", 0, 0.0)
        if draw.random() >= self.soak.faulty:
            return None
        name = draw.choice((*AT_DECODE, *AT_PREFILL * 3))
        ranks = self.decode_tp if name in AT_DECODE else self.prefill_tp
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

    def take(self, count: int) -> np.ndarray | None:
        if len(self._free) < count:
            return None
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
        self.board: Board = case.shared.boards[self.side]

    def _write_truth(self, *_: Any) -> None:
        """Pages get a request's rows when it gets them."""

    def rooms(self) -> list[int]:
        return [self.case.room(n) for n in range(len(self.case.requests))]

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
                self.report.resources.append(resources())
            time.sleep(0.0005)

    def _fits(self, number: int) -> bool:
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


class Troubles:
    """Drawn from the soak's seed, the side and the rank."""

    def __init__(self, rank: SoakRank) -> None:
        self._draw = random.Random(f"{rank.case.seed} {rank.side} {rank.rank}")

    def happens(self) -> bool:
        return self._draw.random() < TROUBLE

    def in_rows(self, name: str) -> None:
        """Out of memory."""
        real = getattr(DraftRows, name)

        def copy(rows: DraftRows, *args: Any) -> Any:
            if self.happens():
                raise MemoryError(f"no memory to {name}")
            return real(rows, *args)

        setattr(DraftRows, name, copy)

    def doubled(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def send(*args: Any) -> Any:
            if self.happens():
                real(*args)
            return real(*args)

        return send


class SoakPrefill(SoakRank):
    def inject(self) -> None:
        troubles, outbox = Troubles(self), self.manager.outbox
        troubles.in_rows("pack")
        outbox._send = troubles.doubled(outbox._send)

    def _begin(
        self, number: int, pages: np.ndarray, row: np.ndarray, meeting: Meeting | None
    ) -> Open:
        for name, pool in self.pools.items():
            for entry, rows in zip(pool, self._rows(name, number), strict=True):
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
            one.handle.send(one.chunks.pop(0), None)

    def _succeeded(self, one: Open) -> None:
        one.handle.clear()
        self._give_back(one)

    def _failed(self, one: Open) -> None:
        self._give_back(one)


class SoakDecode(SoakRank):
    def inject(self) -> None:
        self.compared = 0
        self.shadow = {name: [e.copy() for e in pool] for name, pool in self.pools.items()}
        self.shadow_aux = [aux.copy() for aux in self.aux]
        troubles, inbox = Troubles(self), self.manager.inbox
        troubles.in_rows("unpack")
        peers, plane = inbox._peers, inbox._fetches._plane
        send, start = troubles.doubled(peers.send), plane.start

        def send_or_lose(peer: bytes, message: Any) -> Any:
            lost = isinstance(message, OpenMessage) and troubles.happens()
            return True if lost else send(peer, message)

        def start_somewhere(link: Any, local: int, remote: int, size: int) -> Any:
            return start(link, local, remote + (troubles.happens() << 44), size)

        peers.send, plane.start = send_or_lose, start_somewhere

    def _begin(
        self, number: int, pages: np.ndarray, row: np.ndarray, meeting: Meeting | None
    ) -> Open:
        address = f"127.0.0.1:{self.ports[0]}"
        while not self.manager.try_ensure_parallel_info(address):
            time.sleep(0.02)
        receiver = self.kv_class["receiver"](self.manager, address, self.case.room(number))
        receiver.init(0)
        one = Open(number, receiver, pages, row, meeting)
        if receiver.conclude_state is None:
            self._say(one)
        return one

    def _say(self, one: Open) -> None:
        """Send the metadata, unless this request's fault is that it is late or never sent."""
        if one.is_to("metadata: late") and one.age < one.part:
            return
        if one.meets("abort before metadata", self.rank):
            one.handle.abort()
            return
        one.published = True
        one.handle.send_metadata(one.pages, int(one.row[0]), None, decode_prefix_len=0)

    def _go_on(self, one: Open, status: Any) -> None:
        if not one.published and one.handle.conclude_state is None:
            self._say(one)
        aborts = one.meets("abort after metadata", self.rank) and one.age > one.part / 20
        if one.published and (aborts or one.is_to("abort storm")):
            one.handle.abort()

    def _succeeded(self, one: Open) -> None:
        """The request's own pages and row are the truth's; they are freed at once."""
        if is_cold(one.handle):
            self.report.cold.add(one.number)
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
        """What the pool's entries hold of a request that has succeeded. A cold drafter's rows may
        hold anything that was its own, or zeros."""
        if name == "draft" and one.number in self.report.cold:
            return [entry[one.pages].copy() for entry in self.pools[name]]
        return self._rows(name, one.number)

    def _failed(self, one: Open) -> None:
        """Its memory may hold anything, and is used again when nothing can arrive any more."""
        if one.published:
            self.releases.hold(one.handle, lambda: self._release(one))
        else:
            self._give_back(one)

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


# ---------------------------------------------------------------- processes


def _rank_main(
    case: SoakCase, side: str, rank: int, ports: list[int], pipe: Any, go: Any, life: int
) -> None:
    report: RankReport = RankReport(side, rank)
    try:
        one = (SoakPrefill if side == "prefill" else SoakDecode)(case, side, rank, ports, life)
        report = one.report
        one.start_manager()
        one.inject()
        case.shared.idle.wait(60)
        one.run()
        case.shared.idle.wait(10 * STUCK_S)  # nobody sends any more
        report.wrong += left_behind(one.manager)
        if side == "decode":
            one.compare_idle()
        report.resources.append(resources())
        report.stats = one.plugin.stats.snapshot()
    except BaseException:
        report.error = traceback.format_exc()
        case.shared.idle.abort()
    pipe.send(report)
    go.wait(60)
    os._exit(0)


@dataclass
class Verdict:
    """`problems`: empty when nothing was lost, leaked or wrong. `others`: why requests without a
    fault of their own failed."""

    soak: Soak
    problems: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    others: Counter[str] = field(default_factory=Counter)


@dataclass
class OfSoak(Shared):
    """`idle`: a barrier of all ranks. `boards`: by side."""

    idle: Any = None
    boards: dict[str, Board] = field(default_factory=dict)


class Running:
    """The servers of one soak."""

    def __init__(self, soak: Soak) -> None:
        context = mp.get_context("fork")
        shared = OfSoak(
            bootstrap_up=[context.Event()],
            all_sent=context.Event(),
            idle=context.Barrier(soak.prefill_tp + soak.decode_tp),
            boards={
                "prefill": Board(context, soak.prefill_tp, soak.requests),
                "decode": Board(context, soak.decode_tp, soak.requests),
            },
        )
        self.case = replace(soak.case(), shared=shared)
        self.servers = Servers(self.case, context, [free_port()], _rank_main)

    def verdict(self) -> Verdict:
        """Once its last rank has reported."""
        return judge(self.case, self.servers.reports(120 + self.case.soak.requests))


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


def judge(case: SoakCase, reports: dict[Key, RankReport]) -> Verdict:
    """Put side by side what the ranks say."""
    found = Verdict(case.soak)
    for (side, rank), report in reports.items():
        lines = [*report.wrong, *filter(None, [report.error])]
        lines = [line for line in lines if not any(what in line for what in REMAINS)]
        found.problems += [f"{side} {rank}: {line}" for line in lines]
    complete = [r for r in reports.values() if isinstance(r, Report)]
    if len(complete) == len(reports):
        found.counts["cold"] = len(set().union(*(r.cold for r in complete if r.side == "decode")))
        for number in range(len(case.requests)):
            _judge_request(case.fault(number), number, complete, found)
        found.problems += [line for report in complete for line in _leaks(report)]
    return found


def _judge_request(
    meeting: Meeting | None, number: int, reports: list[Report], found: Verdict
) -> None:
    name = meeting.name if meeting is not None else "none"
    ends = {(r.side, r.rank): r.ended.get(number, ("lost", "")) for r in reports}
    decode = {status for (side, _), (status, _) in ends.items() if side == "decode"}
    prefill = {status for (side, _), (status, _) in ends.items() if side == "prefill"}
    succeeded = decode == {"success"}
    found.counts["succeeded" if succeeded else "failed"] += 1
    if not succeeded and meeting is None:
        texts = [r for (side, _), (_, r) in ends.items() if side == "decode" and r]
        reasons = sorted(texts, key=lambda text: UNNAMED in text)
        found.others[re.sub(r"\d+", "N", (reasons or ["?"])[0])[:120]] += 1
    where = f"request {number} ({name})"
    named = {side for (side, _), (_, reason) in ends.items() if reason and UNNAMED not in reason}
    found.problems += [
        f"{where}: {side} {rank} says {status}, {reason!r}"
        for (side, rank), (status, reason) in ends.items()
        if status not in ("success", "failed")
        or (status == "failed" and side == "decode" and side not in named)
    ]
    if succeeded and prefill != {"success"} and name not in ("prefill aborts", "abort storm"):
        found.problems.append(f"{where}: succeeded on decode, on prefill {ends}")


def _leaks(report: Report) -> list[str]:
    """What has grown since the first requests."""
    if len(report.resources) != 2:
        return [f"{report.side} {report.rank}: resources were not counted"]
    lines = grown(*report.resources, SLACK)
    return [f"{report.side} {report.rank}: {line}" for line in lines]
