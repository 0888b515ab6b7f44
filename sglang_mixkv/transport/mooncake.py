"""Mooncake: over RDMA as SGLang uses it, over TCP within the limits of that transport.

Mooncake's TCP transport fails above some 2,048 ranges in flight per engine and peer. After such
an overflow the engine can be stuck towards that peer for good: each call returns -1 after a
second, while the peer still answers a probe. So over TCP all threads together keep at most
IN_FLIGHT ranges in flight to a peer (`InFlight`), and an engine whose write failed although the
peer answers is replaced by a fresh one with the same memory registered (`Engines`). A peer does
not notice: the engine's own session is never told to it.

A failed call is not repeated: bytes of it may still arrive, and the request that it belongs to
fails. The old engine is kept, since ending it takes a second under the GIL.

`Mooncake` is the transport of what the plugin plans. SGLang's own writes (targets without a
drafter, model state, metadata) go through `SharedEngine`, so that they count as well.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sglang_mixkv.kv.ranges import Blocks
from sglang_mixkv.transport.base import Limits

logger = logging.getLogger(__name__)

IN_FLIGHT = 1024
ASYNCHRONOUS = 128  # of them, in writes that nobody waits for yet
WAITED_FOR = IN_FLIGHT - ASYNCHRONOUS

# A range costs 20-25 us on TCP, as much as the copy of some 150 KiB, or of 75 KiB at both ends.
FEW, SHORT = 16, 96 << 10

MOST_ENGINES = 8
MOST_IN_VAIN = 2  # of them for one peer, without a write to it that was right
POLL_S = 5e-5
GIVE_UP_S = 30.0  # after which Mooncake gives up a call that waits, unless told otherwise


class InFlight:
    """Ranges in flight of one process, to each peer: one that hangs takes nobody else's share.
    Writes that are waited for and asynchronous ones have a share each: no call waits for room that
    only a thread which itself waits can give back. Nothing is kept of a peer with none."""

    def __init__(self, waited_for: int = WAITED_FOR, asynchronous: int = ASYNCHRONOUS) -> None:
        self.most, self.most_asynchronous = waited_for, asynchronous
        self._room = threading.Condition()
        self._waited_for: Counter[str] = Counter()
        self._asynchronous: Counter[str] = Counter()
        self._turns: dict[str, deque[object]] = {}

    def take(self, session: str, count: int) -> None:
        """Room for so many ranges, in the order of asking: a large call is not passed by."""
        with self._room:
            turns = self._turns.setdefault(session, deque())
            turns.append(turn := object())
            while turns[0] is not turn or self._waited_for[session] + count > self.most:
                self._room.wait()
            turns.popleft()
            if not turns:
                del self._turns[session]
            self._waited_for[session] += count
            self._room.notify_all()

    def give_back(self, session: str, count: int) -> None:
        with self._room:
            _less(self._waited_for, session, count)
            self._room.notify_all()

    def begin(self, session: str, count: int) -> bool:
        """Room for so many asynchronous ranges, if there is any now."""
        with self._room:
            fits = self._asynchronous[session] + count <= self.most_asynchronous
            if fits:
                self._asynchronous[session] += count
            return fits

    def end(self, session: str, count: int) -> None:
        with self._room:
            _less(self._asynchronous, session, count)


def _less(counted: Counter[str], session: str, count: int) -> None:
    counted[session] -= count
    if not counted[session]:
        del counted[session]


class Engines:
    """The engine in use, the memory registered with it, and those that it replaced.

    `make`: a fresh engine like the first. Only so many are made: those that were replaced are kept.
    A peer to which the fresh ones fail as well does not use them up for the others.
    """

    def __init__(self, engine: Any, make: Callable[[], Any]) -> None:
        self.current = engine
        self._make = make
        self._memory: dict[int, int] = {}  # registered: address -> length
        self._replaced: list[Any] = []
        self._in_vain: Counter[str] = Counter()  # made for a session, since a write to it was right
        self._lock = threading.Lock()

    def register(self, ptrs: list[int], lengths: list[int]) -> int:
        with self._lock:
            code: int = self.current.batch_register(ptrs, lengths)
            if code == 0:
                self._memory.update(zip(ptrs, lengths, strict=True))
            return code

    def deregister(self, ptrs: list[int]) -> int:
        with self._lock:
            for ptr in ptrs:
                self._memory.pop(ptr, None)
            code: int = self.current.batch_deregister(ptrs)
            return code

    def note(self, engine: Any, session: str, code: int) -> None:
        """How a write ended. One that failed though the peer is there has a fresh engine take the
        place of this one."""
        if code == 0:
            if self._in_vain and engine is self.current:
                self._in_vain.pop(session, None)
            return
        try:
            if not _answers(engine, session):
                return
            with self._lock:
                if self.current is engine and self._in_vain[session] < MOST_IN_VAIN:
                    self._replace(session)
        except Exception:
            logger.exception("[MIXKV-SEND-04] sglang-mixkv could not replace the transfer engine")

    def _replace(self, session: str) -> None:
        if len(self._replaced) >= MOST_ENGINES:
            logger.error(
                "[MIXKV-SEND-04] sglang-mixkv: transfers to %s fail although it answers, and the "
                "transfer engine was replaced %d times already; restart this server",
                session, MOST_ENGINES,
            )  # fmt: skip
            return
        fresh = self._make()
        code = fresh.batch_register(list(self._memory), list(self._memory.values()))
        if code != 0:
            raise RuntimeError(f"registering memory with a new engine returned {code}")
        self._replaced.append(self.current)
        self.current = fresh
        self._in_vain[session] += 1
        logger.warning(
            "[MIXKV-SEND-03] sglang-mixkv: a transfer to %s failed although it answers; the "
            "transfer engine was replaced", session,
        )  # fmt: skip


@dataclass(frozen=True)
class Ended:
    """A write that was waited for already."""

    code: int


@dataclass(frozen=True)
class Begun:
    """An asynchronous write: Mooncake's numbers, one per range, 0 of one that it rejected, the
    engine that does it, and when it is given up (time.monotonic)."""

    engine: Any
    session: str
    numbers: list[int]
    until: float


class Mooncake:
    """Transport over one or more of SGLang's MooncakeTransferEngine.

    `in_flight`: None over RDMA, which has no such limit: then a write is one call.
    """

    def __init__(self, engines: Engines, in_flight: InFlight | None) -> None:
        self._engines, self._in_flight = engines, in_flight
        begun = in_flight.most_asynchronous if in_flight else 0
        self.limits = Limits(FEW, SHORT, overlaps=bool(begun), begun=begun)

    @property
    def engine(self) -> Any:
        """SGLang's engine that is in use."""
        return self._engines.current

    def register(self, address: int, size: int) -> None:
        code = self._engines.register([address], [size])
        if code:
            raise MemoryError(f"registering {size} bytes returned {code}")

    def why(self, code: int) -> str:
        return f"the transport returned {code}"

    def probe(self, session: str) -> bool:
        return _answers(self._engines.current, session)

    def write(self, session: str, blocks: Blocks, *, overlap: bool = False) -> Ended | Begun:
        begun = self._begin(session, blocks) if overlap else None
        return begun or Ended(self._write(session, blocks))

    def wait(self, handle: Ended | Begun) -> int:
        return handle.code if isinstance(handle, Ended) else self._finish(handle)

    # -- waited for

    def _write(self, session: str, blocks: Blocks) -> int:
        """In calls within the limit. The first code that is not 0 ends it."""
        total = len(blocks.length)
        most = self._in_flight.most if self._in_flight is not None else total
        if total <= most:
            return self.transfer(session, *blocks.lists()) if total else 0
        first = int(blocks.length[0])
        alike = bool((blocks.length == first).all())
        for start in range(0, total, most):
            part = slice(start, start + most)
            src = blocks.src[part].tolist()
            lengths = [first] * len(src) if alike else blocks.length[part].tolist()
            code = self.transfer(session, src, blocks.dst[part].tolist(), lengths)
            if code != 0:
                return code
        return 0

    def transfer(self, session: str, src: list[int], dst: list[int], lengths: list[int]) -> int:
        """One batch, waited for: lists, as Mooncake's binding takes them."""
        limiter, engine, count = self._in_flight, self._engines.current, len(lengths)
        if limiter is None:
            return int(engine.batch_transfer_sync(session, src, dst, lengths))
        limiter.take(session, count)
        try:
            engine = self._engines.current
            code = int(engine.batch_transfer_sync(session, src, dst, lengths))
        finally:
            limiter.give_back(session, count)
        self._engines.note(engine, session, code)
        return code

    # -- asynchronous

    def _begin(self, session: str, blocks: Blocks) -> Begun | None:
        """None, with nothing begun, where too many are in flight or Mooncake cannot."""
        engine, limiter = self._engines.current, self._in_flight
        mooncake = getattr(engine, "engine", None)
        if limiter is None or not hasattr(mooncake, "transfer_submit_write"):
            return None
        if not limiter.begin(session, len(blocks.length)):
            return None
        numbers = [_submit(mooncake, session, one) for one in zip(*blocks.lists(), strict=True)]
        return Begun(engine, session, numbers, time.monotonic() + patience_s())

    def _finish(self, begun: Begun) -> int:
        mooncake = begun.engine.engine
        codes = [_outcome(mooncake, number, begun.until) for number in begun.numbers]
        assert self._in_flight is not None
        self._in_flight.end(begun.session, len(codes))
        code = -1 if any(codes) else 0
        self._engines.note(begun.engine, begun.session, code)
        return code


class SharedEngine:
    """Stands in for SGLang's MooncakeTransferEngine where its writes have to count too. What is
    not here is the engine's own."""

    def __init__(self, engines: Engines, transport: Mooncake, in_flight: InFlight) -> None:
        self._engines, self._transport, self._most = engines, transport, in_flight.most

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engines.current, name)

    def batch_register(self, ptrs: list[int], lengths: list[int]) -> int:
        return self._engines.register(ptrs, lengths)

    def batch_deregister(self, ptrs: list[int]) -> int:
        return self._engines.deregister(ptrs)

    def batch_transfer_sync(
        self, session_id: str, buffers: list[int], peer_buffer_addresses: list[int],
        lengths: list[int],
    ) -> int:  # fmt: skip
        """As the engine's, in calls within the limit. The first code that is not 0 ends it."""
        for start in range(0, len(lengths), self._most):
            part = slice(start, start + self._most)
            code = self._transport.transfer(
                session_id, buffers[part], peer_buffer_addresses[part], lengths[part]
            )
            if code != 0:
                return code
        return 0


def _answers(engine: Any, session: str) -> bool:
    """Whether this peer is there, towards an engine that may be stuck."""
    try:
        return bool(engine.send_probe(session) == 0)
    except Exception:
        logger.warning("[MIXKV-SEND-03] sglang-mixkv could not probe %s", session, exc_info=True)
        return False


def _submit(mooncake: Any, session: str, one: tuple[int, int, int]) -> int:
    """Mooncake's number of this write; 0 if it was rejected."""
    try:
        number = int(mooncake.transfer_submit_write(session, *one))
    except Exception:
        logger.exception("[MIXKV-SEND-03] sglang-mixkv could not begin a write to %s", session)
        return 0
    return number if 0 < number < 1 << 63 else 0  # a pointer, 0, or -1 as it may be unsigned


def patience_s() -> float:
    """Seconds after which Mooncake gives up a call that waits: MC_TRANSFER_TIMEOUT, at least 5."""
    said = os.environ.get("MC_TRANSFER_TIMEOUT", "")
    return max(5.0, float(said)) if said.isdecimal() else GIVE_UP_S


def _outcome(mooncake: Any, number: int, deadline: float) -> int:
    """0 when this write is done; -1 if it failed, was rejected, or is not done by then.
    Mooncake forgets the number of one that ended."""
    try:
        while number and (state := int(mooncake.transfer_check_status(number))) <= 0:
            if state < 0 or time.monotonic() > deadline:
                return -1
            time.sleep(POLL_S)
    except Exception:
        logger.exception("[MIXKV-SEND-03] sglang-mixkv does not know what became of a write")
        return -1
    return 0 if number else -1
