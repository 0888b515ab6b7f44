"""Move a request's rows through slots in each way that the plugin has: by torch, by its kernels on
CUDA, and through the draft channel with its real threads and sockets."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from rig.channel.threads import Decode, Prefill, Reads, wait_for
from torch import Tensor

from sglang_mixkv.channel.data_plane import Read
from sglang_mixkv.channel.times import Times
from sglang_mixkv.decode import actions as act
from sglang_mixkv.decode.transfer import Source
from sglang_mixkv.draft.layout import Pages
from sglang_mixkv.draft.rows import DraftRows, Staging
from sglang_mixkv.draft.rows_gpu import BatchTicket, GpuRows, gpu_rows
from sglang_mixkv.draft.slot_format import SlotCheck

from .pools import SLOT, SLOTS, Ints

STAMP = 7
TIMES, LIMIT_S = Times(20), 60.0  # long enough that nothing times out


class Request(NamedTuple):
    """A request. `numbers`: the rows of its tokens. `cuts`: the tokens in each slot, beginning with
    slot `slot`."""

    numbers: Ints
    heads: range
    cuts: list[range]
    slot: int = 0

    def rows(self, cut: range) -> Ints:
        return self.numbers[cut.start : cut.stop]


class Torch:
    def __init__(self, entries: list[Tensor], heads: range, page: int, staging: Staging) -> None:
        self._rows, self._staging = DraftRows(entries, heads, by_numpy=False), staging

    def pack(self, request: Request) -> None:
        self._each("pack", request)

    def unpack(self, request: Request) -> list[SlotCheck]:
        return self._each("unpack", request)

    def clear(self, request: Request, cut: range) -> None:
        self._rows.clear(request.rows(cut))

    def _each(self, copy: str, request: Request) -> list[Any]:
        make = getattr(self._rows, copy)
        return [
            make(request.rows(cut), request.heads, self._staging.slot(number), STAMP + number)
            for number, cut in enumerate(request.cuts, request.slot)
        ]


class Kernels:
    def __init__(self, entries: list[Tensor], heads: range, page: int, staging: Staging) -> None:
        self.rows, self._page = kernels(DraftRows(entries, heads), page, staging), page
        self._made: tuple[Ints, memoryview] | None = None

    def pack(self, request: Request) -> None:
        assert set(ended(self.start("pack", request))) == {SlotCheck.OK}

    def unpack(self, request: Request) -> list[SlotCheck]:
        return ended(self.start("unpack", request))

    def clear(self, request: Request, cut: range) -> None:
        job = self.rows.job(self._pages(request), cut.start, len(cut))
        assert ended(self.rows.start("clear", [job])) == [SlotCheck.OK]

    def start(self, kind: str, request: Request) -> BatchTicket:
        """Start a batch, and return its ticket."""
        pages = self._pages(request)
        jobs = [
            self.rows.job(pages, cut.start, len(cut), request.heads, number, STAMP + number)
            for number, cut in enumerate(request.cuts, request.slot)
        ]
        return self.rows.start(kind, jobs)

    def _pages(self, request: Request) -> memoryview:
        """Return the request's pages on the device, made only once, as in the channel."""
        if self._made is None or self._made[0] is not request.numbers:
            pages = self.rows.pages(request.numbers[:: self._page] // self._page)
            self._made = request.numbers, pages
        return self._made[1]


WAYS: dict[str, tuple[Any, ...]] = {"cpu": (Torch,), "cuda": (Torch, Kernels)}


def ended(ticket: BatchTicket) -> list[SlotCheck]:
    """Poll a batch until it has ended, and return its verdicts."""
    while not ticket.done():
        pass
    assert not ticket.error, ticket.error
    return ticket.results


def kernels(rows: DraftRows, page: int, staging: Staging) -> GpuRows:
    found = gpu_rows(rows, page, staging)
    assert isinstance(found, GpuRows), found
    return found


# ---------------------------------------------------------------- the channel


class Direct(Reads):
    """Reads between slots in this process. Like a NIC's reads, they do not wait for any CUDA
    stream."""

    def __init__(self, stagings: list[Staging]) -> None:
        super().__init__()
        self._stagings = stagings

    def _at(self, address: int, length: int) -> Tensor:
        (one,) = (s for s in self._stagings if 0 <= address - s.address < s.size)
        slot, offset = divmod(address - one.address, one.slot_bytes)
        return one.slot(slot)[offset : offset + length]

    def _check(self, read: Read) -> str | None:
        on_gpu = self._stagings[0].device.type == "cuda"
        stream = torch.cuda.Stream() if on_gpu else None
        with torch.inference_mode(), torch.cuda.stream(stream):
            for local, remote, length in read.handle:
                self._at(local, length).copy_(self._at(remote, length))
        if stream is not None:
            stream.synchronize()
        return ""


def given(rows: DraftRows, page: int, stagings: list[Staging], plane: Any = None) -> dict[str, Any]:
    """Return the arguments for one side of a channel over these rows. Without a plane, that side
    reads from `stagings`."""
    staging = Staging(SLOTS, SLOT[rows.device.type], rows.device)
    stagings.append(staging)
    on_device = kernels(rows, page, staging) if rows.device.type == "cuda" else None
    plane = plane or Direct(stagings)
    return {"rows": rows, "staging": staging, "plane": plane, "on_device": on_device}


def fetch(
    decode: Decode, row: Any, held: range, room: int, tokens: int, page: int, event: Any = None
) -> None:
    """Run a request on decode until it is warm. `held`: the prefill rank's heads. Decode's pages
    are in order, so that row numbers equal token numbers."""
    wanted = decode.rows.heads
    heads = range(max(held.start, wanted.start), min(held.stop, wanted.stop))
    size = decode.segment_tokens(len(heads), row.staging.slot_bytes)
    source = Source(row.instance, heads, 1, row.staging.slots, size)
    pages = np.arange(-(-tokens // page))
    handle = decode.open(
        room, tokens, row.instance, event=event, source=source, pages=pages, page=page
    )
    assert wait_for(lambda: handle.state is not None, LIMIT_S), "the room is not decided"
    state, reason = handle.state, handle.reason
    decode.channel.close(handle)
    assert state is act.State.WARM, f"{state}: {reason} {decode.notes.seen}"


def serve(prefill: Prefill, room: int, tokens: int, pages: Pages) -> None:
    """Run the same request on prefill until all of it is packed and read."""
    handle = prefill.send(room, tokens, pages=pages)
    assert wait_for(lambda: handle.pages_released, LIMIT_S), "its pages are not released"
    prefill.channel.end(handle)
