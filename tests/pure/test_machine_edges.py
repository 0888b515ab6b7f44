"""Limits of the two machines, tested exactly at the limit, and the exact texts of messages."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from rig.channel.driven import BEGAN, PREFILL, READER, SLOTS, TOKENS, Decode, Prefill
from rig.channel.invariants import outstanding

from sglang_mixkv.channel.messages import Ack, Fail
from sglang_mixkv.channel.slots import RoundRobin, SlotPool, list_of, quota_of, share_of, slots_of
from sglang_mixkv.channel.times import Times
from sglang_mixkv.decode import actions as dact
from sglang_mixkv.decode.transfer import RecentRooms
from sglang_mixkv.draft.slot_format import HEADER, SlotCheck
from sglang_mixkv.prefill import machine

AT = BEGAN


@pytest.mark.parametrize(
    ("staging_mb", "slots", "rows"),
    [(1, 64, 16), (2, 64, 32), (100, 64, 1600), (255, 64, 4080), (256, 64, 4096), (259, 64, 4096),
     (260, 65, 4096), (683, 170, 4096), (1024, 256, 4096), (16384, 4096, 4096)],
)  # fmt: skip
def test_slots_follow_the_staging_buffer(staging_mb: int, slots: int, rows: int) -> None:
    """The number and the size of slots follow from the size of the staging buffer.

    `rows`: the size of a slot's rows in KiB. The header takes another 4 KiB.
    """
    assert slots_of(staging_mb) == (slots, (rows << 10) + 4096)
    assert slots * rows <= staging_mb << 10 < (slots + 1) * rows


def test_every_staging_buffer_gives_valid_slots() -> None:
    """Every size of the staging buffer gives at least 64 slots of a size that kernels can copy."""
    for staging_mb in range(1, 16385):
        count, size = slots_of(staging_mb)
        assert (count >= 64, size % HEADER, size // 16 < 1 << 29) == (True, 0, True)
    assert HEADER % 16 == 0


def test_quotas_and_list_lengths_are_as_documented() -> None:
    """Quotas and list lengths are as documented; a READY or a read has at most eight segments."""
    assert (quota_of(SLOTS), list_of(SLOTS), list_of(4096)) == (32, 8, 8)
    assert [list_of(count) for count in (2, 8, 15, 16, 24, 40)] == [1, 1, 1, 2, 3, 5]
    quotas = {2: 2, 3: 2, 4: 2, 5: 2, 16: 8, 2047: 1023, 2048: 1024, 2050: 1024, 4096: 1024}
    assert {count: quota_of(count) for count in quotas} == quotas


def test_the_documented_limits_of_open_readers() -> None:
    assert (machine.MAX_OPEN, machine.MAX_ALL) == (32_768, 131_072)


@pytest.mark.parametrize(
    ("after", "doubtful"), [(0.0, True), (599.9, True), (600.0, True), (600.1, False)]
)
def test_a_room_number_is_ambiguous_for_600_s(after: float, doubtful: bool) -> None:
    numbers = RecentRooms(600.0)
    assert not numbers.is_ambiguous(7, AT)
    assert numbers.is_ambiguous(7, AT + after) is doubtful


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 500), st.booleans())))
def test_ambiguity_depends_on_a_numbers_own_last_request(
    asked: list[tuple[int, int, bool]],
) -> None:
    """A room number is ambiguous for 600 s after its own last request, unless that was warm.

    Other numbers do not matter, and numbers that are no longer ambiguous are dropped.
    """
    numbers, last, now = RecentRooms(600.0), dict[int, float](), AT
    for number, after, warm in asked:
        now += after
        last = {one: since for one, since in last.items() if now - since <= 600.0}
        assert numbers.is_ambiguous(number, now) is (number in last)
        last[number] = now
        assert numbers._since == last
        if warm:
            numbers.was_warm(number)
            del last[number]


def test_a_token_that_just_fits_a_slot_is_served() -> None:
    for tokens, fails in ((1, {}), (0, {1: "heads"})):
        rank = Prefill(most=tokens)
        rank.open(1)
        assert rank.fails == fails


@pytest.mark.parametrize(("less", "held"), [(0.01, True), (0.0, False)])
def test_an_early_open_is_held_while_sglang_waits(less: float, held: bool) -> None:
    rank = Prefill()
    rank.until(rank.now + 400.0, step=0.9)
    rank.open(1)
    rank.until(rank.now + rank.times.early_room - less, step=0.9)
    assert ("waiting" in outstanding(rank.machine)) is held
    assert (READER, "early") in rank.notes or held


@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(0, 4), st.sampled_from("abr")), min_size=20)
)
def test_an_early_open_expires_after_its_rooms_last_open(opens: list[tuple[int, int, str]]) -> None:
    """An early OPEN expires two seconds after the last OPEN of its room number.

    OPENs of other numbers do not matter. A request ("r") consumes the OPENs of its own number.
    """
    rank, last = Prefill(), dict[int, tuple[float, set[str]]]()
    rank.times.early_room = 2.0
    rank.do(rank.machine.tick)
    for generation, (number, quarters, who) in enumerate(opens, 1):
        rank.now += quarters / 4  # a clock advances by a second at most
        rank.do(rank.machine.tick)
        last = {one: at for one, at in last.items() if rank.now - at[0] < 2.0}
        if who == "r":
            rank.tell(rank.machine.begin, generation, number)
            rank.do(rank.machine.end, generation)
            last.pop(number, None)
        else:
            rank.open(number, who.encode() * 8, generation, readers=2)
            last[number] = rank.now, {who, *last.get(number, (0.0, ()))[1]}
        parts = sum(len(readers) for _, readers in last.values())
        held = {"waiting": len(last), "transfers": parts}
        assert outstanding(rank.machine) == {name: count for name, count in held.items() if count}
        assert rank.violations == []


def test_the_fail_messages_of_both_sides() -> None:
    rank = Prefill()
    rank.open(5, generation=77)
    rank.tell(rank.machine.begin, "use", 5)
    rank.do(rank.machine.add_chunk, "use", 0, 10, last=False)
    rank.do(rank.machine.end, "use", "gone")
    assert rank.failed == [(READER, Fail(5, 77, "aborted", "gone"))]
    assert (READER, "aborted") in rank.notes
    other = Decode()
    other.open(77, number=5)
    other.arrive(77)
    other.wait(1.1)
    fails = [message for _, message in other.sends if isinstance(message, Fail)]
    assert fails == [Fail(5, 77, "deadline", "its KV is late")]
    other.close(77)
    assert fails == [message for _, message in other.sends if isinstance(message, Fail)]
    other.open(78, number=6)
    other.close(78, reason="aborted")
    assert other.sends[-1] == (PREFILL, Fail(6, 78, "closed", "aborted"))


def test_an_open_is_a_sign_of_its_reader_not_of_its_connection() -> None:
    """A reader that has just sent an OPEN gets one of the last slots; an unknown owner does not."""
    rank = Prefill()
    rank.do(rank.machine.tick)
    for number in range(SLOTS - 6):
        rank.slots.publish(rank.slots.allocate(number), number + 1, rank.machine._clock)
    rank.now += 1
    rank.do(rank.machine.received, b"its connection", rank.message(7))
    assert rank.slots.available_for(b"unknown", SLOTS) == 0
    rank.begin("use", 7, TOKENS)
    assert rank.sent == {7: TOKENS}


def test_the_largest_number_of_readers_that_an_open_claims_counts() -> None:
    """A rank's pages stay until as many readers have opened as any of them has claimed."""
    rank = Prefill()
    for generation, (reader, claimed) in enumerate(
        ((b"a" * 8, 3), (b"b" * 8, 1), (b"c" * 8, 2)), 1
    ):
        assert rank.pages_released == {}
        rank.open(7, reader, generation, readers=claimed)
        if generation == 1:
            rank.begin("use", 7, TOKENS)
    assert rank.sent == dict.fromkeys((1, 2, 3), TOKENS)
    assert [*rank.pages_released] == ["use"]


@pytest.mark.parametrize(
    ("heads", "is_held"),
    [((4, 8), True), ((4, 5), True), ((7, 8), True), ((3, 5), False), ((7, 9), False),
     ((3, 9), False), ((8, 9), False), ((3, 4), False), ((0, 4), False), ((6, 6), True)],
)  # fmt: skip
def test_a_prefill_rank_serves_only_its_own_heads(heads: tuple[int, int], is_held: bool) -> None:
    """A rank of a larger TP size does not begin at head 0. An empty range asks for nothing."""
    rank = Prefill()
    rank.machine._heads = range(4, 8)
    rank.do(rank.machine.received, READER, replace(rank.message(7), heads=heads))
    assert rank.fails == ({} if is_held else {7: "heads"})


@pytest.mark.parametrize("outcome", [SlotCheck.OK, SlotCheck.STALE, RuntimeError("copy")])
@pytest.mark.parametrize("cold", [False, True])
def test_a_copy_that_outlives_its_request_has_no_effect(cold: bool, outcome: Any) -> None:
    """A copy that ends after its request causes no verdict, strike or note.

    The room number stays ambiguous, since the request was not warm.
    """
    rank = Decode()
    rank.held_copies = []
    rank.open(1, number=9)
    rank.ready(1, 4, last=not cold)
    if cold:
        rank.fail(1, "pack")
    rank.arrive(1)
    rank.close(1)
    notes = len(rank.notes)
    rank.do(rank.machine.copied, rank.held_copies, outcome)
    assert (rank.verdicts, rank.notes[notes:], rank.strikes()) == ({}, [], 0)
    assert outstanding(rank.machine) == {}
    assert rank.machine._recent.is_ambiguous(9, rank.now)


def test_a_copy_stopped_by_a_closed_gate_is_no_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A copy stopped by a closed gate is not a failure: the request ends with its own reason.

    The copy's outcome may arrive first, since the scheduler closes the gate before it queues the
    end.
    """
    rank, held = Prefill(), list[Any]()
    monkeypatch.setattr(rank, "pack", held.extend)
    rank.open(5, generation=77)
    rank.begin("use", 5, 2 * TOKENS)
    assert len(held) == 2
    rank.do(rank.machine.copied, held, None)
    assert (rank.failed, rank.notes, len(rank.slots.free_slots)) == ([], [], SLOTS)
    rank.do(rank.machine.end, "use", "gone")
    assert rank.failed == [(READER, Fail(5, 77, "aborted", "gone"))]
    for cold in (False, True):
        other = Decode()
        other.held_copies = held = []
        other.open(77, number=5)
        if cold:
            other.fail(77, "slow")
        else:
            other.ready(77, 4)
        sent, notes = len(other.sends), len(other.notes)
        other.do(other.machine.copied, tuple(held), None)
        assert (other.verdicts, other.sends[sent:], other.notes[notes:]) == ({}, [], [])
        other.close(77, reason="aborted")
        assert other.sends[-1] == (PREFILL, Fail(5, 77, "closed", "aborted"))
        assert (other.verdicts, len(other.slots.free_slots)) == ({}, SLOTS)


def test_a_read_that_has_just_begun_is_not_the_peers_fault() -> None:
    """A peer whose segments waited for a local slot until recently gets no strike.

    First the segments of another peer use all slots, and then those of one of the peer's two rooms.
    """
    rank, other = Decode(slots=2), b"other___"
    rank.hung = {PREFILL, other}
    rank.now = AT
    rank.open(1, other)
    rank.open(2)
    rank.open(3)
    rank.ready(1, 2, other)
    rank.ready(2, 2)
    rank.ready(3, 1)
    rank.arrive(3)
    rank.until(AT + 0.2, step=0.05)
    rank.end_reads()
    rank.until(AT + 0.35, step=0.05)
    assert (PREFILL, "deadline") in rank.notes
    assert rank.strikes() == 0


def test_an_owner_with_slots_leaves_a_quarter_free() -> None:
    """An owner with slots gets more only while over a quarter of all slots is free."""
    pool = SlotPool(64, Times())
    for _ in range(41):
        pool.allocate("others")
    pool.allocate("owner")
    found = []
    while free := len(pool.free_slots):
        found.append((free, pool.available_for("owner", 2)))
        pool.allocate("others")
    assert found[:8] == [(22, 6), (21, 5), (20, 4), (19, 3), (18, 2), (17, 1), (16, 0), (15, 0)]
    owners = (1, 2, 3, 47, 48, 49, 128)
    assert [share_of(64, number) for number in owners] == [32, 24, 16, 1, 1, 0, 0]


def test_removing_an_item_keeps_the_owners_other_items() -> None:
    turns, pool = RoundRobin[str](), SlotPool(4, Times())
    for item in ("first", "second"):
        turns.add("owner", item)
    turns.remove("owner", "first")
    turns.remove("nobody", "first")
    assert [item for item, _ in turns.take(pool, 4)] == ["second"]
    turns.add("owner", "third")
    turns.remove("owner", "third")
    assert not turns.owners


@pytest.mark.parametrize(
    ("error", "took", "detail"), [("broken", 0.1, "broken"), ("", 5.1, "it took too long")]
)
def test_a_failed_read_notes_its_cause(error: str, took: float, detail: str) -> None:
    rank = Decode()
    rank.hung = {PREFILL}
    rank.open(1)
    rank.ready(1)
    rank.until(rank.now + max(took - 0.2, 0.0))
    rank.now += 0.2
    rank.end_reads(error)
    assert ("read", detail) in rank.details
    assert rank.verdicts[1] == ("cold", "read")


@pytest.mark.parametrize("took", [0.0, 0.2, 9.0])
def test_a_room_goes_cold_exactly_at_its_deadline(took: float) -> None:
    """A room goes cold exactly at its deadline.

    `took`: the seconds from the first READY to the target's arrival.
    """
    rank = Decode()
    rank.now = AT
    rank.open(1)
    rank.ready(1)
    rank.until(AT + took)
    rank.arrive(1)
    due = rank.machine._requests[1].deadline(rank.times)
    assert due == pytest.approx(AT + took + min(max(3 * took, 0.3), 1.0))
    for now, cold in ((due - 1e-3, False), (due, True)):
        rank.now = now
        rank.do(rank.machine.tick)
        assert (1 in rank.verdicts) is cold


class Held(Prefill):
    """A prefill rank whose copies stay in flight until the test completes them."""

    def __init__(self) -> None:
        super().__init__()
        self.jobs: list[Any] = []

    def meet(self, action: Any) -> None:
        if isinstance(action, machine.StartCopies):
            self.jobs += action.jobs
        else:
            super().meet(action)


def test_packed_slots_are_freed_when_the_reader_leaves() -> None:
    """Packed segments that wait for an earlier one give their slots back when their reader leaves.

    Segments are announced in order.
    """
    rank = Held()
    rank.open(1)
    rank.begin(1, 1, 5 * TOKENS)
    first, *others = rank.jobs
    rank.do(rank.machine.copied, tuple(others))
    assert len(rank.slots.free_slots) == SLOTS - 5
    rank.do(rank.machine.connection_lost, READER)
    assert len(rank.slots.free_slots) == SLOTS - 1
    rank.do(rank.machine.copied, (first,))
    assert len(rank.slots.free_slots) == SLOTS


@given(st.lists(st.tuples(st.booleans(), st.sets(st.integers(0, 15))), max_size=10))
def test_at_most_two_batches_are_in_flight(
    steps: list[tuple[bool, set[int]]],
) -> None:
    """No more than two batches of copies are in flight, in whatever order copies end.

    With this limit, a reader that opens late does not wait for the copies of many other readers.
    Each copy that ends lets another one begin.
    """
    rank, readers, most = Held(), 0, 2 * list_of(SLOTS)
    for opens, ended in [(True, set[int]()), *steps]:
        if opens:
            readers += 1
            rank.open(readers, b"reader%02d" % readers)
            rank.begin(readers, readers, 50 * TOKENS)
        packed = [one for at, one in enumerate(rank.jobs) if at in ended]
        rank.jobs = [one for one in rank.jobs if one not in packed]
        rank.pack(packed)
        assert len(rank.jobs) <= most
        assert rank.violations == []
    while rank.jobs:
        first, rank.jobs = rank.jobs[0], rank.jobs[1:]
        rank.pack([first])
        assert len(rank.jobs) <= most
    assert rank.sent == dict.fromkeys(range(1, readers + 1), 50 * TOKENS)


@pytest.mark.parametrize("failed", [0, 2, 4])
def test_a_failed_pack_fails_the_transfer_at_once(failed: int) -> None:
    """A failed pack sends the reader a Fail and releases the request's pages at once."""
    rank, error = Held(), RuntimeError("x" * 1000)
    rank.open(1)
    rank.begin(1, 1, 5 * TOKENS)
    rank.do(rank.machine.copied, (rank.jobs.pop(failed),), error)
    assert rank.failed == [(READER, Fail(1, 1, "pack", repr(error)[:300]))]
    assert list(rank.pages_released) == [1]
    rank.do(rank.machine.copied, tuple(rank.jobs))
    assert len(rank.slots.free_slots) == SLOTS
    assert len(rank.failed) == 1


def test_packing_is_given_up_exactly_at_its_deadline() -> None:
    rank = Held()
    rank.times.packing = 1.5
    rank.open(1)
    rank.request(1, TOKENS)
    for now, given_up in ((0.5, False), (1.0, False), (1.5 - 2**-20, False), (1.5, True)):
        rank.now = BEGAN + now
        rank.do(rank.machine.tick)
        assert ((READER, "slow") in rank.notes) is given_up


def test_slow_packing_is_given_up_before_the_last_resort() -> None:
    """Packing that makes steady but slow progress is given up 6 s after the target was sent."""
    rank = Prefill(2)
    rank.slow.add(READER)
    rank.open(1)
    rank.request(1, 100 * TOKENS)
    while not rank.pages_released:
        rank.wait(0.5)
        rank.acknowledge(1)
    assert rank.fails == {1: "slow"}
    times = rank.times
    assert abs(rank.pages_released[1] - BEGAN - times.whole_wait - times.packing) <= 1.0
    assert rank.pages_released[1] - BEGAN < times.last_resort


def test_a_strangers_ready_is_acknowledged_without_a_read() -> None:
    """A READY from a peer that is not a source is acknowledged without a read.

    The room goes on.
    """
    rank = Decode()
    rank.open(1)
    rank.ready(1, 2, b"stranger")
    assert rank.sends[1:] == [(b"stranger", Ack(((0, 1 << 20 | 1), (1, 1 << 20 | 2))))]
    assert rank.wants(1)
    rank.ready(1, 4, last=True)
    assert rank.verdicts[1] == ("warm", "")


def test_the_end_of_a_read_is_progress() -> None:
    """A room's wait starts again when a read ends, although its copy is still in flight."""
    rank = Decode()
    rank.held_copies, rank.hung = [], {PREFILL}
    rank.open(1)
    rank.arrive(1)
    rank.ready(1, 4, last=True)
    rank.wait(0.25)
    rank.end_reads()
    rank.wait(0.25)
    assert rank.wants(1)
    rank.wait(0.1)
    assert not rank.wants(1)


def test_a_read_that_cannot_start_counts_as_failed() -> None:
    rank = Decode()
    rank.hung = {PREFILL}
    rank.open(1)
    rank.ready(1, 3)
    rank.do(rank.machine.on_action_failed, rank.reading.pop(), OverflowError("x"))
    assert rank.verdicts[1] == ("cold", "read")
    assert len(rank.slots.free_slots) == SLOTS


def test_the_error_of_a_failed_action_is_truncated() -> None:
    rank, error = Decode(), OverflowError("x" * 1000)
    rank.open(1, number=7)
    opened = rank.sends[0]
    rank.do(rank.machine.on_action_failed, dact.Send(*opened), error)
    assert ("unsent", repr(error)[:300]) in rank.details
