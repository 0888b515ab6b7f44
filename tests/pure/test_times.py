"""The machines' deadlines, tested just before and at each deadline, for several patiences."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from rig.channel.driven import BEGAN, PREFILL, READER, TOKENS, Decode, Prefill

from sglang_mixkv.channel.times import Times
from sglang_mixkv.draft.slot_format import SlotCheck

PATIENCE = (0.1, 1.0, 3.0)
BEFORE, AT = -1e-6, 1e-9  # offsets to a deadline; not 0, since the clock's numbers are rounded

patiently = pytest.mark.parametrize("patience", PATIENCE)


@pytest.mark.parametrize("patience", [*PATIENCE, 10.0])
def test_a_slot_is_reused_only_after_all_reads_of_it(patience: float) -> None:
    times, one = Times(patience), Times()
    assert times.slot_aside > times.delivery + times.unread + times.stall + times.read
    for name, value in vars(one).items():
        whole = value if name == "early_room" else value * patience
        assert vars(times)[name] == pytest.approx(whole), name
    assert (one.shortest_wait, one.longest_wait, one.whole_wait, one.packing) == (0.3, 1, 5, 1)
    assert (one.slot_aside, one.unread, one.read, one.stall, one.delivery) == (60, 30, 5, 5, 5)
    assert Times(patience, 123.0).early_room == 123.0


# ---------------------------------------------------------------- decode


class Late(NamedTuple):
    """The events of a room, in seconds since its OPEN with a patience of 1.

    `readies`: the times of its READYs. `arrives`: when its target arrives. `cold`: when it goes
    cold.
    """

    readies: tuple[float, ...]
    arrives: float
    cold: float


LATE = [
    Late((), 0.0, 0.3),  # waits at least 0.3 s
    Late((), 20.0, 20.3),  # the time before the target's arrival does not count
    Late((1.0,), 20.0, 21.0),  # waits at most 1 s
    Late((0.0,), 0.05, 0.35),
    Late((1.0,), 1.1, 1.4),  # 3 x 0.1
    Late((1.0,), 1.11, 1.44),  # 3 x as long as the target took
    Late((1.0,), 1.2, 1.8),
    Late((1.0,), 1.32, 2.28),
    Late((1.0,), 1.35, 2.35),
    Late((1.0, 1.5), 1.2, 2.1),  # the wait starts again with each READY
    Late((2.0,), 1.0, 1.3),  # a READY after the deadline does not count
    Late((1.2,), 1.0, 1.5),  # a READY after the target's arrival
    Late(tuple(1 + 0.29 * n for n in range(1, 40)), 1.0, 6.0),  # at most 5 s in all
    Late((0.0, *(2.5 + 0.9 * n for n in range(1, 40))), 2.0, 3.0),
    Late((0.0, *(2.0 + 0.9 * n for n in range(1, 40))), 2.0, 7.0),
    Late((1.0, *(1.2 + 0.55 * n for n in range(1, 4))), 1.2, 3.45),
]


@patiently
@pytest.mark.parametrize("case", LATE)
def test_a_room_waits_in_proportion_to_its_target(case: Late, patience: float) -> None:
    """A room waits, after its last progress, for three times as long as its target took.

    Each wait takes 0.3 s to 1 s, and all waits after the target's arrival take at most 5 s.
    """
    events = sorted([(at, "ready") for at in case.readies] + [(case.arrives, "arrive")])
    for when in (BEFORE, AT):
        rank = Decode(patience=patience)
        rank.open(1, segments=100, patience=patience)
        for at, what in events:
            if at * patience < case.cold * patience + when:
                rank.until(BEGAN + at * patience)
                getattr(rank, what)(1)
        rank.until(BEGAN + case.cold * patience + when)
        assert rank.wants(1) == (when == BEFORE), when
    assert rank.verdicts[1] == ("cold", "deadline")


@patiently
def test_each_announced_or_copied_segment_is_progress(patience: float) -> None:
    rank = Decode(patience=patience)
    rank.hung.add(PREFILL)
    rank.open(1, segments=99, patience=patience)
    rank.arrive(1)
    for _ in range(12):
        rank.wait(0.29 * patience)
        assert rank.wants(1)
        rank.ready(1)
    rank = Decode(patience=patience)
    rank.held_copies = []
    rank.open(1, segments=8, patience=patience)
    rank.ready(1, 8, last=True)
    rank.arrive(1)
    for job in list(rank.held_copies):
        rank.wait(0.29 * patience)
        assert rank.wants(1)
        rank.do(rank.machine.copied, (job,), SlotCheck.OK)
    assert rank.verdicts[1] == ("warm", "")


@patiently
def test_a_complete_room_is_not_late(patience: float) -> None:
    rank = Decode(patience=patience)
    rank.open(1, segments=2, patience=patience)
    rank.ready(1, 2, last=True)
    assert rank.verdicts[1] == ("warm", "")
    rank.arrive(1)
    rank.wait(10 * patience)
    assert rank.strikes() == 0


@pytest.mark.parametrize("theirs", PATIENCE)
@pytest.mark.parametrize("ours", PATIENCE)
def test_the_smaller_patience_limits_the_use_of_a_slot(ours: float, theirs: float) -> None:
    """A room goes cold before prefill may reuse its slot, even if its target has not arrived.

    The smaller patience of both sides decides. The segment waits for a local slot, is being read,
    or this rank is stopped.
    """
    limits = Times(min(ours, theirs))
    for waits, limit, reason in (
        ("slot", limits.unread, "slots"), ("read", limits.read, "read"),
        ("stop", limits.stall, "stalled"),
    ):  # fmt: skip
        for when in (BEFORE, AT):
            if waits == "stop" and limit < 0.5:
                continue  # the limit is not longer than the time between two ticks
            rank = Decode(8, patience=ours)
            if waits == "slot":
                rank.slots.free_slots.clear()
            rank.hung.add(PREFILL)
            rank.open(1, patience=theirs)
            rank.ready(1)
            if waits == "stop":
                rank.now = BEGAN + limit + when * 10
                rank.do(rank.machine.tick)
            else:
                rank.until(BEGAN + limit + when, 0.1 * min(ours, theirs) / ours)
            assert rank.wants(1) == (when == BEFORE), (waits, when)
        assert (waits == "stop" and limit < 0.5) or rank.verdicts[1] == ("cold", reason)


@patiently
def test_a_read_that_ends_late_is_not_used(patience: float) -> None:
    for late in (False, True):
        rank = Decode(patience=patience)
        rank.hung.add(PREFILL)
        rank.open(1, segments=1, patience=patience)
        rank.ready(1, last=True)
        rank.until(BEGAN + rank.times.read * 0.999)
        rank.now = BEGAN + rank.times.read + (1e-6 if late else -1e-6)
        rank.end_reads()
        assert rank.verdicts[1] == (("cold", "read") if late else ("warm", ""))


# ---------------------------------------------------------------- prefill


def slow(patience: float, tokens: int = 400, readers: int = 1) -> Prefill:
    """Return a rank of eight slots with a large request, whose reader has acknowledged nothing.

    Four segments are announced, since one reader may hold four of eight slots.
    """
    rank = Prefill(8, patience)
    rank.slow.add(READER)
    rank.open(1, readers=readers)
    rank.begin(1, 1, tokens)
    assert len(rank.unread) == 4
    return rank


PROGRESS = {
    "a slot is acknowledged": lambda rank, n: rank.acknowledge(1),
    "a reader opens": lambda rank, n: (
        rank.slow.add(b"reader%02d" % n), rank.open(1, b"reader%02d" % n, 100 + n, readers=99),
    ),
}  # fmt: skip


@patiently
@pytest.mark.parametrize("what", PROGRESS)
@pytest.mark.parametrize("sent_at", [0.0, 0.5, 20.0])
def test_packing_with_progress_is_not_given_up(what: str, sent_at: float, patience: float) -> None:
    """A request is given up after `packing` seconds without progress, not while it progresses.

    Progress later than `whole_wait` after the target was sent does not count.
    """
    rank = slow(patience, readers=99)
    limit = rank.times.packing
    rank.until(BEGAN + sent_at * patience)
    rank.do(rank.machine.target_sent, 1)
    for number in range(5):
        rank.wait(limit + 10 * BEFORE)
        assert rank.fails == {}, number
        PROGRESS[what](rank, number)
    rank.wait(limit / 2)
    PROGRESS[what](rank, 5)
    rank.until(BEGAN + sent_at * patience + rank.times.whole_wait + limit + BEFORE)
    assert rank.fails == {}
    assert not rank.pages_released
    rank.wait(-BEFORE + AT)
    assert rank.fails[1] == "slow"
    assert rank.pages_released == {1: rank.now}


@patiently
def test_an_unopened_request_waits_for_the_packing_limit(patience: float) -> None:
    for opens in (None, BEFORE, AT):
        rank = Prefill(patience=patience)
        rank.begin(1, 1, 8)
        rank.wait(7.0)
        rank.do(rank.machine.target_sent, 1)
        limit = rank.now + rank.times.packing
        rank.until(limit + (opens or BEFORE))
        assert bool(rank.pages_released) == (opens == AT)
        if opens is not None:
            rank.open(1)
            assert rank.sent == ({} if opens == AT else {1: 8}), "the OPEN is for the next request"
        rank.until(limit + AT)
        assert 1 in rank.pages_released
        assert rank.notes.count((b"", "unopened")) == (opens != BEFORE)


ENDS = {
    "all segments are packed": lambda rank: rank.acknowledge(),
    "the reader closes": lambda rank: rank.close(1),
    "the reader disconnects": lambda rank: rank.do(rank.machine.connection_lost, READER),
    "the last READY cannot be sent": lambda rank: (
        rank.unreachable.add(READER), rank.acknowledge(),
    ),
}  # fmt: skip


@pytest.mark.parametrize("sent_first", [True, False])
@pytest.mark.parametrize("how", ENDS)
def test_success_waits_for_packing_alone(how: str, sent_first: bool) -> None:
    """Pages are released as soon as packing ends, whether or not the target was sent before.

    Reads may still be in flight.
    """
    rank = slow(1.0, tokens=8 * TOKENS)
    if sent_first:
        rank.do(rank.machine.target_sent, 1)
    rank.wait(0.5)
    assert not rank.pages_released
    ENDS[how](rank)
    assert rank.pages_released == {1: BEGAN + 0.5}
    rank.do(rank.machine.target_sent, 1)
    assert len(rank.pages_released) == 1
    assert len(rank.slots._published) == len(rank.unread)
    assert rank.violations == []


@patiently
def test_a_slot_without_an_ack_expires(patience: float) -> None:
    rank = slow(patience)
    rank.close(1)
    rank.until(BEGAN + rank.times.slot_aside + BEFORE)
    assert len(rank.slots._published) == 4
    rank.wait(-BEFORE + AT)
    assert len(rank.slots._published) == 0
    assert [what for _, what in rank.notes] == ["expired"] * 4
    rank.acknowledge()
    assert rank.notes[4:] == [(b"", "unknown_ack")] * 4


def test_an_early_open_expires() -> None:
    for when in (BEFORE, AT):
        rank = Prefill()
        rank.open(1)
        rank.until(BEGAN + rank.times.early_room + when, 1.0)
        rank.begin(1, 1, 8)
        assert rank.sent == ({1: 8} if when == BEFORE else {})
        assert rank.notes == ([] if when == BEFORE else [(READER, "early")])


@pytest.mark.parametrize("patience", [0.1, 1.0, 3.0])
def test_the_last_resort_comes_after_all_deadlines(patience: float) -> None:
    """SGLang's scheduler decides by itself only after every deadline of the channel thread.

    The scheduler decides within twice the longest deadline.
    """
    times = Times(patience)
    assert times.whole_wait + times.longest_wait < times.last_resort <= 2 * times.whole_wait
    assert times.packing < times.last_resort
