"""What the draft channel itself costs, without a GPU and without a NIC.

Both sides' threads, sockets, slots and machines are the real ones. Copies copy nothing and end at
once, or in batches of 15 us (`device`). Reads end at once (`control plane`), or at the pace of a
400 Gb/s NIC: each after the one before, at 50 GB/s. Slots are of 4 MiB, as by default.

`us per slot`: CPU time of each side's channel thread. `calls`: Python functions of the package
that both threads enter. `ms`: from the chunk's hand-over to the verdict.
"""

from __future__ import annotations

import importlib
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from common import Record, options, show

from sglang_mixkv.channel import messages
from sglang_mixkv.channel.data_plane import Extent, Read
from sglang_mixkv.channel.slot_format import SlotCheck
from sglang_mixkv.channel.slots import SLOTS, slot_bytes
from sglang_mixkv.channel.times import Times
from sglang_mixkv.decode import actions as act
from sglang_mixkv.decode.transfer import Source
from sglang_mixkv.draft.copier import Copier, Copy, Ended
from sglang_mixkv.draft.layout import Pages

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))
rig = importlib.import_module("rig.channel.threads")
Quick = importlib.import_module("rig.channel.on_device").Quick

HEADS, TIMES = range(64), Times(100)
SLOT = slot_bytes(256)
TOKEN = 16 << 10  # bytes of all heads
TOKENS = (SLOT - 4096) // TOKEN  # of a slot
NIC = 50e9  # bytes per second
REQUESTS = ((1, 1), (16, 1), (1024, 1), (1, 64), (16, 64))  # slots of each; how many at once
SETTLE_S = 0.02  # in which what was said last is done


class AtOnce(Copier):
    """Copies that have ended when they are started."""

    is_alive, polled = True, False
    done: Sequence[Ended] = ()

    def start(self, copies: Sequence[Copy]) -> None:
        self.done = [*self.done, *((copy, SlotCheck.OK, 0.0) for copy in copies)]

    def _take(self) -> list[Ended]:
        found, self.done = list(self.done), ()
        return found


class NoRows:
    """Sizes, and no bytes."""

    pack = unpack = clear = staticmethod(lambda *_: None)
    heads, bytes_per_head, device = HEADS, TOKEN // len(HEADS), SimpleNamespace(index=None)

    def use_device(self) -> None: ...

    def packed_bytes(self, tokens: int, heads: int) -> int:
        return 64 + tokens * heads * self.bytes_per_head


class Plane(rig.Reads):  # type: ignore[misc, name-defined]
    """`pace`: bytes per second of all reads, one after the other; None: each ends at once."""

    def __init__(self, pace: float | None = None) -> None:
        super().__init__()
        self._pace, self._free = pace, 0.0

    def _post(self, read: Read, extents: Sequence[Extent]) -> None:
        if self._pace is not None:
            self._free = max(self._free, time.perf_counter())
            self._free += sum(length for _, _, length in extents) / self._pace
        read.handle = self._free

    def _check(self, read: Read) -> str | None:
        return "" if self._pace is None or time.perf_counter() >= read.handle else None


class Pair:
    """A prefill rank and a decode rank."""

    def __init__(self, pace: float | None) -> None:
        staging = SimpleNamespace(
            address=1 << 30, slot_bytes=SLOT, count=SLOTS, size=SLOTS * SLOT, slot=lambda _: None
        )
        given = {"rows": NoRows(), "staging": staging}
        self._sides = (
            rig.Prefill(TIMES, plane=Plane(), **given),
            rig.Decode(TIMES, plane=Plane(pace), **given),
        )
        self.prefill, self.decode = (side.channel for side in self._sides)
        for worker in () if rig._Side.device else (self.prefill, self.decode):
            worker._copies._work.put(None)
            worker._copies = AtOnce(worker._store, worker._reporter.moved)
        prefill, decode = self._sides
        self.source = Source(decode.reach(prefill.row), HEADS, 1, SLOTS, TOKENS)
        rig.wait_for(lambda: self.decode.knows(self.source.peer))
        self._room = 0

    def run(self, slots: int, requests: int = 1) -> tuple[float, list[float]]:
        """So many requests at once, of so many full slots each: seconds from their chunks to the
        last verdict, and CPU seconds of both channel threads, from the chunks to the last ACK."""
        pages, (_, decode) = np.arange(slots * TOKENS), self._sides
        sent, handles = [], []
        for _ in range(requests):
            self._room += 1
            sent.append(self.prefill.begin(self._room))
            handles.append(
                decode.open(self._room, len(pages), b"", source=self.source, pages=pages, page=1)
            )
        time.sleep(SETTLE_S)
        began, cpu = time.perf_counter(), self._cpu()
        for one in sent:
            self.prefill.add_chunk(one, 0, len(pages), True, Pages(pages, 1))
        while any(handle.state is None for handle in handles):
            time.sleep(1e-4)
        seconds = time.perf_counter() - began
        assert all(handle.state is act.State.WARM for handle in handles)
        time.sleep(SETTLE_S)
        cpu = [after - before for before, after in zip(cpu, self._cpu(), strict=True)]
        for one, handle in zip(sent, handles, strict=True):
            self.prefill.end(one)
            self.decode.close(handle)
        time.sleep(SETTLE_S)
        return seconds, cpu

    def _cpu(self) -> list[float]:
        """Seconds of both channel threads."""
        threads = self.prefill._thread, self.decode._thread
        return [time.clock_gettime(time.pthread_getcpuclockid(one.ident or 0)) for one in threads]

    def close(self) -> None:
        for side in self._sides:
            side.close()


def control_plane(slots: int, requests: int, repeats: int) -> Record:
    """CPU time per slot of each thread, for so many requests at once, of so many slots."""
    pair, found = Pair(None), []
    pair.run(slots, requests)
    for _ in range(repeats):
        found.append([cpu / (slots * requests) * 1e6 for cpu in pair.run(slots, requests)[1]])
    pair.close()
    prefill, decode = (statistics.median(side) for side in zip(*found, strict=True))
    return {
        "slots": slots, "requests": requests,
        "prefill us per slot": prefill, "decode us per slot": decode,
    }  # fmt: skip


def traffic(slots: int) -> Record:
    """Messages and calls of one request of so many slots."""
    calls, sent = [0], {"READY": 0, "ACK": 0}
    package, encode = str(ROOT / "sglang_mixkv"), messages.encode

    def counted(message: messages.Message) -> bytes:
        name = type(message).__name__.upper()
        sent[name] = sent.get(name, 0) + 1
        return encode(message)

    def entered(frame: Any, event: str, _: Any) -> None:
        calls[0] += event == "call" and frame.f_code.co_filename.startswith(package)

    messages.encode = counted  # type: ignore[assignment]
    threading.setprofile(entered)
    pair = Pair(None)
    threading.setprofile(None)  # type: ignore[arg-type]
    pair.run(1)
    calls[0], sent["READY"], sent["ACK"] = 0, 0, 0
    pair.run(slots)
    found = {"slots": slots, "calls": calls[0], "READY": sent["READY"], "ACK": sent["ACK"]}
    pair.close()
    messages.encode = encode
    return found


def paced(slots: int, repeats: int, device: Any = None) -> Record:
    rig._Side.device = device
    pair = Pair(NIC)
    pair.run(slots)
    found = [pair.run(slots)[0] * 1e3 for _ in range(repeats)]
    pair.close()
    wire = slots * (64 + TOKENS * TOKEN) / NIC * 1e3
    return {"slots": slots, "ms": statistics.median(found), "ms on the wire": wire}


def main() -> None:
    arguments = options(__doc__ or "").parse_args()
    repeats = arguments.repeats or (1 if arguments.quick else 15)
    parts = {
        "control plane": [control_plane(*one, repeats) for one in REQUESTS],
        "traffic": [traffic(slots) for slots in (1, 16)],
        "paced": [paced(slots, repeats) for slots in (1, 16, 64)],
        "device": [paced(slots, repeats, Quick) for slots in (1, 16, 64)],
    }
    show(arguments, parts)


if __name__ == "__main__":
    main()
