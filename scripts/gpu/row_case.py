"""A request of part_rows: its pool and slots, the copies of it, and whether bytes are right."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import scene
import torch
from parts import Wrong

from sglang_mixkv.draft import rows as product
from sglang_mixkv.draft.rows import DraftRows, Staging
from sglang_mixkv.draft.slot_format import HEADER, SlotCheck

STAMP = 7
Copies = dict[str, Callable[[], Any]]


class Prepared(DraftRows):
    """Rows of one request: their numbers are uploaded once, since a graph cannot hold that."""

    _ready: list[Any] | None = None

    def _parts(self, *what: Any) -> Iterator[tuple[Any, Any, Any]]:
        if self._ready is None:
            self._ready = list(super()._parts(*what))
        return iter(self._ready)


class Case:
    """Some heads of a request: its pool, one slot for all of it, and slots as the product has."""

    def __init__(
        self, drafter: scene.Drafter, dtype: str, heads: int, layout: str, tokens: int, device: Any
    ) -> None:
        self.name = f"{drafter.name}, {dtype}, {heads} of {drafter.heads} heads, {layout}"
        self.held, self.tokens, self.device = range(drafter.heads), tokens, device
        self.heads = range(drafter.heads - heads, drafter.heads)
        page = scene.LAYOUTS[layout]
        whole = -(-tokens // (page or 1)) * (page or 1)
        self.pool = scene.pool(drafter.layers, drafter.heads, whole, dtype, device, tokens)
        self.rows = scene.rows_of(tokens, page, tokens)
        self.draft = DraftRows(self.pool, self.held, by_numpy=False)
        self.size = tokens * self.draft.bytes_per_token(heads)
        packed = -(-self.draft.packed_bytes(tokens, heads) // 64) * 64
        self.slot = Staging(1, packed, device).slot(0)
        self.payload = self.slot[HEADER : HEADER + self.size]
        self.target = torch.empty_like(self.payload)
        slot = scene.SLOT[device.type]
        self.step = (slot - self.draft.packed_bytes(0, 0)) // self.draft.bytes_per_token(heads)
        self.segments = -(-tokens // self.step)
        self.slots = Staging(min(scene.SLOTS, self.segments), slot, device)

    def by_slots(self, act: Callable[[Any, torch.Tensor], Any]) -> None:
        for number, first in enumerate(range(0, self.tokens, self.step)):
            rows = self.rows[first : first + self.step]
            act(rows, self.slots.slot(number % self.slots.count))

    # -- whether the bytes are right

    def wrong(self) -> int:
        """Bytes of the slot that are not those of the pool."""
        places, end, found = torch.from_numpy(self.rows).to(self.device), 0, 0
        for entry in scene.as_bytes(self.pool):
            wanted = entry[places][:, self.heads.start :].flatten()
            start, end = end, end + wanted.numel()
            found += int((self.payload[start:end] != wanted).sum())
        return found

    def check(self, by: str, copies: Copies) -> None:
        """Raises Wrong unless these pack what the pool has, and unpack it to where it was."""
        self.payload.zero_()
        copies[f"pack, {by}"]()
        wrong = {"pack": self.wrong()}
        for entry in scene.as_bytes(self.pool):
            entry.zero_()
        copies[f"unpack, {by}"]()
        others = [entry[:, : self.heads.start] for entry in scene.as_bytes(self.pool)]
        wrong["unpack"] = self.wrong() + sum(int(other.count_nonzero()) for other in others)
        if any(wrong.values()) or not self.payload.any():
            raise Wrong(f"{self.name}, {self.tokens:,} tokens, {by}: wrong bytes: {wrong}")

    def check_sum(self) -> None:
        """Raises Wrong unless the slot's sum is the host's, and shows a changed byte."""
        tokens, slot = min(self.tokens, self.step), self.slots.slot(0)
        host = DraftRows([entry[:1].cpu() for entry in self.pool], self.held)
        self.draft.pack(self.rows[:tokens], self.heads, slot, STAMP)
        for where, found in (("the host", self._verify(host)), ("the device", self._verify())):
            if found is not SlotCheck.OK:
                raise Wrong(f"{self.name}: a sum that {where} does not find")
        slot[HEADER] ^= 1
        if self._verify() is SlotCheck.OK:
            raise Wrong(f"{self.name}: a sum that does not show a changed byte")

    def _verify(self, by: DraftRows | None = None) -> SlotCheck:
        draft, slot = by or self.draft, self.slots.slot(0)
        tokens = min(self.tokens, self.step)
        return draft.verify(slot.to(draft.device), tokens, len(self.heads), STAMP)

    def check_clear(self) -> None:
        """Raises Wrong unless all heads of the rows become zeros, and nothing else does."""
        cleared, wrong = torch.from_numpy(self.rows[1:]).to(self.device), 0
        for entry in scene.as_bytes(self.pool):
            entry.fill_(1)
        self.draft.clear(self.rows[1:])
        for entry in scene.as_bytes(self.pool):
            rest = (len(entry) - len(cleared)) * entry[0].numel()
            wrong += int(entry[cleared].count_nonzero())
            wrong += abs(int(entry.count_nonzero()) - rest)
        if wrong:
            raise Wrong(f"{self.name}, {self.tokens:,} tokens: {wrong} wrong bytes once cleared")

    # -- the copies

    def whole(self, draft: DraftRows) -> Copies:
        """Of the whole request in one slot."""
        given = self.rows, self.heads, self.slot
        return {
            "pack, torch": lambda: draft.pack(*given, STAMP),
            "unpack, torch": lambda: draft.unpack(*given),
        }

    def alone(self) -> Copies:
        """What only starts copies on the current stream."""
        prepared = Prepared(self.pool, self.held, by_numpy=False)
        return {"copy": lambda: self.target.copy_(self.payload), **self.whole(prepared)}

    def kernel(self) -> Copies:
        import triton_rows

        widths = np.array(self.draft.head_bytes) * len(self.heads)
        ends = np.cumsum(widths * self.tokens)
        packed = self.payload.data_ptr() + ends - widths * self.tokens
        first = np.array(self.draft.head_bytes) * self.heads.start
        pool = np.array([entry.data_ptr() for entry in self.pool]) + first
        row = np.array(self.draft.head_bytes) * len(self.held)
        order = np.arange(self.tokens)
        pack = triton_rows.RowCopy(pool, packed, row, widths, widths, self.rows, order)
        unpack = triton_rows.RowCopy(packed, pool, widths, row, widths, order, self.rows)
        return {
            "pack, Triton": triton_rows.prepared(pack, self.device),
            "unpack, Triton": triton_rows.prepared(unpack, self.device),
        }

    def calls(self) -> Copies:
        """The product's own, and copies of as many bytes; each waits for its end."""
        draft, heads = self.draft, self.heads

        def copy(rows: Any, slot: torch.Tensor) -> None:
            size = len(rows) * draft.bytes_per_token(len(heads))
            with product.own_stream(self.device):
                self.target[:size].copy_(slot[HEADER : HEADER + size])

        return {
            "copy": lambda: self.by_slots(copy),
            "pack": lambda: self.by_slots(lambda r, s: draft.pack(r, heads, s, STAMP)),
            "unpack": lambda: self.by_slots(lambda r, s: draft.unpack(r, heads, s)),
            "verify": self._verify,
        }
