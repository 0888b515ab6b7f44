"""A rank of the benchmarks' rings, in its own process: one request at a time, step by step.

A rank is one of tests/rig. Its main thread makes SGLang's sender or receiver and calls it as
SGLang's scheduler does; each public method of a member is a command of the ring's (rings.py).
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
load = importlib.import_module("rig.load")  # sets what SGLang's import reads
model = importlib.import_module("rig.model")
rig = importlib.import_module("rig.rank")

SIDES = ("prefill", "decode")
PAGE = 64
POLL_S, REST_S, LIMIT_S, LOOK_S = 2e-4, 1e-3, 60.0, 2.0


def page_numbers(side: str, layout: str, tokens: int, most: int) -> np.ndarray[Any, Any]:
    """The pages of a request of so many tokens, of the first ones that hold `most` tokens."""
    count = -(-tokens // PAGE)
    if layout == "runs":
        return np.arange(count, dtype=np.int32)
    order = np.random.default_rng([tokens, side == "decode"]).permutation(-(-most // PAGE))
    return order[:count].astype(np.int32)


class Meter:
    """Seconds of this thread, and by the clock, of each call."""

    def __init__(self) -> None:
        self.thread: dict[str, float] = {}
        self.clock: dict[str, float] = {}

    def __call__(self, name: str, call: Callable[[], Any], times: int = 1) -> Any:
        """What the call returns; the mean of so many."""
        clock, thread = time.perf_counter(), time.thread_time()
        for _ in range(times):
            result = call()
        self.thread[name] = (time.thread_time() - thread) / times
        self.clock[name] = (time.perf_counter() - clock) / times
        return result


class Member:
    """One rank, and its request. Each public method is a command."""

    def __init__(self, rank: Any) -> None:
        self.rank, self.manager = rank, rank.manager
        self.most = rank.case.requests[0].tokens
        self.handle: Any = None
        self.meter = Meter()

    def size(self) -> dict[str, int]:
        """Resident bytes of this process, and how many threads it has."""
        process = psutil.Process()
        return {"resident": process.memory_info().rss, "threads": process.num_threads()}

    def own_threads(self) -> float:
        """Seconds of a processor that the channel's threads have taken."""
        names = (t.ident for t in threading.enumerate() if t.name.startswith("mixkv-"))
        return sum(time.clock_gettime(time.pthread_getcpuclockid(n)) for n in names if n)

    def pages(self, tokens: int, layout: str) -> np.ndarray[Any, Any]:
        return page_numbers(self.rank.side, layout, tokens, self.most)

    def poll_until(self, statuses: tuple[Any, ...]) -> None:
        until = time.monotonic() + LIMIT_S
        while (status := self.handle.poll()) not in statuses:
            if time.monotonic() > until or status == 0:  # KVPoll.Failed
                raise RuntimeError(f"{self.rank.side} {self.rank.rank}: status {status}")
            time.sleep(POLL_S)

    def wait_for(self, what: Callable[[], bool]) -> None:
        """Without a call that the scheduler would make."""
        until = time.monotonic() + LIMIT_S
        while not what():
            if time.monotonic() > until:
                raise RuntimeError(f"{self.rank.side} {self.rank.rank}: not within {LIMIT_S} s")
            time.sleep(REST_S)

    def clear(self) -> Meter:
        self.meter("clear", self.handle.clear)
        return self.meter


class PrefillMember(Member):
    def begin(self, room: int, tokens: int, layout: str, polls: int) -> None:
        """Until decode's metadata is here."""
        from sglang.srt.disaggregation.base.conn import KVPoll

        self.meter = Meter()
        arguments = (self.manager, self.rank.address(0), room, True)
        self.handle = self.meter("made", lambda: self.rank.asked_class("sender")(*arguments))
        self.chunk = self.pages(tokens, layout)
        self.poll_until((KVPoll.WaitingForInput, KVPoll.Success))
        self.meter("init", lambda: self.handle.init(len(self.chunk), 0))
        if polls:
            self.meter("poll", self.handle.poll, polls)

    def send(self) -> float:
        """When it was handed over. Returns once SGLang's own transfer has succeeded."""
        from sglang.srt.disaggregation.base.conn import KVPoll

        now, room = time.monotonic(), self.handle.bootstrap_room
        self.meter("send", lambda: self.handle.send(self.chunk))
        self.wait_for(lambda: self.manager.request_status.get(room) == KVPoll.Success)
        return now

    def conclude(self) -> None:
        from sglang.srt.disaggregation.base.conn import KVPoll

        self.meter("last poll", self.handle.poll)
        self.poll_until((KVPoll.Success,))
        self.meter("metric", self.handle.get_transfer_metric)


def request_of(room: int) -> Any:
    """SGLang's, as far as the plugin looks at it when its room ends."""
    from sglang.srt.managers.schedule_batch import Req

    request = Req.__new__(Req)
    request.rid, request.finished_reason = str(room), None
    request.spec_correct_drafts_histogram = []
    return request


class DecodeMember(Member):
    def __init__(self, rank: Any) -> None:
        super().__init__(rank)
        self.warm = 0.0
        inbox = getattr(self.manager, "inbox", None)
        if inbox is not None:
            real = inbox._decide
            inbox._decide = lambda verdict: (self._note_time(), real(verdict))

    def _note_time(self) -> None:
        self.warm = time.monotonic()

    def resolve(self) -> None:
        self.wait_for(lambda: self.manager.try_ensure_parallel_info(self.rank.address(0)))

    def open(self, room: int, tokens: int, layout: str, polls: int) -> float:
        """When the metadata was about to go out."""
        self.meter, arguments = Meter(), (self.manager, self.rank.address(0), room)

        def made() -> Any:
            receiver = self.rank.asked_class("receiver")(*arguments)
            receiver.init(0)
            return receiver

        self.handle, pages = self.meter("init", made), self.pages(tokens, layout)
        self.opened = (tokens, layout)
        now = time.monotonic()
        self.meter(
            "send_metadata", lambda: self.handle.send_metadata(pages, 1, decode_prefix_len=0)
        )
        if polls:
            self.meter("poll", self.handle.poll, polls)
        return now

    def finish(self) -> tuple[float, float]:
        """When the draft KV was in place, over the channel; when SGLang could go on."""
        from sglang.srt.disaggregation.base.conn import KVPoll

        self.poll_until((KVPoll.Success,))
        return self.warm, time.monotonic()

    def await_draft(self, polls: int) -> None:
        """SGLang's own transfer has come, draft KV has not."""
        from sglang.srt.disaggregation.base.conn import KVPoll

        self.manager.update_status(self.handle.bootstrap_room, KVPoll.Success)
        self.handle.poll()
        self.meter("awaited poll", self.handle.poll, polls)

    def conclude(self) -> None:
        """The one poll that says Success, once everything is there."""
        from sglang.srt.disaggregation.base.conn import KVPoll

        room, entry = self.handle.bootstrap_room, getattr(self.handle, "entry", None)
        self.wait_for(lambda: self.manager.request_status.get(room) == KVPoll.Success)
        self.wait_for(lambda: entry is None or entry.state is not None)
        if entry is not None:
            entry.request = self.request = request_of(room)
        status = self.meter("last poll", self.handle.poll)
        if status != KVPoll.Success:
            raise RuntimeError(f"{status}, expected Success")

    def empty(self) -> None:
        for name in ("target", "draft"):
            for entry in self.rank.pools[name]:
                entry.fill(0)

    def wrong(self) -> int:
        """Bytes of the request's pages that are not prefill's."""
        entry = getattr(self.handle, "entry", None)
        if entry is not None and entry.reason:
            raise RuntimeError(f"a cold drafter: {entry.reason}")
        case, rank = self.rank.case, self.rank
        there, here = (page_numbers(s, *reversed(self.opened), self.most) for s in SIDES)
        found = 0
        for name in ("target", "draft"):
            cache = case.cache(name)
            rows = model.cut(cache, model.whole(case, name, cache, 0), rank.tp, rank.attn_rank)
            for row, entry in zip(rows, rank.pools[name], strict=True):
                found += int((row[there] != entry[here]).sum())
        return found


MEMBERS = {"prefill": PrefillMember, "decode": DecodeMember}


def serve(case: Any, side: str, number: int, ports: list[int], pipe: Any, parent: int) -> None:
    """One rank: commands in, what they return out, until the parent ends it."""
    try:
        rank = rig.Rank(case, side, number, ports)
        start = time.perf_counter()
        rank.start_manager()
        member = MEMBERS[side](rank)
        pipe.send(time.perf_counter() - start)
        while True:
            while not pipe.poll(LOOK_S):
                if os.getppid() != parent:
                    os._exit(0)
            name, *args = pipe.recv()
            pipe.send(getattr(member, name)(*args))
    except BaseException:
        pipe.send(RuntimeError(f"{side} {number}:\n{traceback.format_exc()}"))
    os._exit(0)
