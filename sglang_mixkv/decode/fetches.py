"""A decode rank's reads over the data plane, from a peer's slots to its own."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from sglang_mixkv.channel.data_plane import DataPlane, Outcome
from sglang_mixkv.decode import events as ev
from sglang_mixkv.decode.peers import Link
from sglang_mixkv.draft.facts import Row, StagingFacts

if TYPE_CHECKING:
    from sglang_mixkv.draft.rows import DraftRows, Staging

logger = logging.getLogger(f"sglang.{__name__}")

MENDERS = 16  # a peer that is stopped holds one for a minute (channel/mooncake.py)

Ended = ev.ReadDone | ev.ReadFailed | ev.ReadSettled


class Fetches:
    """`connect` and `hang_up` may run in any thread; everything else is the channel thread's."""

    def __init__(self, plane: DataPlane, rows: DraftRows, staging: Staging) -> None:
        self._plane, self._rows, self._staging = plane, rows, staging
        self._peers: dict[ev.Peer, tuple[Any, StagingFacts]] = {}
        self._running: dict[int, tuple[ev.Peer, Any]] = {}
        self._failed: dict[int, Any] = {}  # and not settled
        self._mending: dict[ev.Peer, Any] = {}
        self._background = ThreadPoolExecutor(MENDERS, "mixkv-mend")

    @property
    def busy(self) -> bool:
        return bool(self._running or self._failed)

    def connect(self, row: Row) -> Any:
        """May block; ConnectionError where the peer's memory cannot be read."""
        assert row.staging is not None
        return self._plane.connect(row.staging.endpoint)

    def hang_up(self, memory: Any) -> None:
        """What `connect` returned is not needed."""
        self._plane.forget(memory)

    def add(self, link: Link) -> None:
        assert link.row.staging is not None
        self.drop(link.peer)
        self._peers[link.peer] = link.memory, link.row.staging

    def drop(self, peer: ev.Peer) -> None:
        memory, _ = self._peers.pop(peer, (None, None))
        self._mending.pop(peer, None)
        if memory is not None:
            self._plane.forget(memory)

    def start(self, read: ev.StartRead) -> Iterator[Ended]:
        known = self._peers.get(read.peer)
        if known is None:
            yield ev.ReadFailed(read.read, "the prefill rank is gone")
            yield ev.ReadSettled(read.read)
            return
        memory, there = known
        local = self._staging.address + read.local_slot * self._staging.slot_bytes
        size = self._rows.packed_bytes(read.tokens, read.heads)
        remote = there.address(read.remote_slot)
        self._running[read.read] = read.peer, self._plane.start(memory, local, remote, size)

    def give_up(self, number: int) -> None:
        if number in self._running:
            self._plane.give_up(self._running[number][1])

    def ended(self) -> Iterator[Ended]:
        """What has changed since it was asked last."""
        for number, (peer, read) in list(self._running.items()):
            outcome = self._plane.outcome(read)
            if outcome is not None:
                del self._running[number]
            if outcome is Outcome.DONE:
                yield ev.ReadDone(number)
            elif outcome is Outcome.FAILED:
                self._failed[number] = read
                yield ev.ReadFailed(number, read.why or "given up")
                self._mend(peer)
        for number, read in list(self._failed.items()):
            if self._plane.settled(read):
                del self._failed[number]
                yield ev.ReadSettled(number)

    def _mend(self, peer: ev.Peer) -> None:
        """A connection that broke does not come back by itself."""
        mending = self._mending.get(peer)
        known = self._peers.get(peer)
        if known is not None and (mending is None or mending.done()):
            self._mending[peer] = self._background.submit(self._connect_again, known[0])

    def _connect_again(self, memory: Any) -> None:
        try:
            self._plane.mend(memory)
        except (ConnectionError, ValueError) as error:
            logger.warning("[MIXKV-MSG-02] a data plane's connection is not mended: %s", error)

    def close(self) -> None:
        self._background.shutdown(wait=True, cancel_futures=True)
        self._plane.close()
