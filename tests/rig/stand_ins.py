"""Prefill servers that consist of a real bootstrap server and of sockets that only listen.

They live in a decode rank's own process: what that rank says to them, and asks them for, is
counted there. `decode_rank()` is a rank of the ring whose manager runs, without a prefill.
"""

from __future__ import annotations

import functools
import multiprocessing as mp
import os
import threading
import time
import traceback
from collections import Counter
from types import SimpleNamespace
from typing import Any
from unittest import mock

import msgspec
import requests
import zmq
from rig.model import Cache, Case, Request
from rig.rank import Rank, free_port, wait_for_port

from sglang_mixkv.protocol.announcement import announcement


def in_own_process(test: Any) -> Any:
    """Run a test in a fork, which may publish arguments and start threads as a rank does."""

    @functools.wraps(test)
    def forked(*args: Any, **kwargs: Any) -> None:
        context = mp.get_context("fork")
        here, there = context.Pipe()

        def body() -> None:
            try:
                test(*args, **kwargs)
                there.send("")
            except BaseException:
                there.send(traceback.format_exc())
            os._exit(0)

        process = context.Process(target=body)
        process.start()
        there.close()
        try:
            found = here.recv() if here.poll(120) else "no answer"
        except EOFError:
            found = "the process died"
        process.kill()
        process.join()
        assert not found, found

    return forked


def decode_rank(pages: int = 100, *, mixkv: bool = True) -> Rank:
    """A decode rank in this process, its manager started. `pages`: of its one request."""
    case = Case(
        2, 1, draft=Cache("mha", heads=8, layers=2), requests=(Request(4 * pages),),
        decode_mixkv=mixkv, extra={"bootstrap_up": [mock.Mock()]},
    )  # fmt: skip
    rank = Rank(case, "decode", 0, [free_port()])
    rank.start_manager()
    return rank


class StandIn:
    """A prefill server of `dp` x `tp` ranks. `fits`: it announces what the decode rank wants.

    `heard`: messages by DP rank; `asked`: requests to its bootstrap server by path, and whether
    the thread that made this object made them; those of the heartbeat apart.
    """

    def __init__(self, rank: Rank, tp: int = 2, dp: int = 1, *, fits: bool, by_room: bool) -> None:
        self.rank, self.tp, self.dp, self.by_room = rank, tp, dp, by_room
        self.address = f"127.0.0.1:{free_port()}"
        self.heard: dict[int, list[list[bytes]]] = {n: [] for n in range(dp)}
        self.asked: Counter[tuple[str, bool]] = Counter()
        self._count_requests(threading.get_ident())
        port = int(self.address.rpartition(":")[2])
        self.bootstrap = rank.kv_class["bootstrap_server"]("127.0.0.1", port)
        wait_for_port(port)
        self._context = zmq.Context()
        self._sockets = [self._context.socket(zmq.PULL) for _ in range(dp * tp)]
        self._ports = [one.bind_to_random_port("tcp://127.0.0.1") for one in self._sockets]
        self.announce(fits=fits)
        threading.Thread(target=self._listen, daemon=True).start()

    def _count_requests(self, mine: int) -> None:
        real = requests.Session.request

        def counted(session: Any, method: str, url: str, *args: Any, **kwargs: Any) -> Any:
            path = url.partition(self.address)[2].partition("?")[0]
            if path and path != "/health" and method.upper() == "GET":
                self.asked[path, threading.get_ident() == mine] += 1
            return real(session, method, url, *args, **kwargs)

        requests.Session.request = counted

    def announce(self, *, fits: bool = True, **other: Any) -> None:
        """Have all ranks register (again), with facts that fit or not, or with others of them."""
        side = self.rank.plugin  # None: stock, which asks for no facts
        facts = side.local.facts if side is not None else None
        if facts is not None and not fits:
            facts = msgspec.structs.replace(facts, page_size=facts.page_size + 1)
        if facts is not None:
            facts = msgspec.structs.replace(facts, **other)
        balance = "follow_bootstrap_room" if self.by_room else "round_robin"
        for number, port in enumerate(self._ports):
            row = {
                "attn_tp_size": self.tp, "attn_tp_rank": number % self.tp,
                "attn_dp_size": self.dp, "attn_dp_rank": number // self.tp,
                "attn_cp_size": 1, "attn_cp_rank": 0, "pp_size": 1, "pp_rank": 0,
                "system_dp_size": 1, "system_dp_rank": 0,
                "rank_ip": "127.0.0.1", "rank_port": port,
                "page_size": self.rank.case.page_size, "kv_cache_dtype": "bf16",
                "load_balance_method": balance, "mixkv": facts and announcement(facts),
            }  # fmt: skip
            requests.put(f"http://{self.address}/route", json=row, timeout=5).raise_for_status()

    def _listen(self) -> None:
        poller = zmq.Poller()
        dp_of = {socket: number // self.tp for number, socket in enumerate(self._sockets)}
        for socket in dp_of:
            poller.register(socket, zmq.POLLIN)
        while True:
            for socket, _ in poller.poll():
                self.heard[dp_of[socket]].append(socket.recv_multipart())

    def aborted(self, dp: int) -> set[int]:
        """Rooms that all ranks of this DP rank were told the end of."""
        told = Counter(int(m[1]) for m in self.heard[dp] if m[0] == b"ABORT")
        return {room for room, times in told.items() if times >= self.tp}

    def request(self, room: int) -> Any:
        """One request to it, as SGLang's scheduler opens it."""
        receiver = self.rank.kv_class["receiver"](self.rank.manager, self.address, room)
        self.resolve()
        receiver.init(self.dp_rank_of(room))
        return receiver

    def resolve(self) -> None:
        deadline = time.monotonic() + 20
        while not self.rank.manager.try_ensure_parallel_info(self.address):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.address} was not resolved")
            time.sleep(0.001)

    def dp_rank_of(self, room: int) -> int:
        """The DP rank that SGLang's scheduler takes the request to be at."""
        from sglang.srt.disaggregation.decode import DecodePreallocQueue

        host, _, port = self.address.rpartition(":")
        request = SimpleNamespace(
            bootstrap_host=host, bootstrap_port=int(port), bootstrap_room=room,
            disagg_prefill_dp_rank=None,
        )  # fmt: skip
        queue = SimpleNamespace(kv_manager=self.rank.manager)
        found = DecodePreallocQueue._resolve_prefill_dp_rank(queue, request)
        assert found is not None, "SGLang would ask the bootstrap server, in its loop"
        return int(found)


def wait_until(what: Any, seconds: float = 20) -> None:
    """Until `what()` is true."""
    deadline = time.monotonic() + seconds
    while not what():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} did not come true")
        time.sleep(0.005)
