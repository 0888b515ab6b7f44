"""The state machines: their states by fingerprint, and their answers."""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Hashable
from enum import Enum
from typing import Any

import msgspec

from sglang_mixkv.channel.times import Times
from sglang_mixkv.decode import transfer as decode
from sglang_mixkv.prefill import machine as prefill
from sglang_mixkv.prefill import transfer
from tests.rig.books import wrong_books
from tests.sim.exhaustive.values import Violation, require

AGES = {"sent": 1, "progress": 1, "first_ready": 0, "arrived": 3, "_offered": 4}
"""Seconds by field: ages beyond these are alike, as `Steps` has it. Others: 5."""


SEGMENTS = (transfer.Segment, decode.Segment)  # which change; other structs do not


class Steps(Times):
    def __init__(self) -> None:
        super().__init__()
        self.shortest_wait = self.longest_wait = self.packing = self.late_ack = 1.0
        self.read = self.stall = 1.0
        self.whole_wait, self.slot_aside, self.early_room = 3.0, 4.0, 5.0


class Part(transfer.Part):
    """Its stamps follow from what they mark, so that equal worlds look equal."""

    def cut(self, job: int, slot: int, stamp: int) -> Any:
        stamp = self.opened.generation * 10 + self.announced + len(self.packing)
        return super().cut(job, slot, stamp)


class Prefill(prefill.Machine):
    def _opened(self, *args: Any) -> None:
        super()._opened(*args)
        for part in self._parts.values():
            part.__class__ = Part


_CONSTANT = ("_clock", "_seen", "_times", "limits", "_out", "_draw", "_segment_tokens")
_COUNTERS = ("_job", "_number")  # the numbers in use are in the fingerprint, the next one is not
_UNORDERED = {"_owner", "_held"}


def freeze(value: Any, now: float, seen: dict[int, int], name: str = "") -> Hashable:
    """A value that two objects share if they act alike from `now` on."""
    if value is None or isinstance(value, int | str | bytes | range):
        return value
    if isinstance(value, msgspec.Struct) and not isinstance(value, SEGMENTS):
        return value
    if isinstance(value, float):
        return min(AGES.get(name, 5), round(now - value))
    if isinstance(value, tuple | list | deque):
        return tuple(freeze(item, now, seen, name) for item in value)
    if isinstance(value, set):
        return tuple(sorted(value))
    if isinstance(value, dict):
        return tuple(
            (freeze(k, now, seen, name), freeze(v, now, seen, name)) for k, v in value.items()
        )
    if isinstance(value, Enum):
        return value.value
    if id(value) in seen:
        return "the same as", seen[id(value)]
    seen[id(value)] = len(seen)
    names = getattr(value, "__struct_fields__", None) or getattr(value, "__slots__", None)
    names = names or vars(value)
    fields = {k: getattr(value, k) for k in names if k not in _CONSTANT + _COUNTERS}
    for unordered in _UNORDERED & fields.keys():
        fields[unordered] = dict(sorted(fields[unordered].items()))
    return type(value).__name__, *(freeze(v, now, seen, k) for k, v in fields.items())


class Machine:
    """All states of a machine that were met, by number, and its answers."""

    def __init__(self) -> None:
        self._states: list[bytes] = []
        self._numbers: dict[Hashable, int] = {}
        self._answers: dict[Hashable, tuple[int, list[Any]]] = {}
        self.left: list[dict[str, int]] = []

    def number(self, machine: Any, now: float) -> int:
        clock = machine._clock if isinstance(machine, Prefill) else now
        key = freeze(machine, clock, {})
        if key not in self._numbers:
            require(not (wrong := wrong_books(machine)), f"books: {wrong}")
            self._numbers[key] = len(self._states)
            self._states.append(pickle.dumps((machine, now), 5))
            self.left.append(machine.left())
        return self._numbers[key]

    def handle(self, number: int, event: Any, seconds: float = 0.0) -> tuple[int, list[Any]]:
        key = number, event, seconds
        if key not in self._answers:
            machine, now = pickle.loads(self._states[number])
            try:
                machine.handle(event, now + seconds)
                actions = machine.actions()
            except Exception as error:
                raise Violation(f"{type(error).__name__} in {event}: {error}") from error
            self._answers[key] = self.number(machine, now + seconds), actions
        return self._answers[key]
