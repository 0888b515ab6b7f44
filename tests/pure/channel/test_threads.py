"""The threads, sockets and copies around the two state machines, both sides in one process."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import zmq
from rig.channel.invariants import left, outstanding
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

from sglang_mixkv.channel.messages import draw_instance
from sglang_mixkv.channel.times import Times
from sglang_mixkv.decode.breaker import STRIKES
from sglang_mixkv.draft import copier
from sglang_mixkv.draft.gate import Gate
from sglang_mixkv.draft.layout import Pages
from sglang_mixkv.draft.rows import DraftRows
from sglang_mixkv.draft.slot_format import SlotCheck

TOKENS = 20  # three segments
PATIENCE = 3  # a busy machine of two cores


@pytest.fixture
def channel(monkeypatch: pytest.MonkeyPatch) -> Iterator[Channel]:
    """Copies are made by their threads."""
    monkeypatch.setattr(copier, "AT_ONCE", 0)
    with Channel() as one:
        yield one


# ---------------------------------------------------------------- reads


def test_a_link_that_is_made_while_a_message_fails_stays(
    channel: Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message belongs to a room whose link was dropped; meanwhile the same server was connected
    to again."""
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


def test_a_link_in_the_place_of_another_ends_that(channel: Channel) -> None:
    channel.connect(channel.prefill)
    assert channel.request(1) == ("warm", "")
    channel.decode.channel.drop(channel.prefill.instance)
    assert wait_for(lambda: channel.prefill.instance not in channel.decode.channel._links)
    assert wait_for(lambda: not channel.decode.plane._peers)


def test_a_read_from_a_peer_that_is_gone_by_then_ends_at_once(
    channel: Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel.decode.channel._links, "read", lambda action: False)
    assert channel.request(1) == ("cold", "read")
    assert channel.decode.notes.details == ["the prefill rank is gone"]
    monkeypatch.undo()
    assert channel.request(2) == ("warm", "")


def test_a_connection_leaves_a_slot_that_is_in_use_as_it_is(channel: Channel) -> None:
    """Connecting reads a byte into this rank's own memory, which must not change a slot."""
    decode, other = channel.decode, Prefill(channel.times)
    other.staging.slot(0).fill_(0xFF)
    decode.rows.pack(np.arange(4), HEADS, decode.staging.slot(0), 7)
    decode.plane.connect(other.plane.endpoint)
    other.close()
    found = decode.rows.unpack(np.arange(4), HEADS, decode.staging.slot(0), 7)
    assert found is SlotCheck.OK


@pytest.mark.parametrize("offset", [0, -1], ids=["stamp", "last byte"])
def test_a_slot_that_changed_under_a_read_is_not_used(channel: Channel, offset: int) -> None:
    channel.decode.plane.damage = [offset]
    assert channel.request(1) == ("cold", "stale")
    channel.decode.plane.damage = []
    assert channel.request(2) == ("warm", "")


# ---------------------------------------------------------------- copies on a device


def test_a_device_copies_what_threads_would(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device also clears rows as the threads would."""
    monkeypatch.setattr(_Side, "device", OnDevice)
    with Channel() as channel:
        channel.check_three_at_once()
        channel.decode.plane.damage = [64]
        assert channel.request(4) == ("cold", "stale")
        assert channel.at_rest()


# ---------------------------------------------------------------- who is gone


def test_a_peer_that_comes_back_is_asked_at_once(channel: Channel) -> None:
    """The peer's breaker was open before, and giving a peer up forgets all that was held against
    it."""
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


def test_a_rank_that_was_restarted_is_dropped_and_forgotten(
    channel: Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By now another instance listens at the rank's address. That one is served as before."""
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


@pytest.mark.parametrize("host", [HOST, "::1"])
def test_a_rank_listens_at_the_port_that_it_is_given(host: str) -> None:
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
def test_readers_that_end_before_packing_cost_nobody_a_request(
    vanish: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """These readers outnumber the slots. Either their READYs cannot be sent, so that their slots
    are free at once, or their host's kernel accepts them, and one slot is left for others."""
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
        time.sleep(0.2)  # their connections are ended
        sent = [prefill.send(100 + number, 60) for number in range(len(gone))]
        assert wait_for(lambda: prefill.slots.free_slots == (SLOTS // 8 if vanish else SLOTS))
        time.sleep(channel.times.unsure)
        for room in range(20):
            assert channel.request(room, 60, arrived=True) == ("warm", "")
        for one in sent:
            worker.end(one)


def test_a_failed_send_ends_every_transfer_of_its_connection() -> None:
    """Even a room with nothing to send yet ends, since its pages would otherwise be kept for a
    reader that is gone."""
    with Channel(Times(100)) as channel:
        prefill, reader = channel.prefill, Decode(channel.times)
        reader.reach(prefill.row)
        for room in (1, 2):
            reader.open(room, TOKENS, prefill.instance)
        machine = prefill.channel._machine
        assert wait_for(lambda: outstanding(machine).get("transfers") == 2)
        reader.close()
        time.sleep(0.2)  # its connection is ended
        idle, sent = prefill.channel.begin(2), prefill.send(1, TOKENS)
        assert wait_for(lambda: sent.pages_released and idle.pages_released)
        for one in (idle, sent):
            prefill.channel.end(one)


@pytest.mark.parametrize("number", [-1, 1 << 64, -(1 << 63), 1 << 200])
def test_an_invalid_room_number_costs_its_own_room_only(channel: Channel, number: int) -> None:
    """The room's OPEN cannot be encoded, or the other side cannot read it."""
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


# ---------------------------------------------------------------- what raises, what ends


ACTIONS = [
    ("decode", "Send", ("cold", "unsent")), ("decode", "StartRead", ("cold", "read")),
    ("decode", "StartCopies", ("cold", "unpack")), ("decode", "Verdict", ("cold", "broken")),
    ("decode", "Note", ("warm", "")),
    ("prefill", "Send", ("cold", "deadline or protocol")),
    ("prefill", "StartCopies", ("cold", "prefill_pack")),
    ("prefill", "PagesReleased", ("warm", "")),
]  # fmt: skip


@pytest.mark.parametrize(("side", "name", "found"), ACTIONS)
def test_an_action_that_raises_loses_no_other(
    channel: Channel, monkeypatch: pytest.MonkeyPatch, side: str, name: str, found: tuple[str, str]
) -> None:
    """The room is decided, with the scheduler's help where its verdict itself was lost, and both
    sides get their slots back: one whose READY was lost after a while, or with the next READY,
    which breaks the order."""
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
    if found[0] == "cold":  # after a while at the latest
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
        del calls[calls.index("MainThread")]  # it connects, as a thread that asks servers does
        for number in range(3):
            assert channel.request(number) == ("warm", "")
        channel.decode.plane.broken = 1
        assert channel.request(4) == ("cold", "read")
        assert wait_for(lambda: channel.decode.plane.opened == 2), "it was not mended"
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
def test_rooms_are_cleared_if_the_decode_thread_has_ended(
    channel: Channel, monkeypatch: pytest.MonkeyPatch, end: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The log tells an operator where an error ended the thread."""
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
    assert not handle.gate.enter(), "the thread that is left would write to them"


CLOSING: dict[str, Callable[[Channel, Any, Any], Any]] = {
    "prefill's end": lambda channel, sent, _: channel.prefill.channel.end(sent, "aborted"),
    "prefill's release": lambda channel, sent, _: channel.prefill.channel.release(sent),
    "decode's close": lambda channel, _, handle: channel.decode.channel.close(handle, "aborted"),
    "decode's last resort": lambda channel, _, handle: channel.decode.channel.clear_now(handle),
}


@pytest.mark.parametrize("how", CLOSING)
def test_a_handle_shows_its_end_only_once_its_gate_is_closed(
    how: str, channel: Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The channel's thread looks at handles at any time: pages of a request that it takes for ended
    must not be packed or cleared through an open gate. Here it looks a few times before a gate
    closes."""
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
        if gate is mine.gate and gate._open:
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
def test_each_chunk_is_timed_once_from_its_forward_to_its_ready(
    channel: Channel, held: tuple[int, ...], prefix: int
) -> None:
    """The request has three chunks of one or several segments; those in `held` wait for their
    forward. A chunk within the reader's prefix has no READY."""
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
    for number, seconds in zip(chunks, times, strict=True):  # 1 was written, and waited for 0
        assert (seconds > 0.25) == (number not in held and number not in wait_before)
    channel.end(sent, handle)


def test_a_request_without_its_target_waits_for_nothing(channel: Channel) -> None:
    """One whose target has arrived waits until the verdict, which is once, whoever made it."""
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


def test_nothing_is_cleared_while_an_earlier_forward_runs(channel: Channel) -> None:
    """It would write to the rows afterwards."""
    worker, forward = channel.decode.channel, Event()
    handle = channel.open(1, SEGMENT, event=forward)
    worker.clear_now(handle)
    assert handle.state is None
    assert (channel.decode.rows_of(handle) == CANARY).all()
    forward.done = True
    worker.clear_now(handle)
    assert channel.state(handle) == ("cold", "broken")
    worker.close(handle)


def test_a_verdict_after_the_schedulers_own_changes_nothing(
    channel: Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The room's rows were in place, but the end of its copies was not handled yet, when the
    scheduler had them cleared."""
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
    """They may be another request's, whoever should have cleared them."""
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
def test_the_text_of_an_error_is_cut(
    channel: Channel, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """An error of CUDA or a library may be of any length, and goes into a message and a log
    line."""
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
def test_a_call_or_a_look_that_raises_ends_no_channel(
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


def test_what_is_no_message_is_counted_and_nothing_more(channel: Channel) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.setsockopt(zmq.LINGER, 0)
        stranger.connect(channel.prefill.channel.address)
        for frame in (b"", b"\x94" * 200, bytes(4000)):
            stranger.send(frame)
        assert wait_for(lambda: channel.prefill.notes.seen.count("unreadable") == 3)
    assert channel.request(1) == ("warm", "")


@pytest.mark.parametrize("patience", [0.1, 1.0, 3.0])
def test_the_scheduler_decides_once_the_channel_had_its_time(
    patience: float, caplog: pytest.LogCaptureFixture
) -> None:
    """It logs its decision once, however often SGLang polls."""
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


def test_each_side_counts_a_request_by_both_sides_weights(channel: Channel) -> None:
    """Decode takes the weights when a request begins, prefill when it ends. A request of several
    segments counts once."""
    sides = prefill, decode = channel.prefill.notes, channel.decode.notes
    expected = ["weights_unknown", "weights_different", "weights_different", "weights_same"]
    for room, (theirs, ours) in enumerate([(0, 5), (7, 5), (7, 6), (6, 6)]):
        prefill.digest, decode.digest = theirs, ours
        assert channel.request(room, 64) == ("warm", "")
        assert wait_for(lambda: all(len(side.weighed) == room + 1 for side in sides))  # noqa: B023
    assert prefill.weighed == decode.weighed == expected
