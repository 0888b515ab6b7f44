"""A soak's prefill and decode ranks, and the troubles that the channel has there."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from rig.rank import is_cold
from rig.soak_case import Meeting
from rig.soak_rank import Open, SoakRank

from sglang_mixkv.channel.messages import Open as OpenMessage
from sglang_mixkv.draft.rows import DraftRows

TROUBLE = 0.01
"""Of so many copies, reads and messages each."""
COMPARE_EVERY = 100


class Troubles:
    """Drawn from the soak's seed, the side and the rank."""

    def __init__(self, rank: SoakRank) -> None:
        self._draw = random.Random(f"{rank.case.seed} {rank.side} {rank.rank}")

    def happens(self) -> bool:
        return self._draw.random() < TROUBLE

    def in_rows(self, name: str) -> None:
        """Out of memory."""
        real = getattr(DraftRows, name)

        def copy(rows: DraftRows, *args: Any) -> Any:
            if self.happens():
                raise MemoryError(f"no memory to {name}")
            return real(rows, *args)

        setattr(DraftRows, name, copy)

    def doubled(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def send(*args: Any) -> Any:
            if self.happens():
                real(*args)
            return real(*args)

        return send


class SoakPrefill(SoakRank):
    def inject(self) -> None:
        troubles, channel = Troubles(self), self.manager.prefill_channel
        troubles.in_rows("pack")
        channel._send = troubles.doubled(channel._send)

    def _begin(
        self, number: int, pages: np.ndarray, row: np.ndarray, meeting: Meeting | None
    ) -> Open:
        for name, pool in self.pools.items():
            for entry, rows in zip(pool, self._rows(name, number), strict=True):
                entry[pages] = rows
        for index, aux in enumerate(self.aux):
            aux[row[0]] = self.aux_truth(self.rank, number, index)
        sender = self.kv_class["sender"](
            self.manager, f"127.0.0.1:{self.ports[0]}", self.case.room(number),
            req_has_disagg_prefill_dp_rank=True,
        )  # fmt: skip
        sender.init(len(pages), int(row[0]))
        step = self.case.requests[number].chunk_pages or len(pages)
        chunks = [pages[i : i + step] for i in range(0, len(pages), step)]
        return Open(number, sender, pages, row, meeting, chunks)

    def _go_on(self, one: Open, status: Any) -> None:
        from sglang.srt.disaggregation.base.conn import KVPoll

        if one.is_to("prefill aborts") and one.age > one.part / 10:
            one.handle.abort()
            return
        if status >= KVPoll.WaitingForInput and one.chunks:
            one.handle.send(one.chunks.pop(0), None)

    def _succeeded(self, one: Open) -> None:
        one.handle.clear()
        self._give_back(one)

    def _failed(self, one: Open) -> None:
        self._give_back(one)


class SoakDecode(SoakRank):
    def inject(self) -> None:
        self.compared = 0
        self.shadow = {name: [e.copy() for e in pool] for name, pool in self.pools.items()}
        self.shadow_aux = [aux.copy() for aux in self.aux]
        troubles, channel = Troubles(self), self.manager.decode_channel
        troubles.in_rows("unpack")
        links, plane = channel._links, channel._store.plane
        send, start = troubles.doubled(links.send), plane.start

        def send_or_lose(peer: bytes, message: Any) -> Any:
            lost = isinstance(message, OpenMessage) and troubles.happens()
            return True if lost else send(peer, message)

        def start_somewhere(tag: Any, peer: Any, extents: Any) -> Any:
            off = troubles.happens() << 44
            return start(tag, peer, [one._replace(remote=one.remote + off) for one in extents])

        links.send, plane.start = send_or_lose, start_somewhere

    def _begin(
        self, number: int, pages: np.ndarray, row: np.ndarray, meeting: Meeting | None
    ) -> Open:
        address = f"127.0.0.1:{self.ports[0]}"
        while not self.manager.try_ensure_parallel_info(address):
            time.sleep(0.02)
        receiver = self.kv_class["receiver"](self.manager, address, self.case.room(number))
        receiver.init(0)
        one = Open(number, receiver, pages, row, meeting)
        if receiver.conclude_state is None:
            self._say(one)
        return one

    def _say(self, one: Open) -> None:
        """Send the metadata, unless this request's fault is that it is late or never sent."""
        if one.is_to("metadata: late") and one.age < one.part:
            return
        if one.meets("abort before metadata", self.rank):
            one.handle.abort()
            return
        one.published = True
        one.handle.send_metadata(one.pages, int(one.row[0]), None, decode_prefix_len=0)

    def _go_on(self, one: Open, status: Any) -> None:
        if not one.published and one.handle.conclude_state is None:
            self._say(one)
        aborts = one.meets("abort after metadata", self.rank) and one.age > one.part / 20
        if one.published and (aborts or one.is_to("abort storm")):
            one.handle.abort()

    def _succeeded(self, one: Open) -> None:
        """The request's own pages and row are the truth's; they are freed at once."""
        if is_cold(one.handle):
            self.report.cold.add(one.number)
        for name, pool in self.pools.items():
            for index, rows in enumerate(self.expected(name, one)):
                self.shadow[name][index][one.pages] = rows
                if not np.array_equal(pool[index][one.pages], rows):
                    self.wrong(f"request {one.number}: {name} entry {index}, {one.meeting}")
        sender = self._aux_sender(one.number)
        for index, aux in enumerate(self.aux):
            row = self.aux_truth(sender, one.number, index)
            self.shadow_aux[index][one.row[0]] = row
            if not np.array_equal(aux[one.row[0]], row):
                self.wrong(f"request {one.number}: aux {index}, {one.meeting}")
        one.handle.clear()
        self._give_back(one)
        if len(self.report.ended) // COMPARE_EVERY > self.compared:
            self.compared = len(self.report.ended) // COMPARE_EVERY
            self.compare_idle()

    def expected(self, name: str, one: Open) -> list[np.ndarray]:
        """What the pool's entries hold of a request that has succeeded. A cold drafter's rows may
        hold anything that was its own, or zeros."""
        if name == "draft" and one.number in self.report.cold:
            return [entry[one.pages].copy() for entry in self.pools[name]]
        return self._rows(name, one.number)

    def _failed(self, one: Open) -> None:
        """Its memory may hold anything, and is used again when nothing can arrive any more."""
        if one.published:
            self.releases.hold(one.handle, lambda: self._release(one))
        else:
            self._give_back(one)

    def _release(self, one: Open) -> None:
        for name, pool in self.pools.items():
            for want, got in zip(self.shadow[name], pool, strict=True):
                want[one.pages] = got[one.pages]
        for want, got in zip(self.shadow_aux, self.aux, strict=True):
            want[one.row[0]] = got[one.row[0]]
        self._give_back(one)

    def compare_idle(self) -> None:
        """Every byte of every page and row that no request has now."""
        pages, rows = self.pages.free, self.rows.free
        for name, pool in self.pools.items():
            for index, (want, got) in enumerate(zip(self.shadow[name], pool, strict=True)):
                self._same(f"{name} entry {index}", want, got, pages)
        for index, (want, got) in enumerate(zip(self.shadow_aux, self.aux, strict=True)):
            self._same(f"aux {index}", want, got, rows)

    def _same(self, what: str, want: np.ndarray, got: np.ndarray, where: np.ndarray) -> None:
        if not np.array_equal(want[where], got[where]):
            bad = [int(p) for p in where if not np.array_equal(want[p], got[p])]
            self.wrong(f"{what}: idle pages or rows {bad[:9]} were written")
            want[where] = got[where]
