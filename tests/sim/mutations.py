"""Defects, one at a time, that the simulator must find: the ten most dangerous points of the
design's review, ten bounds, and what makes a slot safe to use again.

Each is a function that changes the real code, or the simulated executor where the duty is the
executor's, by `patch(owner, name, value)`, which is undone afterwards.
"""

from __future__ import annotations

import msgspec

from sglang_mixkv.channel.messages import Open
from sglang_mixkv.channel.slots import SlotPool
from sglang_mixkv.channel.times import Times
from sglang_mixkv.decode import breaker, parts, servers
from sglang_mixkv.decode import events as dev
from sglang_mixkv.decode import rooms as decode
from sglang_mixkv.prefill import events as pev
from sglang_mixkv.prefill import rooms as prefill
from tests.sim.copiers import Copiers
from tests.sim.decode import DecodeRank
from tests.sim.mutating import Patch, mutation

PREFILL, DECODE = prefill._HANDLERS, decode._HANDLERS


# -- the ten most dangerous points


@mutation
def facts_unchecked(patch: Patch) -> None:
    """1. Metadata leaves for a prefill server that has no row."""
    real = servers.make_plan

    def make_plan(contacts: object, rows: dict, own: object, **options: bool) -> servers.Plan:
        return real(contacts, rows, own, **options) if rows else servers.Plan((), ())

    patch(servers, "make_plan", make_plan)


@mutation
def gate_ignored(patch: Patch) -> None:
    """2. Rows are unpacked although the gate was closed on the group's verdict."""
    real = DecodeRank.refusal
    patch(DecodeRank, "refusal", lambda self, job, open_: real(self, job, True))


@mutation
def chunk_not_awaited(patch: Patch) -> None:
    """3. Rows are packed before they are written."""

    def add_chunk(self: prefill.Rooms, event: pev.AddChunk) -> None:
        prefill.Rooms._add_chunk(self, msgspec.structs.replace(event, pending=False))

    patch(PREFILL, pev.AddChunk, add_chunk)
    patch(PREFILL, pev.ChunkWritten, lambda self, event: None)


@mutation
def forward_not_awaited(patch: Patch) -> None:
    """4. Rows are unpacked while an earlier forward still writes to their pages."""

    def open_(self: decode.Rooms, event: dev.OpenRoom) -> None:
        decode.Rooms._open(self, msgspec.structs.replace(event, pending=False))

    patch(DECODE, dev.OpenRoom, open_)


@mutation
def prefill_never_gives_up(patch: Patch) -> None:
    """5. A room that nobody opens holds its request for ever."""
    patch(prefill.Rooms, "_give_up", lambda self, room: None)


@mutation
def no_deadline(patch: Patch) -> None:
    """6. Nothing ends a room whose target is there and whose draft KV does not come."""
    patch(parts.Room, "deadline", lambda self, times: float("inf"))


@mutation
def rooms_by_number(patch: Patch) -> None:
    """7. A READY counts for the room of its number, of whatever generation."""
    real = decode.Rooms._ready

    def ready(self: decode.Rooms, peer: bytes, message: object) -> None:
        for generation, room in self._rooms.items():
            if room.opened.bootstrap_room == message.room:
                message = msgspec.structs.replace(message, generation=generation)
        real(self, peer, message)

    patch(decode.Rooms, "_ready", ready)


@mutation
def instance_ignored(patch: Patch) -> None:
    """7. An OPEN for the former instance at this address is served."""
    real = prefill.Rooms._refusal

    def refusal(self: prefill.Rooms, connection: bytes, opened: Open) -> tuple[str, str] | None:
        return real(self, connection, msgspec.structs.replace(opened, prefill=self._instance))

    patch(prefill.Rooms, "_refusal", refusal)


@mutation
def local_slot_reused(patch: Patch) -> None:
    """8. The local slot of a failed read is used again while its bytes may still land."""

    def failed(self: decode.Rooms, event: dev.ReadFailed) -> None:
        segment = self._reads.get(event.read)
        if not segment.failed:
            self._reads.slots.free(segment.slot)
            segment.slot = -1
        decode.Rooms._read_failed(self, event)

    def settled(self: decode.Rooms, event: dev.ReadSettled) -> None:
        segment = self._reads.end(event.read)
        self._acknowledge(segment.peer, segment.ready)
        if segment.slot >= 0:
            self._reads.slots.free(segment.slot)

    patch(DECODE, dev.ReadFailed, failed)
    patch(DECODE, dev.ReadSettled, settled)
    patch(decode.Rooms, "check", lambda self: iter(()))


@mutation
def no_reserve(patch: Patch) -> None:
    """9. Dead readers may take the last slots: no reserve, and none is late."""

    def can_take(self: SlotPool, owner: object, now: float) -> bool:
        return bool(self._free) and self._held[owner] < self._quota

    patch(SlotPool, "can_take", can_take)


@mutation
def not_cleared(patch: Patch) -> None:
    """10. A cold room leaves the rows of earlier requests in place."""

    def clear(self: decode.Rooms, room: object) -> None:
        if room.cold and not (room.pending or room.unpacking or room.decided or room.closed):
            self._decide(room, dev.State.COLD)

    patch(decode.Rooms, "_clear", clear)


# -- ten bounds


@mutation
def short_lease(patch: Patch) -> None:
    """A slot without its ACK is used again after a second."""
    patch(Times, "slot_aside", property(lambda self: 1.0))


@mutation
def no_quota(patch: Patch) -> None:
    """One reader may hold all slots."""
    real = SlotPool.__init__

    def init(self: SlotPool, count: int, times: Times) -> None:
        real(self, count, times)
        self._quota, self._reserve = count, 0

    patch(SlotPool, "__init__", init)


@mutation
def late_open_joins(patch: Patch) -> None:
    """An OPEN that comes after its room was settled is served from pages that may be gone."""
    real = prefill.Rooms._opened

    def opened(self: prefill.Rooms, connection: bytes, message: Open) -> None:
        room = self._current.get(message.room)
        settled = room is not None and room.settled
        if settled:
            room.settled = False
        real(self, connection, message)
        if settled:
            room.settled = True
            self._out = [action for action in self._out if not isinstance(action, pev.Settled)]

    patch(prefill.Rooms, "_opened", opened)


@mutation
def chunks_before_open_lost(patch: Patch) -> None:
    """A reader that opens a room gets the chunks that come after that."""
    real = prefill.Rooms._join

    def join(self: prefill.Rooms, room: object, part: object) -> None:
        real(self, room, part)
        self._packing._turns.remove(part.reader, part.opened.generation)

    patch(prefill.Rooms, "_join", join)


@mutation
def foreign_ack(patch: Patch) -> None:
    """An ACK frees its slot under any stamp."""

    def acknowledge(self: SlotPool, slot: int, stamp: int) -> bool:
        if slot not in self._offered:
            return False
        self.free(slot)
        return True

    patch(SlotPool, "acknowledge", acknowledge)


@mutation
def doubled_ready(patch: Patch) -> None:
    """A READY that comes twice is acknowledged at once, though the first one's read runs."""
    real = decode.Rooms._ready

    def ready(self: decode.Rooms, peer: bytes, message: object) -> None:
        room = self._rooms.get(message.generation)
        part = room.parts.get(peer) if room is not None else None
        if part is not None and message.segment < part.segments:
            self._acknowledge(peer, message)
            return
        real(self, peer, message)

    patch(decode.Rooms, "_ready", ready)


@mutation
def older_open_supersedes(patch: Patch) -> None:
    """An OPEN takes the place of a reader's other one, whichever generation is the later."""
    patch(prefill.Rooms, "_opened", _opened_without_generations)


def _opened_without_generations(self: prefill.Rooms, connection: bytes, opened: Open) -> None:
    if why := self._refusal(connection, opened):
        self._send(connection, prefill.fail(opened.room, opened.generation, *why))
        return
    room = self._current.get(opened.room)
    before = room.parts.get(opened.reader) if room is not None else None
    for part in (before, self._early.get(opened.room, opened.reader)):
        self._ended_by_reader(part)
    part = self._parts[opened.generation] = prefill.Part(opened, connection, self._clock)
    if room is not None and before is None and not room.settled:
        self._join(room, part)
    else:
        self._early.put(part)


@mutation
def breaker_never_opens(patch: Patch) -> None:
    patch(breaker, "STRIKES", 1 << 30)


@mutation
def no_probe(patch: Patch) -> None:
    """A breaker that has opened stays open."""

    def blocked(self: breaker.Breaker, peers: object, generation: int, now: float) -> bool:
        states = [self._states[peer] for peer in peers if peer in self._states]
        return any(state.is_open for state in states)

    patch(breaker.Breaker, "blocked", blocked)


@mutation
def gate_open_after_clear(patch: Patch) -> None:
    """SGLang's clear, abort and failure_exception leave the gate open."""
    patch(Copiers, "close", lambda self, owner, call, args: call(*args))


@mutation
def prefix_cleared(patch: Patch) -> None:
    """A cold room zeroes the shared pages of its prefix, too."""
    real = decode.Rooms._clear

    def clear(self: decode.Rooms, room: object) -> None:
        real(self, room)
        if self._out and isinstance(self._out[-1], dev.Clear):
            self._out[-1] = msgspec.structs.replace(self._out[-1], first_token=0)

    patch(decode.Rooms, "_clear", clear)


# -- what makes the reuse of a slot safe


@mutation
def stall_ignored(patch: Patch) -> None:
    """A decode rank that stood still trusts what it was sent before."""
    patch(Times, "stall", property(lambda self: float("inf")))


@mutation
def clock_runs_while_stopped(patch: Patch) -> None:
    """A prefill rank that stood still counts that time against its readers."""
    patch(prefill, "STEP", float("inf"))


@mutation
def long_reads_used(patch: Patch) -> None:
    """The bytes of a read are used however long it took."""
    patch(Times, "read", property(lambda self: float("inf")))
