"""Dozens of peers that have died or hang leave enough of a rank's slots to other peers."""

from __future__ import annotations

from itertools import product

import pytest
from rig.channel.driven import SLOTS, TOKENS, Decode, Prefill
from rig.channel.invariants import outstanding

from sglang_mixkv.decode.breaker import STRIKES

RANKS = (8, 19, 64, 128)
LIVING = tuple(b"living%02d" % n for n in range(12))
EVERYTHING = 7 * SLOTS // 8
LONG = 60  # segments of a request that uses all slots it may have


def names(kind: bytes, ranks: int) -> list[bytes]:
    return [b"%b%04d" % (kind, n) for n in range(ranks)]


def serve(rank: Prefill, readers: tuple[bytes, ...], first: int) -> list[int]:
    """Serve one request per reader. Return the rooms that did not get all of their draft KV."""
    rooms = range(first, first + len(readers))
    for room, reader in zip(rooms, readers, strict=True):
        rank.open(room, reader)
    for room in rooms:
        rank.request(room, 20 * TOKENS)
    rank.wait(1.2)
    for room in rooms:
        rank.do(rank.machine.end, room)
    return [room for room in rooms if rank.sent.get(room) != 20 * TOKENS]


@pytest.mark.parametrize("fails", [True, False], ids=["unreachable", "vanished"])
@pytest.mark.parametrize("ranks", RANKS)
def test_dead_readers_leave_slots_to_other_readers(ranks: int, fails: bool) -> None:
    """Dead readers leave enough slots for new requests of readers that are alive.

    `busy`: the number of readers that hold slots when they die; requests of the others are computed
    later. `known`: whether the readers that are alive have acknowledged a slot before.
    """
    for busy, known, readers in product((0, 2, ranks), (False, True), (1, 4)):
        rank, dead, case = Prefill(), names(b"dead", ranks), f"{busy} {known} {readers}"
        if known:
            assert not serve(rank, LIVING[:readers], 90_000)
        rank.slow.update(dead)
        for number, reader in enumerate(dead):
            rank.now += 1e-4
            rank.open(1 + number, reader)
            if number < busy:
                rank.request(1 + number, LONG * TOKENS)
                rank.acknowledge(3)
        (rank.unreachable if fails else rank.gone).update(dead)
        for number in range(busy, ranks):
            rank.now += 1e-4
            rank.request(1 + number, LONG * TOKENS)
        free = len(rank.slots.free_slots)
        assert SLOTS - free <= EVERYTHING + (SLOTS // 32 if busy else 0), case
        assert not fails or busy or free == SLOTS, "unsent slots are not freed"
        rank.wait(rank.times.unsure * 1.1)
        for turn in range(2):
            assert serve(rank, LIVING[:readers], 100_000 + 100 * turn) == [], (case, turn)
        assert rank.violations == []


def test_a_reading_request_goes_on_while_others_die() -> None:
    """A request goes on while its reader acknowledges slots, although many other readers die."""
    rank = Prefill()
    rank.slow.update(LIVING)
    for room, reader in enumerate(LIVING, 1):
        rank.open(room, reader)
        rank.request(room, LONG * TOKENS)
    dead = names(b"dead", 64)
    for number, reader in enumerate(dead):
        rank.open(1000 + number, reader)
    rank.gone.update(dead)
    rank.wait(0.5)
    for number in range(64):
        rank.request(1000 + number, LONG * TOKENS)
    while rank.unread:
        rank.acknowledge(1)
        rank.now += 1e-3
    assert rank.fails == {}
    assert all(rank.sent[room] == LONG * TOKENS for room in range(1, 13))


@pytest.mark.parametrize("ranks", range(1, 10))
def test_open_requests_are_served_after_a_few_readers_die(ranks: int) -> None:
    """Requests opened before a few readers died are still served.

    Their readers have sent nothing since, so nothing distinguishes them from the dead readers.
    """
    rank, dead = Prefill(), names(b"dead", ranks)
    for number, reader in enumerate([*dead, *LIVING], 1):
        rank.open(number, reader)
    rank.gone.update(dead)
    for number in range(1, 1 + ranks + len(LIVING)):
        rank.now += 1e-3
        rank.request(number, LONG * TOKENS)
    assert all(rank.sent[number] == LONG * TOKENS for number in range(1 + ranks, 13 + ranks))


def test_a_second_crash_leaves_slots_too() -> None:
    """A second crash of many readers also leaves slots to others.

    Ranks that die in the second crash had acknowledged slots after the first crash.
    """
    rank = Prefill()
    for crash in range(2):
        dead = names(b"dead%d" % crash, 128)
        assert serve(rank, tuple(dead[:16]), 1000 + 5000 * crash) == []
        for number, reader in enumerate(dead):
            rank.open(2000 + 5000 * crash + number, reader)
        rank.gone.update(dead)
        rank.wait(0.5)
        for number in range(128):
            rank.request(2000 + 5000 * crash + number, LONG * TOKENS)
        rank.wait(1.0)
        assert len(rank.slots.free_slots) == (8, 2)[crash]
        assert serve(rank, LIVING[:4], 50_000 + 1000 * crash) == []


# ---------------------------------------------------------------- decode


def ask(rank: Decode, peer: bytes, generation: int, segments: int = 4) -> tuple[str, str]:
    """Open a request with one READY and its target. Return the request's verdict."""
    rank.open(generation, peer, segments=segments)
    rank.ready(generation, segments, peer, last=True)
    rank.arrive(generation)
    rank.wait(1.2)
    rank.close(generation)
    return rank.verdicts[generation]


def hang(rank: Decode, ranks: int, apart: float, segments: int = 40) -> list[bytes]:
    hung = names(b"hung", ranks)
    rank.hung.update(hung)
    for number, peer in enumerate(hung):
        rank.open(number, peer, segments=segments)
        for at in range(0, segments, 8):
            rank.ready(number, 8, peer, last=at + 8 == segments)
        rank.wait(apart)
    return hung


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("ranks", [18, *RANKS])
def test_prefill_ranks_with_hung_reads_leave_slots_to_others(ranks: int, known: bool) -> None:
    rank = Decode()
    if known:
        assert ask(rank, b"healthy0", 1000)[0] == "warm"
    hang(rank, ranks, 1e-4)
    assert SLOTS - len(rank.slots.free_slots) <= EVERYTHING
    rank.wait(rank.times.unsure * 1.1)
    for generation in range(2000, 2025):
        assert ask(rank, b"healthy0", generation) == ("warm", "")
    assert rank.strikes(b"healthy0") == 0
    rank.end_reads("late")
    rank.close(*range(ranks))
    free = len(rank.slots.free_slots)
    assert (free, outstanding(rank.machine), rank.violations) == (SLOTS, {}, [])


def test_ranks_that_hang_one_by_one_leave_slots_to_others() -> None:
    rank = Decode()
    for turn, peer in enumerate(names(b"hung", 128)):
        rank.hung.add(peer)
        rank.open(turn, peer, segments=40)
        rank.ready(turn, 8, peer)
        rank.wait(0.2)
        assert ask(rank, b"healthy0", 1000 + turn) == ("warm", ""), turn
        assert len(rank.slots.free_slots) >= SLOTS // 16
    assert len(rank.slots.free_slots) == SLOTS // 16
    assert ask(rank, b"healthy1", 3000)[0] == "cold", "a peer without a completed read gets no slot"
    assert rank.strikes(b"healthy1") == 0


@pytest.mark.parametrize("patience", [0.1, 1.0, 3.0])
def test_a_peer_gets_no_slot_until_its_overdue_read_has_ended(patience: float) -> None:
    rank, peer = Decode(patience=patience), b"hung"
    rank.hung.add(peer)

    def given(generation: int) -> bool:
        reading = len(rank.reading)
        rank.open(generation, peer)
        rank.ready(generation, 1, peer)
        return len(rank.reading) > reading

    assert given(1)
    rank.wait(rank.times.read * 0.99)
    assert given(2)
    rank.wait(rank.times.read * 0.02)
    assert not given(3)
    first, second = rank.reading
    rank.do(rank.machine.read_ended, second, "late")
    assert not given(4), "the first read is still overdue"
    rank.reading = [first]
    rank.end_reads("late")
    assert len(rank.reading) == 2, "the waiting segments are not read"
    assert given(5)
    assert rank.violations == []


def test_a_peer_that_waits_for_local_slots_gets_no_strike() -> None:
    """A peer whose segments wait for slots that other peers hold gets no strike.

    A peer whose own reads hold slots does get one.
    """
    rank = Decode(8)
    hung = hang(rank, 8, 0.2, segments=8)
    assert len(rank.slots.free_slots) == 0
    for number in range(len(hung)):
        rank.arrive(number)
    rank.wait(1.2)
    assert {rank.verdicts[number] for number in range(len(hung))} == {("cold", "deadline")}
    assert [rank.strikes(peer) for peer in hung] == [int(peer in rank.slots.held) for peer in hung]
    for generation in range(100, 100 + 2 * STRIKES):
        assert ask(rank, b"healthy0", generation, 2) == ("cold", "deadline")
    assert rank.strikes(b"healthy0") == 0
    rank.end_reads("late")
    assert ask(rank, b"healthy0", 200, 2) == ("warm", "")


@pytest.mark.parametrize("error", ["", "broken"])
def test_a_failed_read_is_no_sign_of_life(error: str) -> None:
    rank = Decode()
    rank.hung.update((b"first", b"second"))
    for generation, peer in enumerate((b"first", b"second")):
        rank.open(generation, peer)
        rank.ready(generation, 1, peer)
        rank.wait(0.01)
    rank.do(rank.machine.read_ended, rank.reading[1], error)
    assert set(rank.slots._signs[True]) == (set() if error else {b"second"})
