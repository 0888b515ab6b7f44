"""What a prefill rank costs SGLang's scheduler per request: the calls of one sender.

Real ranks of tests/rig, a process each. The decode rank asks for all rooms; prefill rank 0 then
takes them one by one, as the scheduler does: the sender is made, polled, given its pages in one
chunk, polled, asked for its figures and cleared. Its transfer threads get nothing to do.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import time
from typing import Any

import numpy as np
from common import Record, elapsed
from rig.memory import RankReport
from rig.model import Cache, Case, Request
from rig.rank import LIMIT_S, Rank, free_port
from rig.ring import Servers

POLLS = 20
FIRST_ROOM = 10_000
CALLS = ("made", "init", "send", "poll", "metric", "clear")


class Nowhere:
    """A transfer queue whose thread never gets anything."""

    def put(self, chunk: Any) -> None:
        pass


class Passes:
    """Requests of one prefill rank; seconds of each call."""

    def __init__(self, rank: Rank, pages: int) -> None:
        self.rank, self.manager = rank, rank.manager
        self.pages = np.arange(pages, dtype=np.int32)
        self.manager.transfer_queues = [Nowhere()]

    def one(self, room: int) -> dict[str, float]:
        from sglang.srt.disaggregation.base.conn import KVPoll

        taken: dict[str, float] = {}
        made: list[Any] = []
        arguments = (self.manager, self.rank.address(0), room, True)
        taken["made"] = elapsed(lambda: made.append(self.rank.asked_class("sender")(*arguments)))
        (sender,) = made
        self._wait(sender, KVPoll.WaitingForInput)
        taken["init"] = elapsed(lambda: sender.init(len(self.pages), 0))
        taken["send"] = elapsed(lambda: sender.send(self.pages))
        taken["poll"] = elapsed(lambda: [sender.poll() for _ in range(POLLS)]) / POLLS
        self.manager.update_status(room, KVPoll.Success)
        sender.poll()
        taken["metric"] = elapsed(sender.get_transfer_metric)
        taken["clear"] = elapsed(sender.clear)
        return taken

    @staticmethod
    def _wait(sender: Any, status: Any) -> None:
        deadline = time.monotonic() + LIMIT_S
        while sender.poll() != status:
            if time.monotonic() > deadline:
                raise TimeoutError(f"room {sender.bootstrap_room} never had its metadata")
            time.sleep(0.0005)

    def many(self, rooms: range) -> Record:
        """Medians in microseconds: of each call, and of a request without its polls."""
        found = [self.one(room) for room in rooms]
        calls = {f"{name}_us": 1e6 * float(np.median([o[name] for o in found])) for name in CALLS}
        sums = [sum(one.values()) - one["poll"] for one in found]
        return {**calls, "sender_us": 1e6 * float(np.median(sums))}


def calls(tp: int, pages: int, passes: int, *, mixkv: bool) -> Record:
    """Prefill rank 0 of so many, to one decode rank."""
    case = Case(
        tp, 1, draft=Cache("mha", heads=8, layers=2), requests=(Request(4 * pages),),
        prefill_mixkv=mixkv, decode_mixkv=mixkv,
    )  # fmt: skip
    context = mp.get_context("fork")
    case.extra.update(
        bootstrap_up=[context.Event()], done=context.Event(), found=context.SimpleQueue(),
        passes=passes, pages=pages, pp_groups={},
    )  # fmt: skip
    servers = Servers(case, context, [free_port()], _main)
    try:
        if not case.extra["done"].wait(2 * LIMIT_S):
            raise TimeoutError(f"{tp} to 1, {pages} pages: no figures")
        found: Record = case.extra["found"].get()
    finally:
        servers.end()
    who = "mixkv" if mixkv else "stock"
    return {"prefill_tp": tp, "decode_tp": 1, "pages": pages, "plugin": who, **found}


def _main(
    case: Case, side: str, number: int, ports: list[int], pipe: Any, go: Any, life: int
) -> None:
    """One rank. The first fifth of the requests warms up."""
    rank = Rank(case, side, number, ports, life)
    rank.start_manager()
    pages, warm = case.extra["pages"], case.extra["passes"] // 5 + 1
    end = FIRST_ROOM + warm + case.extra["passes"]
    if side == "decode":
        for room in range(FIRST_ROOM, end):
            _ask(rank, room, pages)
    elif number == 0:
        passes = Passes(rank, pages)
        passes.many(range(FIRST_ROOM, FIRST_ROOM + warm))
        case.extra["found"].put(passes.many(range(FIRST_ROOM + warm, end)))
        case.extra["done"].set()
    pipe.send(RankReport(side, number))
    go.wait(4 * LIMIT_S)
    os._exit(0)


def _ask(rank: Rank, room: int, pages: int) -> None:
    """As a decode rank's scheduler does; what is asked for never comes."""
    address = rank.address(0)
    deadline = time.monotonic() + LIMIT_S
    while not rank.manager.try_ensure_parallel_info(address) and time.monotonic() < deadline:
        time.sleep(0.01)
    receiver = rank.kv_class["receiver"](rank.manager, address, room)
    receiver.init(0)
    receiver.send_metadata(np.arange(pages, dtype=np.int32), 0)
