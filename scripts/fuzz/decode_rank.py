"""A decode rank under mutated READY and FAIL messages; machines.py says what is a finding."""

from __future__ import annotations

from collections import defaultdict, deque
from typing import Any

from machines import HOSTILE, STRANGER, TOKENS, VICTIM, Rank, run, segment_tokens, sent, then
from mutate import pack
from parsers import BASE, DRAFT, MEMORY, SLOT_BYTES, SLOTS
from sglang_mixkv.decode.rooms import Rooms

from sglang_mixkv.channel import messages
from sglang_mixkv.channel.messages import Ack, Fail, Ready
from sglang_mixkv.decode import events as ev
from sglang_mixkv.draft.layout import SLOT_OVERHEAD

ALONE, SHARED, LATE = 10, 11, 12  # generations; of LATE an earlier forward still runs
RESULTS = (ev.Result.DONE, ev.Result.STALE, ev.Result.ERROR)


class Decode(Rank):
    """`open`: heads of each peer, by generation. `at`: tokens that were unpacked of each of them.
    `sent`: what was announced; `victim`: how many tokens it has announced, by generation."""

    kinds = (Ready, Fail)
    tick = ev.Tick()

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self.rooms = Rooms(self.instance, self.slots, SLOT_BYTES, self.times)
        self.reads: dict[int, ev.StartRead] = {}
        self.landed: dict[int, ev.StartRead] = {}
        self.jobs: deque[ev.Unpack | ev.Clear] = deque()
        self.at: dict[tuple[int, bytes], int] = defaultdict(int)
        self.sent: set[tuple[bytes, int, int]] = set()
        self.victim, self.warm, self.ending = {self.number: 0, SHARED: 0}, False, False
        self.open = {
            self.number: {VICTIM: range(4)}, ALONE: {HOSTILE: range(4)}, LATE: {HOSTILE: range(4)},
            SHARED: {HOSTILE: range(2), VICTIM: range(2, 4)},
        }  # fmt: skip
        for generation, heads in self.open.items():
            sources = tuple(
                ev.Source(peer, of, 1, SLOTS, segment_tokens(len(of))) for peer, of in heads.items()
            )
            late = generation == LATE
            self.feed(ev.OpenRoom(generation, 7, sources, 0, TOKENS, pending=late))

    def receive(self, which: int, message: Any) -> None:
        self.announce((HOSTILE, STRANGER)[which % 2], message)

    def announce(self, peer: bytes, message: Ready | Fail) -> None:
        if isinstance(message, Ready):
            self.sent.add((peer, message.slot, message.stamp))
        self.feed(ev.Received(peer, message))

    def step(self, what: int, which: int) -> None:
        generation = (ALONE, SHARED, LATE)[which % 3]
        if what == 5:
            self.end_reads(HOSTILE, 1, failed=which % 4 == 3)
        elif what == 6:
            self.end_job(RESULTS[which % 3])
        elif which < 24:
            self.feed((ev.TargetArrived, ev.ForwardDone)[which % 2](generation))
        elif which < 28:
            self.feed(ev.PeerLost(HOSTILE))
        else:
            self.close(generation, "aborted")

    def end_reads(self, peer: bytes, count: int, failed: bool = False) -> None:
        """The oldest of this peer."""
        for number in [n for n, read in self.reads.items() if read.peer == peer][:count]:
            read = self.reads.pop(number)
            self.landed[read.local_slot] = read
            for kind in (ev.ReadFailed, ev.ReadSettled) if failed else (ev.ReadDone,):
                self.feed(kind(number))

    def end_job(self, result: ev.Result = ev.Result.DONE) -> None:
        if self.jobs:
            job = self.jobs.popleft()
            if job.generation not in self.open:
                result = ev.Result.CLOSED
            elif job.generation == self.number:
                result = ev.Result.DONE
            self.feed(ev.JobDone(job.job, result))

    def close(self, generation: int, reason: str = "") -> None:
        if self.open.pop(generation, None):
            self.feed(ev.CloseRoom(generation, reason))

    def wait(self, seconds: float) -> None:
        """The victim announces five tokens more, and its reads end; so do all copies."""
        for generation, at in self.victim.items():
            if at < TOKENS:
                self.victim[generation] = at + 5
                slot, last = at // 5, at + 5 == TOKENS
                ready = Ready(7, generation, slot, slot, next(self.stamps), at, 5, last)
                self.announce(VICTIM, ready)
        for peer in (VICTIM, HOSTILE) if self.ending else (VICTIM,):
            self.end_reads(peer, SLOTS)
        while self.jobs:
            self.end_job()
        super().wait(seconds)

    def finish(self) -> None:
        self.ending = True
        for _ in range(2 * TOKENS // 5):
            self.wait(0.0 if self.warm else 1.0)
        assert self.warm, "the victim's room is not warm"
        for generation in list(self.open):
            self.close(generation)

    def do(self, action: ev.Action) -> None:
        match action:
            case ev.Send(peer=peer, message=Ack(slot=slot, stamp=stamp)):
                assert (peer, slot, stamp) in self.sent, "an ACK of what the peer has not sent"
            case ev.Send(message=message):
                assert messages.decode(messages.encode(message)) == message
            case ev.StartRead(tokens=tokens, heads=heads, remote_slot=slot):
                size = SLOT_OVERHEAD + tokens * DRAFT.bytes_per_token(heads)
                assert size <= SLOT_BYTES, "more than a slot"
                assert MEMORY.holds(BASE + slot * SLOT_BYTES, size), "a read outside the slots"
                self.reads[action.read] = action
            case ev.Unpack(generation=generation, heads=heads, first_token=first, tokens=tokens):
                read = self.landed.pop(action.slot)
                assert self.open[generation][read.peer] == heads, "heads of another peer"
                assert (read.tokens, read.heads) == (tokens, len(heads)), "another read's rows"
                assert self.at[generation, read.peer] == first, "rows that come twice, or a gap"
                assert first + tokens <= TOKENS, "rows outside the room"
                self.at[generation, read.peer] += tokens
                self.jobs.append(action)
            case ev.Clear(first_token=first, end=end):
                assert 0 <= first < end <= TOKENS, "cleared rows outside the room"
                self.jobs.append(action)
            case ev.Verdict(generation=self.number, state=state):
                self.warm = state is ev.State.WARM
            case ev.Forget(peer=peer):
                assert peer != VICTIM, "the victim is forgotten"


def target(data: bytes) -> None:
    run(Decode(data), data)


def ready(generation: int, count: int) -> list[Ready]:
    return [
        Ready(7, generation, at // count, at // count, 99 + at, at, min(count, TOKENS - at),
              last=at + count >= TOKENS)
        for at in range(0, TOKENS, count)
    ]  # fmt: skip


GONE = [Fail(7, ALONE, "closed", "a reason", HOSTILE), Fail(7, ALONE, "slow")]
SEEDS = [pack(steps) for steps in (
    [step for part in ready(ALONE, 7) for step in sent(part) + then(5, 6)],
    sent(*ready(SHARED, 15)) + then(5, 5, 4, 6, 5) + then(7, which=4),
    sent(*ready(LATE, 7)) + then(5, 5) + then(7, which=5) + then(5, 5, 4, 4, 5, 5, 4),
    sent(*ready(ALONE, 7)[:2]) + sent(*GONE, by=1) + sent(*GONE) + then(7, which=24),
    sent(Fail(7, SHARED, "restarted"), *ready(SHARED, 15)[1:]) + then(5, 4) + then(7, which=29),
)]  # fmt: skip
