"""One prefill rank: what it decides, from the first message about a room to its end.

    control thread    gate.may_pass -> peers, rooms
    scheduler         open_room -> pages_to_send ... -> close_room
    transfer threads  send, aux, digest: by the peer's plan

All of it runs in SGLang's threads, which an exception would end without a word: engine/ lets
none of those that are raised here through.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import Enum

import numpy as np
import numpy.typing as npt

from sglang_mixkv.config import Config
from sglang_mixkv.errors import MixKVError, refuse
from sglang_mixkv.kv.pages import pages_to_send
from sglang_mixkv.prefill import failures
from sglang_mixkv.prefill.failures import Failures
from sglang_mixkv.prefill.gate import Gate
from sglang_mixkv.prefill.peer import Local, Peer
from sglang_mixkv.prefill.peers import Peers
from sglang_mixkv.prefill.rooms import Room, Rooms
from sglang_mixkv.prefill.sglang import SGLang
from sglang_mixkv.prefill.worker import PackMemory, Worker
from sglang_mixkv.prefill.writer import Chunk, ChunkWriter, Written
from sglang_mixkv.protocol.extension import Digest
from sglang_mixkv.protocol.framing import Framing
from sglang_mixkv.protocol.messages import Poll
from sglang_mixkv.rows.digest import Digester, Sums, pairs
from sglang_mixkv.rows.host import Rows
from sglang_mixkv.series import divided
from sglang_mixkv.stats import Stats
from sglang_mixkv.transport.base import Transport

PageNumbers = npt.ArrayLike


class AuxFrom(Enum):
    """What of a request's metadata row this rank sends to a decode rank."""

    NOBODY = "nothing"
    STOCK = "all of it, as SGLang does"
    COLD = "all but the drafter's part"


class PrefillRank:
    """`peers`, `rooms`: what it knows; `gate`: its door; `failures`: its judgement of sends."""

    def __init__(
        self,
        local: Local,
        config: Config,
        stats: Stats,
        rows: Rows,
        sglang: SGLang,
        framing: Framing,
        awaited_s: float,
    ) -> None:
        self.local, self.config, self.stats, self.rows = local, config, stats, rows
        self._sglang = sglang
        self.peers, self.rooms = Peers(local), Rooms()
        self.gate = Gate(self.peers, self.rooms, sglang, stats, framing, awaited_s)
        self.transport: Transport | None = None
        self.failures = Failures(sglang)

    def connect(self, transport: Transport) -> None:
        """Once SGLang has its engine."""
        self.transport = transport

    def worker(self, threads: int, most_pages: int) -> Worker:
        """For one of so many transfer threads, which keeps them. `most_pages`: see ChunkWriter."""
        assert self.transport is not None, "a transfer thread before the transport"
        size = (self.config.staging_mb << 20) // threads
        buffer = PackMemory(self.transport, self.rows, size)
        writer = ChunkWriter(
            self.transport, self.rows, buffer.get, self.config.draft_transfer, most_pages
        )
        return Worker(self.rooms, writer, Digester(self.rows))

    # -- rooms, in the scheduler

    def open_room(self, number: int) -> Room:
        """A sender was made; a room that was refused fails now."""
        room = self.rooms.open(number, time.monotonic())
        if room.reason:
            self._sglang.fail(number, room.reason)
        return room

    def fail(self, room: Room | None, reason: str) -> None:
        """End a request with this reason on both sides, unless it has ended: its number can be
        another's by then."""
        if room is not None and room.has_sender:
            self._sglang.fail(room.number, reason)

    def abandon_room(self, room: Room) -> None:
        """The scheduler aborts the sender: tell decode."""
        if room.number in self._sglang.statuses():
            self.fail(room, f"[MIXKV-ROOM-02] room {room.number}: aborted by the prefill server")
            self.rooms.abandon(room, time.monotonic())

    def close_room(self, room: Room) -> None:
        self.rooms.close(room, time.monotonic())

    def refused_by_sglang(self, session: str, reason: str) -> None:
        """SGLang's own check of a peer that was admitted here."""
        self.peers.refuse(session, f"[MIXKV-PAIR-07] {reason}")
        self.stats.refused()

    def pages_to_send(
        self, room: Room | None, offered: int, start: int, tokens: int | None, *, last: bool
    ) -> int:
        """Pages of this chunk to send, the same for every planned peer of the room: without
        lookahead pages. Raises MixKVError for a chunk that does not line up."""
        count = offered
        for session, member in list(room.members.items()) if room else []:
            peer, said = self.planned(session), member.said
            if peer is not None and peer.plan is not None and not said.is_dummy:
                size, parts = peer.plan.page_tokens, peer.plan.parts
                total = len(said.pages) * parts
                count = pages_to_send(offered, tokens, size, start, total, last=last, parts=parts)
        return count

    # -- chunks, in transfer threads

    def planned(self, session: str) -> Peer | None:
        """The peer, if what it is sent is ours to decide."""
        peer = self.peers.get(session)
        return peer if peer is not None and peer.plan is not None else None

    def guarded(self, worker: Worker | None, session: str, send: Callable[[], int]) -> int:
        """What SGLang is told of a send: 0, or a code, by which it takes the peer for dead and
        fails every request to it. Nothing is sent for a room that has failed or ended.

        Where `send` raises, or a write failed though the peer answers, this thread's room fails
        alone, with the reason.
        """
        task = worker.task if worker is not None else None
        if task is None or worker is None:
            return self._without_task(session, send)
        if self.has_failed(task.room):
            return 0
        worker.begin()
        began = time.monotonic()
        try:
            self.check_still_fits(task.room, session)
            code = int(send())
        except Exception as error:
            failures.log(session, task.room, error)
            code = worker.settle()
            if not code:
                self.fail(task.room, failures.raised(session, task.room, error))
                return 0
        if self.failures.is_peers(session, code, time.monotonic() - began):
            return code
        if code:
            self._sglang.note_unsettled(task.room.number)
            why = self.why_unsent(session, task.room, code)
            self.fail(task.room, f"{why}; the decode rank answers")
        return 0

    def _without_task(self, session: str, send: Callable[[], int]) -> int:
        """A thread that took no chunk has no room to fail: SGLang fails the one it works on."""
        try:
            return int(send())
        except Exception as error:
            failures.log(session, None, error)
            return -1

    def why_unsent(self, session: str, room: Room | None, code: int) -> str:
        """The reason of a room that a write of failed, for a peer that may be gone."""
        assert self.transport is not None
        return failures.unsent(session, room, code, self.transport)

    def check_still_fits(self, room: Room, session: str) -> None:
        """Raise MixKVError unless a room stays inside what its peer registered last, which can be
        anew since the room was admitted, and the process that wanted it is still there."""
        member, peer = room.members.get(session), self.peers.get(session)
        refusal = self.peers.refusal(session)
        if member is None or peer is None:
            return
        if refusal is not None:
            raise refusal
        member.follow(peer)

    def send_target(
        self, worker: Worker | None, peer: Peer, tokens: int, send: Callable[[], int]
    ) -> int:
        """Where decode context parallelism deals out the target's tokens, and SGLang's own `send`
        writes so many of a chunk: its code, with what it sent counted."""
        began = time.perf_counter()
        code = int(send())
        room = worker.task.room if worker and worker.task else None
        if code == 0 and room is not None:
            size = tokens * sum(self.local.caches.target.rows)
            written = Written(0, size, 0, 0, 0, size)
            self._count(written, time.perf_counter() - began)
            room.sent.add(peer, written)
        return code

    def send(
        self, worker: Worker | None, peer: Peer, src_pages: PageNumbers,
        dst_pages: PageNumbers | None = None,
    ) -> int:  # fmt: skip
        """Write one chunk of a thread's room by the peer's plan: the transport's code. Without
        `dst_pages` they are the room's, from the chunk's place on.

        Raises MixKVError for a chunk that does not fit, and what packing raises.
        """
        if worker is None or worker.task is None:
            raise refuse(
                "MIXKV-SEND-01",
                "to know which room this chunk belongs to",
                "a thread that took none from SGLang's queue",
                "draft heads would land outside the region that the decode rank reads",
                "Report this; it is not expected from a supported SGLang",
            )
        task, room = worker.task, worker.task.room
        member = room.members.get(peer.session)
        if member is None:
            text = "the request ended meanwhile; nothing of this chunk was sent"
            raise MixKVError("MIXKV-ROOM-04", text)
        said, peer, plan = member.said, member.peer, member.peer.plan
        assert plan is not None
        pages = plan.room_pages(np.asarray(said.pages, np.int64))
        src = np.asarray(src_pages, np.int64)
        if dst_pages is None:
            dst_pages = pages[task.start : task.start + len(src)]
        dst = np.asarray(dst_pages, np.int64)
        plan.check_pages(src, dst)
        chunk = Chunk(src, dst, task.start, plan.firsts(len(pages)), pages)
        began = time.perf_counter()
        written = worker.writer.write(peer.session, plan, chunk, said.grant)
        if written.code == 0:
            self._count(written, time.perf_counter() - began)
            room.sent.add(peer, written)
            if peer.verify:
                member.sums = member.sums or Sums()
                worker.digester.add_chunk(member.sums, plan, src, chunk.skips)
        return written.code

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

    def has_failed(self, room: Room) -> bool:
        """Whether nothing more is to be sent of this room."""
        status = self._sglang.statuses().get(room.number, Poll.FAILED)
        return not room.has_sender or status == Poll.FAILED

    def digest(self, session: str, room: Room, own_rank: int) -> Digest | None:
        """Checksums of all that this peer was sent, once, if it asked for them. `own_rank`:
        SGLang's unique number of this rank."""
        peer, member = self.planned(session), room.members.get(session)
        if peer is None or peer.plan is None or member is None or member.sums is None:
            return None
        sums, member.sums = member.sums, None
        drafts = zip(peer.plan.draft, sums.draft, strict=True)
        draft = tuple(pair for reach, found in drafts for pair in pairs(reach.copies, found))
        return Digest(room.number, own_rank, pairs(peer.plan.target, sums.target), draft)

    def problems(self) -> list[str]:
        """What is wrong while no request runs, once what is due has been reaped."""
        self.gate.reap(time.monotonic())
        return self.rooms.problems(self._sglang.rooms())
