"""The strikes of a cold room: which peers get one, and which breakers open and close."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from rig.channel.driven import PREFILL, Decode

from sglang_mixkv.channel.messages import Open, Ready
from sglang_mixkv.decode import actions as dact
from sglang_mixkv.decode.breaker import LONGEST_WAIT, STRIKES
from sglang_mixkv.decode.cold import FAILS, ColdReason
from sglang_mixkv.draft.slot_format import SlotCheck

OTHER = b"other___"


def wait(rank: Decode) -> None:
    rank.arrive(1)
    rank.wait(1.1)


def half(rank: Decode) -> None:
    """Deliver the part of the room that the other peer sends."""
    rank.ready(1, 4, OTHER, last=True)
    wait(rank)


def result(found: SlotCheck) -> Callable[[Decode], None]:
    def act(rank: Decode) -> None:
        rank.result = found
        rank.ready(1)

    return act


def no_slot(rank: Decode) -> None:
    rank.slots.free_slots.clear()
    rank.ready(1)
    rank.wait(rank.times.unread)


def stopped(rank: Decode) -> None:
    rank.now += 5.1
    rank.do(rank.machine.tick)


def hangs(rank: Decode) -> None:
    rank.hung.add(PREFILL)
    rank.ready(1)
    rank.wait(rank.times.read)


def breaks(rank: Decode) -> None:
    rank.broken.add(PREFILL)
    rank.ready(1)


def lost(**more: object) -> Callable[[Decode], None]:
    return lambda rank: rank.do(rank.machine.peer_lost, PREFILL, **more)


def open_fails(rank: Decode) -> None:
    to, message = next(one for one in rank.sends if isinstance(one[1], Open))
    rank.do(rank.machine.on_action_failed, dact.Send(to, message), OverflowError())


COLDS: list[tuple[str, Callable[[Decode], None], set[bytes]]] = [
    ("deadline", wait, {PREFILL, OTHER}), ("deadline", half, {PREFILL}),
    ("lost", lost(), {PREFILL}), ("lost", lost(gone=True), set()),
    ("read", hangs, {PREFILL}), ("read", breaks, {PREFILL}),
    ("slots", no_slot, set()), ("stalled", stopped, set()), ("unsent", open_fails, set()),
    ("stale", result(SlotCheck.STALE), set()), ("stale", result(SlotCheck.DIFFERS), set()),
    ("unpack", result(SlotCheck.ERROR), set()), ("unpack", result(OSError()), set()),
    ("protocol", lambda rank: rank.ready(1, 5), set()),
    ("restored", lambda rank: rank.do(rank.machine.restored), set()),
    *(
        ("prefill_" + code, lambda rank, code=code: rank.fail(1, code), set())
        for code in (*FAILS, "other")
    ),
]  # fmt: skip
AT_ONCE = ("no_drafter", "mismatch", "breaker", "repeated")  # rooms that are cold from the start


def test_the_table_has_all_reasons() -> None:
    """COLDS and AT_ONCE together cover every reason that the machine decides."""
    assert {reason for reason, _, _ in COLDS} | {*AT_ONCE, "broken", "other"} == set(ColdReason)


@pytest.mark.parametrize(("reason", "act", "struck"), COLDS)
def test_a_cold_room_strikes_the_peers_that_did_not_deliver(
    reason: str, act: Callable[[Decode], None], struck: set[bytes]
) -> None:
    """A cold room is a strike against exactly the peers that did not deliver.

    The other room goes cold only if the connection is lost, or this rank stalls or is restored.
    """
    rank = Decode()
    rank.open(1, PREFILL, OTHER)
    rank.open(2, PREFILL)
    act(rank)
    assert rank.verdicts[1] == ("cold", reason)
    assert {peer for peer in (PREFILL, OTHER) if rank.strikes(peer)} == struck | (
        {PREFILL} if struck and reason == "lost" else set()
    )
    assert all(rank.strikes(peer) == 1 + (reason == "lost") for peer in struck)
    others = {"lost", "stalled", "restored"}
    assert rank.wants(2) == (reason not in others)
    assert rank.forgotten == [PREFILL] * (reason == "prefill_restarted")
    notified = {to for to, message in rank.sends if getattr(message, "generation", 0) == 1}
    assert notified == {PREFILL, OTHER}


@pytest.mark.parametrize("reason", AT_ONCE)
def test_a_room_that_is_cold_at_once_is_no_strike(reason: str) -> None:
    for generation in range(2 * STRIKES):
        rank = Decode()
        rank.open(generation, cold=reason)
        assert rank.verdicts[generation] == ("cold", reason)
        assert rank.strikes() == 0


def test_slow_copies_of_this_rank_are_no_strike() -> None:
    """A peer gets no strike for a room that is late only because of this rank's copies."""
    rank = Decode()
    rank.held_copies = []
    rank.open(1)
    rank.ready(1, 4, last=True)
    wait(rank)
    assert (PREFILL, "deadline") in rank.notes
    assert rank.strikes() == 0


def delayed(by: str, slots: int = 4) -> Decode:
    """Return a rank whose slots all belong to the peer's first request, which keeps them.

    `by`: what keeps the slots, "copies" or "reads". Four more requests of the peer wait for slots.
    """
    rank = Decode(slots)
    rank.held_copies = [] if by == "copies" else None
    rank.hung.update([PREFILL] * (by == "reads"))
    rank.open(1, segments=60)
    for _ in range(8):
        rank.ready(1)
    for generation in (2, 3, 4, 5):
        rank.open(generation)
    for generation in range(1, 6):
        rank.arrive(generation)
    return rank


@pytest.mark.parametrize("by", ["copies", "reads"])
def test_a_peer_that_waits_for_this_rank_gets_no_strike(by: str) -> None:
    """A peer gets no strike while its segments wait until this rank has finished copies.

    A peer whose own reads do not end does get strikes.
    """
    rank = delayed(by)
    rank.wait(1.1)
    assert [rank.verdicts.get(n, ("cold", "deadline")) for n in range(2, 6)] == [
        ("cold", "deadline")
    ] * 4
    assert not rank.wants(1)
    assert rank.strikes() == (0 if by != "reads" else STRIKES)


def test_a_peer_delayed_by_this_rank_gets_more_time() -> None:
    """A peer whose segments had to wait for slots gets no strike while they are being read.

    A read that takes longer than the shortest wait is the peer's fault.
    """
    rank = delayed("copies")
    rank.wait(0.29)
    rank.hung.add(PREFILL)
    ended, rank.held_copies = rank.held_copies, None
    rank.do(rank.machine.copied, ended, SlotCheck.OK)
    assert len(rank.reading) == 2
    for generation in (6, 7):
        rank.open(generation)
        rank.arrive(generation)
    rank.wait(0.02)
    assert {n for n in range(1, 8) if n in rank.verdicts} == {2, 3, 4, 5}
    assert rank.strikes() == 0
    rank.wait(0.3)
    assert {6, 7} <= {*rank.verdicts}
    assert rank.strikes() >= 2


@pytest.mark.parametrize("tenths", range(3, 12))
def test_a_peers_time_starts_at_the_end_of_the_delay(
    tenths: int,
) -> None:
    rank = delayed("copies")
    rank.wait(tenths / 10 - 0.21)
    for generation in (6, 7, 8):
        rank.open(generation)
        rank.arrive(generation)
    rank.wait(0.21)
    ended, rank.held_copies = rank.held_copies, None
    rank.do(rank.machine.copied, ended, SlotCheck.OK)
    rank.wait(0.1)
    assert {6, 7, 8} <= {*rank.verdicts}
    assert rank.strikes() == 0
    for generation in (16, 17, 18):
        rank.open(generation)
        rank.arrive(generation)
    rank.wait(0.4)
    assert rank.strikes() == STRIKES


def test_a_restarted_peer_is_forgotten_even_without_a_room() -> None:
    rank = Decode()
    rank.fail(77, "restarted")
    rank.fail(78, "aborted")
    assert rank.forgotten == [PREFILL]


def test_a_lost_peer_ends_only_its_own_rooms() -> None:
    """A lost peer ends its own rooms at once, and rooms of other peers go on.

    The lost rooms include one whose segments are all announced and being read.
    """
    rank = Decode()
    rank.hung.add(PREFILL)
    for generation in range(2 * STRIKES):
        rank.open(generation, PREFILL, OTHER)
    rank.ready(0, 4, last=True)
    rank.open(99, OTHER)
    rank.do(rank.machine.peer_lost, PREFILL, gone=True)
    found = [rank.verdicts[n] for n in range(2 * STRIKES)]
    assert found == [("cold", "lost")] * len(found)
    assert (PREFILL, "breaker_opened") not in rank.notes
    assert rank.wants(99)
    rank.end_reads("late")
    assert rank.violations == []


# ---------------------------------------------------------------- breakers


def strike(rank: Decode, generation: int) -> None:
    rank.open(generation)
    rank.arrive(generation)
    rank.wait(0.4)
    rank.close(generation)


def warm(rank: Decode, generation: int) -> tuple[str, str]:
    rank.open(generation, segments=1)
    rank.ready(generation, 1, last=True)
    rank.close(generation)
    return rank.verdicts[generation]


def opened(strikes: int = STRIKES) -> Decode:
    rank = Decode()
    for generation in range(1, 1 + strikes):
        strike(rank, generation)
    return rank


def asked(rank: Decode, generation: int) -> bool:
    """Open a room. Return True if its rows are requested, or False if it goes cold at once."""
    rank.open(generation, segments=60)
    assert rank.verdicts.get(generation) in (None, ("cold", "breaker"))
    return generation not in rank.verdicts


@pytest.mark.parametrize("strikes", range(6))
def test_three_requests_in_a_row_open_a_breaker(strikes: int) -> None:
    rank = opened(strikes)
    assert asked(rank, 50) == (strikes < STRIKES)
    assert rank.notes.count((PREFILL, "breaker_opened")) == (strikes >= STRIKES)


@pytest.mark.parametrize("before", range(STRIKES))
def test_a_warm_room_resets_the_strikes(before: int) -> None:
    rank = opened(before)
    assert warm(rank, 20) == ("warm", "")
    for generation in range(30, 30 + STRIKES - 1):
        strike(rank, generation)
    assert asked(rank, 50)


def test_a_probes_first_segment_lets_other_rooms_through() -> None:
    """A probe's first segment lets other rooms through until the next strike.

    A warm room closes the breaker and resets its strikes.
    """
    rank = opened()
    for turn in range(3):
        first = 100 * (1 + turn)
        assert not asked(rank, first)
        rank.wait(2.0**turn)
        assert asked(rank, first + 1)
        assert not asked(rank, first + 2), "the probe has delivered nothing yet"
        rank.ready(first + 1)
        assert asked(rank, first + 3)
        rank.close(first + 1, first + 3)
        if turn < 2:
            strike(rank, first + 4)
    assert rank.machine.breaker.open_peers() == []
    assert warm(rank, 500) == ("warm", "")
    assert rank.strikes() == 0


def test_a_closed_probe_admits_no_room_beside_the_next() -> None:
    rank = opened()
    rank.wait(1.0)
    assert asked(rank, 10)
    rank.wait(2.0)
    assert asked(rank, 11)
    rank.close(10)
    assert not asked(rank, 12)
    rank.close(11)
    assert asked(rank, 13)


def test_a_probe_without_a_result_admits_another_probe() -> None:
    """A probe without a result for two seconds lets another probe through.

    The first of these probes that fails starts the next wait.
    """
    rank = opened()
    rank.wait(1.0)
    assert asked(rank, 10)
    rank.wait(1.99)
    assert not asked(rank, 11)
    rank.wait(0.02)
    assert asked(rank, 12)
    assert not asked(rank, 13)
    rank.arrive(10)
    rank.wait(0.31)
    assert rank.verdicts[10] == ("cold", "deadline")
    rank.arrive(12)
    rank.wait(0.31)
    assert rank.verdicts[12] == ("cold", "deadline")
    rank.wait(1.3)
    assert not asked(rank, 14), "2 s after the first failure"
    rank.wait(0.4)
    assert asked(rank, 15)


@pytest.mark.parametrize("how", ["closed", "aborted", "no rows"])
def test_a_probe_without_a_read_admits_another_room(how: str) -> None:
    """A probe that ends without a read lets another room through, since it proves nothing."""
    rank = opened()
    rank.wait(1.0)
    if how == "no rows":
        rank.open(10, segments=4, first_token=40)
        rank.do(rank.machine.ready, PREFILL, Ready(10, 10, 0, 40, (), True))
        assert rank.verdicts[10] == ("warm", "")
    else:
        assert asked(rank, 10)
        rank.close(10) if how == "closed" else rank.fail(10, "aborted")
    assert asked(rank, 11) == (how != "no rows")
    rank.close(10)
    assert asked(rank, 12) == (how == "no rows")


def test_one_segment_per_room_does_not_close_a_breaker() -> None:
    """A peer that delivers only one segment per room has its breaker open most of the time."""
    rank, asks = Decode(), 0
    for generation in range(1, 101):
        rank.open(generation)
        asks += generation not in rank.verdicts
        rank.ready(generation)
        rank.arrive(generation)
        rank.wait(1.0)
        rank.close(generation)
    assert asks < 15
    assert rank.machine.breaker._states[PREFILL].wait == LONGEST_WAIT
