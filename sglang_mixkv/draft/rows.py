"""A rank's draft KV rows: packed into slots, verified, unpacked, cleared.

Rows are copied as *items*: the largest groups of neighbouring heads that evenly divide both a row
and the slice. So all entries share one list of item numbers. On the host, numpy copies items as
opaque values (torch's index_put_ takes twice as long); on a GPU, torch does. Both release the GIL.
rows_gpu.py copies batches of slots on a GPU.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sglang_mixkv.draft.cuda import DeviceMemory, Driver, is_over, spare_captures
from sglang_mixkv.draft.slot_format import HEADER, MASK, SEED, SlotCheck, weights

Ints = NDArray[np.int64]

WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
_own = threading.local()


class DraftRows:
    """One rank's draft pool. `entries`: contiguous tensors [rows, heads, head size] of any type, as
    in SGLang's `k_buffer` and then `v_buffer`; stored as bytes. `heads`: the heads on this rank.

    `bytes_per_head`: the bytes of one head of one token, over all entries. `flush`: if set, called
    before data from a NIC is unpacked. In all methods, `rows` are distinct token numbers in the
    pool, `heads` is a range of global numbers, and `slot` is from a Staging on the pool's device.
    Anything out of range raises ValueError before a byte is touched. When a call returns, its bytes
    are visible to any stream. Several threads may make calls, for different rows and slots."""

    def __init__(self, entries: Sequence[Tensor], heads: range, by_numpy: bool = True) -> None:
        """`by_numpy`: use numpy in host memory. Tests turn this off, to run a GPU's code there."""
        if any(entry.shape[-2] != len(heads) or not entry.is_contiguous() for entry in entries):
            raise ValueError(f"draft rows of {tuple(entries[0].shape)}: expected heads {heads}")
        pools = [entry.view(torch.uint8) for entry in entries]
        self.entries, self.heads, self.device = pools, heads, pools[0].device
        self.head_bytes = tuple(pool.shape[-1] for pool in pools)
        self.num_rows = min(pool.shape[:-2].numel() for pool in pools)
        self._by_numpy = by_numpy and self.device.type == "cpu"
        self._int64: Any = np.int64 if self._by_numpy else torch.int64
        flat = [pool.view(-1) for pool in pools]
        self._pools: list[Any] = [one.numpy() for one in flat] if self._by_numpy else flat
        self._word = WORDS[math.gcd(8, *self.head_bytes, *(pool.data_ptr() for pool in pools))]
        self.bytes_per_head = sum(self.head_bytes)
        self.flush: Callable[[], None] | None = None

    def use_device(self) -> None:
        """Select this rank's GPU; each thread calls this once before it uses the rank's memory. A
        thread starts on device 0, and `torch.cuda.stream` restores that device on exit, which would
        create a context of some 500 MiB on another rank's GPU."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            if not torch.version.hip:
                spare_captures()

    def packed_bytes(self, tokens: int, heads: int) -> int:
        """Return the bytes of a slot that a reader reads: the header and the padded payload."""
        return HEADER + -(-tokens * self.bytes_per_head * heads // 8) * 8

    def pack(self, rows: Ints, heads: range, slot: Tensor, stamp: int) -> None:
        """Fill a slot; `stamp` has 64 bits. The header is written last: until then, a late reader
        of the slot sees the old stamp and sum, and its computed sum differs."""
        first, added = np.array([stamp, stamp * SEED & MASK], np.uint64).view(np.int64).tolist()
        with stream_of(self.device):
            memory, words = self._opened(slot, len(rows), len(heads))
            places, parts = self._parts(rows, heads, memory)
            if len(rows) and self.bytes_per_head % 8:
                words[-1:] = 0  # its last bytes may be padding
            for entry, packed in parts:
                if self._by_numpy:  # other modes copy through a temporary array
                    np.take(entry, places, out=packed, mode="clip")
                else:
                    torch.index_select(entry, 0, places, out=packed)
            # Slices of one word: copying a scalar to the GPU would block.
            words[1:2] = self._sum(words)
            words[1:2] += added
            words[:1] = first

    def unpack(self, rows: Ints, heads: range, slot: Tensor, stamp: int) -> SlotCheck:
        """Copy the slot's segment to these rows, if its stamp and sum are right."""
        if self.flush:
            self.flush()
        with stream_of(self.device):
            memory, words = self._opened(slot, len(rows), len(heads))
            places, parts = self._parts(rows, heads, memory)
            found = self._check(words, stamp)
            for entry, packed in parts if found is SlotCheck.OK else ():
                entry[places] = packed
        return found

    def clear(self, rows: Ints) -> None:
        """Zero all heads of these rows."""
        with stream_of(self.device):
            places, parts = self._parts(rows, self.heads, self._pools[0][:HEADER])
            for entry, _ in parts:
                entry[places] = np.void(entry.itemsize) if self._by_numpy else 0

    def _check(self, words: Any, stamp: int) -> SlotCheck:
        found, total = words[:2].tolist()
        if found & MASK != stamp:
            return SlotCheck.STALE
        same = (int(self._sum(words)) + stamp * SEED - total) & MASK == 0
        return SlotCheck.OK if same else SlotCheck.DIFFERS

    def _sum(self, words: Any) -> Any:
        """Return the weighted sum of the payload's words, without the stamp."""
        payload = words[HEADER // 8 :]
        by = _weights(len(payload).bit_length(), None if self._by_numpy else self.device)
        by = by[: len(payload)]
        # np.dot of integers takes a fifth longer.
        return np.einsum("i,i", payload, by) if self._by_numpy else (payload * by).sum()

    def _opened(self, slot: Tensor, tokens: int, heads: int) -> tuple[Any, Any]:
        """Return the part of a slot that a segment occupies, as bytes and as words."""
        size = self.packed_bytes(tokens, heads)
        memory: Any = (slot.numpy() if self._by_numpy else slot)[:size]
        if size > len(memory):
            raise ValueError(f"{tokens} tokens of {heads} heads: {size} bytes do not fit the slot")
        return memory, memory.view(self._int64)

    def _parts(self, rows: Ints, heads: range, memory: Any) -> tuple[Any, list[Any]]:
        """Return these rows' item numbers within an entry, in the payload's order, and for each
        entry two arrays: all its items, and the items in the slot's memory."""
        first, last = heads.start - self.heads.start, heads.stop - self.heads.start
        if heads.step != 1 or not 0 <= first < last <= len(self.heads):
            raise ValueError(f"{heads}: expected some of {self.heads}")
        rows = rows.astype(np.int64, copy=False)
        if len(rows) and rows.view(np.uint64).max() >= self.num_rows:  # negatives are large
            raise ValueError(f"rows {rows.min()} to {rows.max()}: the pool has {self.num_rows}")
        size = math.gcd(first, last, len(self.heads))
        starts = rows[:, None] * (len(self.heads) // size)
        items = (starts + np.arange(first // size, last // size)).ravel()
        end, parts = HEADER, list[Any]()
        for pool, head_bytes in zip(self._pools, self.head_bytes, strict=True):
            start, end, width = end, end + len(items) * size * head_bytes, size * head_bytes
            if self._by_numpy:
                parts.append((pool.view(f"V{width}"), memory[start:end].view(f"V{width}")))
            else:
                shape = -1, width // self._word.itemsize
                both = pool.view(self._word), memory[start:end].view(self._word)
                parts.append(tuple(one.view(shape) for one in both))
        if self._by_numpy:
            return items, parts
        return torch.from_numpy(items).to(self.device, non_blocking=True), parts


class Staging:
    """`count` equal slots in one zeroed block of memory, registered once. A slot's length is a
    multiple of HEADER. `pool`: the drafter's torch.cuda.MemPool, if any, for the slots too."""

    def __init__(self, count: int, slot_bytes: int, device: torch.device, pool: Any = None) -> None:
        self.count, self.slot_bytes, self.device = count, slot_bytes, device
        place, size = torch.cuda.use_mem_pool(pool) if pool else nullcontext(), count * slot_bytes
        with stream_of(device), torch.inference_mode(False), place:  # writable everywhere
            if device.type == "cuda" and not (pool or torch.version.hip):
                self._memory = torch.as_tensor(DeviceMemory(size, Driver(device.index))).zero_()
            else:
                self._memory = torch.zeros(size, dtype=torch.uint8, device=device)
        self.address, self.size = self._memory.data_ptr(), self._memory.numel()
        self._slots = [self._memory[n * slot_bytes :][:slot_bytes] for n in range(count)]

    def slot(self, number: int) -> Tensor:
        if not 0 <= number < self.count:
            raise ValueError(f"slot {number} of {self.count}")
        return self._slots[number]


def stream_of(device: torch.device) -> AbstractContextManager[None]:
    """Return a context that runs this device's work on its stream; an empty one for host memory."""
    return nullcontext() if device.type == "cpu" else own_stream(device)


@contextmanager
def own_stream(device: torch.device) -> Iterator[None]:
    """Use this thread's own stream of a GPU, and wait on exit for all work started on it. Torch
    reuses a few streams, SGLang's included, but none of SGLang's has a priority. A process uses one
    GPU."""
    if not hasattr(_own, "stream"):
        _own.stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
    with torch.inference_mode(), torch.cuda.stream(_own.stream):
        try:
            yield
        finally:
            while not is_over(_own.stream):
                time.sleep(1e-4)


@cache
def _weights(bits: int, device: torch.device | None) -> Any:
    """Return the weights of 2**bits places, cached. `device`: None for numpy."""
    found = weights(1 << bits).view(np.int64)
    return found if device is None else torch.from_numpy(found).to(device)
