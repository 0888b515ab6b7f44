"""The ways to get a case's bytes across, each timed part by part.

A `Run` is one case between the sender's process and the receiver's; each of its methods sends
all of it once and adds one sample.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import cases
import numpy as np
from cases import Case, page_tables
from common import Samples, elapsed
from peer import MIB, Remote, receiver
from wires import ENGINES, sending

from sglang_mixkv.kv.plan import Copies, Plan
from sglang_mixkv.prefill.worker import PackMemory
from sglang_mixkv.prefill.writer import Chunk, ChunkWriter, Written
from sglang_mixkv.rows.host import HostRows, RowCopy

STAGING = 256 * MIB  # the receiver's buffer; the product's default
PACK = 64 * MIB  # a transfer thread's: the same, over SGLang's four transfer threads
AT_ONCE = 8
WHOLE_LAYERS = 61
DONE = pickle.dumps(("done", (0,)))


class TimedRows(HostRows):
    """The product's rows, with the seconds spent in copies."""

    pack = 0.0

    def copy(self, what: RowCopy) -> None:
        start = time.perf_counter()
        super().copy(what)
        self.pack += time.perf_counter() - start


@dataclass
class Sender:
    """The senders' process: one engine, the receiver at the other end."""

    remote: Remote
    engine: Any
    truth: cases.Bytes

    def __post_init__(self) -> None:
        self.sessions, self.pool, self.plain = self.remote.hello()
        self.transport, self.shared = sending(self.engine)
        self.transport.register(self.truth.ctypes.data, self.truth.nbytes)
        self.rows = TimedRows()
        self.stock: Any = None
        self.buffers: dict[int, Any] = {}
        self.writers: dict[tuple[str, int], ChunkWriter] = {}

    def buffer(self, slot: int) -> Any:
        """The pack buffer of transfer thread number `slot`, made once."""
        if slot not in self.buffers:
            self.buffers[slot] = PackMemory(self.transport, self.rows, PACK).get()
        return self.buffers[slot]

    def writer(self, mode: str, slot: int = 0) -> ChunkWriter:
        """That of transfer thread number `slot`, made once."""
        if (mode, slot) not in self.writers:
            make = partial(self.buffer, slot)
            self.writers[mode, slot] = ChunkWriter(self.transport, self.rows, make, mode)
        return self.writers[mode, slot]

    def plan(self, case: Case, sender: int) -> Plan:
        return cases.plan(case, sender, self.truth.ctypes.data, self.pool)

    def load_stock(self) -> None:
        """SGLang's own Mooncake manager, as far as it plans, over the same engine."""
        from planning import stock_manager

        if self.shared is None:
            return
        self.stock = stock_manager(self.shared)
        self.stock.kv_args.prefill_end_layer = WHOLE_LAYERS

    def reset(self) -> None:
        self.engine.reset()
        self.rows.pack = 0.0


@contextmanager
def pair(all_cases: list[Case], quick: bool, backend: str = "mooncake") -> Iterator[Sender]:
    """Sender and receiver with memory for the largest of these cases."""
    truth = cases.make_truth(max(map(plain_or_pools, all_cases)))
    pool = max(map(cases.dst_size, all_cases))
    plain = max(case.bytes * case.requests for case in all_cases)
    staging = 32 * MIB if quick else STAGING
    peers = max(case.requests for case in all_cases)
    with receiver(backend, truth, pool, plain, staging, peers) as remote:
        yield Sender(remote, ENGINES[backend](), truth)


def plain_or_pools(case: Case) -> int:
    return max(cases.src_size(case), case.bytes * case.requests)


# ---------------------------------------------------------------- methods


class Run:
    """The methods over one case. `codes`: non-zero return codes seen."""

    def __init__(self, sender: Sender, case: Case) -> None:
        self.sender, self.case = sender, case
        self.plans = [sender.plan(case, number) for number in range(case.senders)]
        self.src = page_tables(case, "prefill")[0]
        self.dst = page_tables(case, "decode")[0]
        self.chunk = Chunk(self.src, self.dst, room_pages=self.dst)
        self.codes: list[int] = []
        for hello in sender.remote.begin(case):
            sender.engine.meet(hello)

    def plain(self, samples: Samples) -> None:
        """One contiguous write of the same bytes."""
        self.plain_of(samples, self.case.bytes)

    def plain_of(self, samples: Samples, size: int) -> None:
        """One contiguous write of so many bytes."""
        one = self.sender
        addresses = [one.truth.ctypes.data], [one.plain], [size]
        samples.add(elapsed(lambda: self._write(*addresses)))

    def _write(self, src: list[int], dst: list[int], lengths: list[int]) -> None:
        one = self.sender
        self._note(one.engine.batch_transfer_sync(one.sessions[0], src, dst, lengths))

    def _note(self, code: int) -> None:
        if code:
            self.codes.append(code)

    def product(self, samples: Samples, way: str, plans: list[Plan] | None = None) -> list[Written]:
        """The product's way: every sender's chunk, the signal, the scatter.

        `way`: `region` or `by page`, which the receiver grants, or the sender's mode.
        """
        one, written = self.sender, []
        granted, grant_s = one.remote.grant(0, way)
        mode = way if way in ("packed", "direct") else "auto"
        one.reset()
        start = time.perf_counter()
        for number, plan in enumerate(plans or self.plans):
            done = one.writer(mode).write(
                one.sessions[0], plan, self.chunk, granted.get((number, 0))
            )
            self._note(done.code)
            written.append(done)
        self._finish(samples, start, grant=grant_s)
        return written

    def _finish(self, samples: Samples, start: float, **more: float) -> None:
        one = self.sender
        sent = time.perf_counter()
        known, complete = one.remote.say(DONE)
        pack, wire = one.rows.pack, one.engine.wire
        samples.add(
            complete - start, plan=sent - start - pack - wire, pack=pack, wire=wire,
            signal=known - sent, scatter=complete - known,
            ranges=float(one.engine.descriptors), **more,
        )  # fmt: skip

    def stock(self, samples: Samples) -> None:
        """Slices as SGLang's send_kvcache_slice lists them, in batches that do not fail."""
        self.sender.reset()
        start = time.perf_counter()
        for plan in self.plans:
            draft = plan.draft[0].copies
            for entry in range(len(draft)):
                self._stock_entry(draft.at(entry))
        self._finish(samples, start)

    def _stock_entry(self, one: Copies) -> None:
        """Restates process_layer_tp_aware of sglang/srt/disaggregation/mooncake/conn.py,
        which sends the whole list in one call: that fails above some 2,048 ranges."""
        slots = np.arange(self.case.page_size).reshape(1, -1)
        src_pages, dst_pages = self.src.reshape(-1, 1), self.dst.reshape(-1, 1)
        src_item, dst_item = one.src_row * slots.size, one.dst_row * slots.size
        src = (one.src + src_pages * src_item) + (slots * one.src_row + one.src_offset)
        dst = (one.dst + dst_pages * dst_item) + (slots * one.dst_row + one.dst_offset)
        src_list, dst_list = src.reshape(-1).tolist(), dst.reshape(-1).tolist()
        lengths = [int(one.width[0])] * len(src_list)
        most = self.sender.engine.most
        for first in range(0, len(src_list), most):
            part = slice(first, first + most)
            self._write(src_list[part], dst_list[part], lengths[part])

    def stock_target(self, samples: Samples) -> None:
        """The target's rows by SGLang's own plan, in batches that do not fail."""
        one, plan = self.sender, self.plans[0]
        one.reset()
        start = time.perf_counter()
        ptrs = plan.target.src.tolist(), plan.target.dst.tolist()
        items = (plan.target.width * plan.page_size).tolist()
        pages = self.src.astype(np.int32), self.dst.astype(np.int32)
        self._note(one.stock._send_kvcache_generic(one.sessions[0], *ptrs, items, *pages, None))
        self._finish(samples, start)

    def checked(self, method: Callable[[Samples], Any]) -> int:
        """Wrong bytes after this method on a pool of canaries."""
        self.sender.remote.clear()
        method(Samples())
        return int(self.sender.remote.wrong())
