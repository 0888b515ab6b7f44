"""Rooms of one decode rank: one table, from the receiver's init to its end.

    init                    INVITED   who may answer is known
    metadata goes out       ASKED     what it holds of the landing area, whether it is verified
    all senders answered    LANDED    its slices are in place
    clear                   gone      what it held is given back, or in quarantine

The scheduler begins and ends rooms, SGLang's decode thread lands them; every change is made
under one lock.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from enum import StrEnum

from sglang_mixkv.decode.source import Source
from sglang_mixkv.decode.verify import Asked

REMEMBERED = 1024  # ended rooms, for verdicts that arrive later


class State(StrEnum):
    INVITED = "invited"
    ASKED = "asked"
    LANDED = "landed"


@dataclass
class Room:
    """`span`: of the staging buffer, as its prefill ranks were told of it; `aux_row`: its row of
    the metadata buffers; `pages`: how many it has; `verified`: what is compared before it
    starts."""

    number: int
    source: Source
    span: tuple[int, int] = (0, 0)
    state: State = State.INVITED
    aux_row: int | None = None
    pages: int = 0
    verified: Asked | None = None


@dataclass
class Rooms:
    """All rooms of one decode rank. Numbers that it counts only grow."""

    _rooms: dict[int, Room] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _begun: int = 0
    _ended: int = 0
    _last: OrderedDict[int, Source] = field(default_factory=OrderedDict)

    def get(self, number: int) -> Room | None:
        return self._rooms.get(number)

    def source(self, number: int) -> Source | None:
        """Whose room it is, or was not long ago."""
        room = self._rooms.get(number)
        return room.source if room is not None else self._last.get(number)

    def begin(self, number: int, source: Source, span: tuple[int, int] = (0, 0)) -> Room:
        """A receiver was initialised. The number must not be another request's still."""
        with self._lock:
            assert number not in self._rooms, self._rooms[number]
            self._begun += 1
            room = self._rooms[number] = Room(number, source, span)
            return room

    def ask(self, room: Room, pages: int, aux_row: int | None, verified: Asked | None) -> None:
        """Its metadata is about to go out."""
        with self._lock:
            assert room.state is State.INVITED, room
            room.state, room.pages = State.ASKED, pages
            room.aux_row, room.verified = aux_row, verified

    def land(self, room: Room) -> None:
        """All of it has arrived, and is in place."""
        with self._lock:
            assert room.state is State.ASKED, room
            room.state = State.LANDED

    def end(self, room: Room) -> None:
        """Its receiver ended. Not twice: the number may be another request's by then."""
        with self._lock:
            if self._rooms.get(room.number) is room:
                del self._rooms[room.number]
                self._ended += 1
                self._last[room.number] = room.source
                if len(self._last) > REMEMBERED:
                    self._last.popitem(last=False)

    def problems(self) -> list[str]:
        """What is wrong while no request runs."""
        with self._lock:
            held = len(self._rooms)
            found = [f"{held} rooms are held: {sorted(self._rooms)[:5]}"] if held else []
            if self._begun - self._ended != held:
                found.append(
                    f"{self._begun} rooms begun and {self._ended} ended, but {held} are held"
                )
        return found
