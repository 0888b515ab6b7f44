"""Rooms of either side: their states, and what must hold of all of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from sglang_mixkv.decode import rooms as decode
from sglang_mixkv.decode.gate import Gate
from sglang_mixkv.decode.rank import DecodeRank
from sglang_mixkv.decode.registrations import Registrations
from sglang_mixkv.errors import MixKVError
from sglang_mixkv.prefill import peers
from sglang_mixkv.prefill.gate import Gate as PrefillGate
from sglang_mixkv.prefill.peer import Peer
from sglang_mixkv.prefill.rank import PrefillRank
from sglang_mixkv.prefill.rooms import MEMORY_S, Member, Rooms, State
from sglang_mixkv.protocol.frames import Address
from sglang_mixkv.protocol.framing import Framing
from sglang_mixkv.protocol.messages import Metadata, Poll

ROOM = 7


def said(session: str = "a:1", required: int = 1, room: int = ROOM) -> Metadata:
    sender = Address("10.0.0.1", 9000, session)
    return Metadata(room, sender, False, np.arange(3, dtype=np.int32), 1, required)


def peer(session: str = "a:1") -> Any:
    return mock.Mock(session=session)


def join(rooms: Rooms, now: float = 0.0, **kwargs: Any) -> None:
    rooms.join(said(**kwargs), peer(kwargs.get("session", "a:1")), now)


def test_metadata_then_sender_then_end() -> None:
    rooms = Rooms()
    join(rooms)
    assert rooms.get(ROOM).state is State.AWAITED
    assert rooms.open_room(ROOM) is None
    room = rooms.open(ROOM, 1.0)
    assert (room.state, room.reason, len(room.members["a:1"].said.pages)) == (State.OPEN, "", 3)
    assert "1 rooms have a sender" in rooms.problems([ROOM])[0]
    rooms.close(room, 2.0)
    assert rooms.problems([]) == []
    assert rooms.problems([ROOM]) == ["SGLang holds 1 rooms that are over here: [7]"]


def test_a_refused_room_fails_when_its_sender_comes() -> None:
    rooms = Rooms()
    assert rooms.refuse(ROOM, "no drafter", 0.0)
    assert rooms.open(ROOM, MEMORY_S - 1).reason == "no drafter"
    assert not rooms.refuse(ROOM, "too late", 0.0), "it has a sender"
    other = Rooms()
    other.refuse(ROOM, "long ago", 0.0)
    assert other.open(ROOM, MEMORY_S + 1).reason == ""


def test_a_room_is_complete_with_as_many_as_it_requires() -> None:
    rooms = Rooms()
    join(rooms, required=2)
    room = rooms.get(ROOM)
    assert (room.is_complete, room.may_join("b:1")) == (False, True)
    join(rooms, session="b:1", required=2)
    assert (room.is_complete, room.may_join("c:1"), room.may_join("a:1")) == (True, False, True)


def test_a_number_is_another_requests_once_the_first_has_ended() -> None:
    rooms = Rooms()
    first = rooms.open(ROOM, 0.0)
    rooms.close(first, 1.0)
    join(rooms, now=2.0)
    assert rooms.get(ROOM).reused
    rooms.close(first, 3.0)  # SGLang clears a request again
    assert rooms.get(ROOM).state is State.AWAITED


def test_of_a_room_that_has_ended_nothing_stays_but_what_it_sent() -> None:
    """A transfer thread can still hold it; the next request of its number has another."""
    rooms = Rooms()
    join(rooms)
    room = rooms.open(ROOM, 1.0)
    room.sent.bytes = 5
    rooms.close(room, 2.0)
    rooms.close(room, 3.0)
    assert (room.members, room.since) == ({}, 2.0)
    assert room.sent.bytes == 5, "SGLang asks after it has cleared the sender"
    join(rooms)
    assert rooms.get(ROOM) is not room


@pytest.mark.parametrize("aborted", [False, True])
def test_a_second_sender_has_a_room_of_its_own(aborted: bool) -> None:
    """Beside a first that is still served both fail: SGLang tells them apart by the number. It
    keeps the failure of one that was aborted for the next of its number."""
    rooms = Rooms()
    join(rooms)
    first = rooms.open(ROOM, 1.0)
    if aborted:
        rooms.abandon(first, 1.0)
    second = rooms.open(ROOM, 2.0)
    assert (first.has_sender, second.has_sender) == (False, True)
    assert "MIXKV-ROOM-03" in second.reason
    rooms.close(first, 3.0)
    rooms.abandon(first, 3.0)
    assert (rooms.get(ROOM), second.state, second.reused) == (second, State.OPEN, True)
    assert list(second.members) == ["a:1"], "they are told"
    assert rooms.problems([])[0] == "1 rooms have a sender, 0 wait for one"


def test_no_request_gets_a_number_that_a_transfer_thread_works_for() -> None:
    """By it SGLang's thread says how the request before ended, after its sender was cleared."""
    rooms, sglang = Rooms(), mock.Mock()
    gate = PrefillGate(
        mock.Mock(refusal=lambda _: None), rooms, sglang, mock.Mock(), Framing(), 0.0
    )
    gate.peers.get.return_value.address = said().sender  # type: ignore[attr-defined]
    first = rooms.open(ROOM, 0.0)
    assert rooms.begin_chunk(first)
    assert not rooms.is_taken(ROOM), "its own"
    rooms.close(first, 0.0)
    assert "threads work for rooms [7]" in rooms.problems([])
    with pytest.raises(MixKVError, match="MIXKV-ROOM-03"):
        gate._check(said())
    join(rooms)  # its metadata was looked at a moment before the first ended
    second = rooms.open(ROOM, 0.0)
    assert "MIXKV-ROOM-03" in second.reason
    assert second.served() == [said().sender.at], "they are told"
    rooms.close(second, 0.0)
    rooms.end_chunk(first)
    assert not rooms.begin_chunk(first), "it has ended"
    gate._check(said())
    assert (rooms.open(ROOM, 0.0).reason, rooms._working) == ("", {})


def test_a_sender_that_is_cleared_after_its_room_was_reaped_counts_once() -> None:
    rooms = Rooms()
    room = rooms.open(ROOM, 0.0)
    rooms.abandon(room, 0.0)
    rooms.reap(101.0, 100.0)
    rooms.close(room, 102.0)
    assert rooms.problems([]) == []


@pytest.mark.parametrize("abandoned", [False, True])
def test_what_nobody_ends_is_reaped(abandoned: bool) -> None:
    rooms = Rooms()
    join(rooms)
    if abandoned:
        rooms.abandon(rooms.open(ROOM, 0.0), 0.0)
    assert rooms.reap(10.0, 100.0) == []
    assert rooms.reap(101.0, 100.0) == [ROOM]
    assert rooms.problems([]) == []


class PrefillRooms(RuleBasedStateMachine):
    """Whatever happens, opened less closed is what has a sender."""

    def __init__(self) -> None:
        super().__init__()
        self.rooms, self.now, self.senders = Rooms(), 0.0, []

    numbers = st.integers(1, 3)

    @rule(room=numbers, session=st.sampled_from(["a:1", "b:1"]))
    def metadata(self, room: int, session: str) -> None:
        known = self.rooms.get(room)
        if known is None or known.may_join(session):
            join(self.rooms, now=self.now, room=room, session=session, required=2)

    @rule(room=numbers)
    def refuse(self, room: int) -> None:
        self.rooms.refuse(room, "why", self.now)

    @rule(room=numbers)
    def open(self, room: int) -> None:
        self.senders.append(self.rooms.open(room, self.now))

    @rule(index=st.integers(0, 5))
    def abandon(self, index: int) -> None:
        if self.senders:
            self.rooms.abandon(self.senders[index % len(self.senders)], self.now)

    @rule(index=st.integers(0, 5))
    def clear(self, index: int) -> None:
        if self.senders:
            self.rooms.close(self.senders[index % len(self.senders)], self.now)

    @rule(seconds=st.sampled_from([0.5, 30.0, 400.0]))
    def later(self, seconds: float) -> None:
        self.now += seconds
        self.rooms.reap(self.now, 300.0)

    @invariant()
    def conserved(self) -> None:
        assert [p for p in self.rooms.problems([]) if "but" in p] == []


TestPrefillRooms = PrefillRooms.TestCase
TestPrefillRooms.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_a_broken_law_names_both_numbers() -> None:
    rooms = Rooms()
    rooms.open(ROOM, 0.0)
    rooms._closed += 1
    assert rooms.problems([])[0] == "1 rooms opened and 1 closed, but 1 have a sender"
    own = decode.Rooms()
    own.begin(ROOM, mock.Mock())
    own._ended += 1
    assert own.problems()[1] == "1 rooms begun and 1 ended, but 1 are held"


def test_what_is_said_of_a_request_is_not_about_the_last_one_of_its_number() -> None:
    rank = DecodeRank.__new__(DecodeRank)
    rank.rooms, rank.landing, rank.sources = decode.Rooms(), mock.Mock(), mock.Mock()
    room = rank.begin(ROOM, "host:1")
    assert rank.rooms.get(ROOM) is room
    assert room.span is rank.landing.span
    rank.landing.begin.assert_called_once_with(ROOM)


def test_a_success_before_metadata_is_the_last_requests_of_its_number() -> None:
    rooms = decode.Rooms()
    gate = Gate(rooms, Registrations(), mock.Mock(), True, (), (), Framing())
    room = rooms.begin(ROOM, mock.Mock(senders={0}, contacted={0, 1}))
    success, failure = ([b"%d" % ROOM, b"%d" % status, b"0"] for status in (Poll.SUCCESS, 0))
    with pytest.raises(MixKVError, match="before anything was asked for"):
        gate.may_pass(success)
    assert gate.may_pass(failure)
    with pytest.raises(AssertionError):
        rooms.land(room)
    rooms.ask(room, 3, 1, None)
    assert gate.may_pass(success)


def test_a_server_that_gave_this_rank_up_is_registered_with_at_once_then_rarely(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each time it tries a write, in a thread that others need. A success ends that."""
    now, at, registrations = 1000.0, ("host", 2), Registrations()
    monkeypatch.setattr("time.monotonic", lambda: now)

    def again(reason: str) -> bool:
        registrations.told("host:1", at, (0, 0))
        registrations.failed("host:1", reason)
        return registrations.lacks("host:1", at, (0, 0))

    waits, last = list[float](), now
    for _ in range(1200):
        if again("[MIXKV-SEND-03] in other words"):
            waits.append(now - last)
            last = now
        now += 1
    assert waits == [0, 30, 60, 120, 240, 300, 300]
    assert not again("")
    assert not again("Aborted by AbortReq.")
    assert again("[MIXKV-REG-02] in other words")
    registrations.worked("host:1")
    assert again("")


def test_a_decode_room_ends_once() -> None:
    rooms = decode.Rooms()
    first = rooms.begin(ROOM, mock.Mock())
    rooms.ask(first, 3, 1, None)
    assert rooms.problems() == ["1 rooms are held: [7]"]
    rooms.end(first)
    second = rooms.begin(ROOM, mock.Mock())
    rooms.end(first)
    assert rooms.get(ROOM) is second
    with pytest.raises(AssertionError):
        rooms.begin(ROOM, mock.Mock())


@pytest.mark.parametrize(
    ("rank", "reason", "again"),
    [(0, b"[MIXKV-REG-02] it registers again", True), (0, b"timed out", False),
     (1, b"[MIXKV-REG-02] it registers again", False)],
)  # fmt: skip
def test_a_verdict_on_an_ended_room_has_the_rank_register_again(
    rank: int, reason: bytes, again: bool
) -> None:
    """SGLang fails a request on all ranks when one has failed; each rank has its own registration.
    It is not shown to SGLang, which would take it for a verdict on the number's next request."""
    rooms, registrations = decode.Rooms(), Registrations()
    gate = Gate(rooms, registrations, mock.Mock(), True, (), (), Framing())
    registrations.told("host:1", ("host", 2), (0, 0))
    rooms.end(rooms.begin(ROOM, mock.Mock(address="host:1", contacted={0})))
    assert not gate.may_pass([b"%d" % ROOM, b"0", b"%d" % rank, reason])
    assert registrations.lacks("host:1", ("host", 2), (0, 0)) is again


def test_a_verdict_of_checksums_is_the_rooms_that_was_verified() -> None:
    """The scheduler can end the room while the decode thread compares: its pages are free then."""
    for ends in (False, True):
        rank = DecodeRank.__new__(DecodeRank)
        rank.rooms, rank.landing, rank.stats = decode.Rooms(), mock.Mock(), mock.Mock()
        rank._sglang = mock.Mock(statuses=dict)
        room = rank.rooms.begin(ROOM, mock.Mock())
        rank.rooms.ask(room, 3, 1, mock.Mock())

        def compare(_: Any, rank: Any = rank, room: Any = room, ends: bool = ends) -> str:
            if ends:
                rank.rooms.end(room)
            return "differs"

        rank.verifier = mock.Mock(problem=compare)
        assert rank.land(ROOM) == (None if ends else "differs")


def test_strangers_are_bounded_and_never_cost_a_peer_its_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without its plan a transfer thread would take it for a peer without a drafter."""
    monkeypatch.setattr(peers, "MAX_NOTED", 2)
    known = peers.Peers(mock.Mock())
    known._peers["a:1"] = there = peer()
    for number in range(5):
        known.refuse(f"refused:{number}", "facts differ")
        known.note_unread(f"unread:{number}", "no number")
    assert (len(known._refused), len(known._unread)) == (2, 2)
    assert "never arrived" in str(known.refusal("refused:4"))
    for note, words in ((known.note_unread, "was rejected"), (known.refuse, "refuses")):
        note("a:1", "too short")
        assert words in str(known.refusal("a:1"))
        assert known.get("a:1") is there


@pytest.mark.parametrize(
    "now",
    [{"address": Address("10.0.0.1", 9555, "a:1")}, {"process": "another"}],
    ids=["another port", "another process"],
)
def test_a_room_is_not_sent_to_the_successor_of_its_decode_rank(now: dict[str, Any]) -> None:
    """A decode rank that was killed and started can get its session again: its pages are other
    requests' there. The same process registers again, too, and is served."""
    room = Rooms().open(ROOM, 0.0)
    first = Peer(said().sender, mock.Mock(), None, 10, 4, process="one")
    room.members["a:1"] = Member(said(), first)
    rank = PrefillRank.__new__(PrefillRank)
    rank.peers = mock.Mock(refusal=lambda _: None, get=lambda _: again)
    again = replace(first, pages=11)
    rank.check_still_fits(room, "a:1")
    assert room.members["a:1"].peer is again
    again = replace(first, **now)
    with pytest.raises(MixKVError, match=r"MIXKV-ROOM-04.*started anew"):
        rank.check_still_fits(room, "a:1")


def test_a_refused_room_keeps_its_first_reason() -> None:
    """Decode gives a room up when it hears that it was refused; its abort can come before this
    side's request."""
    from sglang_mixkv.protocol.messages import Abort

    rooms, sglang = Rooms(), mock.Mock()
    sglang.statuses.return_value = {}
    gate = PrefillGate(peers.Peers, rooms, sglang, mock.Mock(), Framing(), 0.0)  # type: ignore
    rooms.refuse(ROOM, "it does not fit", 0.0)
    gate._note_abort(Abort(ROOM, "10.0.0.1", 9000), rooms.get(ROOM))
    assert rooms.open(ROOM, 0.0).reason == "it does not fit"


@pytest.mark.parametrize(("held", "awaited"), [(True, False), (False, True)])
def test_a_room_number_that_is_in_use_is_refused(*, held: bool, awaited: bool) -> None:
    """By a request that goes on, and by one whose senders have not all acknowledged its end."""
    rank = object.__new__(DecodeRank)
    rank.sources, rank.rooms, rank._sglang = mock.Mock(), mock.Mock(), mock.Mock()
    rank.sources.why_not.return_value = None
    rank.rooms.get.return_value = mock.Mock() if held else None
    rank._sglang.awaits_acks.return_value = awaited
    assert "still belongs to another request" in str(rank.refusal("a", ROOM))
    rank.rooms.get.return_value, rank._sglang.awaits_acks.return_value = None, False
    assert rank.refusal("a", ROOM) is None
