"""A whole rank, without its sockets: the gate, then SGLang's own loop and parsers behind it.

One input is a few messages. They go through the receive that the plugin wraps into the body of
SGLang's control thread, taken out of its thread; what ends that body would have ended the
thread. Somewhere between the messages, and once more behind them, the scheduler takes its turn
with the real senders and SGLang's transfer loop, over an engine that only notes where it was
asked to write.

Findings: an exception in the loop, or one that the plugin only logs; a write outside what the
peer that owns the room registered last; anything changed of a bystander that no message named;
anything left of a room that has ended.
"""

from __future__ import annotations

import dataclasses
import importlib
import logging
import sys
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from traceback import walk_tb
from typing import Any
from unittest import mock

import msgspec
import numpy as np
from mutate import recorded, unpack
from tables import Tables

from sglang_mixkv.protocol import registration
from sglang_mixkv.protocol.messages import ABORT

TESTS = Path(__file__).parents[2] / "tests"
sys.path.insert(0, str(TESTS))
rig = importlib.import_module("rig.load")  # sets what SGLang's import reads

HOST, PORT, ROOM = "10.9.9.9", 17009, 7
NEXT_ROOM = b"99"
MAX_PAGES = 512

Messages = list[list[bytes]]
Region = tuple[int, int]  # address, bytes


def load() -> None:
    rig.load_sglang()


def cases() -> dict[str, Any]:
    """Name -> case of the protocol ring."""
    from rig.model import Cache, Case, Request

    def packed(config: dict | None = None, **changed: Any) -> Case:
        extra = {"config": {"draft_transfer": "packed", "staging_mb": 1, **(config or {})}}
        sizes = {"prefill_tp": 2, "decode_tp": 1} | changed
        return Case(requests=(Request(23), Request(8)), extra=extra, **sizes)

    cold = packed({"on_draft_mismatch": "cold"})
    cold.extra.update(cold=True, facts={"decode": _another_drafter})
    return {
        "plain": packed({"verify": "checksum"}),
        "hybrid": packed(hybrid=True),
        "no-draft": packed(hybrid=True, draft=None),
        "cold": cold,
        "shared": packed(prefill_tp=1, decode_tp=2),
        "gqa": packed(target=Cache("mha", heads=4)),
    }


def _another_drafter(manager: Any) -> None:
    draft = msgspec.structs.replace(manager.facts.draft, architecture="Another")
    manager.facts = msgspec.structs.replace(manager.facts, draft=draft, topk=4)


def rank_of(side: str, case: Any) -> Any:
    """A rank of the ring in this process, its manager started."""
    from rig.rank import Rank, free_port

    up = threading.Event()
    up.set()  # a decode rank would wait for the prefill's bootstrap server
    case.extra.update(bootstrap_up=[up], all_sent=threading.Event(), small_rounds=True)
    rank = Rank(case, side, 0, [free_port()])
    rank.start_manager()
    return rank


def number(frame: bytes) -> int | None:
    try:
        return int(frame)
    except ValueError:
        return None


class End(BaseException):
    """No more messages: ends the body of the thread. No error that anything would catch."""


class Feed:
    """A socket that delivers one input's messages. `before`: called before each, with its place."""

    def __init__(self) -> None:
        self.messages: Messages = []
        self.before: Callable[[int], None] = lambda _: None
        self._next = 0

    def fill(self, messages: Messages) -> None:
        self.messages, self._next = messages, 0

    def recv_multipart(self) -> list[bytes]:
        self.before(self._next)
        if self._next == len(self.messages):
            raise End
        self._next += 1
        return list(self.messages[self._next - 1])


def body_of(manager: Any, start: str, feed: Feed) -> Callable[[], None]:
    """The function that `manager.start()` gives to its control thread."""
    taken: list[Callable[[], None]] = []

    class Taken(threading.Thread):
        def start(self) -> None:
            taken.append(self._target)  # type: ignore[attr-defined]

    socket, threads = manager.server_socket, list(manager._worker_threads)
    manager.server_socket = feed
    with mock.patch.object(threading, "Thread", Taken):
        getattr(manager, start)()
    manager.server_socket, manager._worker_threads = socket, threads
    return taken[0]


class Errors:
    """In the place of the plugin's loggers: what it only logs, and goes on, is a finding. Not what
    SGLang raised while it sent: that fails one room, and is meant to."""

    def __init__(self) -> None:
        self.seen: list[BaseException] = []
        for name in [*logging.root.manager.loggerDict]:
            if name.startswith("sglang_mixkv"):
                logger: Any = logging.getLogger(name)
                logger.exception, logger.error = self._exception, self._error

    def _exception(self, *_: Any, **__: Any) -> None:
        error = sys.exc_info()[1]
        assert error is not None
        self.seen.append(error)

    def _error(self, *_: Any, exc_info: Any = False, **__: Any) -> None:
        error = sys.exc_info()[1]
        if exc_info and error is not None and _raised_by_plugin(error):
            self.seen.append(error)

    def check(self) -> None:
        if self.seen:
            raise RuntimeError("the plugin logged an error that it did not expect") from self.seen[
                0
            ]


def _raised_by_plugin(error: BaseException) -> bool:
    """Whether it comes from the plugin's own code, and not from SGLang's that it called."""
    files = [frame.f_code.co_filename for frame, _ in walk_tb(error.__traceback__)]
    known = [f for f in files if "/sglang/srt/" in f or "/sglang_mixkv/" in f]
    return bool(known) and "/sglang_mixkv/" in known[-1]


class Bench:
    """One rank; call it with inputs."""

    def __init__(self, side: str, case: Any) -> None:
        replies = importlib.import_module("sglang_mixkv.engine.replies")
        self.told: list[str] = []
        for sender in (replies.Replies, replies.Notices):
            sender.send = lambda _, endpoint, *__: self.told.append(endpoint)
        self.rank = rank_of(side, case)
        self.manager, self.side = self.rank.manager, self.rank.plugin
        self.manager._send_multipart_locked = lambda to, *_, **__: self.told.append(to)
        self.feed = Feed()
        self.body = body_of(self.manager, f"start_{side}_thread", self.feed)
        self.errors = Errors()

    def deliver(self, messages: Messages) -> None:
        self.feed.fill(messages)
        try:
            self.body()
        except End:
            return
        raise AssertionError("the control thread has returned")

    def __call__(self, data: bytes) -> None:
        messages = unpack(data)
        self.errors.seen.clear()
        self.told.clear()
        self.run(messages, zlib.crc32(data) % (len(messages) + 1))
        self.errors.check()
        left = self.manager.check_integrity()
        assert not left, left

    def run(self, messages: Messages, turn: int) -> None:
        """Deliver and check them; the scheduler's first turn comes before message `turn`."""
        raise NotImplementedError


class Engine:
    """In the place of SGLang's transfer engine, and of Mooncake's in it: notes what it is asked
    to write, and says that it was written."""

    def __init__(self) -> None:
        self.engine = self
        self.registered: list[Region] = []
        self.writes: list[tuple[str, int, int, int]] = []  # session, source, destination, bytes

    def batch_register(self, ptrs: list[int], lengths: list[int]) -> int:
        self.registered += zip(ptrs, lengths, strict=True)
        return 0

    def batch_deregister(self, _: list[int]) -> int:
        return 0

    def batch_transfer_sync(self, session: str, *ranges: list[int]) -> int:
        self.writes += [(session, *one) for one in zip(*ranges, strict=True)]
        return 0

    def transfer_submit_write(self, session: str, src: int, dst: int, length: int) -> int:
        self.writes.append((session, src, dst, length))
        return len(self.writes)

    def transfer_check_status(self, _: int) -> int:
        return 1

    def send_probe(self, _: str) -> int:
        return 0


class Chunks(deque):
    """SGLang's transfer queue; its loop ends where nothing is left."""

    put = deque.append

    def get(self) -> Any:
        return self.popleft() if self else None


class Inline:
    """An executor without threads."""

    def submit(self, call: Callable[..., Any], *args: Any) -> Future:
        future: Future = Future()
        try:
            future.set_result(call(*args))
        except Exception as error:
            future.set_exception(error)
        return future


class Scheduler:
    """What SGLang's scheduler and transfer threads do with the requests of some rooms."""

    def __init__(self, rank: Any) -> None:
        from sglang.srt.disaggregation.base.conn import KVPoll

        from sglang_mixkv.engine.transfers import SchedulerQueue

        self.poll, self.rank, self.manager = KVPoll, rank, rank.manager
        self.chunks = Chunks()
        self.manager.transfer_queues = [SchedulerQueue(self.chunks, self.manager._queued)]
        worker = rank.plugin.worker(1, 0)
        rank.plugin.worker = lambda *_: worker
        self.pool_pages = rank.plugin.local.caches.pages
        self.senders: dict[int, Any] = {}

    def open(self, room: int) -> Any:
        make = self.rank.kv_class["sender"]
        return make(self.manager, "", room, req_has_disagg_prefill_dp_rank=True)

    def turn(self, rooms: Iterable[int], *, last: bool) -> None:
        """Send of each room what it has: half of it, or the rest."""
        for room in rooms:
            if room not in self.senders:
                self.senders[room] = self.open(room)
            self._send(self.senders[room], last)
        self.manager.transfer_worker(self.chunks, Inline())

    def _send(self, sender: Any, last: bool) -> None:
        room = sender.bootstrap_room
        infos = self.manager.transfer_infos.get(room, {})
        if infos and sender.poll() == self.poll.Bootstrapping:  # as if the last of them had come
            self.manager.update_status(room, self.poll.WaitingForInput)
        if sender.poll() != self.poll.WaitingForInput:
            return
        if sender.aux_index is None:
            pages = max(len(info.dst_kv_indices) for info in infos.values())
            sender.init(min(pages, MAX_PAGES), 0)
        total = sender.num_kv_indices
        end = total if last else total // 2
        if last or end > sender.curr_idx:
            pages = np.arange(sender.curr_idx, end, dtype=np.int32) % self.pool_pages
            sender.send(pages, self._state() if last else None)

    def _state(self) -> Any:
        return [np.zeros(1, np.int32) for _ in self.manager.kv_args.state_types] or None

    def finish(self) -> None:
        """Every request ends; one that waits for more decode ranks is aborted."""
        for sender in self.senders.values():
            status = sender.poll()
            if status not in (self.poll.Success, self.poll.Failed):
                sender.abort()
                status = self.poll.Failed
            sender.get_transfer_metric()
            if status == self.poll.Failed:
                with suppress(Exception):  # the reason
                    sender.failure_exception()
            sender.clear()
        self.senders.clear()


class PrefillBench(Bench):
    """The bystanders: decode ranks at HOST whose room 7 is under way. The decode ranks of the
    recorded messages are known, and after a registration they ask for a room of their own."""

    def __init__(self, name: str) -> None:
        super().__init__("prefill", cases()[name])
        self.engine = Engine()
        self._connect()
        self.scheduler = Scheduler(self.rank)
        self.regions: dict[str, list[Region]] = {}
        self._may_pass, self.manager.may_pass = self.manager.may_pass, self._pass
        recorded = peers(name)
        self.next = [[NEXT_ROOM, *metadata[1:]] for _, metadata in recorded]
        self.bystanders: list[str] = []
        self.sender = self.scheduler.open(ROOM)
        for registered, metadata in recorded:
            self.deliver([registered, *self._bystander(registered, metadata)])
        assert self.sender.poll() == self.scheduler.poll.WaitingForInput
        self.known = dict(self.regions)
        args = self.manager.kv_args
        self.own = [
            *zip(args.kv_data_ptrs, args.kv_data_lens, strict=True),
            *zip(args.aux_data_ptrs, args.aux_data_lens, strict=True),
        ]
        for ptrs, lens in zip(args.state_data_ptrs, args.state_data_lens, strict=True):
            self.own += zip(ptrs, lens, strict=True)
        self.tables = Tables(self.manager, self.side.peers, self.side.rooms, self.sender)

    def _bystander(self, registered: list[bytes], metadata: list[bytes]) -> Messages:
        """The messages of this decode rank, from another address and about another room."""
        port = PORT + len(self.bystanders)
        self.bystanders.append(f"{HOST}:{port}")
        who = [HOST.encode(), str(port).encode(), self.bystanders[-1].encode()]
        return [[registered[0], *who, *registered[4:]], [str(ROOM).encode(), *who, *metadata[4:]]]

    def _connect(self) -> None:
        from sglang_mixkv.transport import mooncake

        engines, in_flight = mooncake.Engines(self.engine, Engine), mooncake.InFlight()
        transport = mooncake.Mooncake(engines, in_flight)
        self.manager.engine = mooncake.SharedEngine(engines, transport, in_flight)
        self.side.connect(transport)

    def _pass(self, message: list[bytes]) -> bool:
        """The gate; keeps what every session registered last, nothing if it was not admitted."""
        passed = self._may_pass(message)
        if message[0] == b"None":
            at = self.side.gate.framing.registration
            regions = _regions(registration.read(message, at)) if passed else []
            self.regions[registration.session_of(message, at)] = regions
        return bool(passed)

    def run(self, messages: Messages, turn: int) -> None:
        if any(message[0] == b"None" for message in messages):
            messages = [*messages, *self.next]
        self.regions = dict(self.known)
        self.feed.before = lambda place: self._turn(messages[:place]) if place == turn else None
        self.deliver(messages)
        self._turn(messages, last=True)
        self.scheduler.finish()
        if not any(HOST.encode() in frame for message in messages for frame in message):
            changed = self.tables.changed((ROOM, *self.bystanders))
            assert not changed, f"of a bystander, {changed}"
            assert not any(HOST in one for one in self.told), "a bystander was told"
        self.sender.clear()

    def __call__(self, data: bytes) -> None:
        try:
            super().__call__(data)
        finally:
            self.scheduler.senders.clear()
            self.scheduler.chunks.clear()
            self.tables.put_back()

    def _turn(self, messages: Messages, *, last: bool = False) -> None:
        """Of the rooms that these messages name."""
        self.engine.writes.clear()
        frames = [m[1] if m[0] == ABORT else m[0] for m in messages if len(m) > (m[0] == ABORT)]
        rooms = dict.fromkeys(number(frame) for frame in frames)
        self.scheduler.turn([r for r in rooms if r is not None and 0 <= r != ROOM], last=last)
        for session, src, dst, length in self.engine.writes:
            inside = _inside(src, length, self.own) or _inside(src, length, self.engine.registered)
            assert inside, f"{length} bytes from {src:#x}, outside of this rank's memory"
            assert _inside(dst, length, self.regions[session]), (
                f"{length} bytes at {dst:#x} are outside what {session} registered"
            )


def _regions(said: registration.Registration) -> list[Region]:
    """Where this peer may be written to."""
    more = said.extension
    aux = [n * more.aux_rows for n in more.facts.aux_item_lens]
    found = [
        *zip(said.kv_ptrs, more.kv_data_lens, strict=True),
        *zip(said.aux_ptrs, aux, strict=True),
        more.staging,
    ]
    for ptrs, lens in zip(said.state_ptrs, more.state_lens, strict=True):
        found += zip(ptrs, lens, strict=True)
    return found


def _inside(start: int, length: int, regions: list[Region]) -> bool:
    return any(a <= start and start + length <= a + size for a, size in regions)


class DecodeBench(Bench):
    """Rooms of two prefill ranks, each with a region to land in: 7 and 100, which are verified,
    and 101, which is not. Each is a bystander of a message that does not name it."""

    OPEN = (100, 101, ROOM)

    def __init__(self) -> None:
        from rig.model import Request, page_tables
        from sglang.srt.disaggregation.base.conn import KVPoll

        plain = cases()["plain"]
        case = dataclasses.replace(plain, requests=(*plain.requests, Request(8)))
        super().__init__("decode", case)
        self.poll = KVPoll
        self.pages = dict(zip(self.OPEN, page_tables(case, "decode"), strict=True))
        self.aux_row = {room: row for row, room in enumerate(self.OPEN, 1)}
        self.memory = [entry for pool in self.rank.pools.values() for entry in pool]
        self.memory_before = [entry.copy() for entry in self.memory]
        self.aux_before = [row.copy() for row in self.rank.aux]
        self._resolve()

    def _resolve(self) -> None:
        """The prefill servers of the rooms."""
        from sglang_mixkv.decode.source import Sizes

        side = self.side
        verified = side.learn("verified", Sizes(2, 1, 1, 1), side.local.facts, cold=False)
        side.sources.put(dataclasses.replace(verified, address="plain", verify=False))
        side.landing.prepare(verified.target, verified.draft)
        self.tables = Tables(self.manager)

    def run(self, messages: Messages, turn: int) -> None:
        """The scheduler gives one room up before message `turn`, if there is such a message."""
        rooms = {number: self._begin(number) for number in self.OPEN}

        def give_up(place: int) -> None:
            if place == turn < len(messages):
                self.side.release(rooms[100])
                self.manager.register_deferred_abort_room(100)

        self.feed.before = give_up
        try:
            self.deliver(messages)
            self._check(messages, rooms)
        finally:
            for room in rooms.values():
                self.side.end(room)
                self.side.landing.drained(room.number, room.source.contacted)
            self.tables.put_back()
            self._put_back()

    def _begin(self, number: int) -> Any:
        """As the scheduler does: a receiver is made, and its metadata goes out."""
        manager, side = self.manager, self.side
        room = side.begin(number, "plain" if number == 101 else "verified")
        manager.request_status[number] = self.poll.WaitingForInput
        manager.prefill_response_tracker[number] = set()
        manager.required_prefill_response_num_table[number] = room.source.required
        side.prepare(room, self.pages[number], self.aux_row[number])
        return room

    def _check(self, messages: Messages, rooms: dict[int, Any]) -> None:
        statuses = self.manager.request_status
        assert set(statuses) == set(self.OPEN), "a room that nobody opened"
        said = {(number(m[0]), number(m[2])) for m in messages if len(m) > 2}
        for n, room in rooms.items():
            if not any((n, rank) in said for rank in room.source.contacted):
                assert statuses[n] == self.poll.WaitingForInput, "a room of others"
                assert room.state == "asked", "a room of others"
        landed = [n for n in self.OPEN if statuses[n] != self.poll.WaitingForInput]
        self._only("pages", [self.pages[n] for n in landed], self.memory, self.memory_before)
        named = {number(m[1]) for m in messages if m[0] == b"AUX_DATA" and len(m) > 1}
        rows = [[self.aux_row[n]] for n in self.OPEN if n in named]
        self._only("aux rows", rows, self.rank.aux, self.aux_before)

    @staticmethod
    def _only(what: str, allowed: list[Any], now: list[np.ndarray], before: list[Any]) -> None:
        """Only these rows have changed."""
        free = {int(row) for rows in allowed for row in rows}
        for one, other in zip(now, before, strict=True):
            if not np.array_equal(one, other):
                differs = (one != other).reshape(len(one), -1).any(axis=1)
                changed = set(np.flatnonzero(differs).tolist())
                assert changed <= free, f"{what} {sorted(changed - free)} of others"

    def _put_back(self) -> None:
        for now, before in ((self.memory, self.memory_before), (self.rank.aux, self.aux_before)):
            for one, other in zip(now, before, strict=True):
                one[:] = other


def peers(name: str) -> list[tuple[list[bytes], list[bytes]]]:
    """What each decode rank of a case sent to prefill rank 0: its registration, and the metadata
    of the first room."""
    seeds = Path(__file__).parent / "seeds" / "prefill"
    messages = [unpack(recorded(p))[0] for p in sorted(seeds.glob(f"{name}0-message-*"))]
    registered, rooms = ({m[3]: m for m in messages if m[0] == tag} for tag in (b"None", b"100"))
    return [(registered[session], rooms[session]) for session in sorted(registered)]


def bench(name: str) -> Bench:
    """The bench of a target, filled from the recorded messages of its case."""
    load()
    return DecodeBench() if name == "decode" else PrefillBench(name)
