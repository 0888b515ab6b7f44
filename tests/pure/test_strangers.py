"""What strangers send to both sides of the channel, over real sockets, while it serves others."""

from __future__ import annotations

import multiprocessing as mp
import time
from statistics import median
from types import SimpleNamespace
from typing import Any

import pytest
import zmq
from pure import stranger
from rig.channel.invariants import outstanding
from rig.channel.threads import Channel, wait_for
from rig.process.resources import leaks, resources

from sglang_mixkv.channel.messages import Open, draw_instance, encode
from sglang_mixkv.channel.times import Times
from sglang_mixkv.prefill.machine import MAX_OPEN

REQUESTS = 200
PATIENCE = 30  # a busy machine of two cores, and all threads of both sides share the GIL
SLACK = {"rss_mib": 128}  # twice what the rooms of two connections take


@pytest.mark.parametrize("lasts", [5, pytest.param(120, marks=pytest.mark.full)])
def test_strangers_cost_nobody_a_request(lasts: int) -> None:
    """Rooms without end, foreign ACKs, slots and tokens that do not exist, READYs of rooms that are
    none, as fast as they can be sent."""
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
        assert channel.state(cheated) == ("cold", "protocol")  # its rows are the others', too
        seconds, most = list[float](), 0
        while process.is_alive() or len(seconds) < REQUESTS:
            began = time.monotonic()
            assert channel.request(3 + len(seconds), arrived=True) == ("warm", "")
            seconds.append(time.monotonic() - began)
            most = max(most, outstanding(prefill._machine).get("transfers", 0))
        sent = pipe.recv()
        decode.close(cheated)
        print(
            f"{sum(sent)} messages beside {len(seconds)} requests, the typical one of "
            f"{median(seconds) * 1e3:.0f} ms, the slowest of {max(seconds) * 1e3:.0f}; "
            f"{most} parts were open"
        )
        assert 100 < most <= MAX_OPEN + 1  # and the request's own
        assert most > MAX_OPEN // 2 or lasts < 60
        assert min(sent) > stranger.ENOUGH
        assert wait_for(lambda: not outstanding(decode._machine))
        assert wait_for(lambda: set(outstanding(prefill._machine)) <= {"waiting", "transfers"})
        assert leaks(warm, resources, SLACK) == []


def test_answers_that_a_peer_does_not_take_end_its_connection_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each end looks at all parts of the rank."""

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
        assert wait_for(lambda: len(lost) > again), "a later loss is one of its own"
