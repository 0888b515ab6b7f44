"""Defects that the simulator must find, each with the scene and invariant that reveal it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import pytest

from sglang_mixkv.channel import slots
from sglang_mixkv.channel.times import Times
from sglang_mixkv.decode import actions as dact
from sglang_mixkv.decode import breaker, segments
from sglang_mixkv.decode import machine as decode
from sglang_mixkv.decode import transfer as decode_transfer
from sglang_mixkv.decode.worker import DecodeWorker
from sglang_mixkv.draft import gate
from sglang_mixkv.draft.slot_format import SlotCheck
from sglang_mixkv.prefill import machine as prefill
from sglang_mixkv.prefill import transfer as prefill_transfer
from sglang_mixkv.prefill.worker import PrefillWorker
from tests.sim import memory

Patch = pytest.MonkeyPatch


class Mistake(NamedTuple):
    """A defect that `make` patches into the code.

    It must break one of the invariants in `found` within the first `most` schedules of a scene.
    `most` is about ten times the average, so that another order of draws also finds the defect.
    """

    make: Callable[[Patch], None]
    found: tuple[str, ...]
    scene: str
    most: int


TABLE: list[Mistake] = []


def mistake(found: str, scene: str, most: int = 100) -> Callable[..., Any]:
    def add(make: Callable[[Patch], None]) -> Callable[[Patch], None]:
        TABLE.append(Mistake(make, tuple(found.split("|")), scene, most))
        return make

    return add


# -- decode: how long a room waits


@mistake("late", "any")
def missing_progress_does_not_shorten_the_wait(patch: Patch) -> None:
    def deadline(request: Any, times: Times) -> float:
        return float("inf") if request.arrived is None else request.arrived + times.whole_wait

    patch.setattr(decode_transfer.Request, "deadline", deadline)


@mistake("late", "any")
def every_room_waits_the_longest_time(patch: Patch) -> None:
    def deadline(request: Any, times: Times) -> float:
        if request.arrived is None:
            return float("inf")
        calm = max(request.arrived, request.progress) + times.longest_wait
        return min(calm, request.arrived + times.whole_wait)

    patch.setattr(decode_transfer.Request, "deadline", deadline)


@mistake("deadline", "dead_plane")
def every_room_waits_the_shortest_time(patch: Patch) -> None:
    def deadline(request: Any, times: Times) -> float:
        if request.arrived is None:
            return float("inf")
        return max(request.arrived, request.progress) + times.shortest_wait

    patch.setattr(decode_transfer.Request, "deadline", deadline)


@mistake("deadline", "hung", 1000)
def copies_do_not_count_as_progress(patch: Patch) -> None:
    real = decode.Machine.copied

    def copied(self: Any, *args: Any) -> None:
        before = [(request, request.progress) for request in self._requests.values()]
        real(self, *args)
        for request, progress in before:
            request.progress = progress

    patch.setattr(decode.Machine, "copied", copied)


@mistake("late", "waiting", 1000)
def the_total_wait_has_no_limit(patch: Patch) -> None:
    def deadline(request: Any, times: Times) -> float:
        if request.arrived is None:
            return float("inf")
        took = 0.0 if request.first_ready is None else request.arrived - request.first_ready
        wait = min(max(3 * took, times.shortest_wait), times.longest_wait * 5)
        return max(request.arrived, request.progress) + wait

    patch.setattr(decode_transfer.Request, "deadline", deadline)


# -- decode: breakers


@mistake("breaker", "dead_plane")
def no_room_closes_a_breaker(patch: Patch) -> None:
    patch.setattr(breaker.Breaker, "came", lambda *_: None)
    real = decode.Machine._finish

    def finish(self: Any, request: Any) -> None:
        self.breaker.forget = lambda peer: None
        try:
            real(self, request)
        finally:
            del self.breaker.forget

    patch.setattr(decode.Machine, "_finish", finish)


@mistake("breaker", "probe")
def only_warm_rooms_close_a_breaker(patch: Patch) -> None:
    patch.setattr(breaker.Breaker, "came", lambda *_: None)


@mistake("strike", "dead_plane")
def every_cold_room_is_a_strike(patch: Patch) -> None:
    real = decode.Machine._go_cold

    def go_cold(
        self: Any, request: Any, reason: str, detail: str, *peers: bytes, strikes: Any = ()
    ) -> None:
        real(self, request, reason, detail, *peers, strikes=tuple(request.transfers))

    patch.setattr(decode.Machine, "_go_cold", go_cold)


@mistake("breaker", "dead_plane")
def breakers_never_block(patch: Patch) -> None:
    patch.setattr(breaker.Breaker, "blocked", lambda *_: False)


@mistake("breaker", "any")
def one_strike_opens_a_breaker(patch: Patch) -> None:
    patch.setattr(breaker, "STRIKES", 1)


@mistake("breaker", "dead_plane")
def breaker_waits_do_not_double(patch: Patch) -> None:
    patch.setattr(breaker, "LONGEST_WAIT", 1.0)


@mistake("breaker", "probe", 300)
def a_probe_blocks_all_other_rooms(patch: Patch) -> None:
    patch.setattr(breaker, "PROBE", 1e9)


@mistake("blame", "forward")
def only_segments_of_the_late_room_excuse_a_peer(patch: Patch) -> None:
    def late(self: Any, request: Any, since: float) -> list[bytes]:
        reading = {one for read in self._reads for one in read.segments}
        here = {one.peer for one in request.segments if one not in reading}
        here -= {read.peer for read in self._reads if read.began <= since}
        return [peer for peer in request.missing() if peer not in here]

    patch.setattr(segments.Segments, "late", late)


@mistake("blame", "forward", 300)
def recent_local_delays_do_not_excuse_a_peer(patch: Patch) -> None:
    real = segments.Segments.note_delays
    patch.setattr(segments.Segments, "note_delays", lambda self, now, _: real(self, now, now))


@mistake("blame", "dead_plane")
def late_segments_are_never_a_strike(patch: Patch) -> None:
    patch.setattr(segments.Segments, "late", lambda *_: [])


@mistake("blame", "crowded")
def waiting_for_local_slots_is_a_strike(patch: Patch) -> None:
    patch.setattr(segments.Segments, "late", lambda self, request, since: request.missing())


# -- decode: rooms, segments, numbers


@mistake("forget", "restart")
def restarted_peers_are_not_forgotten(patch: Patch) -> None:
    real = decode.Machine.failed

    def failed(self: Any, peer: bytes, message: Any) -> None:
        real(self, peer, message)
        self._out[:] = [one for one in self._out if type(one) is not dact.Forget]

    patch.setattr(decode.Machine, "failed", failed)


@mistake("lost", "gone")
def rooms_wait_for_peers_that_are_gone(patch: Patch) -> None:
    real = decode.Machine.peer_lost
    patch.setattr(
        decode.Machine, "peer_lost", lambda self, peer, gone=False: gone or real(self, peer)
    )


@mistake("repeated", "reuse")
def no_room_number_is_ambiguous(patch: Patch) -> None:
    patch.setattr(decode_transfer.RecentRooms, "is_ambiguous", lambda *_: False)


@mistake("untouched", "numbers", 300)
def an_unsendable_message_loses_the_peer(patch: Patch) -> None:
    real = decode.Machine.on_action_failed

    def on_action_failed(self: Any, action: Any, error: Exception) -> None:
        if type(action) is dact.Send:
            self.peer_lost(action.peer)
        else:
            real(self, action, error)

    patch.setattr(decode.Machine, "on_action_failed", on_action_failed)


@mistake("acks", "any")
def slots_are_acknowledged_before_the_read_ends(patch: Patch) -> None:
    real = segments.Segments.actions

    def actions(self: Any, now: float) -> Any:
        found = real(self, now)
        for one in found:
            if isinstance(one, dact.StartRead):
                self.acknowledge(one.peer, [segment.announced for segment in one.segments])
        return found

    patch.setattr(segments.Segments, "actions", actions)


@mistake("rows", "any")
def copies_do_not_wait_for_an_earlier_forward(patch: Patch) -> None:
    real = DecodeWorker._copy_of

    def copy_of(self: Any, job: Any) -> Any:
        copy = real(self, job)
        copy.pages.events = ()
        return copy

    patch.setattr(DecodeWorker, "_copy_of", copy_of)


@mistake("clear", "any")
def rows_in_place_are_cleared(patch: Patch) -> None:
    first = property(lambda request: request.opened.first_token)
    patch.setattr(decode_transfer.Request, "placed_to", first)


@mistake("crash IndexError|lost", "liar")
def readys_are_not_validated(patch: Patch) -> None:
    patch.setattr(decode_transfer.SourceTransfer, "violation", lambda *_: "")


@mistake("rows", "any")
def row_offsets_include_the_cached_prefix(patch: Patch) -> None:
    real = DecodeWorker._copy_of

    def copy_of(self: Any, job: Any) -> Any:
        copy, opened = real(self, job), job.request.opened
        first = (copy.first + opened.first_token) % opened.page_size
        return msgspec.structs.replace(copy, first=first)

    patch.setattr(DecodeWorker, "_copy_of", copy_of)


@mistake("rows", "spoiled")
def wrong_checksums_are_accepted(patch: Patch) -> None:
    real = decode.Machine.copied

    def copied(self: Any, jobs: Any, outcome: Any) -> None:
        real(self, jobs, SlotCheck.OK if outcome is SlotCheck.DIFFERS else outcome)

    patch.setattr(decode.Machine, "copied", copied)


@mistake("lease", "stopped", 1000)
def stops_are_not_noticed(patch: Patch) -> None:
    patch.setattr(decode, "TICKS", 1e9)


@mistake("lease", "waiting")
def unread_segments_never_expire(patch: Patch) -> None:
    real = decode.Machine.tick

    def tick(self: Any) -> None:
        for request in self._requests.values():
            request.limits.unread = 1e9
        real(self)

    patch.setattr(decode.Machine, "tick", tick)


@mistake("rows", "suspended")
def slots_are_unpacked_without_a_check(patch: Patch) -> None:
    patch.setattr(memory, "check", lambda *_: SlotCheck.OK)


# -- a process that was restored from a snapshot


@mistake("restored", "restored")
def only_rooms_in_flight_go_cold_after_a_restore(patch: Patch) -> None:
    real = decode.Machine.restored

    def restored(self: Any) -> None:
        real(self)
        self._restored = False

    patch.setattr(decode.Machine, "restored", restored)


@mistake("restored", "restored")
def rooms_in_flight_wait_after_a_restore(patch: Patch) -> None:
    patch.setattr(decode.Machine, "restored", lambda self: setattr(self, "_restored", True))


@mistake("restored", "restored")
def a_restored_rank_serves_later_readers(patch: Patch) -> None:
    real = prefill.Machine.restored

    def restored(self: Any) -> None:
        real(self)
        self._restored = False

    patch.setattr(prefill.Machine, "restored", restored)


@mistake("restored|late release", "restored")
def a_restored_rank_serves_its_rooms_to_the_end(patch: Patch) -> None:
    patch.setattr(prefill.Machine, "restored", lambda self: setattr(self, "_restored", True))


# -- prefill


@mistake("late release", "any")
def pages_are_released_late(patch: Patch) -> None:
    real, ticked = prefill.Machine._release_pages, prefill.Machine.tick

    def release_pages(self: Any, request: Any, given_up: bool = False) -> None:
        early = request.sent is not None and self._clock - request.sent < 0.9
        if given_up or not (early and any(one.wanted for one in request.transfers.values())):
            real(self, request, given_up)

    def tick(self: Any) -> None:
        for request in list(self._requests.values()):
            release_pages(self, request)
        ticked(self)

    patch.setattr(prefill.Machine, "_release_pages", release_pages)
    patch.setattr(prefill.Machine, "tick", tick)


@mistake("last resort", "unopened")
def prefill_waits_for_readers_that_do_not_open(patch: Patch) -> None:
    patch.setattr(prefill.Machine, "_give_up", lambda *_: None)


@mistake("released", "any")
def packing_continues_for_readers_that_are_gone(patch: Patch) -> None:
    real, advance = prefill_transfer.Packing.drop, prefill_transfer.ReaderTransfer.advance

    def drop(self: Any, transfer: Any) -> None:
        remove, self.turns.remove = self.turns.remove, lambda *_: None
        try:
            real(self, transfer)
        finally:
            self.turns.remove = remove

    def anyhow(transfer: Any) -> bool:
        ended, transfer.ended = transfer.ended, not transfer.wanted
        try:
            return advance(transfer)
        finally:
            transfer.ended = ended

    patch.setattr(prefill_transfer.Packing, "drop", drop)
    patch.setattr(prefill_transfer.ReaderTransfer, "advance", anyhow)


@mistake("over", "any", 300)
def lost_connections_are_ignored(patch: Patch) -> None:
    def unsent(self: Any, message: Any) -> None:
        self.slots.acknowledge((one.slot, one.stamp) for one in getattr(message, "segments", ()))

    patch.setattr(prefill.Machine, "connection_lost", lambda *_: None)
    patch.setattr(prefill.Machine, "unsent", unsent)


@mistake("unwritten", "any")
def chunks_are_packed_before_their_forward(patch: Patch) -> None:
    real = PrefillWorker.add_chunk

    def add_chunk(self: Any, *chunk: Any) -> None:
        chunk[-1].events = ()
        real(self, *chunk)

    patch.setattr(PrefillWorker, "add_chunk", add_chunk)


# -- slots


@mistake("invariants", "any")
def one_owner_may_take_all_slots(patch: Patch) -> None:
    patch.setattr(slots.SlotPool, "available_for", lambda self, *_: len(self.free_slots))


@mistake("untouched", "dead_readers", 1000)
def every_owner_gets_a_first_slot(patch: Patch) -> None:
    def available_for(self: Any, owner: Any, owners: int) -> int:
        held, free = self.held.get(owner, 0), len(self.free_slots)
        more = min(free - self._reserve, slots.share_of(self.count, owners) - held)
        return max(more, 0) if held else min(max(more, 1), free)

    patch.setattr(slots.SlotPool, "available_for", available_for)


@mistake("untouched", "dead_readers", 1000)
def signs_of_life_are_ignored(patch: Patch) -> None:
    patch.setattr(slots.SlotPool, "sign", lambda *_, **__: None)


@mistake("lease", "stranger")
def acks_with_a_wrong_stamp_free_slots(patch: Patch) -> None:
    real = slots.SlotPool.acknowledge

    def acknowledge(self: Any, some: Any, read: float | None = None) -> Any:
        published = self._published
        own = [(slot, published[slot][1]) for slot, _ in some if slot in published]
        return real(self, own, read)

    patch.setattr(slots.SlotPool, "acknowledge", acknowledge)


@mistake("left", "dead_readers")
def slots_never_expire(patch: Patch) -> None:
    patch.setattr(slots.SlotPool, "expire", lambda *_: [])


@mistake("lease", "stopped", 1000)
def slots_expire_early(patch: Patch) -> None:
    real = slots.SlotPool.expire
    patch.setattr(slots.SlotPool, "expire", lambda self, now: real(self, now + 50))


@mistake("unsent", "dead_readers")
def unsent_messages_keep_their_slots(patch: Patch) -> None:
    real = prefill.Machine.unsent

    def unsent(self: Any, message: Any) -> None:
        acknowledge = slots.SlotPool.acknowledge
        slots.SlotPool.acknowledge = lambda *_: True
        try:
            real(self, message)
        finally:
            slots.SlotPool.acknowledge = acknowledge

    patch.setattr(prefill.Machine, "unsent", unsent)


# -- SGLang's scheduler while the channel thread hangs, and gates


@mistake("undecided", "hung")
def decode_has_no_last_resort(patch: Patch) -> None:
    patch.setattr(DecodeWorker, "is_lost", lambda *_: False)


@mistake("last resort", "hung")
def the_last_resort_comes_early(patch: Patch) -> None:
    def is_lost(self: Any, handle: Any) -> bool:
        return handle.arrived is not None and self._clock() - handle.arrived > self._slowest / 2

    patch.setattr(DecodeWorker, "is_lost", is_lost)


@mistake("undecided", "hung")
def prefill_has_no_last_resort(patch: Patch) -> None:
    def release(self: Any, handle: Any) -> bool:
        if handle.sent is None:
            handle.sent = self._clock()
            self._call(self._machine.target_sent, handle, wake=False)
        return bool(handle.pages_released and handle.gate.try_close())

    patch.setattr(PrefillWorker, "release", release)


@mistake("pages", "unopened", 300)
def gates_do_not_wait_for_copies_in_flight(patch: Patch) -> None:
    real = gate.Gate.try_close

    def try_close(self: Any) -> bool:
        real(self)
        return True

    patch.setattr(gate.Gate, "try_close", try_close)


@mistake("pages|gate", "batches")
def gates_ignore_tickets(patch: Patch) -> None:
    patch.setattr(gate.Gate, "try_close", _without_tickets(gate.Gate.try_close))


def _without_tickets(real: Any) -> Any:
    def try_close(self: Any) -> bool:
        self.tickets.clear()
        return bool(real(self))

    return try_close


@mistake("pages|gate", "batches")
def gates_wait_for_only_one_batch(patch: Patch) -> None:
    def try_close(self: Any) -> bool:
        self.is_open = False
        if self._in_flight or not self.tickets:
            return not self._in_flight
        return any(ticket.over() for ticket in self.tickets)

    patch.setattr(gate.Gate, "try_close", try_close)
