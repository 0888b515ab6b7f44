"""Rooms of one prefill rank: one table, from the first message about a room to its end.

    metadata        AWAITED ----- its sender is made -----> OPEN ----- cleared -----> ENDED
    a second sender of the number is made                   OPEN (and fails at once), of a new room
    refusal, abort  REFUSED ----- its sender is made -----> OPEN (and fails at once)
    the scheduler aborts the sender                         ABANDONED -- cleared, or reaped

A room number is the router's. It can be used again once the request before has ended, and a
message that is late can still belong to that one: an ENDED room is remembered for MEMORY_S. What
belongs to a request holds its Room, since the number alone can be another request's by then.
SGLang has the number alone, and by it a transfer thread says how a request ended: while one works
for a request, no other gets its number.

SGLang's control thread, its scheduler and its transfer threads call this; every change is made
under one lock.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from enum import StrEnum

from sglang_mixkv.errors import MixKVError
from sglang_mixkv.prefill.peer import Peer
from sglang_mixkv.prefill.writer import Written
from sglang_mixkv.protocol.messages import Metadata
from sglang_mixkv.rows.digest import Sums

# How long a refused room, and one that has ended, is remembered.
MEMORY_S = 60.0

# Rooms that are remembered without a sender: a sender of more is not SGLang.
MAX_WAITING = 1 << 16


class State(StrEnum):
    AWAITED = "awaited"
    REFUSED = "refused"
    OPEN = "open"
    ABANDONED = "abandoned"
    ENDED = "ended"


WITH_SENDER = (State.OPEN, State.ABANDONED)


@dataclass
class Sent:
    """What went out for one room, for SGLang's own sglang:kv_transfer_* series.

    Stock multiplies a page of this rank's pools, the drafter's included, by the number of decode
    ranks (CommonKVSender.get_transfer_metric). That is right for rows that every decode rank gets
    whole; a sharded drafter's heads go out once, and a rank that sends heads only sends no target.
    `state_to`: sessions of the peers that get model state from this rank.
    """

    bytes: int = 0
    state_to: set[str] = field(default_factory=set)

    def add(self, peer: Peer, written: Written) -> None:
        self.bytes += written.target_bytes + written.draft_bytes
        if peer.route.sends_state:
            self.state_to.add(peer.session)

    def total(self, state_bytes: int, *, sharded: bool) -> int:
        """With `state_bytes` of model state: cut between the peers (sharded), or a copy each."""
        copies = len(self.state_to)
        return self.bytes + state_bytes * (min(1, copies) if sharded else copies)


@dataclass
class Member:
    """One decode rank of a room: its metadata, the registration that this was compared with last,
    and checksums of what it was sent so far, if it asks for them."""

    said: Metadata
    peer: Peer
    sums: Sums | None = None

    def follow(self, peer: Peer) -> None:
        """The rank's registration now. Raises MixKVError unless the process that wanted the room
        is still there and the room stays inside what it registered last."""
        if peer is not self.peer:
            peer.check_continues(self.peer)
            peer.check_metadata(self.said)
            self.peer = peer


@dataclass
class Room:
    """One room number, and the request that it stands for now.

    `since`: when it came into its state. `reason`: why its request is to fail (REFUSED).
    `members`: the decode ranks that share it, by session. `reused`: the number stood for another
    request lately, whose messages may still come.
    """

    number: int
    state: State
    since: float
    reason: str = ""
    members: dict[str, Member] = field(default_factory=dict)
    sent: Sent = field(default_factory=Sent)
    reused: bool = False

    def enter(self, state: State, now: float) -> None:
        """Of one that has ended nothing stays but that it has."""
        self.state, self.since = state, now
        if state is State.ENDED:
            self.reason, self.members = "", {}

    @property
    def is_complete(self) -> bool:
        """Whether all its decode ranks have sent their metadata."""
        said = self._said()
        return any(len(said) >= one.required for one in said)

    @property
    def has_sender(self) -> bool:
        return self.state in WITH_SENDER

    def may_join(self, session: str) -> bool:
        """Whether this decode rank is one of the room's, or can still become one."""
        return session in self.members or not self.is_complete

    def has_member_at(self, endpoint: str, port: int) -> bool:
        return (endpoint, port) in {one.sender.at for one in self._said()}

    def served(self) -> list[tuple[str, int]]:
        """Addresses of the members that this rank sends something."""
        return list({one.sender.at: None for one in self._said() if not one.is_dummy})

    def _said(self) -> list[Metadata]:
        return [member.said for member in list(self.members.values())]


class Rooms:
    """All rooms of one prefill rank. Numbers that it counts only grow."""

    def __init__(self) -> None:
        self._rooms: dict[int, Room] = {}
        self._lock = threading.Lock()
        self._working = Counter[int]()  # transfer threads, by the number of their chunk's room
        self._opened = self._closed = 0
        self._next_reap = 0.0

    def get(self, number: int) -> Room | None:
        return self._rooms.get(number)

    def open_room(self, number: int) -> Room | None:
        """The room, while it has a sender."""
        room = self._rooms.get(number)
        return room if room is not None and room.has_sender else None

    def is_taken(self, number: int) -> bool:
        """Whether a transfer thread still works for a request of this number that has ended."""
        return self._working[number] > 0 and self.open_room(number) is None

    # -- its chunks, in transfer threads

    def begin_chunk(self, room: Room) -> bool:
        """A thread takes one. False if the request has ended: nothing of it is sent."""
        with self._lock:
            if room.has_sender:
                self._working[room.number] += 1
            return room.has_sender

    def end_chunk(self, room: Room) -> None:
        with self._lock:
            assert self._working[room.number] > 0, room
            self._working[room.number] -= 1
            if not self._working[room.number]:
                del self._working[room.number]

    # -- before a sender is there

    def join(self, said: Metadata, peer: Peer, now: float) -> None:
        """A decode rank's metadata was admitted. It must be one that may join."""
        with self._lock:
            room = self._rooms.get(said.room)
            if room is None or room.state is State.ENDED:
                room = self._put(said.room, State.AWAITED, now, reused=room is not None)
            assert room.may_join(said.sender.session), said
            room.members[peer.session] = Member(said, peer)
            if room.state is State.ABANDONED:
                room.since = now

    def refuse(self, number: int, reason: str, now: float) -> bool:
        """Its request fails when it comes. False, and nothing changed, if it has come."""
        with self._lock:
            room = self._rooms.get(number)
            if room is not None and room.has_sender:
                return False
            if room is None and len(self._rooms) >= MAX_WAITING:
                return True
            reused = room is not None and (room.reused or room.state is State.ENDED)
            members = room.members if room is not None else {}
            self._put(number, State.REFUSED, now, reason=reason, members=members, reused=reused)
            return True

    # -- its sender

    def open(self, number: int, now: float) -> Room:
        """A sender was made; `reason` of the room says if it has to fail at once."""
        with self._lock:
            room = self._rooms.get(number)
            self._opened += 1
            if room is not None and room.has_sender:
                return self._take_over(room, now)
            if self._working[number]:
                return self._put(
                    number, State.OPEN, now, reason=str(taken(number)), reused=True,
                    members=room.members if room is not None else {},
                )  # fmt: skip
            if room is None or room.state is State.ENDED:
                return self._put(number, State.OPEN, now, reused=room is not None)
            if room.state is State.REFUSED and now - room.since >= MEMORY_S:
                room.reason = ""
            room.enter(State.OPEN, now)
            return room

    def _take_over(self, before: Room, now: float) -> Room:
        """The number's room for another sender. SGLang knows requests by their number alone: of
        two at once, either could be sent to the other's pages, and both fail."""
        self._closed += 1
        room = self._put(
            before.number, State.OPEN, now, reason=str(taken(before.number)),
            members=before.members, reused=True,
        )  # fmt: skip
        before.enter(State.ENDED, now)
        return room

    def abandon(self, room: Room, now: float) -> None:
        """The scheduler aborted the sender, and may never clear it."""
        with self._lock:
            if room.state is State.OPEN:
                room.enter(State.ABANDONED, now)

    def close(self, room: Room, now: float) -> None:
        """The sender was cleared: nothing of its room stays but that it has ended. Not twice:
        the number may be another request's by then."""
        with self._lock:
            if self._rooms.get(room.number) is room and room.has_sender:
                self._closed += 1
                room.enter(State.ENDED, now)

    def reap(self, now: float, limit: float) -> list[int]:
        """Forget what is over, at most once per second. The numbers of rooms that no sender will
        end, after `limit` seconds: SGLang's tables still hold them."""
        if now < self._next_reap:
            return []
        self._next_reap = now + 1.0
        dropped = []
        with self._lock:
            for room in list(self._rooms.values()):
                age = now - room.since
                if room.state in (State.AWAITED, State.ABANDONED) and age > limit:
                    self._closed += room.state is State.ABANDONED
                    room.enter(State.ENDED, now)
                    dropped.append(room.number)
                elif room.state in (State.REFUSED, State.ENDED) and age > MEMORY_S:
                    del self._rooms[room.number]
                    dropped += [room.number] if room.members else []
        return dropped

    def _put(self, number: int, state: State, now: float, **fields: object) -> Room:
        room = self._rooms[number] = Room(number, state, now, **fields)  # type: ignore[arg-type]
        return room

    # -- what must hold

    def problems(self, of_sglang: Collection[int]) -> list[str]:
        """What is wrong while no request runs. `of_sglang`: numbers of the
        rooms that SGLang holds."""
        with self._lock:
            count = Counter(room.state for room in self._rooms.values())
            known = {n for n, room in self._rooms.items() if room.state is not State.ENDED}
            working = sorted(self._working)
        held = count[State.OPEN] + count[State.ABANDONED]
        found = []
        if self._opened - self._closed != held:
            found.append(
                f"{self._opened} rooms opened and {self._closed} closed, but {held} have a sender"
            )
        if held or count[State.AWAITED]:
            found.append(f"{held} rooms have a sender, {count[State.AWAITED]} wait for one")
        found += [f"threads work for rooms {working}"] if working else []
        found += _strays(of_sglang, known)
        return found


def taken(number: int) -> MixKVError:
    """Why a request fails whose number still is another's."""
    return MixKVError(
        "MIXKV-ROOM-03",
        f"room {number} still belongs to another request of this prefill server: the KV of one "
        "could land in the pages of the other. Send each request with a bootstrap_room of its "
        "own, as SGLang's router does, and with n=1.",
    )


def _strays(of_sglang: Collection[int], known: set[int]) -> list[str]:
    strays = sorted(set(of_sglang) - known)
    return [f"SGLang holds {len(strays)} rooms that are over here: {strays[:5]}"] if strays else []
