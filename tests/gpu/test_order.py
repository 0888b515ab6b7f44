"""The channel waits for CUDA events, and reports a copy only when it is complete.

    early_send      prefill's forward writes a chunk's rows late; packing waits for its event
    indices         a chunk's page numbers are copied from the GPU late; packing waits for the event
    forward         a finished request's forward writes to decode's rows late; unpacking waits for
                    its event
    pack, unpack    copies run late; another stream reads their output after torch's call has
                    returned, or after the kernels' ticket is done

The control runs without the wait, and must find wrong bytes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Any

import pytest
import torch
from rig.channel.threads import Decode, Event, Prefill

from sglang_mixkv.draft import rows as product
from sglang_mixkv.draft.layout import Pages
from sglang_mixkv.draft.rows import DraftRows, Staging
from sglang_mixkv.draft.slot_format import HEADER, SlotCheck

from .copies import TIMES, WAYS, Kernels, Request, ended, fetch, given, serve
from .pools import as_bytes, pages_of, pool, rows_of, settle, wrong_bytes

PAGE, COUNT, HEADS = 16, 32, range(8)
TOKENS, SIZE = PAGE * COUNT, PAGE * COUNT * 2 * 8 * 256  # bytes
CYCLES = 200_000_000  # cycles of a GPU's clock, about 0.1 s
NOTHING = "bytes are correct even without the wait, so the test proves nothing"


class HostLate:
    """A replacement on the CPU for late work in another stream. The work runs at the third query
    of the event, or when `finish` is called."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work, self._asked, self.event = [work], 0, self

    def query(self) -> bool:
        self._asked += 1
        if self._asked == 3:
            self.finish()
        return not self._work

    def finish(self) -> None:
        while self._work:
            self._work.pop()()


class CudaLate:
    def __init__(self, work: Callable[[], Any]) -> None:
        self._stream = torch.cuda.Stream()
        with torch.cuda.stream(self._stream):
            torch.cuda._sleep(CYCLES)
            work()
        self.event, self.finish = self._stream.record_event(), self._stream.synchronize


class Order:
    """A prefill rank and a decode rank on one device."""

    def __init__(self, device: torch.device) -> None:
        self.device, self._late = device, CudaLate if device.type == "cuda" else HostLate
        self.truth, self.here, self.there = (new_pool(device, seed) for seed in (1, 2, 3))
        stagings: list[Staging] = []
        rows = [DraftRows(entries, HEADS, by_numpy=False) for entries in (self.there, self.here)]
        self.prefill = Prefill(TIMES, **given(rows[0], PAGE, stagings))
        self.decode = Decode(TIMES, **given(rows[1], PAGE, stagings))
        self.decode.reach(self.prefill.row)
        self._rooms, self._pages = count(1), pages_of(TOKENS, PAGE)

    def wrong(self, claim: str, waits: bool) -> int:
        """Run a request from the same initial state, and return the number of wrong bytes."""
        write(self.there, self.truth)
        write(self.here, new_pool(self.device, 2))
        pages, forward = self._pages, None
        if claim == "early_send":
            write(self.there, new_pool(self.device, 3))
            work: Any = partial(write, self.there, self.truth)
        elif claim == "indices":
            computed = torch.from_numpy(self._pages).to(self.device)
            pages = torch.zeros(COUNT, dtype=torch.int64, pin_memory=self.device.type == "cuda")
            work = partial(pages.copy_, computed, non_blocking=True)
        else:
            work = partial(write, self.here, new_pool(self.device, 5))
        settle()
        late = self._late(work)
        if claim == "forward" and waits:
            forward = late.event
        earlier = Event()
        earlier.done = True  # the channel must wait for all events, not only the first
        events = [earlier, late.event] if claim != "forward" and waits else []
        room = next(self._rooms)
        packing = threading.Thread(
            target=serve, args=(self.prefill, room, TOKENS, Pages(pages, PAGE, events))
        )
        packing.start()
        fetch(self.decode, self.prefill.row, HEADS, room, TOKENS, PAGE, forward)
        packing.join()
        late.finish()
        settle()
        rows = torch.from_numpy(rows_of(TOKENS, PAGE)).to(self.device)
        return wrong_bytes(self.here, [entry[rows] for entry in self.truth])


def new_pool(device: torch.device, seed: int) -> list[torch.Tensor]:
    return pool(1, len(HEADS), TOKENS, "bf16", device, seed)


def write(entries: list[torch.Tensor], data: list[torch.Tensor]) -> None:
    for entry, new in zip(entries, data, strict=True):
        entry.copy_(new)


@pytest.mark.parametrize("claim", ["early_send", "indices", "forward"])
def test_the_channel_waits(device: torch.device, claim: str, figures: Callable[..., None]) -> None:
    order = Order(device)
    wrong, without = (order.wrong(claim, waits) for waits in (True, False))
    order.decode.close()
    order.prefill.close()
    figures(bytes=SIZE, wrong=wrong, without_the_wait=without)
    assert wrong == 0
    assert without > SIZE // 2, NOTHING


@contextmanager
def unwaited(_: Any) -> Iterator[None]:
    """A replacement for own_stream that does not wait."""
    with torch.inference_mode(), torch.cuda.stream(torch.cuda.Stream(priority=-1)):
        yield


@pytest.mark.parametrize("copy", ["pack", "unpack"])
@pytest.mark.parametrize("way", WAYS["cuda"])
def test_a_copy_is_complete_when_reported_so(
    cuda: torch.device, way: Any, copy: str, figures: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    source, target = new_pool(cuda, 1), new_pool(cuda, 2)
    staging, reader = Staging(1, SIZE + HEADER, cuda), torch.cuda.Stream()
    first, second = (way(entries, HEADS, PAGE, staging) for entries in (source, target))
    request, slot = Request(rows_of(TOKENS, PAGE), HEADS, [range(TOKENS)]), staging.slot(0)
    settle()
    first.pack(request)
    copies, written, right = second, as_bytes(target), as_bytes(source)
    if copy == "pack":
        copies, written, right = first, [slot[HEADER:]], [slot[HEADER:].clone()]
    seen = [torch.zeros_like(entry) for entry in right]
    before = {"pack": "_parts", "unpack": "_check"}[
        copy
    ]  # the last step of torch's copy that may wait
    step = getattr(DraftRows, before)

    def late(*what: Any) -> Any:
        found = step(*what)
        torch.cuda._sleep(CYCLES)
        return found

    def wrong(waits: bool) -> int:
        """Return the number of wrong bytes after the copy is reported complete. If `waits` is
        False, count them after the copy has only been started."""
        for entry in written:
            entry[:] = 0
        if copy == "unpack":
            first.pack(request)
        torch.cuda.synchronize()
        if way is Kernels:
            with torch.cuda.stream(torch.cuda.ExternalStream(copies.rows.driver.stream)):
                torch.cuda._sleep(CYCLES)
            ticket = copies.start(copy, request)
            assert not waits or ended(ticket) == [SlotCheck.OK]
        else:
            with monkeypatch.context() as patch:
                patch.setattr(DraftRows, before, late)
                if not waits:
                    patch.setattr(product, "own_stream", unwaited)
                getattr(copies, copy)(request)
        with torch.cuda.stream(reader):  # a stream that does not wait for the copy's stream
            for entry, data in zip(seen, written, strict=True):
                entry.copy_(data)
        torch.cuda.synchronize()
        return wrong_bytes(seen, right)

    wrong(True)  # warm up: CUDA synchronizes when kernels, memory and weights are first needed
    found, without = wrong(True), wrong(False)
    figures(bytes=SIZE, wrong=found, without_the_wait=without)
    assert found == 0
    assert without > SIZE // 2, NOTHING
