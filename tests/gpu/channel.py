"""The draft channel over pools of a device. Its threads and sockets are the product's, and on CUDA
the kernels that copy."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from rig.threads import Decode, Prefill, Reads, wait_for

from sglang_mixkv.channel.data_plane import Read
from sglang_mixkv.channel.times import Times
from sglang_mixkv.decode import events as ev
from sglang_mixkv.draft.rows import DraftRows, Staging
from sglang_mixkv.prefill.worker import Pages

from .copies import kernels
from .pools import SLOT, SLOTS

TIMES, LIMIT_S = Times(20), 60.0  # nothing here is late


class Direct(Reads):
    """Reads between slots of this process. As a network card's, they wait for no stream."""

    def __init__(self, stagings: list[Staging]) -> None:
        super().__init__()
        self._stagings = stagings

    def _at(self, address: int, length: int) -> torch.Tensor:
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
    """What a side over these rows, in pages of so many, is made of. Without a plane it reads among
    `stagings`."""
    staging = Staging(SLOTS, SLOT[rows.device.type], rows.device)
    stagings.append(staging)
    on_cuda = rows.device.type == "cuda"
    return {
        "rows": rows, "staging": staging, "plane": plane or Direct(stagings),
        "on_device": kernels(rows, page, staging) if on_cuda else None,
    }  # fmt: skip


def fetch(
    decode: Decode, row: Any, held: range, room: int, tokens: int, page: int, event: Any = None
) -> None:
    """A request of decode's, to its end, from a prefill rank that has these heads. Decode's pages
    are in order, so that its rows are tokens."""
    wanted = decode.rows.heads
    heads = range(max(held.start, wanted.start), min(held.stop, wanted.stop))
    size = decode.segment_tokens(len(heads), row.staging.slot_bytes)
    source = ev.Source(row.instance, heads, 1, row.staging.slots, size)
    more = {"source": source, "pages": np.arange(-(-tokens // page)), "page": page}
    handle = decode.open(room, tokens, row.instance, event=event, **more)
    assert wait_for(lambda: handle.state is not None, LIMIT_S), "the room is not decided"
    state, reason = handle.state, handle.reason
    decode.channel.close(handle)
    assert state is ev.State.WARM, f"{state}: {reason} {decode.notes.seen}"


def serve(prefill: Prefill, room: int, tokens: int, pages: Pages) -> None:
    """The same request of prefill's, until all of it is packed and read."""
    handle = prefill.send(room, tokens, pages=pages)
    assert wait_for(lambda: handle.settled, LIMIT_S), "the request is not settled"
    prefill.channel.end(handle)
