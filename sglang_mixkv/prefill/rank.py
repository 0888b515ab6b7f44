"""One prefill rank: what it decides, from the first message about a room to its end.

    control thread    gate.may_pass -> peers, rooms
    scheduler         open_room -> pages_to_send ... -> close_room
    transfer threads  send, aux, digest: by the peer's plan

All of it runs in SGLang's threads, which an exception would end without a word: engine/ lets
none of those that are raised here through.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt

from sglang_mixkv.config import Config
from sglang_mixkv.errors import MixKVError, refuse
from sglang_mixkv.kv.pages import pages_to_send, window_start
from sglang_mixkv.prefill.gate import Gate
from sglang_mixkv.prefill.packing import PackBuffer
from sglang_mixkv.prefill.peer import Local, Peer
from sglang_mixkv.prefill.peers import Peers
from sglang_mixkv.prefill.rooms import Room, Rooms
from sglang_mixkv.prefill.sglang import SGLang
from sglang_mixkv.prefill.writer import Chunk, ChunkWriter, Written
from sglang_mixkv.protocol.extension import Digest
from sglang_mixkv.protocol.messages import Metadata, MetadataPositions, Poll
from sglang_mixkv.protocol.registration import Positions
from sglang_mixkv.rows.digest import Digester, Sums, pairs
from sglang_mixkv.rows.host import Rows
from sglang_mixkv.series import divided
from sglang_mixkv.stats import Stats
from sglang_mixkv.transport.base import Transport

logger = logging.getLogger(__name__)

PageNumbers = npt.ArrayLike

# How long a pack buffer that could not be had is not asked for again.
RETRY_BUFFER_S = 60.0


@dataclass(frozen=True)
class Task:
    """What a transfer thread took from SGLang's queue: `pages` of a room, from its page
    `start` on."""

    room: int
    start: int
    pages: int


class Hands:
    """One of SGLang's transfer threads: what it works on, and the buffers it works with.

    `code`: the first of this send that is not 0, and `writes`: of this send, on SGLang's executor:
    where SGLang's own code raises, what it handed to the transport before has to end first.
    """

    def __init__(self, writer: ChunkWriter, digester: Digester) -> None:
        self.writer, self.digester = writer, digester
        self.task: Task | None = None
        self.code = 0
        self.writes: list[Future[int]] = []

    def begin(self) -> None:
        """Another send begins."""
        self.code = 0
        self.writes.clear()

    def settle(self) -> int:
        """Wait for what SGLang's executor still writes. 0, or the first code that is not."""
        for write in self.writes:
            failed = write.cancel() or write.exception() is not None
            self.code = self.code or (0 if failed else int(write.result()))
        return self.code


class AuxFrom(Enum):
    """What of a request's metadata row this rank sends to a decode rank."""

    NOBODY = "nothing"
    STOCK = "all of it, as SGLang does"
    COLD = "all but the drafter's part"


class PrefillRank:
    """`peers`, `rooms`: what it knows; `gate`: its door."""

    def __init__(
        self,
        local: Local,
        config: Config,
        stats: Stats,
        rows: Rows,
        sglang: SGLang,
        at: tuple[Positions, MetadataPositions],
        awaited_s: float,
    ) -> None:
        self.local, self.config, self.stats, self.rows = local, config, stats, rows
        self._sglang = sglang
        self.peers, self.rooms = Peers(local), Rooms()
        page_size = local.caches.target.page_size
        self.gate = Gate(self.peers, self.rooms, sglang, stats, page_size, *at, awaited_s)
        self.transport: Transport | None = None

    def connect(self, transport: Transport) -> None:
        """Once SGLang has its engine."""
        self.transport = transport

    def hands(self, threads: int, most_pages: int) -> Hands:
        """For one of so many transfer threads, which keeps them. `most_pages`: see ChunkWriter."""
        assert self.transport is not None, "a transfer thread before the transport"
        size = (self.config.staging_mb << 20) // threads
        buffer = PackMemory(self.transport, self.rows, size)
        writer = ChunkWriter(
            self.transport, self.rows, buffer.get, self.config.draft_transfer, most_pages
        )
        return Hands(writer, Digester(self.rows))

    # -- rooms, in the scheduler

    def open_room(self, number: int) -> Room:
        """A sender was made; a room that was refused fails now."""
        room = self.rooms.open(number, time.monotonic())
        if room.reason:
            self._sglang.fail(number, room.reason)
        return room

    def fail(self, number: int, reason: str) -> None:
        """End a room with this reason on both sides."""
        self._sglang.fail(number, reason)

    def abandon_room(self, number: int) -> None:
        """The scheduler aborts the sender: tell decode."""
        if number in self._sglang.statuses():
            self._sglang.fail(number, f"room {number}: aborted by the prefill server")
            self.rooms.abandon(number, time.monotonic())

    def close_room(self, room: Room) -> None:
        self.rooms.close(room, time.monotonic())

    def refused_by_sglang(self, session: str, reason: str) -> None:
        """SGLang's own check of a peer that was admitted here."""
        self.peers.refuse(session, reason)
        self.stats.refused()

    def pages_to_send(
        self, number: int, offered: int, start: int, tokens: int | None, *, last: bool
    ) -> int:
        """Pages of this chunk to send, the same for every planned peer of the room: without
        lookahead pages. Raises MixKVError for a chunk that does not line up."""
        count, room = offered, self.rooms.get(number)
        for session, said in list(room.members.items()) if room else []:
            peer = self.planned(session)
            if peer is not None and peer.plan is not None and not said.is_dummy:
                size, total = peer.plan.page_size, len(said.pages)
                count = pages_to_send(offered, tokens, size, start, total, last=last)
        return count

    # -- chunks, in transfer threads

    def planned(self, session: str) -> Peer | None:
        """The peer, if what it is sent is ours to decide."""
        peer = self.peers.get(session)
        return peer if peer is not None and peer.plan is not None else None

    def guarded(self, hands: Hands | None, session: str, send: Callable[[], int]) -> int:
        """What `send` returns, the transport's code. Nothing is sent for a room that has failed.

        Where `send` raises, this thread's room fails with the reason. It fails alone (0) unless a
        write of it failed: another code is SGLang's word for a peer that is dead.
        """
        task = hands.task if hands is not None else None
        if task is not None and self._has_failed(task.room):
            return 0
        if hands is not None:
            hands.begin()
        try:
            if task is not None:
                self._check_still_fits(task.room, session)
            return int(send())
        except Exception as error:
            ours = isinstance(error, MixKVError)
            room = f"room {task.room} " if task is not None else ""
            why = str(error) if ours else repr(error)
            reason = f"sglang-mixkv could not send {room}to {session}: {why}"
            logger.error("%s", reason, exc_info=not ours)
            if task is None or hands is None:  # SGLang fails the room that it works on
                return -1
            code = hands.settle()
            self._sglang.fail(task.room, reason)
            return code

    def _check_still_fits(self, number: int, session: str) -> None:
        """Raise MixKVError unless a room stays inside what its peer registered last, which can be
        anew since the room was admitted."""
        room, peer = self.rooms.open_room(number), self.peers.get(session)
        said = room.members.get(session) if room is not None else None
        if room is None or said is None or peer is None:
            return
        refusal = self.peers.refusal(session)
        if refusal is not None:
            raise MixKVError(refusal)
        if room.fits.get(session) is not peer:
            peer.check_metadata(said)
            room.fits[session] = peer

    def send(
        self, hands: Hands | None, peer: Peer, src_pages: PageNumbers, dst_pages: PageNumbers
    ) -> int:
        """Write one chunk of a thread's room by the peer's plan: the transport's code.

        Raises MixKVError for a chunk that does not fit, and what packing raises.
        """
        if hands is None or hands.task is None:
            raise refuse(
                "to know which room this chunk belongs to",
                "a thread that took none from SGLang's queue",
                "draft heads would land outside the region that the decode rank reads",
                "Report this; it is not expected from a supported SGLang",
            )
        task, plan = hands.task, peer.plan
        assert plan is not None
        room = self.rooms.open_room(task.room)
        said = room.members.get(peer.session) if room is not None else None
        if room is None or said is None:
            raise MixKVError("the request ended meanwhile; nothing of this chunk was sent")
        src, dst = np.asarray(src_pages, np.int64), np.asarray(dst_pages, np.int64)
        plan.check_pages(src, dst)
        skip = self._before_window(peer, said, task)
        chunk = Chunk(src, dst, task.start, skip, np.asarray(said.pages, np.int64))
        began = time.perf_counter()
        written = hands.writer.write(peer.session, plan, chunk, said.grant)
        if written.code == 0:
            self._count(written, time.perf_counter() - began)
            room.sent.add(peer, written)
            if peer.verify:
                sums = room.sums.setdefault(peer.session, Sums())
                hands.digester.add_chunk(sums, plan, src, chunk.skip)
        return written.code

    @staticmethod
    def _before_window(peer: Peer, said: Metadata, task: Task) -> int:
        """Pages at this chunk's front that the drafter's window cannot reach."""
        assert peer.plan is not None
        first = window_start(len(said.pages), peer.plan.page_size, peer.draft_window)
        return min(task.pages, max(0, first - task.start))

    def _count(self, written: Written, seconds: float) -> None:
        target, draft = divided(seconds, written.target_bytes, written.draft_bytes)
        self.stats.add(
            target_bytes_sent=written.target_bytes,
            draft_bytes_sent=written.draft_bytes,
            target_send_seconds=target,
            draft_send_seconds=draft,
            packed_bytes=written.packed_bytes,
            direct_bytes=written.target_bytes + written.draft_bytes - written.packed_bytes,
            descriptors=written.descriptors,
            wire_bytes=written.wire_bytes,
        )

    # -- after the last chunk

    def aux_from(self, session: str) -> AuxFrom:
        """Metadata comes from one sender per decode rank."""
        peer = self.planned(session)
        if peer is None:
            return AuxFrom.STOCK
        if not peer.route.sends_aux:
            return AuxFrom.NOBODY
        return AuxFrom.COLD if peer.cold else AuxFrom.STOCK

    def verifies(self, session: str) -> bool:
        """Whether this peer asked for checksums."""
        peer = self.planned(session)
        return peer is not None and peer.verify

    def _has_failed(self, number: int) -> bool:
        return self._sglang.statuses().get(number, Poll.FAILED) == Poll.FAILED

    def digest(self, session: str, number: int, own_rank: int) -> Digest | None:
        """Checksums of all that this peer was sent, once, if it asked for them. `own_rank`:
        SGLang's unique number of this rank."""
        peer, room = self.planned(session), self.rooms.open_room(number)
        if peer is None or peer.plan is None or room is None:
            return None
        sums = room.sums.pop(session, None)
        if sums is None:
            return None
        target = pairs(peer.plan.target, sums.target)
        return Digest(number, own_rank, target, pairs(peer.plan.draft, sums.draft))

    def problems(self) -> list[str]:
        """What is wrong while no request runs, once what is due has been reaped."""
        self.gate.reap(time.monotonic())
        return self.rooms.problems(self._sglang.rooms())


class PackMemory:
    """One thread's pack buffer, made at the first need; what could not be had is not asked for
    again at once, since asking can be slow on a GPU that is short of memory."""

    def __init__(self, transport: Transport, rows: Rows, size: int) -> None:
        self._transport, self._rows, self._size = transport, rows, size
        self._next_try = 0.0

    def get(self) -> PackBuffer | None:
        now = time.monotonic()
        if now < self._next_try:
            return None
        self._next_try = now + RETRY_BUFFER_S
        try:
            memory = self._rows.allocate(self._size)
            self._transport.register(memory.address, memory.size)
        except MemoryError as error:
            logger.warning(
                "sglang-mixkv: no pack buffer of %d bytes (%s); slices go without it",
                self._size, error,
            )  # fmt: skip
            return None
        return PackBuffer(memory.address, memory.size, memory.owner)
