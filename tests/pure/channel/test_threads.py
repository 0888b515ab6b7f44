"""The threads, sockets and copies around the two state machines, with both sides in one process."""

from __future__ import annotations

import itertools
import socket
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import zmq
from rig.channel.invariants import left, outstanding, strikes
from rig.channel.on_device import OnDevice
from rig.channel.threads import (
    CANARY,
    HEADS,
    HOST,
    PAGE,
    SEGMENT,
    SLOTS,
    SOON_S,
    Channel,
    Decode,
    Event,
    Prefill,
    _Side,
    wait_for,
)

from sglang_mixkv.channel.actions import Send
from sglang_mixkv.channel.messages import Fail, draw_instance
from sglang_mixkv.channel.times import Times
from sglang_mixkv.decode.breaker import STRIKES
from sglang_mixkv.decode.worker import ENDING
from sglang_mixkv.draft import copier
from sglang_mixkv.draft.gate import Gate
from sglang_mixkv.draft.layout import Pages
from sglang_mixkv.draft.rows import DraftRows
from sglang_mixkv.draft.slot_format import SlotCheck

TOKENS = 20  # three segments
PATIENCE = 3  # longer than usual, for a busy machine of two cores


@pytest.fixture
def channel(monkeypatch: pytest.MonkeyPatch) -> Iterator[Channel]:
    """Make a channel whose copies all run in copying threads."""
    monkeypatch.setattr(copier, "AT_ONCE", 0)
    with Channel() as one:
        yield one


# ---------------------------------------------------------------- reads


def test_a_new_link_survives_a_failed_send_of_the_former(
    channel: Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new link to a server stays open if a message over the server's former link fails.

    The message belongs to a room of the former link, which was dropped.
    """
    decode, peer = channel.decode.channel, channel.prefill.instance
    link, send = decode.dial(channel.prefill.row, ""), decode._links.send
    first, links = channel.open(1, 20), [link]

    def sends(to: bytes, message: Any) -> bool:
        left = send(to, message)
        if not left and links:
            decode.add(links.pop())
        return left

    monkeypatch.setattr(decode._links, "send", sends)
    decode.drop(peer)
    assert channel.state(first) == ("cold", "lost")
    assert wait_for(lambda: peer in decode._links)
    monkeypatch.undo()
    decode.close(first)
    assert channel.request(2) == ("warm", "")


def test_a_new_link_replaces_the_former_one(channel: Channel) -> None:
    channel.connect(channel.prefill)
    assert channel.request(1) == ("warm", "")
    channel.decode.channel.drop(channel.prefill.instance)
    assert wait_for(lambda: channel.prefill.instance not in channel.decode.channel._links)
    assert wait_for(lambda: not channel.decode.plane._peers)


def test_a_read_from_a_peer_that_is_gone_fails_at_once(
    channel: Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel.decode.channel._links, "read", lambda action: False)
    assert channel.request(1) == ("cold", "read")
    assert channel.decode.notes.details == ["the prefill rank is gone"]
    monkeypatch.undo()
    assert channel.request(2) == ("warm", "")


def test_a_probe_does_not_change_a_used_slot(channel: Channel) -> None:
    """The probe of a new connection does not change a slot that is in use.

    A probe reads one byte into this rank's memory.
    """
    decode, other = channel.decode, Prefill(channel.times)
    other.staging.slot(0).fill_(0xFF)
    decode.rows.pack(np.arange(4), HEADS, decode.staging.slot(0), 7)
    decode.plane.connect(other.plane.endpoint)
    other.close()
    found = decode.rows.unpack(np.arange(4), HEADS, decode.staging.slot(0), 7)
    assert found is SlotCheck.OK


@pytest.mark.parametrize("offset", [0, -1], ids=["stamp", "last byte"])
def test_a_slot_that_changed_during_a_read_is_not_used(channel: Channel, offset: int) -> None:
    channel.decode.plane.damage = [offset]
    assert channel.request(1) == ("cold", "stale")
    channel.decode.plane.damage = []
    assert channel.request(2) == ("warm", "")


# ---------------------------------------------------------------- copies on a device


def test_device_copies_equal_those_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies and clears on a device have the same results as in copying threads."""
    monkeypatch.setattr(_Side, "device", OnDevice)
    with Channel() as channel:
        channel.check_three_at_once()
        channel.decode.plane.damage = [64]
        assert channel.request(4) == ("cold", "stale")
        assert channel.at_rest()


# ---------------------------------------------------------------- peers that are gone


def test_a_peer_that_comes_back_is_used_at_once(channel: Channel) -> None:
    """A peer that was dropped and connected again is used at once, even if its breaker was open."""
    decode = channel.decode
    decode.plane.broken = 10**6
    for room in range(STRIKES):
        assert channel.request(room) == ("cold", "read")
    decode.plane.broken = 0
    assert channel.request(STRIKES) == ("cold", "breaker")
    decode.channel.drop(channel.prefill.instance)
    assert wait_for(lambda: channel.prefill.instance not in decode.channel._links)
    channel.connect(channel.prefill)
    assert channel.request(STRIKES + 1) == ("warm", "")


def test_a_restarted_rank_is_dropped(channel: Channel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefill rank that was restarted is dropped, and its new instance is served.

    The new instance listens at the same address.
    """
    decode, forgotten = channel.decode, list[bytes]()

    def forget(peer: bytes) -> None:
        forgotten.append(peer)
        decode.channel.drop(peer)  # as PrefillServers does

    monkeypatch.setattr(decode.channel, "_forget_peer", forget)
    former = SimpleNamespace(**vars(channel.prefill.row) | {"instance": draw_instance()})
    peer = decode.reach(former)
    handle = decode.open(1, TOKENS, peer)
    assert channel.state(handle) == ("cold", "prefill_restarted")
    assert wait_for(lambda: forgotten == [peer])
    assert wait_for(lambda: peer not in decode.channel._links)
    decode.channel.close(handle)
    assert channel.request(2) == ("warm", "")


def test_a_restored_decode_rank_reads_nothing_more(
    channel: Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a restore from a snapshot, open and later requests start cold, without a strike.

    A failed read does not make the rank reconnect, and a new link has no memory to read from.
    """
    decode, opened = channel.decode, channel.decode.plane.opened
    decode.plane.held = True
    sent, handle = channel.prefill.send(1, TOKENS), channel.open(1, TOKENS)
    assert wait_for(lambda: decode.plane.busy)
    decode.channel.restored()
    assert channel.state(handle) == ("cold", "restored")
    assert not decode.rows_of(handle).any()
    monkeypatch.setattr(decode.plane, "_check", lambda _: "the agent is gone")
    assert wait_for(lambda: not decode.plane.busy)
    channel.end(sent, handle)
    channel.connect(channel.prefill)
    link = decode.channel.dial(channel.prefill.row, "")
    assert link.memory is None
    decode.channel.hang_up(link)
    assert channel.request(2) == ("cold", "restored")
    assert decode.plane.opened == opened
    assert not strikes(decode.channel._machine)
    assert channel.at_rest()


def test_no_read_starts_over_a_dead_data_plane(channel: Channel) -> None:
    channel.decode.plane.dead = True
    assert channel.request(1) == ("cold", "read")


def test_a_restored_prefill_rank_refuses_its_readers(channel: Channel) -> None:
    """After a restore from a snapshot, a prefill rank packs nothing, and holds no request back."""
    handle = channel.open(1, TOKENS)
    assert wait_for(lambda: outstanding(channel.prefill.channel._machine))
    channel.prefill.channel.restored()
    assert channel.state(handle) == ("cold", "prefill_snapshot")
    sent = channel.prefill.channel.begin(1)
    channel.end(sent, handle)
    assert channel.request(2) == ("cold", "prefill_snapshot")
    assert channel.prefill.notes.bytes == 0
    assert channel.prefill.notes.seen == ["snapshot"] * 2
    assert channel.at_rest()


@pytest.mark.parametrize("host", [HOST, "::1"])
def test_a_rank_listens_on_the_given_port(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as free:
        free.bind((host, 0))
        port = free.getsockname()[1]
    with Channel() as channel:
        for asked in (port, 0):
            one = Prefill(channel.times, port=asked, host=host)
            address, _, found = one.channel.address.rpartition(":")
            assert address == ("tcp://[::1]" if ":" in host else f"tcp://{HOST}")
            assert int(found) == asked or not asked
            peer = channel.decode.reach(one.row)
            sent, handle = one.send(7, TOKENS), channel.decode.open(7, TOKENS, peer)
            assert channel.state(handle) == ("warm", "")
            one.channel.end(sent)
            channel.decode.channel.close(handle)
            one.close()


@pytest.mark.parametrize("vanish", [False, True])
def test_dead_readers_make_no_other_request_cold(
    vanish: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dead readers that outnumber the slots make no other request cold.

    Either their READYs cannot be sent, so that their slots are free at once; or the kernel of their
    host still accepts the READYs, and one slot is left for other readers.
    """
    with Channel(Times(PATIENCE)) as channel:
        prefill, gone, worker = channel.prefill, list[Decode](), channel.prefill.channel
        send = worker._send

        def sends(action: Any) -> None:
            if action.message.room < 100:
                send(action)

        for number in range(SLOTS + 1):
            gone.append(Decode(channel.times))
            gone[-1].reach(prefill.row)
            gone[-1].open(100 + number, 60, prefill.instance)
        assert wait_for(lambda: outstanding(worker._machine).get("transfers") == len(gone))
        for one in gone:
            one.close()
        if vanish:
            monkeypatch.setattr(worker, "_send", sends)
        time.sleep(0.2)  # until their connections are closed
        sent = [prefill.send(100 + number, 60) for number in range(len(gone))]
        assert wait_for(lambda: len(prefill.slots.free_slots) == (SLOTS // 8 if vanish else SLOTS))
        time.sleep(channel.times.unsure)
        for room in range(20):
            assert channel.request(room, 60, arrived=True) == ("warm", "")
        for one in sent:
            worker.end(one)


def test_a_failed_send_ends_every_transfer_of_its_connection() -> None:
    """A failed send ends all transfers of its connection, including those with nothing to send.

    Otherwise such transfers would keep their pages for a reader that is gone.
    """
    with Channel(Times(100)) as channel:
        prefill, reader = channel.prefill, Decode(channel.times)
        reader.reach(prefill.row)
        for room in (1, 2):
            reader.open(room, TOKENS, prefill.instance)
        machine = prefill.channel._machine
        assert wait_for(lambda: outstanding(machine).get("transfers") == 2)
        reader.close()
        time.sleep(0.2)  # until its connection is closed
        idle, sent = prefill.channel.begin(2), prefill.send(1, TOKENS)
        assert wait_for(lambda: sent.pages_released and idle.pages_released)
        for one in (idle, sent):
            prefill.channel.end(one)


def test_a_message_of_several_frames_ends_the_requests_of_its_peer(channel: Channel) -> None:
    """Also those whose last segment was announced go cold at once, and the peer gets no strike."""
    worker, plane = channel.prefill.channel, channel.decode.plane
    plane.held = True
    sent, handle = channel.prefill.send(1, SEGMENT), channel.open(1, SEGMENT)
    assert wait_for(lambda: plane.busy)
    (connection,) = worker._machine._open
    worker._call(lambda: worker._socket.send_multipart([connection, b"one", b"two"]))
    assert channel.state(handle) == ("cold", "lost")
    assert strikes(channel.decode.channel._machine) == {}
    plane.held = False
    channel.end(sent, handle)


def test_each_later_failure_of_a_connection_is_handled(
    channel: Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection whose sends fail is given up once for sends that fail together, and once again
    later: a full queue may have room in the meantime."""
    worker, lost = channel.prefill.channel, list[bytes]()
    monkeypatch.setattr(worker._machine, "connection_lost", lost.append)
    messages = [Send(name, Fail(1, 2, "lost")) for name in (b"nobody", b"another", b"nobody")]

    def fail() -> None:
        for one in messages:
            worker._do(one)

    for count in (1, 2, 3):
        worker._call(fail)
        assert wait_for(lambda: len(lost) == 2 * count)  # noqa: B023
        assert Counter(lost) == {b"nobody": count, b"another": count}
        assert wait_for(lambda: not worker._lost)


@pytest.mark.parametrize("number", [-1, 1 << 64, -(1 << 63), 1 << 200])
def test_an_invalid_room_number_makes_only_its_room_cold(channel: Channel, number: int) -> None:
    """A room whose number cannot be encoded goes cold, and other rooms stay warm."""
    others = [channel.open(room, TOKENS) for room in (11, 12, 13)]
    bad = channel.open(number, TOKENS)
    assert channel.state(bad) == ("cold", "unsent")
    channel.decode.channel.close(bad, "timeout")
    for room, other in zip((11, 12, 13), others, strict=True):
        sent = channel.prefill.send(room, TOKENS)
        assert channel.state(other) == ("warm", "")
        channel.end(sent, other)
    assert channel.request(14) == ("warm", "")
    assert channel.decode.notes.seen == ["unsent"]


# ---------------------------------------------------------------- exceptions and ends


ACTIONS = [
    ("decode", "Send", ("cold", "unsent")), ("decode", "StartRead", ("cold", "read")),
    ("decode", "StartCopies", ("cold", "unpack")), ("decode", "Verdict", ("cold", "broken")),
    ("decode", "Note", ("warm", "")),
    ("prefill", "Send", ("cold", "deadline or protocol")),
    ("prefill", "StartCopies", ("cold", "prefill_pack")),
    ("prefill", "PagesReleased", ("warm", "")),
]  # fmt: skip


@pytest.mark.parametrize(("side", "name", "found"), ACTIONS)
def test_an_action_that_raises_loses_no_other_action(
    channel: Channel, monkeypatch: pytest.MonkeyPatch, side: str, name: str, found: tuple[str, str]
) -> None:
    """A room is decided and all slots are freed, whichever action raises once.

    If the verdict itself raises, SGLang's scheduler decides the room. A room whose READY raises
    goes cold at its deadline, or when the next READY comes out of order.
    """
    once, prefill, decode = [name], channel.prefill.channel, channel.decode.channel
    worker: Any = getattr(channel, side).channel
    real = worker._do

    def do(action: Any) -> None:
        if type(action).__name__ in once:
            once.clear()
            raise MemoryError("once")
        real(action)

    monkeypatch.setattr(worker, "_do", do)
    monkeypatch.setattr(worker, "_slowest", 0.3)
    handle, sent = channel.open(1, TOKENS), channel.prefill.send(1, TOKENS)
    prefill.release(sent)
    if found[0] == "cold":  # the target's arrival starts the deadline
        decode.target_arrived(handle)
    if name == "Verdict":
        assert wait_for(lambda: decode.is_lost(handle))
        decode.clear_now(handle)
    state, reason = channel.state(handle)
    assert (state, reason in found[1]) == (found[0], True)
    assert wait_for(lambda: prefill.release(sent))
    assert not once or name == "Note"
    channel.end(sent, handle)
    assert channel.request(2) == ("warm", "")
    assert wait_for(lambda: not left(prefill))


def test_each_thread_of_the_channel_sets_its_device_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = list[str]()
    monkeypatch.setattr(
        DraftRows, "use_device", lambda self: calls.append(threading.current_thread().name)
    )
    with Channel() as channel:
        del calls[calls.index("MainThread")]  # the main thread connects in this test
        for number in range(3):
            assert channel.request(number) == ("warm", "")
        channel.decode.plane.broken = 1
        assert channel.request(4) == ("cold", "read")
        assert wait_for(lambda: channel.decode.plane.opened == 2), "the peer was not reopened"
        assert channel.request(5) == ("warm", "")
        names = sorted(name.partition("_")[0] for name in calls)
        assert names == [
            "mixkv-decode", "mixkv-pack", "mixkv-prefill", "mixkv-reconnect", "mixkv-unpack"
        ]  # fmt: skip


def ending(*_: Any) -> None:
    raise SystemExit


def failing(*_: Any) -> None:
    raise RuntimeError("x" * 1000)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("end", ["channel", "copies", "machine"])
def test_rooms_are_cleared_if_decodes_thread_has_ended(
    channel: Channel, monkeypatch: pytest.MonkeyPatch, end: str, caplog: pytest.LogCaptureFixture
) -> None:
    """SGLang's scheduler clears the rows of a room if decode's thread has ended.

    An error that ended the thread is logged.
    """
    worker = channel.decode.channel
    owner, name = {
        "channel": (worker, "_poll"), "copies": (worker._copies, "_copy"),
        "machine": (worker._machine, "actions"),
    }[end]  # fmt: skip
    monkeypatch.setattr(owner, name, failing if end == "machine" else ending)
    handle, _ = channel.open(1, SEGMENT), channel.prefill.send(1, SEGMENT)
    assert wait_for(lambda: worker.broken)
    assert any("[MIXKV-SELF-01]" in line for line in caplog.messages) == (end == "machine")
    assert handle.state is None
    worker.clear_now(handle)
    assert channel.state(handle) == ("cold", "broken")
    assert not channel.decode.rows_of(handle).any()
    assert not handle.gate.enter(), "a copying thread could still write to the rows"


CLOSING: dict[str, Callable[[Channel, Any, Any], Any]] = {
    "prefill's end": lambda channel, sent, _: channel.prefill.channel.end(sent, "aborted"),
    "prefill's release": lambda channel, sent, _: channel.prefill.channel.release(sent),
    "decode's close": lambda channel, _, handle: channel.decode.channel.close(handle, "aborted"),
    "decode's last resort": lambda channel, _, handle: channel.decode.channel.clear_now(handle),
}


@pytest.mark.parametrize("how", CLOSING)
def test_a_handle_changes_only_after_its_gate_is_closed(
    how: str, channel: Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A handle changes only after its gate is closed.

    The channel thread reads handles at any time. If a request seemed to have ended while its gate
    was still open, its pages could be packed or cleared. In this test the channel thread runs a few
    passes just before a gate closes.
    """
    seen, real = list[dict[str, Any]](), Gate.try_close
    handle, forward = channel.open(1, SEGMENT), Event()
    sent = channel.prefill.send(1, SEGMENT, events=[forward])
    assert wait_for(lambda: channel.prefill.channel._machine._transfers)
    if how == "prefill's release":
        channel.decode.channel.close(handle, "aborted")
        channel.prefill.channel.release(sent)
        assert wait_for(lambda: sent.pages_released)
    mine = sent if how.startswith("prefill") else handle
    before = dict(vars(mine))

    def try_close(gate: Gate) -> bool:
        if gate is mine.gate and gate.is_open:
            seen.append(dict(vars(mine)))
            looks = channel.prefill.notes.ticks
            assert wait_for(lambda: channel.prefill.notes.ticks > looks + 1)
        return real(gate)

    monkeypatch.setattr(Gate, "try_close", try_close)
    CLOSING[how](channel, sent, handle)
    assert seen == [before]
    if how == "prefill's end":
        assert channel.state(handle) == ("cold", "prefill_aborted")
    monkeypatch.undo()
    forward.done = True
    channel.end(sent, handle)


@pytest.mark.parametrize(
    ("held", "prefix"), [((), 0), ((0,), 0), ((1,), 8), ((0, 2), 0), ((2,), 20)]
)
def test_each_chunk_is_timed_from_its_forward_to_its_ready(
    channel: Channel, held: tuple[int, ...], prefix: int
) -> None:
    """The metric gets one time per chunk, from the end of its forward to its READY.

    The request has three chunks. `held`: the chunks that wait for their forward. A chunk within the
    reader's cached prefix has no READY.
    """
    handle, sender = channel.open(1, 40 - prefix, first=prefix, page=PAGE), channel.prefill.channel
    sent, forward, times = sender.begin(1), Event(), channel.prefill.notes.announcing
    rows = channel.prefill.pages(40).rows(0, 40)
    chunks = [number for number, end in enumerate((20, 24, 40)) if end > prefix]
    for number, (first, end) in enumerate(((0, 20), (20, 24), (24, 40))):
        pages = Pages(rows[first:end], 1, [forward] * (number in held))
        sender.add_chunk(sent, first, end - first, end == 40, pages)
    wait_before = [number for number in chunks if number < min(held, default=9)]
    assert wait_for(lambda: len(times) == len(wait_before))
    time.sleep(0.3)
    forward.done = True
    assert channel.state(handle) == ("warm", "")
    assert wait_for(lambda: len(times) == len(chunks))
    for number, seconds in zip(chunks, times, strict=True):  # a chunk may wait for an earlier one
        assert (seconds > 0.25) == (number not in held and number not in wait_before)
    channel.end(sent, handle)


def test_the_waiting_time_starts_with_the_targets_arrival(channel: Channel) -> None:
    """A request's waiting time starts with its target's arrival and ends with its verdict."""
    handle, sent = channel.open(1, SEGMENT), channel.prefill.send(1, SEGMENT)
    assert channel.state(handle) == ("warm", "")
    assert handle.waited is None
    channel.decode.channel.target_arrived(handle)
    assert handle.waited == 0
    channel.end(sent, handle)
    handle = channel.open(2, SEGMENT)
    channel.decode.channel.target_arrived(handle)
    assert handle.waited is None
    time.sleep(0.1)
    sent = channel.prefill.send(2, SEGMENT)
    assert channel.state(handle) == ("warm", "")
    assert handle.waited is not None
    assert 0.1 <= handle.waited < SOON_S
    channel.end(sent, handle)


def test_rows_are_not_cleared_during_an_earlier_forward(channel: Channel) -> None:
    """SGLang's scheduler does not clear rows while an earlier forward may still write to them."""
    worker, forward = channel.decode.channel, Event()
    handle = channel.open(1, SEGMENT, event=forward)
    worker.clear_now(handle)
    assert handle.state is None
    assert (channel.decode.rows_of(handle) == CANARY).all()
    forward.done = True
    worker.clear_now(handle)
    assert channel.state(handle) == ("cold", "broken")
    worker.close(handle)


def test_an_earlier_forward_postpones_the_last_resort() -> None:
    """After an earlier forward, the channel thread gets its whole time limit again.

    Otherwise SGLang's scheduler and the thread would both clear the rows when a long forward ends.
    """
    with Channel(Times(0.3)) as channel:
        worker, forward, slowest = channel.decode.channel, Event(), channel.times.last_resort
        handle = channel.open(1, SEGMENT, event=forward)
        handle.arrived = time.monotonic() - 1.1 * slowest
        assert worker.is_lost(handle)
        worker.clear_now(handle)
        forward.done = True
        assert (worker.is_lost(handle), handle.state) == (False, None)
        handle.held -= 1.1 * slowest
        assert worker.is_lost(handle)
        handle.held = 0.0  # as if the scheduler had not seen the forward unfinished
        worker.clear_now(handle)
        assert (worker.is_lost(handle), handle.state) == (False, None)
        handle.held -= ENDING
        assert worker.is_lost(handle)
        worker.clear_now(handle)
        assert handle.reason == "broken"
        worker.close(handle)


def test_a_verdict_after_the_schedulers_has_no_effect(
    channel: Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A verdict of the channel thread has no effect after SGLang's scheduler has decided a room.

    The rows were unpacked, but the channel thread had not handled the ends of the copies when the
    scheduler cleared the rows.
    """
    worker, copied, go = channel.decode.channel, threading.Event(), threading.Event()
    real = worker._machine.copied

    def late(*ended: Any) -> None:
        copied.set()
        assert go.wait(10)
        real(*ended)

    monkeypatch.setattr(worker._machine, "copied", late)
    handle, sent = channel.open(1, SEGMENT), channel.prefill.send(1, SEGMENT)
    assert copied.wait(10)
    worker.clear_now(handle)
    go.set()
    assert channel.request(2) == ("warm", "")
    assert worker._machine._requests[handle.opened.generation].decided
    assert channel.state(handle) == ("cold", "broken")
    channel.end(sent, handle)


def test_a_room_whose_rows_cannot_be_cleared_fails(
    channel: Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A room fails if its rows cannot be cleared, by the scheduler or by the channel thread.

    The rows may still hold draft KV of another request.
    """
    worker = channel.decode.channel
    monkeypatch.setattr(channel.decode.rows, "clear", failing)
    handles = channel.open(1, SEGMENT), channel.open(2, SEGMENT)
    worker.clear_now(handles[0])
    worker.drop(channel.prefill.instance)
    for handle in handles:
        state, reason = channel.state(handle)
        assert (state, "xxx" in reason) == ("failed", True)
        worker.close(handle)


@pytest.mark.parametrize("what", ["pack", "start", "unpack", "forward", "send", "read", "copy"])
def test_the_text_of_an_error_is_truncated(
    channel: Channel, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """The text of an error is truncated before it goes into a message or a log line.

    An error of CUDA or of a library may be of any length.
    """
    forward, prefill, decode = Event(), channel.prefill, channel.decode
    forward.done = True
    owner, name = {
        "pack": (prefill.rows, what), "start": (prefill.channel._copies, what),
        "unpack": (decode.rows, what), "copy": (decode.channel._copies, "start"),
        "send": (decode.channel._links, what), "read": (decode.channel._links, what),
        "forward": (forward, "query"),
    }[what]  # fmt: skip
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, failing)
        handle, sent = channel.open(1, TOKENS, event=forward), prefill.send(1, TOKENS)
        assert wait_for(lambda: decode.notes.details)
        patch.setattr(forward, "query", lambda: True)
        assert channel.state(handle)[0] == ("failed" if what == "copy" else "cold")
    assert set(decode.notes.details) == {repr(RuntimeError("x" * 1000))[:300]}
    channel.end(sent, handle)


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_call_or_poll_that_raises_does_not_end_the_thread(
    channel: Channel, monkeypatch: pytest.MonkeyPatch, side: str
) -> None:
    worker, once = getattr(channel, side).channel, ["_poll", "tick"]

    def raising_once(name: str, real: Any) -> Any:
        def call(*args: Any) -> Any:
            if name in once:
                once.remove(name)
                raise MemoryError("no memory")
            return real(*args)

        return call

    for owner, name in ((worker, "_poll"), (worker._machine, "tick")):
        monkeypatch.setattr(owner, name, raising_once(name, getattr(owner, name)))
    assert wait_for(lambda: not once)
    assert channel.request(1) == ("warm", "")
    assert not worker.broken


# ---------------------------------------------------------------- sockets


def test_invalid_messages_are_only_counted(channel: Channel) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.setsockopt(zmq.LINGER, 0)
        stranger.connect(channel.prefill.channel.address)
        for frame in (b"", b"\x94" * 200, bytes(4000)):
            stranger.send(frame)
        assert wait_for(lambda: channel.prefill.notes.seen.count("unreadable") == 3)
    assert channel.request(1) == ("warm", "")


@pytest.mark.parametrize("patience", [0.1, 1.0, 3.0])
def test_the_scheduler_decides_only_after_the_channels_time(
    patience: float, caplog: pytest.LogCaptureFixture
) -> None:
    """SGLang's scheduler decides a request only after the channel thread's time limit.

    The decision is logged once.
    """
    with Channel(Times(patience)) as channel:
        slowest = channel.times.last_resort
        prefill, decode = channel.prefill.channel, channel.decode.channel
        handle, sent = channel.open(1, TOKENS), prefill.begin(7)
        for since, late in ((0.9 * slowest, False), (1.1 * slowest, True)):
            sent.sent = handle.arrived = time.monotonic() - since
            assert (decode.is_lost(handle), prefill.release(sent)) == (late, late)
        assert prefill.release(sent)
        assert len([line for line in caplog.messages if "neither packed" in line]) == 1
        channel.end(sent, handle)


# ---------------------------------------------------------------- weights


def test_each_side_counts_requests_by_both_sides_weights(channel: Channel) -> None:
    """Each side counts a request once: as one with the same, different or unknown weights.

    Decode uses its weights at the request's start, prefill those at its end.
    """
    sides = prefill, decode = channel.prefill.notes, channel.decode.notes
    default = zlib.crc32(b"default")
    cases = {
        "unknown": [(0, 5), (5, 0), (0, 0), (default, default)],
        "different": [(7, 5), (7, 6), (default, 6), (7, default)], "same": [(6, 6)],
    }  # fmt: skip
    expected = [f"weights_{state}" for state, pairs in cases.items() for _ in pairs]
    for room, (theirs, ours) in enumerate(itertools.chain(*cases.values())):
        prefill.digest, decode.digest = theirs, ours
        assert channel.request(room, 64) == ("warm", "")
        assert wait_for(lambda: all(len(side.weighed) == room + 1 for side in sides))  # noqa: B023
    assert prefill.weighed == decode.weighed == expected


def test_an_empty_last_ready_has_the_weights(channel: Channel) -> None:
    """Both sides compare weights even if a request's last chunk has no tokens."""
    sides = prefill, decode = channel.prefill.notes, channel.decode.notes
    prefill.digest, decode.digest = 7, 5
    sender, handle = channel.prefill.channel, channel.open(3, 20)
    sent = sender.begin(3)
    sender.add_chunk(sent, 0, 20, False, channel.prefill.pages(20))
    assert wait_for(lambda: prefill.announcing)
    sender.add_chunk(sent, 20, 0, True, channel.prefill.pages(0))
    assert channel.state(handle) == ("warm", "")
    assert [side.weighed for side in sides] == [["weights_different"]] * 2
    channel.end(sent, handle)
