"""The receiver's process: a decode rank's pool and staging buffer, driven over ZMQ."""

from __future__ import annotations

import multiprocessing as mp
import os
import pickle
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import zmq
from cases import CANARY, Bytes, Case, dst_draft, dst_places, dst_size, page_tables, wrong_bytes
from common import MOONCAKE_ENV
from wires import LISTENING, receiving

from sglang_mixkv.config import Config
from sglang_mixkv.decode.landing import SCRATCH, Landing
from sglang_mixkv.decode.slices import Slices
from sglang_mixkv.rows.host import Buffer, HostRows
from sglang_mixkv.stats import Stats

ANSWER_MS = 120_000
MIB = 1 << 20


class ScratchOnly(HostRows):
    """Rows without memory for regions."""

    def allocate(self, size: int) -> Buffer:
        if size > SCRATCH:
            raise MemoryError("none for regions, to measure without")
        return super().allocate(size)


class Receiver:
    """Answers one command at a time; each is a method."""

    def __init__(
        self, backend: str, truth: Bytes, pool: int, plain: int, staging: int, peers: int
    ) -> None:
        self.truth = truth
        self.pool, self.plain = np.empty(pool, np.uint8), np.empty(max(1, plain), np.uint8)
        self.engines = [LISTENING[backend]() for _ in range(peers)]
        transport = receiving(backend, self.engines)
        for memory in (self.pool, self.plain):
            transport.register(memory.ctypes.data, memory.nbytes)
        config = Config(staging_mb=staging // MIB)
        self.landings = {
            "region": Landing(HostRows(), config, Stats("decode")),
            "by page": Landing(ScratchOnly(), config, Stats("decode")),
        }
        for landing in self.landings.values():
            landing.connect(transport)
        self.case: Case | None = None
        self.heard = 0.0

    def hello(self) -> tuple[list[str], int, int]:
        """Sessions, address of the pool, address of the area for one contiguous write."""
        sessions = [engine.session for engine in self.engines]
        return sessions, self.pool.ctypes.data, self.plain.ctypes.data

    def begin(self, case: Case) -> list[bytes]:
        """Its prefill ranks are about to register: memory is taken. What they need to know."""
        self.case = case
        for landing in self.landings.values():
            landing.prepare(self._slices(False), (self._slices(True),))
        return [engine.hello for engine in self.engines]

    def clear(self) -> None:
        self.pool[: dst_size(self._case())].fill(CANARY)

    def grant(self, room: int, way: str) -> tuple[dict[tuple[int, int], Any], float]:
        """What senders are told, by (prefill rank, stage), as `auto` grants it with room for
        regions (`region`) or without (`by page`); seconds it took."""
        if way not in self.landings:
            return {}, 0.0
        case, start = self._case(), time.perf_counter()
        pages = page_tables(case, "decode")[room]
        draft, target = self._slices(True), self._slices(False)
        landing = self.landings[way]
        granted = landing.grant(
            room, target, (draft,), pages, told=landing.span, knows_extents=True
        )
        return granted, time.perf_counter() - start

    def _slices(self, draft: bool) -> Slices:
        """The drafter's slices of this case; the target's are none, as if it were MLA."""
        case = self._case()
        pointers = tuple(self.pool.ctypes.data + place for place in dst_places(case))
        senders = {(r.prefill_rank, r.stage): r.draft_heads for r in case.table if draft}
        return Slices(dst_draft(case), pointers, senders, case.topology.prefill_tp)

    def done(self, room: int) -> tuple[float, float]:
        """All senders have answered: (moment this was heard, moment the pool was complete)."""
        for landing in self.landings.values():
            landing.scatter(room)
        return self.heard, time.perf_counter()

    def wrong(self) -> int:
        return wrong_bytes(self._case(), self.truth, self.pool)

    def _case(self) -> Case:
        assert self.case is not None
        return self.case


def _serve(address: str, *args: Any) -> None:
    os.environ.update(MOONCAKE_ENV)
    socket = zmq.Context().socket(zmq.REP)
    socket.connect(address)
    receiver = Receiver(*args)
    while True:
        message = socket.recv()
        receiver.heard = time.perf_counter()
        name, values = pickle.loads(message)
        if name == "stop":
            os._exit(0)
        try:
            socket.send_pyobj(getattr(receiver, name)(*values))
        except Exception as error:
            socket.send_pyobj(error)


class Remote:
    """The receiver as the sender sees it: `remote.grant(room)` is a round trip."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket

    def __getattr__(self, name: str) -> Any:
        return lambda *values: self._ask(name, values)

    def _ask(self, name: str, values: tuple[Any, ...]) -> Any:
        return self.say(pickle.dumps((name, values)))

    def say(self, message: bytes) -> Any:
        """Its answer to a message that was made before: pickled name and values of a call."""
        self._socket.send(message)
        answer = self._socket.recv_pyobj()
        if isinstance(answer, Exception):
            raise answer
        return answer


@contextmanager
def receiver(
    backend: str, truth: Bytes, pool: int, plain: int, staging: int, peers: int = 1
) -> Iterator[Remote]:
    """A receiver in a process of its own. Sizes in bytes; `peers`: engines it listens with.

    Must be entered before this process makes an engine: the process is forked.
    """
    context = zmq.Context()
    socket = context.socket(zmq.REQ)
    socket.setsockopt(zmq.RCVTIMEO, ANSWER_MS)
    socket.setsockopt(zmq.LINGER, 0)
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    process = mp.get_context("fork").Process(
        target=_serve,
        args=(f"tcp://127.0.0.1:{port}", backend, truth, pool, plain, staging, peers),
        daemon=True,
    )
    process.start()
    try:
        yield Remote(socket)
    finally:
        with suppress(zmq.ZMQError):
            socket.send_pyobj(("stop", ()), zmq.NOBLOCK)
        process.join(5)
        if process.is_alive():
            process.kill()
        socket.close()
        context.term()
