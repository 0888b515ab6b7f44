"""The receiver's process: a decode rank's pool and staging buffer, driven over ZMQ."""

from __future__ import annotations

import importlib.util
import multiprocessing as mp
import os
import pickle
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import ModuleType
from typing import Any

import numpy as np
import zmq
from cases import CANARY, Bytes, Case, dst_draft, dst_places, dst_size, page_tables, wrong_bytes
from common import MOONCAKE_ENV

import sglang_mixkv
from sglang_mixkv.prefill.packing import PackBuffer
from sglang_mixkv.rows.host import HostRows

ANSWER_MS = 120_000


def staging_module() -> ModuleType:
    """sglang_mixkv.decode.landing by its path: it needs nothing of SGLang, while importing
    its package imports all of SGLang, half a minute of it."""
    name = "mixkv_bench_staging"
    if name not in sys.modules:
        path = os.path.join(sglang_mixkv.__path__[0], "managers", "staging.py")
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]


class Mooncake:
    """A Mooncake engine with what is used of SGLang's MooncakeTransferEngine.

    `wire`: seconds spent in waiting for writes; `descriptors` counts their ranges.
    """

    def __init__(self) -> None:
        from mooncake.engine import TransferEngine

        self.engine = TransferEngine()
        if self.engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""):
            raise RuntimeError("Mooncake could not be initialised")
        self.session = f"127.0.0.1:{self.engine.get_rpc_port()}"
        self.reset()

    def reset(self) -> None:
        self.wire, self.descriptors = 0.0, 0

    def batch_register(self, addresses: list[int], lengths: list[int]) -> int:
        return int(self.engine.batch_register_memory(addresses, lengths))

    def batch_transfer_sync(
        self, session: str, src: list[int], dst: list[int], lengths: list[int]
    ) -> int:
        start = time.perf_counter()
        code = int(self.engine.batch_transfer_sync_write(session, src, dst, lengths))
        self.took(start, len(lengths))
        return code

    def took(self, start: float, ranges: int) -> None:
        self.wire += time.perf_counter() - start
        self.descriptors += ranges


class Receiver:
    """Answers one command at a time; each is a method."""

    def __init__(self, truth: Bytes, pool: int, plain: int, staging: int, peers: int) -> None:
        self.truth = truth
        self.pool, self.plain = np.empty(pool, np.uint8), np.empty(max(1, plain), np.uint8)
        self.engines = [Mooncake() for _ in range(peers)]
        for engine in self.engines:
            memory = [self.pool, self.plain]
            engine.batch_register([m.ctypes.data for m in memory], [m.nbytes for m in memory])
        product = staging_module()
        rows = HostRows()
        buffer = product.pack_buffer(self.engines[0], rows, staging)
        address, owner = rows.allocate(product.SCRATCH)
        scratch = PackBuffer(address, product.SCRATCH, owner)
        for engine in self.engines[1:]:
            engine.batch_register([buffer.address], [buffer.size])
        self.stagings = {
            "region": product.Staging(buffer, rows, scratch),
            "by page": product.Staging(None, rows, scratch),
        }
        self.case: Case | None = None
        self.heard = 0.0

    def hello(self) -> tuple[list[str], int, int]:
        """Sessions, address of the pool, address of the area for one contiguous write."""
        sessions = [engine.session for engine in self.engines]
        return sessions, self.pool.ctypes.data, self.plain.ctypes.data

    def begin(self, case: Case) -> None:
        self.case = case

    def clear(self) -> None:
        self.pool[: dst_size(self._case())].fill(CANARY)

    def grant(self, room: int, way: str) -> tuple[dict[tuple[int, int], Any], float]:
        """What senders are told, by (prefill rank, stage), as `auto` grants it with room for
        regions (`region`) or without (`by page`); seconds it took."""
        if way not in self.stagings:
            return {}, 0.0
        case, start = self._case(), time.perf_counter()
        pages = page_tables(case, "decode")[room]
        draft, target = self._slices(True), self._slices(False)
        granted = self.stagings[way].grant(room, target, draft, pages, 0, "auto")
        return granted, time.perf_counter() - start

    def _slices(self, draft: bool) -> Any:
        """The drafter's slices of this case; the target's are none, as if it were MLA."""
        case = self._case()
        pointers = tuple(self.pool.ctypes.data + place for place in dst_places(case))
        senders = {(r.prefill_rank, r.stage): r.draft_heads for r in case.table if draft}
        size = case.topology.prefill_tp
        return staging_module().Slices(dst_draft(case), pointers, senders, size)

    def done(self, room: int) -> tuple[float, float]:
        """All senders have answered: (moment this was heard, moment the pool was complete)."""
        for staging in self.stagings.values():
            staging.scatter(room)
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
def receiver(truth: Bytes, pool: int, plain: int, staging: int, peers: int = 1) -> Iterator[Remote]:
    """A receiver in a process of its own. Sizes in bytes; `peers`: engines it listens with.

    Must be entered before this process makes a Mooncake engine: the process is forked.
    """
    context = zmq.Context()
    socket = context.socket(zmq.REQ)
    socket.setsockopt(zmq.RCVTIMEO, ANSWER_MS)
    socket.setsockopt(zmq.LINGER, 0)
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    process = mp.get_context("fork").Process(
        target=_serve,
        args=(f"tcp://127.0.0.1:{port}", truth, pool, plain, staging, peers),
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
