"""The threads, sockets and copies around the two state machines, both sides in one process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import zmq
from rig.threads import CANARY, SEGMENT, SLOTS, TOKEN_BYTES, Channel, Event, Prefill, wait_for

from sglang_mixkv.channel.messages import draw_instance
from sglang_mixkv.channel.times import Times
from sglang_mixkv.decode import events as ev
from sglang_mixkv.decode.copier import Copier

TOKENS = 20  # three segments


class ShortReads(Times, frozen=True):
    """Whatever else takes its time on a busy machine."""

    read = property(lambda self: 0.3)


@pytest.fixture
def channel() -> Iterator[Channel]:
    with Channel() as one:
        yield one


# ---------------------------------------------------------------- a request


@pytest.mark.parametrize(("tokens", "first"), [(1, 0), (SEGMENT, 0), (TOKENS, 0), (TOKENS, 8)])
def test_every_row_is_in_place(channel: Channel, tokens: int, first: int) -> None:
    entry = channel.open(1, tokens, first=first, checksum=True)
    use = channel.prefill.send(1, tokens, first)
    assert channel.state(entry) == ("warm", "")
    assert channel.same(entry)
    assert use.bytes == entry.bytes == tokens * TOKEN_BYTES
    assert use.settled
    channel.end(use, entry)
    assert channel.at_rest()


def test_a_chunk_is_packed_once_all_of_its_events_are_done(channel: Channel) -> None:
    written, filled = Event(), Event()
    written.done = True
    truth = channel.prefill.memory.copy()
    channel.prefill.memory[:] = 0
    entry = channel.open(1, TOKENS)
    use = channel.prefill.send(1, TOKENS, events=(written, filled))
    assert not wait_for(lambda: channel.prefill.slots.free_slots < SLOTS, 0.3)
    channel.prefill.memory[:] = truth
    filled.done = True
    assert channel.state(entry) == ("warm", "")
    assert channel.same(entry)
    channel.end(use, entry)


def test_rows_are_written_once_an_earlier_forward_is_done(channel: Channel) -> None:
    forward = Event()
    entry = channel.open(1, SEGMENT, event=forward)
    use = channel.prefill.send(1, SEGMENT)
    assert wait_for(lambda: use.settled and not channel.prefill.slots.offered)  # it was read
    time.sleep(0.2)
    assert (channel.decode.rows_of(entry) == CANARY).all()
    forward.done = True
    assert channel.state(entry) == ("warm", "")
    channel.end(use, entry)
    assert channel.at_rest()


def test_draft_kv_is_waited_for_from_the_targets_arrival_on(channel: Channel) -> None:
    entry = channel.open(1, TOKENS)
    assert not wait_for(lambda: entry.state, 3 * channel.times.shortest_wait)
    channel.decode.inbox.target_arrived(entry)
    assert channel.state(entry) == ("cold", "deadline")
    assert not channel.decode.rows_of(entry).any()
    channel.decode.inbox.close(entry)


def test_a_prefill_rank_that_ends_waits_for_what_it_has_offered(channel: Channel) -> None:
    channel.decode.plane.held = True
    entry, use = channel.open(1, SEGMENT), channel.prefill.send(1, SEGMENT)
    assert wait_for(lambda: channel.prefill.slots.offered == 1)
    threading.Timer(0.3, setattr, (channel.decode.plane, "held", False)).start()
    channel.prefill.close()
    assert channel.prefill.slots.offered == 0
    assert channel.state(entry) == ("warm", "")
    channel.end(use, entry)


# ---------------------------------------------------------------- reads


def test_a_read_holds_the_slots_of_both_sides_until_it_has_ended(channel: Channel) -> None:
    channel.decode.plane.held = True
    entry, use = channel.open(1, SEGMENT), channel.prefill.send(1, SEGMENT)
    assert wait_for(lambda: channel.decode.slots.free_slots < SLOTS)
    assert not wait_for(lambda: not channel.prefill.slots.offered, 0.3)
    assert channel.decode.slots.free_slots == SLOTS - 1
    channel.decode.plane.held = False
    assert channel.state(entry) == ("warm", "")
    channel.end(use, entry)
    assert channel.at_rest()


def test_so_does_a_read_that_was_given_up() -> None:
    with Channel(ShortReads()) as channel:
        channel.decode.plane.held = True
        entry, use = channel.open(1, SEGMENT), channel.prefill.send(1, SEGMENT)
        assert channel.state(entry) == ("cold", "read")
        channel.end(use, entry)
        assert not wait_for(lambda: not channel.prefill.slots.offered, 0.3)
        assert channel.decode.slots.free_slots == SLOTS - 1
        channel.decode.plane.held = False
        assert channel.at_rest()
        assert not channel.decode.rows_of(entry).any(), "what came late is not used"


def test_a_read_that_fails_has_its_connection_mended(channel: Channel) -> None:
    channel.decode.plane.broken = 1
    assert channel.request(1) == ("cold", "read")
    assert wait_for(lambda: channel.decode.plane.opened == 2)
    assert channel.request(2) == ("warm", "")
    assert channel.at_rest()


@pytest.mark.parametrize("offset", [0, -1, 64], ids=["stamp", "last stamp", "payload"])
def test_a_slot_that_changed_under_a_read_is_not_used(channel: Channel, offset: int) -> None:
    channel.decode.plane.damage = [offset]
    assert channel.request(1, checksum=True) == ("cold", "stale")
    channel.decode.plane.damage = []
    assert channel.request(2, checksum=True) == ("warm", "")


# ---------------------------------------------------------------- the gate


def test_a_gate_closes_behind_the_copy_under_way(
    channel: Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    copying, go_on = threading.Event(), threading.Event()
    real = channel.decode.rows.unpack

    def unpack(*args: Any) -> None:
        copying.set()
        go_on.wait(10)
        real(*args)

    monkeypatch.setattr(channel.decode.rows, "unpack", unpack)
    entry, use = channel.open(1, SEGMENT), channel.prefill.send(1, SEGMENT)
    assert copying.wait(10)
    closing = threading.Thread(target=channel.decode.inbox.close, args=(entry, "aborted"))
    closing.start()
    closing.join(0.2)
    assert closing.is_alive()
    go_on.set()
    closing.join(10)
    channel.decode.memory[:] = CANARY  # its pages are another request's from now on
    channel.prefill.outbox.end(use, "aborted")
    assert channel.at_rest()
    assert (channel.decode.memory == CANARY).all()


def test_no_job_passes_a_closed_gate(channel: Channel) -> None:
    entry, done = channel.open(1, SEGMENT), list[ev.JobDone]()
    generation = entry.opened.generation
    entry.gate.close()
    copier = Copier(
        channel.decode.rows, channel.decode.staging, {generation: entry}, done.append,
        lambda _size, _seconds: None,
    )  # fmt: skip
    copier.put(ev.Clear(1, generation, 0, SEGMENT))
    copier.put(ev.Unpack(2, generation, 0, SEGMENT, range(4), 0, 0, None))  # a slot of zeros
    assert wait_for(lambda: len(done) == 2)
    copier.close()
    assert [job.result for job in done] == [ev.Result.CLOSED] * 2
    assert (channel.decode.memory == CANARY).all()
    channel.decode.inbox.close(entry)


# ---------------------------------------------------------------- what raises, what ends


def raising(*_: Any) -> None:
    raise MemoryError("no memory")


def ending(*_: Any) -> None:
    raise SystemExit


@pytest.mark.parametrize(
    ("side", "name", "cold"), [("prefill", "pack", "prefill_pack"), ("decode", "unpack", "unpack")]
)
def test_a_copy_that_raises_is_the_loss_of_one_room(
    channel: Channel, side: str, name: str, cold: str
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(getattr(channel, side).rows, name, raising)
        assert channel.request(1) == ("cold", cold)
    assert channel.request(2) == ("warm", "")
    assert channel.at_rest()


def test_rows_that_cannot_be_cleared_fail_their_room(
    channel: Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("unpack", "clear"):
        monkeypatch.setattr(channel.decode.rows, name, raising)
    assert channel.request(1)[0] == "failed"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_nobody_waits_for_a_prefill_rank_whose_thread_has_ended(
    channel: Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel.prefill.outbox, "_handle", ending)
    use = channel.prefill.send(1, TOKENS)
    assert wait_for(lambda: use.settled)
    assert wait_for(channel.prefill.outbox.check)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("end", ["channel", "copies"])
def test_rooms_of_a_decode_rank_whose_thread_has_ended_are_cleared(
    channel: Channel, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    inbox = channel.decode.inbox
    owner, name = (inbox, "_look_after") if end == "channel" else (inbox._copier, "_copy")
    monkeypatch.setattr(owner, name, ending)
    entry, _ = channel.open(1, SEGMENT), channel.prefill.send(1, SEGMENT)
    assert wait_for(lambda: inbox.broken)
    assert entry.state is None
    inbox.clear_now(entry)
    assert channel.state(entry) == ("cold", "broken")
    assert not channel.decode.rows_of(entry).any()


# ---------------------------------------------------------------- sockets


def test_what_is_no_message_is_counted_and_nothing_more(channel: Channel) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.setsockopt(zmq.LINGER, 0)
        stranger.connect(channel.prefill.outbox.address)
        for frame in (b"", b"\x94" * 200, bytes(4000)):
            stranger.send(frame)
        assert wait_for(lambda: channel.prefill.notes.seen.count("unreadable") == 3)
    assert channel.request(1) == ("warm", "")


def test_a_use_does_not_wait_for_a_reader_that_is_gone(channel: Channel) -> None:
    entry = channel.open(1, TOKENS)
    assert wait_for(lambda: channel.prefill.outbox.left().get("waiting"))
    channel.decode.close()
    use = channel.prefill.send(1, TOKENS)
    assert wait_for(lambda: use.settled, 20)
    channel.prefill.outbox.end(use)
    assert entry.state is None


def opening(channel: Channel, peer: bytes, until: Callable[[], object]) -> bool:
    """Room after room: what was sent while its connection ended is lost."""

    def found() -> bool:
        entry = channel.decode.open(1, TOKENS, peer)
        wait_for(lambda: entry.state is not None, 0.3)
        channel.decode.inbox.close(entry)
        return bool(until())

    return wait_for(found, 10)


def test_a_room_does_not_wait_for_a_prefill_rank_that_is_gone(channel: Channel) -> None:
    channel.prefill.close()
    seen = channel.decode.notes.seen
    assert opening(channel, channel.prefill.instance, lambda: "cold_lost" in seen)


def test_a_rank_that_was_restarted_says_so_and_is_forgotten(channel: Channel) -> None:
    """The socket connects again, and reaches another instance at the same address."""
    former = channel.prefill
    former.close()
    channel.prefill = Prefill(channel.times, former.port)
    assert opening(channel, former.instance, lambda: channel.decode.forgotten)
    assert set(channel.decode.forgotten) == {former.instance}
    assert not channel.decode.inbox.knows(former.instance)
    assert wait_for(lambda: former.plane.endpoint not in channel.decode.plane._peers)
    channel.connect(channel.prefill)
    assert channel.request(2) == ("warm", "")


def test_rooms_of_a_rank_that_is_dropped_end_and_others_go_on(channel: Channel) -> None:
    """Another one at its address is another rank: it drops nothing."""
    former, entry = channel.prefill, channel.open(1, TOKENS)
    other = SimpleNamespace(**vars(former.row) | {"instance": draw_instance()})
    channel.decode.reach(other)
    assert channel.request(2) == ("warm", "")
    channel.decode.inbox.drop(other.instance)
    assert wait_for(lambda: not channel.decode.inbox.knows(other.instance))
    assert channel.request(3) == ("warm", "")
    channel.decode.inbox.drop(former.instance)
    assert channel.state(entry) == ("cold", "lost")
    assert not channel.decode.inbox.knows(former.instance)
    assert wait_for(lambda: not channel.decode.plane._peers)
    channel.decode.inbox.close(entry)
    channel.connect(former)
    assert channel.request(4) == ("warm", "")
