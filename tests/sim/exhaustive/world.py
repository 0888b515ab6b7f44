"""Both sides at once, each step of which is worked out once."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

from sglang_mixkv.decode import events as dv
from sglang_mixkv.decode.machine import Machine as Decode
from sglang_mixkv.prefill import events as pv
from tests.sim.exhaustive.decode import DecodeSide
from tests.sim.exhaustive.machine import Prefill
from tests.sim.exhaustive.prefill import PrefillSide
from tests.sim.exhaustive.values import NOTHING, Case, Moved, Outs, State, put, require, text


class Table:
    """Values by number, and numbers by value."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self.values: list[Any] = []

    def number(self, value: Hashable) -> int:
        found = self._numbers.setdefault(value, len(self.values))
        if found == len(self.values):
            self.values.append(value)
        return found


class Fact(NamedTuple):
    """Of a reader, what the world asks for. `rest`, `again`: it without its first message to
    prefill, and with that one once more behind the others."""

    link: tuple[int, int] | None
    head: Any
    rest: int
    again: int
    cold: bool
    over: bool  # the gate of its first request is closed
    failed: tuple[bool, ...]


class World:
    """Both sides. What one side can do is worked out once for each of its states."""

    def __init__(
        self,
        case: Case,
        prefill: type[Any] = Prefill,
        decode: type[Any] = Decode,
    ) -> None:
        self.case = case
        self.prefill = PrefillSide(case, prefill)
        self.decode = DecodeSide(case, decode)
        self.fronts, self.readers, self.views = Table(), Table(), Table()
        for name in [name for name in dir(self) if name.startswith("_of_")]:
            setattr(self, name, cache(getattr(self, name)))

    def start(self) -> State:
        readers = [self.readers.number(self.decode.start(rank)) for rank in range(2)]
        return self.fronts.number(self.prefill.start()), *readers

    def steps(self, state: State, disturbed: bool) -> list[tuple[str, State]]:
        """What can happen next by itself: time passes only if nothing else does."""
        front, *readers = state
        facts = [self._of_reader(number) for number in readers]
        require(disturbed or not any(f.cold for f in facts), "cold, and nothing was disturbed")
        found = []
        links = (facts[0].link, facts[1].link)
        for what, after, outs in self._of_front_steps(front, links):
            found.append((what, self._joined(after, readers, outs)))
        for i, fact in enumerate(facts):
            if fact.head is not None:
                what, after, outs = self._of_front_gets(front, links, fact.head)
                found.append((what, self._joined(after, put(readers, i, fact.rest), outs)))
            view = self._of_view(front, i)
            for what, after in self._of_reader_steps(readers[i], view, facts[1 - i].failed):
                found.append((what, (*state[: i + 1], after, *state[i + 2 :])))
        if not found and (later := self._tick(state)) != state:
            found.append(("time passes", later))
        elif not found:
            self._check_end(state)
        return found

    def disturbances(self, state: State) -> list[tuple[str, State]]:
        front, *readers = state
        facts = [self._of_reader(number) for number in readers]
        found, links = [], (facts[0].link, facts[1].link)
        if "early" in self.case.faults:
            found.append(("FAULT: time passes early", self._tick(state)))
        for what, after, outs in self._of_front_faults(front, links):
            found.append(("FAULT: " + what, self._joined(after, readers, outs)))
        for i, fact in enumerate(facts):
            if isinstance(fact.head, pv.Received) and "double" in self.case.faults:
                what, after, outs = self._of_front_gets(front, links, fact.head)
                after = self._joined(after, put(readers, i, fact.again), outs)
                found.append((f"FAULT: {what}, and again", after))
            view = self._of_view(front, i)
            for what, after in self._of_reader_faults(readers[i], view):
                found.append(("FAULT: " + what, (*state[: i + 1], after, *state[i + 2 :])))
        again = self.prefill.again(self.fronts.values[front])
        if self._may_come_again(facts) and again != self.fronts.values[front]:
            found.append(("FAULT: the number comes again", (self.fronts.number(again), *readers)))
        if "restart" in self.case.faults and not self.fronts.values[front].restarted:
            found.append(("FAULT: prefill starts anew", self._restart(state)))
        return found

    def _may_come_again(self, facts: Sequence[Fact]) -> bool:
        over = all(fact.over for fact in facts)
        return "anyhow" in self.case.faults or ("again" in self.case.faults and over)

    def _joined(self, front: int, readers: Sequence[int], outs: Outs) -> State:
        if outs == NOTHING:
            return front, *readers
        return front, *(self._of_sending(r, out) for r, out in zip(readers, outs, strict=True))

    def _tick(self, state: State) -> State:
        front, *readers = state
        links = tuple(self._of_reader(number).link for number in readers)
        after, outs = self._of_front_tick(front, links)
        readers = [self._of_reader_tick(r, self._of_view(front, i)) for i, r in enumerate(readers)]
        return self._joined(after, readers, outs)

    def _restart(self, state: State) -> State:
        front = self.prefill.restarted(self.fronts.values[state[0]])
        readers = [self.readers.values[number] for number in state[1:]]
        readers = [r._replace(up=(), connection=r.connection + 1) for r in readers]
        return self.fronts.number(front), *map(self.readers.number, readers)

    def _check_end(self, state: State) -> None:
        """Of a world in which nothing can happen any more, and time changes nothing."""
        self.prefill.check_end(self.fronts.values[state[0]])
        for number in state[1:]:
            self.decode.check_end(self.readers.values[number])

    # -- answers that are worked out once

    def _of_reader(self, number: int) -> Fact:
        reader = self.readers.values[number]
        head, rest = (*reader.up[:1], None)[0], reader._replace(up=reader.up[1:])
        return Fact(
            reader.link, head, self.readers.number(rest),
            self.readers.number(rest._replace(up=(*rest.up, head))),
            any(seat.verdict == "cold" for seat in reader.seats),
            reader.seats[0].reason is not None or not reader.alive,
            tuple(bool(seat.reason) for seat in reader.seats),
        )  # fmt: skip

    def _of_view(self, front: int, rank: int) -> int:
        return self.views.number(self.prefill.view(self.fronts.values[front], rank))

    def _of_sending(self, reader: int, out: tuple[Any, ...]) -> int:
        after = self.readers.values[reader]
        for message in out:
            if not isinstance(message, pv.ConnectionLost):
                after = after._replace(down=(*after.down, message))
            elif message not in after.up:
                after = after._replace(up=(*after.up, message))
        return self.readers.number(after)

    def _of_front_steps(self, front: int, links: Any) -> list[Any]:
        return self._moves(self.prefill.steps(self.fronts.values[front], links))

    def _of_front_faults(self, front: int, links: Any) -> list[Any]:
        return self._moves(self.prefill.faults(self.fronts.values[front], links))

    def _moves(self, moves: Iterator[tuple[str, Moved]]) -> list[Any]:
        return [(what, self.fronts.number(after), outs) for what, (after, outs) in moves]

    def _of_front_gets(self, front: int, links: Any, event: Any) -> tuple[str, int, Outs]:
        after, outs = self.prefill.handle(self.fronts.values[front], links, event)
        what = f"prefill gets {text(getattr(event, 'message', event))}"
        return what, self.fronts.number(after), outs

    def _of_front_tick(self, front: int, links: Any) -> tuple[int, Outs]:
        after, outs = self.prefill.handle(self.fronts.values[front], links, pv.Tick(), 1.0)
        return self.fronts.number(after), outs

    def _of_reader_tick(self, number: int, view: int) -> int:
        reader = self.readers.values[number]
        if not reader.alive:
            return number
        after = self.decode.handle(reader, self.views.values[view], dv.Tick(), 1.0)
        return self.readers.number(self.decode.late(after))

    def _of_reader_steps(self, number: int, view: int, others: Any) -> list[tuple[str, int]]:
        steps = self.decode.steps(self.readers.values[number], self.views.values[view], others)
        return [(what, self.readers.number(after)) for what, after in steps]

    def _of_reader_faults(self, number: int, view: int) -> list[tuple[str, int]]:
        faults = self.decode.faults(self.readers.values[number], self.views.values[view])
        return [(what, self.readers.number(after)) for what, after in faults]
