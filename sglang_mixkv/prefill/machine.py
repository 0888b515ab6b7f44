r"""A prefill rank's state machine: calls in, actions out, time as an argument. No I/O.

A *room* is one request on this rank: one use of a room number by SGLang. A *part* is what one
reader, a decode rank, gets of it. An OPEN may come before SGLang's sender; its part waits for the
room then. Chunks wait in the room for their readers, and are cut into segments that fit a slot:

    part     opened --Pack--> packing --READY--> ... --last READY--> complete
                 \__________________ FAIL, either way ______________/  over

A room is *settled* when each of its readers has a part, and each part is complete or over. The
sender's Success waits for that and for nothing else, so that no page is given back while it is
packed. What is in slots then is read, and acknowledged, later. Packing that makes no progress
after SGLang's own transfer is given up: the reader is notified, the room settles, the request goes
on. Prefill never fails a request.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from sglang_mixkv.channel.messages import Ack, Fail, Open, Ready, fail
from sglang_mixkv.channel.slot_format import SlotCheck
from sglang_mixkv.channel.slots import SlotPool
from sglang_mixkv.channel.times import Times
from sglang_mixkv.draft.copier import Outcome
from sglang_mixkv.prefill import actions as act
from sglang_mixkv.prefill.transfer import Chunk, Connection, Packing, Part, Room, Segment, Use

MAX_OPEN, MAX_ALL = 1 << 15, 1 << 17
"""Parts of one connection, and of all. Each takes some 500 bytes. Readers can be invented without
end by anybody with access to the port, so the connection counts."""
STEP = 1.0  # a rank's clock advances by so much at most between two calls


class Machine:
    """All rooms of one prefill rank.

    `heads`: those of the drafter on this rank. `segment_tokens`, `draw_stamp`: see Packing.
    """

    def __init__(
        self, instance: bytes, heads: range, segment_tokens: Callable[[int, int], int],
        slots: SlotPool, times: Times, draw_stamp: Callable[[], int],
    ) -> None:  # fmt: skip
        self._instance, self._heads, self._times = instance, heads, times
        self.slots = slots
        self._packing = Packing(segment_tokens, slots, draw_stamp)
        self._uses: dict[Use, Room] = {}
        self._current: dict[int, Room] = {}  # by number: that of the newest sender
        self._early: dict[int, Room] = {}  # by number: opened before SGLang's sender is here
        self._parts: dict[int, Part] = {}  # by generation
        self._open: Counter[Connection] = Counter()  # parts
        self._out: list[act.Action] = []
        self._clock, self._seen = 0.0, float("inf")

    def advance(self, now: float) -> None:
        """Set the clock before each call below. It stands still while this process does: a
        slot's time without an ACK counts from when its READY went out, and a stopped process sends
        it only when it goes on."""
        self._clock += min(max(0.0, now - self._seen), STEP)
        self._seen = now

    def actions(self) -> list[act.Action]:
        """Return the actions since the last time, in the order in which they must be done."""
        packing = self._packing
        for part, ready, chunks in packing.announce(self._clock) if packing.announcing else ():
            part.room.progress = self._clock
            self._out.append(act.Send(part.connection, ready, chunks))
            if ready.last:
                self._settle(part.room)
        if packing.turns.owners and (segments := packing.start()):
            self._out.append(act.Pack(segments))
        actions, self._out = self._out, []
        return actions

    # -- SGLang's side

    def begin(self, use: Use, number: int) -> None:
        """SGLang made a sender for the room of this number. Settled follows for it, unless `end`
        comes before."""
        stale = self._current.get(number)
        if stale is not None:
            self._fail(stale.parts.values(), "aborted", "another request has its room number")
        room = self._early.pop(number, None) or Room(number, self._clock)
        room.use, room.progress = use, self._clock
        self._current[number] = self._uses[use] = room
        self._settle(room)

    def add_chunk(
        self, use: Use, first: int, count: int, last: bool, pages: Any = None,
        pending: bool = False,
    ) -> None:  # fmt: skip
        """SGLang handed a chunk over: tokens [first, first + count) of the prompt, in `pages`.

        `pending`: their KV may not be written yet; `chunk_written` follows. `last`: no more come.
        Chunks of one use follow each other in the prompt, and are written in their order.
        """
        if (room := self._uses.get(use)) is not None:
            room.chunks.append(Chunk(use, first, count, last, pages, pending))
            self._packing.add(room.note_written(pending=False))

    def chunk_written(self, use: Use) -> None:
        """The first of the use's pending chunks is."""
        if (room := self._uses.get(use)) is not None:
            self._packing.add(room.note_written(pending=True))

    def target_sent(self, use: Use) -> None:
        """SGLang's own transfer of the use has succeeded. From now on packing that makes no
        progress is given up."""
        room = self._uses.get(use)
        if room is not None and room.sent is None:
            room.sent = self._clock
            self._settle(room)

    def end(self, use: Use, reason: str = "") -> None:
        """SGLang is done with the sender, and its gate is closed. `reason`: why it failed."""
        room = self._uses.pop(use, None)
        if room is None:
            return
        self._fail(room.parts.values(), "aborted", reason or "the sender was cleared")
        for part in room.parts.values():
            self._forget(part)
        if self._current.get(room.number) is room:
            del self._current[room.number]

    # -- readers

    def received(self, connection: Connection, message: Open | Ack | Fail) -> None:
        """A reader's message. `connection`: what a reply is addressed to."""
        match message:
            case Open() as opened:
                self._opened(connection, opened)
            case Ack(slots):
                for slot in self.slots.acknowledge(slots, self._clock):
                    self._out.append(act.Note("unknown_ack", b"", f"slot {slot}"))
            case Fail(generation=generation):
                if (part := self._parts.get(generation)) is not None:
                    self._over(part)

    def unsent(self, message: Ready | Fail) -> None:
        """This message did not leave, and never will."""
        if isinstance(message, Ready):
            self.slots.acknowledge((one.slot, one.stamp) for one in message.segments)
        if (part := self._parts.get(message.generation)) is not None:
            self._over(part)

    def _opened(self, connection: Connection, opened: Open) -> None:
        number, reader, generation = opened.room, opened.reader, opened.generation
        if why := self._refusal(opened):
            self._refuse(connection, opened, *why)
            return
        if generation in self._parts:
            return  # it has come before
        room = self._current.get(number)
        is_next = room is None or reader in room.parts or room.settled or room.missing <= 0
        for at in (room, self._early.get(number)):
            former = at.parts.get(reader) if at is not None else None
            if former is not None:  # it has begun another request with this number
                if former.opened.generation > generation:
                    return  # late
                self._over(former)
                if former.room.use is None:
                    del former.room.parts[reader]
                    self._forget(former)
        if self._open[connection] >= MAX_OPEN or len(self._parts) >= MAX_ALL:
            self._refuse(connection, opened, "full", "too many of its rooms are open")
            return
        if room is None or is_next:
            room = self._early.pop(number, None) or Room(number, self._clock)
            self._early[number] = room  # the longest untouched is first
        part = Part(room, opened, connection, self._packing.limit(opened) if opened.wanted else 0)
        room.parts[reader] = self._parts[generation] = part
        room.readers, room.progress = max(room.readers, opened.readers), self._clock
        self._open[connection] += 1
        self.slots.sign(reader, self._clock)
        self._packing.add((part,))
        self._settle(room)

    def _refusal(self, opened: Open) -> tuple[str, str] | None:
        """A code and a detail where this rank cannot serve it."""
        wanted, held = opened.wanted, self._heads
        if opened.prefill != self._instance:
            return "restarted", "this prefill rank is another instance than the one addressed"
        if wanted and not (held.start <= wanted.start and wanted.stop <= held.stop):
            return "heads", f"heads {list(opened.heads)} of a rank with {held.start}..{held.stop}"
        if wanted and self._packing.limit(opened) < 1:
            return "heads", "a token is larger than a slot; raise --mixkv-staging-mb"
        return None

    def _refuse(self, connection: Connection, opened: Open, code: str, detail: str) -> None:
        self._out.append(act.Note(code, opened.reader, detail))
        self._out.append(act.Send(connection, fail(opened.room, opened.generation, code, detail)))

    def _forget(self, part: Part) -> None:
        del self._parts[part.opened.generation]
        self._open[part.connection] -= 1
        if not self._open[part.connection]:
            del self._open[part.connection]

    def connection_lost(self, connection: Connection) -> None:
        """Nothing can be sent over it any more. What was sent may have arrived."""
        for part in [p for p in self._parts.values() if p.connection == connection]:
            self._over(part)

    # -- parts

    def _over(self, part: Part) -> None:
        """Nothing more is packed, or announced, for this reader."""
        if not part.ended:
            part.over = True
            self._packing.drop(part)
            self._settle(part.room)

    def _fail(self, parts: Iterable[Part], code: str, detail: str) -> None:
        for part in parts:
            if not part.ended:
                self._refuse(part.connection, part.opened, code, detail)
                self._over(part)

    def _settle(self, room: Room, given_up: bool = False) -> None:
        if room.use is not None and not room.settled and (given_up or room.all_ended):
            room.settled = True
            self._out.append(act.Settled(room.use))

    # -- packing

    def copied(self, segments: Sequence[Segment], outcome: Outcome = SlotCheck.OK) -> None:
        """These segments of Pack actions have all ended so. If it is OK, their bytes are in the
        slots."""
        if failed := self._packing.end(segments, outcome):
            self._fail(failed, "pack", repr(outcome)[:300])

    # -- time

    def tick(self) -> None:
        """Time has passed. Needed at least ten times a second while a room is open."""
        for room in self._uses.values():
            if room.sent is None or room.settled:
                continue
            if self._clock - max(room.sent, room.progress) >= self._times.packing:
                self._give_up(room)
        while self._early:
            room = next(iter(self._early.values()))
            if self._clock - room.progress < self._times.early_room:
                break
            del self._early[room.number]
            for part in room.parts.values():
                self._forget(part)
                if not part.ended:
                    detail = f"room {room.number}: no request came"
                    self._out.append(act.Note("early", part.reader, detail))
        for slot in self.slots.expire(self._clock):
            self._out.append(act.Note("expired", b"", f"slot {slot} was never acknowledged"))

    def _give_up(self, room: Room) -> None:
        if room.missing > 0:
            detail = f"room {room.number}: {room.missing} readers have not opened it"
            self._out.append(act.Note("unopened", b"", detail))
        self._fail(room.parts.values(), "slow", "packing made no progress")
        self._settle(room, given_up=True)

    # -- actions that raised, and what is outstanding

    def on_action_failed(self, action: act.Action, error: Exception) -> None:
        """This action raised, and was not done."""
        match action:
            case act.Pack(segments):
                self.copied(segments, error)
            case act.Send(message=message):
                self.unsent(message)

    def outstanding(self) -> dict[str, int]:
        """Count by name what requests still hold; empty on an idle rank."""
        found = {
            "rooms": len(self._uses), "waiting": len(self._early), "jobs": len(self._packing),
            "published": self.slots.published, "parts": len(self._parts),
        }  # fmt: skip
        return {name: count for name, count in found.items() if count}
