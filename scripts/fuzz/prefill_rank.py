"""A prefill rank under mutated OPEN, ACK and FAIL messages; machines.py says what is a finding."""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Iterator
from typing import Any
from unittest import mock

from machines import HOSTILE, STRANGER, TOKENS, VICTIM, Rank, run, segment_tokens, sent, then
from mutate import pack
from parsers import SLOT_BYTES
from sglang_mixkv.prefill.rooms import Rooms

from sglang_mixkv.channel import messages
from sglang_mixkv.channel.messages import NO_SLOT, Ack, Fail, Open, Ready
from sglang_mixkv.prefill import events as ev
from sglang_mixkv.prefill import waiting

PREFILL, ROOMS, MAX_WAITING = b"prefill_", (7, 8, 9), 4


class Prefill(Rank):
    """`announced`: tokens of the victim's prompt. `ready`: by connection, not acknowledged yet."""

    kinds = (Open, Ack, Fail)
    tick = ev.Tick()

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self.rooms = Rooms(
            PREFILL, range(4), segment_tokens, self.slots, self.times, self.stamps.__next__
        )
        self.jobs: deque[ev.Pack] = deque()
        self.ready: dict[bytes, deque[Ready]] = defaultdict(deque)
        self.uses = itertools.count(1)
        self.connections: set[bytes] = set()
        self.sglang = [self.requests(room) for room in ROOMS]
        self.announced, self.settled = 0, False
        opened = Open(2, self.number, self.number, PREFILL, self.instance, 1, (0, 4), 0, SLOT_BYTES)
        self.feed(ev.Begin(0, self.number))
        self.feed(ev.AddChunk(0, 0, TOKENS, last=True))
        self.feed(ev.Received(VICTIM, opened))

    def requests(self, room: int) -> Iterator[ev.Event]:
        """SGLang's events of one room number, for ever."""
        half = TOKENS // 2
        for use in self.uses:
            yield ev.Begin(use, room)
            yield ev.AddChunk(use, 0, half, last=False)
            yield ev.AddChunk(use, half, half, last=True, pending=True)
            yield ev.ChunkWritten(use)
            yield ev.TargetSent(use)
            yield ev.End(use)

    def receive(self, which: int, message: Any) -> None:
        connection = b"%d" % (which % 3)
        self.connections.add(connection)
        self.feed(ev.Received(connection, message))
        bound = 2 * MAX_WAITING * len(self.connections)  # open ones, and ended ones
        assert self.rooms.left().get("waiting", 0) <= bound, "too much waits"

    def step(self, what: int, which: int) -> None:
        if what == 5:
            self.feed(next(self.sglang[which % 3]))
        elif what == 6:
            self.end_job("it failed" if which == 7 else "")
        elif which < 24:
            self.acknowledge(b"%d" % (which % 3))
        else:
            self.feed(ev.ConnectionLost(b"%d" % (which % 3)))

    def acknowledge(self, connection: bytes) -> None:
        if self.ready[connection]:
            ready = self.ready[connection].popleft()
            actions = self.feed(ev.Received(connection, Ack(ready.slot, ready.stamp)))
            unknown = any(isinstance(action, ev.Note) for action in actions)
            assert connection != VICTIM or not unknown, "a slot of the victim is not its own"

    def end_job(self, error: str = "") -> None:
        if self.jobs:
            job = self.jobs.popleft()
            self.feed(ev.Packed(job.job, error=error if job.use else ""))

    def wait(self, seconds: float) -> None:
        """The victim acknowledges what it was sent."""
        while self.ready[VICTIM]:
            self.acknowledge(VICTIM)
        super().wait(seconds)

    def finish(self) -> None:
        for use in range(1, next(self.uses)):
            self.feed(ev.End(use))
        for _ in range(16):
            while self.jobs:
                self.end_job()
            self.wait(1.0)
            if self.announced == TOKENS:
                break
        assert self.announced == TOKENS, "the victim is not served"
        assert self.settled, "the victim's request waits"
        self.feed(ev.End(0))

    def do(self, action: ev.Action) -> None:
        match action:
            case ev.Pack(heads=heads, count=count, offset=offset):
                assert 0 <= heads.start < heads.stop <= 4, "heads of another rank"
                assert 0 < count <= segment_tokens(len(heads)), "more than a slot"
                assert 0 <= offset <= offset + count <= TOKENS, "tokens outside the chunk"
                self.jobs.append(action)
            case ev.Send(connection=connection, message=message):
                assert messages.decode(messages.encode(message)) == message
                if isinstance(message, Ready) and message.slot != NO_SLOT:
                    self.ready[connection].append(message)
                if connection == VICTIM:
                    assert isinstance(message, Ready), f"the victim is refused: {message}"
                    assert message.first_token == self.announced, "a gap"
                    self.announced += message.count
            case ev.Settled(use=0):
                self.settled = True


@mock.patch.object(waiting, "MAX_ENDED", MAX_WAITING)
@mock.patch.object(waiting, "MAX_WAITING", MAX_WAITING)
def target(data: bytes) -> None:
    run(Prefill(data), data)


def opened(generation: int = 10, room: int = 7, reader: bytes = HOSTILE, readers: int = 1) -> Open:
    return Open(2, room, generation, PREFILL, reader, readers, (0, 4), 0, SLOT_BYTES)


PACKED = then(*(6, 6, 6, 7, 7) * 5)
WHOLE = then(5, 5, 6, 6, 7, 5, 5) + PACKED + then(5, 4, 5)  # one request
GONE = [Fail(7, 10, "closed", "a reason", HOSTILE), Fail(7, 10, "deadline")]
SEEDS = [pack(steps) for steps in (
    sent(opened()) + WHOLE,
    then(5, 5) + sent(opened(readers=2)) + then(6, 6) + sent(opened(20, reader=STRANGER), by=1)
    + then(5, 5) + PACKED + then(5, 4, 7, 5),
    sent(*(opened(10 + room, room) for room in (7, 8, 5, 6, 4))) + WHOLE + then(5, 5, which=1),
    sent(GONE[0]) + WHOLE + sent(opened(11), Ack(3, 99)) + then(7, which=24) + WHOLE,
    sent(opened()) + then(5, 5) + sent(opened(11), GONE[1], opened(12)) + then(5) * 4 + WHOLE,
)]  # fmt: skip
