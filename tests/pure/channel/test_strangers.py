"""Strangers send messages to both sides of a channel over real sockets, while it serves requests.

A stranger is a process that belongs to no server.
"""

from __future__ import annotations

import multiprocessing as mp
import time
from collections import Counter
from collections.abc import Iterator
from statistics import median
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import zmq
from pure.channel import stranger
from rig.channel.invariants import outstanding
from rig.channel.threads import Channel, wait_for
from rig.process.resources import leaks, resources

from sglang_mixkv.channel import messages
from sglang_mixkv.channel.messages import Fail, Open, draw_instance, encode
from sglang_mixkv.channel.sockets import BATCH
from sglang_mixkv.channel.times import Times
from sglang_mixkv.prefill.machine import MAX_OPEN
from sglang_mixkv.prefill.worker import PARTS, PrefillWorker

REQUESTS = 200
PATIENCE = 30  # long, for a busy machine of two cores where both sides share the GIL
SLACK = {"rss_mib": 128}  # twice the memory that the rooms of two connections take


@pytest.mark.parametrize("lasts", [5, pytest.param(120, marks=pytest.mark.full)])
def test_a_stranger_makes_no_request_cold(lasts: int) -> None:
    """All requests stay warm while a stranger sends useless messages as fast as it can.

    The stranger opens rooms, acknowledges slots of other readers, and announces rooms, slots and
    tokens that do not exist (stranger.py).
    """
    with Channel(Times(PATIENCE)) as channel:
        assert channel.request(1) == ("warm", "")
        prefill, decode = channel.prefill.channel, channel.decode.channel
        context = mp.get_context("spawn")
        pipe, there = context.Pipe()
        given = there, prefill.address, channel.prefill.instance, lasts
        process = context.Process(target=stranger.run, args=given, daemon=True)
        process.start()
        there.close()
        row = SimpleNamespace(
            instance=draw_instance(), address=pipe.recv(), staging=channel.prefill.row.staging
        )
        decode.add(decode.dial(row, ""))
        assert wait_for(lambda: row.instance in decode._links)
        warm = resources()
        cheated = channel.decode.open(2, 20, row.instance)
        assert channel.state(cheated) == ("cold", "protocol")
        seconds, most = list[float](), 0
        while process.is_alive() or len(seconds) < REQUESTS:
            began = time.monotonic()
            assert channel.request(3 + len(seconds), arrived=True) == ("warm", "")
            seconds.append(time.monotonic() - began)
            most = max(most, outstanding(prefill._machine).get("transfers", 0))
        sent = pipe.recv()
        decode.close(cheated)
        print(
            f"{sum(sent)} messages of the stranger and {len(seconds)} requests: median "
            f"{median(seconds) * 1e3:.0f} ms, slowest {max(seconds) * 1e3:.0f} ms; "
            f"at most {most} open transfers"
        )
        assert 100 < most <= MAX_OPEN + 1  # the request itself also has a transfer
        assert most > MAX_OPEN // 2 or lasts < 60
        assert min(sent) > stranger.ENOUGH
        assert "unreadable" in channel.prefill.notes.seen
        assert wait_for(lambda: not outstanding(decode._machine))
        assert wait_for(lambda: set(outstanding(prefill._machine)) <= {"waiting", "transfers"})
        assert leaks(warm, resources, SLACK) == []


def test_a_peer_that_reads_no_answers_is_disconnected_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A peer whose messages cannot be sent is disconnected once, not once per message.

    Each disconnection iterates over all transfers of the rank.
    """

    def full(*_: Any) -> None:
        raise zmq.Again

    with Channel() as channel, zmq.Context() as context, context.socket(zmq.DEALER) as deaf:
        prefill, lost = channel.prefill.channel, list[Any]()
        put = prefill._queue.put

        def puts(call: Any, wake: bool = True) -> None:
            lost.extend([call] * (call[0].__name__ == "connection_lost"))
            put(call, wake)

        monkeypatch.setattr(prefill._queue, "put", puts)
        monkeypatch.setattr(prefill._socket, "send", full, raising=False)
        deaf.setsockopt(zmq.LINGER, 0)
        deaf.connect(prefill.address)
        for number in range(200):
            refused = Open(3, number, number + 1, b"another_", draw_instance(), 1, (0, 4), 0, 1024)
            deaf.send(encode(refused))
        assert wait_for(lambda: channel.prefill.notes.seen.count("restarted") == 200)
        assert wait_for(lambda: lost)
        assert len(lost) < 100
        again = len(lost)
        deaf.send(encode(refused))
        assert wait_for(lambda: len(lost) > again), "a later failed send must disconnect again"


class Counting(zmq.Socket):  # type: ignore[type-arg]
    """A socket that counts received frames. `frames`: the number of frames, by socket."""

    frames: ClassVar[Counter[Any]] = Counter()

    def recv(self, *given: Any, **named: Any) -> Any:
        self.frames[self] += 1
        return super().recv(*given, **named)


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Yield the number of frames that each pass of prefill's thread receives.

    A connection's identity counts as a frame.
    """
    taken, poll = list[int](), PrefillWorker._poll

    def counted(worker: Any, ready: list[Any]) -> Any:
        before = Counting.frames[worker._socket]
        yield from poll(worker, ready)
        taken.append(Counting.frames[worker._socket] - before)

    monkeypatch.setattr(zmq.Context, "_socket_class", Counting)
    monkeypatch.setattr(PrefillWorker, "_poll", counted)
    yield taken
    Counting.frames.clear()


def test_one_pass_receives_a_limited_number_of_frames(looks: list[int]) -> None:
    """A message with extra frames counts once as unreadable, and a pass skips at most PARTS frames.

    The tested numbers of frames lie around multiples of the limit per pass. Later messages from the
    same connection and from others are read.
    """
    with Channel(Times(PATIENCE)) as channel, zmq.Context() as context:
        notes, room = channel.prefill.notes.seen, 0
        with context.socket(zmq.DEALER) as peer:
            peer.setsockopt(zmq.LINGER, 0)
            peer.connect(channel.prefill.channel.address)
            for count in (2, 3, PARTS, PARTS + 1, PARTS + 2, 3 * PARTS + 1, 50 * PARTS):
                before, room, seen = Counter(notes), room + 2, len(notes) + 2
                lost = Fail(room, 1, "closed")
                stale = Open(3, room, room, b"another_", draw_instance(), 1, (0, 4), 0, 1024)
                peer.send_multipart([encode(lost)] * count)
                peer.send(encode(stale))
                assert channel.request(room) == ("warm", "")
                assert wait_for(lambda seen=seen: len(notes) >= seen)
                assert Counter(notes) - before == Counter(unreadable=1, restarted=1)
        assert max(looks) <= PARTS + 2 * BATCH
        assert sum(looks) > 54 * PARTS


def test_decode_drops_a_peer_that_sends_a_second_frame() -> None:
    """A peer that sends decode a message of two frames is dropped, even if more messages follow.

    The peer's rooms go cold at once without a strike, and rooms of other peers stay warm.
    """
    with Channel(Times(PATIENCE)) as channel, zmq.Context() as context:
        decode, notes = channel.decode.channel, channel.decode.notes.seen
        with context.socket(zmq.ROUTER) as other:
            other.setsockopt(zmq.LINGER, 0)
            port = other.bind_to_random_port("tcp://127.0.0.1")
            peer = channel.decode.reach(
                SimpleNamespace(
                    instance=draw_instance(), address=f"tcp://127.0.0.1:{port}",
                    staging=channel.prefill.row.staging,
                )
            )  # fmt: skip
            rooms = 10, 11, 12, 1
            handles = [channel.decode.open(room, 20, peer) for room in rooms]
            name, frame = [other.recv_multipart() for _ in rooms][-1]
            late = encode(Fail(1, messages.decode(frame).generation, "late"))  # type: ignore[union-attr]
            for frames in ([late + b"?"], [b"", late], [late]):
                other.send_multipart([name, *frames])
            assert [channel.state(handle) for handle in handles] == [("cold", "lost")] * len(rooms)
            assert peer not in decode._links
            assert "breaker_opened" not in notes
            assert notes.count("unreadable") == 2
            assert channel.state(channel.decode.open(2, 20, peer)) == ("cold", "lost")
            assert channel.request(3) == ("warm", "")
