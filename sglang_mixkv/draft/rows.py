"""The drafter's KV rows of one rank: packed into slots, verified, unpacked, cleared.

A segment lies in a slot of the staging buffer as slot_format.py says.

Rows are copied as *items*: the most neighbouring heads that a row and the slice both consist of.
So one list of item numbers serves all entries. numpy copies them on the host, as opaque values
(torch's index_put_ takes twice as long), and torch on a GPU, in words. Both release the GIL.
rows_gpu.py does the same for batches of slots on a GPU.
"""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sglang_mixkv.draft.slot_format import HEADER, MASK, SEED, SlotCheck, signed, weights

Ints = NDArray[np.int64]

WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
_own = threading.local()


class DraftRows:
    """The draft pool of one rank. `entries`: [rows, heads, head size] of any type, contiguous, as
    SGLang's pool has them in `k_buffer` and then `v_buffer`; `heads`: those on this rank.

    Everywhere `rows` are tokens' numbers in the pool, none twice, `heads` a range of global
    numbers, and `slot` is one of a Staging on the pool's device. ValueError where one of them lies
    outside, before a byte is touched. When a call returns, its bytes are there for any stream.
    Calls may come from several threads, for rows and slots that differ.
    """

    def __init__(self, entries: Sequence[Tensor], heads: range, by_numpy: bool = True) -> None:
        """`by_numpy`: where they are in host memory. Tests run a GPU's code there too."""
        if any(entry.shape[-2] != len(heads) or not entry.is_contiguous() for entry in entries):
            raise ValueError(f"draft rows of {tuple(entries[0].shape)}: expected heads {heads}")
        pools = [entry.view(torch.uint8) for entry in entries]
        self.entries, self.heads, self.device = entries, heads, pools[0].device
        self.head_bytes = tuple(pool.shape[-1] for pool in pools)
        self.num_rows = min(pool.shape[:-2].numel() for pool in pools)
        self._by_numpy = by_numpy and self.device.type == "cpu"
        self._int64: Any = np.int64 if self._by_numpy else torch.int64
        self._pools = [self._array(pool.view(-1)) for pool in pools]
        self._word = WORDS[math.gcd(8, *self.head_bytes, *(pool.data_ptr() for pool in pools))]
        self._weights = self._array(torch.empty(0))

    @classmethod
    def at(
        cls, ptrs: Sequence[int], lens: Sequence[int], items: Sequence[int], page: int, heads: range
    ) -> DraftRows:
        """Host memory that KV args name: address, bytes, bytes of a page of so many tokens."""
        entries = []
        for ptr, size, item in zip(ptrs, lens, items, strict=True):
            pages = size // item
            memory = np.ctypeslib.as_array((ctypes.c_uint8 * (pages * item)).from_address(ptr))
            entries.append(torch.from_numpy(memory.reshape(pages * page, len(heads), -1)))
        return cls(entries, heads)

    def use_device(self) -> None:
        """Once in each thread that works on this rank's memory, before it does. A thread begins on
        device 0, and `torch.cuda.stream` goes back there at its exit: that would make a context,
        of some 500 MiB, on the card of another rank."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    def bytes_per_token(self, heads: int) -> int:
        return sum(self.head_bytes) * heads

    def packed_bytes(self, tokens: int, heads: int) -> int:
        """What a reader has to read of a slot: the header and the padded payload."""
        return HEADER + -(-tokens * self.bytes_per_token(heads) // 8) * 8

    def pack(self, rows: Ints, heads: range, slot: Tensor, stamp: int) -> int:
        """Fill a slot; the bytes of its payload. `stamp`: 64 bits.

        The header is written last. Until then a late reader of the slot's former use finds the
        former stamp and sum, and the sum differs.
        """
        first, added = signed(stamp), signed(stamp * SEED & MASK)
        size, items = self._items(rows, heads)
        words = self._words(slot, len(rows), len(heads))
        payload = len(rows) * self.bytes_per_token(len(heads))
        with own_stream(self.device):
            if payload % 8:
                words[-1:] = 0
            for entry, places, packed in self._parts(size, items, slot):
                if self._by_numpy:  # in modes other than "clip" through a temporary
                    np.take(entry, places, out=packed, mode="clip")
                else:
                    torch.index_select(entry, 0, places, out=packed)
            # Slices of one word: a single word of a GPU's would be copied there, and waited for.
            words[1:2] = self._sum(words)
            words[1:2] += added
            words[:1] = first
        return payload

    def unpack(self, rows: Ints, heads: range, slot: Tensor) -> None:
        """Put a segment into these rows. The caller must have verified the slot."""
        size, items = self._items(rows, heads)
        self._words(slot, len(rows), len(heads))
        with own_stream(self.device):
            for entry, places, packed in self._parts(size, items, slot):
                entry[places] = packed

    def clear(self, rows: Ints) -> None:
        """Zeros in all heads of these rows."""
        size, items = self._items(rows, self.heads)
        with own_stream(self.device):
            for entry, places, _ in self._parts(size, items, None):
                entry[places] = np.void(entry.itemsize) if self._by_numpy else 0

    def verify(self, slot: Tensor, tokens: int, heads: int, stamp: int) -> SlotCheck:
        """Whether a slot holds the segment of this stamp, of so many tokens and heads."""
        words = self._words(slot, tokens, heads)
        with own_stream(self.device):
            found, total = words[:2].tolist()
            if found & MASK != stamp:
                return SlotCheck.STALE
            same = (int(self._sum(words)) + stamp * SEED - total) & MASK == 0
        return SlotCheck.OK if same else SlotCheck.DIFFERS

    def checksum(self, slot: Tensor) -> int:
        """The sum that a slot carries: 64 bits."""
        with own_stream(self.device):
            return int(self._array(slot)[8:16].view(self._int64)[0]) & MASK

    def _sum(self, words: Any) -> Any:
        """Of the payload's words by their weights, without the stamp."""
        payload, known = words[HEADER // 8 :], self._weights
        if len(known) < len(payload):  # another thread may make some too
            made = weights(1 << len(payload).bit_length()).view(np.int64)
            known = self._weights = self._array(torch.from_numpy(made).to(self.device))
        by = known[: len(payload)]
        return np.dot(payload, by) if self._by_numpy else (payload * by).sum()

    def _array(self, tensor: Tensor) -> Any:
        """As numpy's where numpy copies: both are sliced and assigned alike."""
        return tensor.numpy() if self._by_numpy else tensor

    def _items(self, rows: Ints, heads: range) -> tuple[int, Ints]:
        """Heads of an item, and the items of these rows in the order of the payload."""
        first, last = heads.start - self.heads.start, heads.stop - self.heads.start
        if heads.step != 1 or not 0 <= first < last <= len(self.heads):
            raise ValueError(f"{heads}: expected some of {self.heads}")
        rows = rows.astype(np.int64, copy=False)
        if len(rows) and rows.view(np.uint64).max() >= self.num_rows:  # negative ones are large
            raise ValueError(f"rows {rows.min()} to {rows.max()}: the pool has {self.num_rows}")
        size = math.gcd(first, last, len(self.heads))
        starts = rows[:, None] * (len(self.heads) // size)
        return size, (starts + np.arange(first // size, last // size)).ravel()

    def _words(self, slot: Tensor, tokens: int, heads: int) -> Any:
        size = self.packed_bytes(tokens, heads)
        if size > slot.numel():
            raise ValueError(f"{tokens} tokens of {heads} heads: {size} bytes of a smaller slot")
        return self._array(slot)[:size].view(self._int64)

    def _parts(self, size: int, items: Ints, slot: Tensor | None) -> Iterator[tuple[Any, Any, Any]]:
        """By entry: all its items, which of them, and those in the slot."""
        places = self._array(torch.from_numpy(items).to(self.device, non_blocking=True))
        end, memory = HEADER, None if slot is None else self._array(slot)
        for pool, width in zip(self._pools, self.head_bytes, strict=True):
            start, end = end, end + len(places) * size * width
            part = pool[:0] if memory is None else memory[start:end]
            yield self._by_item(pool, size * width), places, self._by_item(part, size * width)

    def _by_item(self, memory: Any, size: int) -> Any:
        """Bytes as items of `size` bytes."""
        if self._by_numpy:
            return memory.view(f"V{size}")
        return memory.view(self._word).view(-1, size // self._word.itemsize)


class Staging:
    """`count` equal slots side by side, zeroed: memory to register once. `pool`: the
    torch.cuda.MemPool that the drafter's KV lies in, if any."""

    def __init__(self, count: int, slot_bytes: int, device: torch.device, pool: Any = None) -> None:
        if min(count, slot_bytes) < 1 or slot_bytes % HEADER:
            raise ValueError(f"{count} slots of {slot_bytes} bytes: not multiples of {HEADER}")
        self.count, self.slot_bytes, self.device = count, slot_bytes, device
        place = torch.cuda.use_mem_pool(pool) if pool else nullcontext()
        with own_stream(device), torch.inference_mode(False), place:  # writable everywhere
            self._memory = torch.zeros(count * slot_bytes, dtype=torch.uint8, device=device)
        self.address, self.size = self._memory.data_ptr(), self._memory.numel()

    def slot(self, number: int) -> Tensor:
        if not 0 <= number < self.count:
            raise ValueError(f"slot {number} of {self.count}")
        return self._memory[number * self.slot_bytes : (number + 1) * self.slot_bytes]


@contextmanager
def own_stream(device: torch.device) -> Iterator[None]:
    """On a GPU: on this thread's own stream, and all that was started there is done at the end.

    Torch deals out few streams again and again, SGLang's among them: of those with priority SGLang
    has none. One GPU a process.
    """
    if device.type == "cpu":
        yield
        return
    if not hasattr(_own, "stream"):
        _own.stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
    with torch.inference_mode(), torch.cuda.stream(_own.stream):
        try:
            yield
        finally:
            _own.stream.synchronize()
