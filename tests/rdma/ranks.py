"""A decode rank that reads its draft KV from two prefill ranks. Each of these has half of the heads
and runs in its own process. State machines, threads, slots, copies and data plane are real.

This module imports torch, which takes two minutes on an emulated processor.
"""

from __future__ import annotations

import itertools
import os
import time
import traceback
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from rdma.far import Call
from rig.channel.invariants import left
from rig.channel.planes import FORK, Place, Way, enter, go
from rig.channel.threads import SLOTS, Decode, Prefill, wait_for
from rig.process.forks import STRETCH, die_with_parent, in_fork

from sglang_mixkv.channel import planes
from sglang_mixkv.channel.times import Times
from sglang_mixkv.decode.actions import State
from sglang_mixkv.decode.transfer import Source
from sglang_mixkv.decode.worker import ReceiveHandle
from sglang_mixkv.draft.layout import Pages
from sglang_mixkv.draft.rows import DraftRows, Staging

TOKENS, PAGE, HEADS, HEAD_BYTES, SLOT_BYTES = 2048, 8, range(4), 1024, 128 << 10
HALVES = range(2), range(2, 4)
OTHER = 0x5A  # written by the next request with the same pages
HURRIED, PATIENT = Times(STRETCH / 3), Times(30.0 * STRETCH)


@cache
def pool_of(heads: range) -> np.ndarray:
    """Return K and V of a prefill rank with these heads."""
    size = 2 * TOKENS * len(heads) * HEAD_BYTES
    found = np.frombuffer(np.random.default_rng(heads.start).bytes(size), np.uint8)
    return found.reshape(2, TOKENS, len(heads), HEAD_BYTES)


def given(way: Way, place: Place, pool: np.ndarray, heads: range) -> dict[str, Any]:
    return {
        "plane": planes.make(way.plane, place.host, place.devices, {}),
        "rows": DraftRows([torch.from_numpy(entry) for entry in pool], heads),
        "staging": Staging(SLOTS, SLOT_BYTES, torch.device("cpu")),
    }


def serve(pipe: Any, way: Way, times: Times, heads: range) -> None:
    """Run a prefill rank."""
    die_with_parent()
    pipe.recv()
    more = given(way, way.peer, pool_of(heads).copy(), heads)
    rank, sent = Prefill(times, host=way.peer.host, **more), {}
    pipe.send(rank.row)
    while True:
        what, room = pipe.recv()
        if what == "send":
            sent[room] = rank.channel.begin(room)
            pages = Pages(np.arange(TOKENS // PAGE), PAGE)
            rank.channel.add_chunk(sent[room], 0, TOKENS, True, pages)
        elif what == "end":
            rank.channel.end(sent.pop(room))
        else:
            pipe.send(rest(rank))


def rest(rank: Prefill | Decode) -> tuple[list[str], int]:
    """Wait up to a minute until the rank is idle, and return its leaks and its number of free
    slots."""
    wait_for(lambda: not left(rank.channel) and len(rank.slots.free_slots) == SLOTS, 60)
    return left(rank.channel), len(rank.slots.free_slots)


def serve_far(pipe: Any, way: Way, times: Times, heads: range) -> None:
    """Run a prefill rank on the second machine."""
    serve(pipe, enter(way), times, heads)


class Served:
    """The decode rank's handle of a prefill rank's process."""

    def __init__(self, way: Way, times: Times, heads: range) -> None:
        self.pipe, there = FORK.Pipe()
        self.process = FORK.Process(target=serve, args=(there, way, times, heads), daemon=True)
        self.process.start()
        self.signal = partial(os.kill, self.process.pid)
        there.close()

    def begin(self) -> Any:
        """Start the rank, and return its row."""
        self.pipe.send("begin")
        return self.pipe.recv()

    @property
    def lives(self) -> bool:
        return self.process.is_alive()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


class FarServed:
    """The handle of a prefill rank on the second machine."""

    def __init__(self, way: Way, times: Times, heads: range) -> None:
        self.arguments, self.lives = (way, times, heads), False

    def begin(self) -> Any:
        self.pipe, self.lives = Call("rdma.ranks:serve_far", *self.arguments), True
        self.pipe.send("begin")
        return self.pipe.recv()

    def kill(self) -> None:
        if self.lives:
            self.pipe.close()
        self.lives = False


class Ranks:
    """A decode rank and its prefill ranks, which `make` makes. `spare`: a third prefill rank with
    the heads of the first, not started yet."""

    def __init__(self, way: Way, times: Times, make: type[Any] = Served) -> None:
        self.prefill = [make(way, times, heads) for heads in HALVES]
        self.spare = make(way, times, HALVES[0])
        self.rows = [rank.begin() for rank in self.prefill]
        self.pool = np.full((2, TOKENS, len(HEADS), HEAD_BYTES), OTHER, np.uint8)
        self.decode = Decode(times, **given(way, way.reader, self.pool, HEADS))
        self.peers = [self.decode.reach(row) for row in self.rows]
        self._numbers = itertools.count(1)

    def begin(self, of: Sequence[int] = (0, 1)) -> tuple[int, ReceiveHandle]:
        """Begin a request for these ranks' heads, whose target has arrived. Its pages are in
        reverse order."""
        assert (self.pool == OTHER).all(), "rows of a request were written after its end"
        number, tokens = next(self._numbers), self.decode.segment_tokens(2, SLOT_BYTES)
        sources = tuple(Source(self.peers[n], HALVES[n], 1, SLOTS, tokens) for n in of)
        handle = ReceiveHandle(np.arange(TOKENS // PAGE)[::-1], PAGE, None)
        self.decode.channel.open(
            handle, bootstrap_room=number, sources=sources, first_token=0, end=TOKENS
        )
        for n in of:
            self.prefill[n].pipe.send(("send", number))
        self.decode.channel.target_arrived(handle)
        return number, handle

    def begin_midway(self) -> tuple[int, ReceiveHandle]:
        """Begin a request, and return while only a part of its draft KV has been unpacked."""
        for _ in range(20):
            self.decode.notes.bytes = 0
            number, handle = self.begin()
            assert wait_for(lambda: self.decode.notes.bytes, 60)
            if self.decode.notes.bytes < self.pool.nbytes // 2:
                return number, handle
            self.end(number, handle)
        raise AssertionError("every request completed too early")

    def is_read(self, of: int) -> bool:
        """Return True if a read from this rank is in flight."""
        running = self.decode.channel._links._store.plane._running
        return any(read.tag[0].peer == self.peers[of] for read in list(running))

    def end(
        self, number: int, handle: ReceiveHandle, of: Sequence[int] = (0, 1)
    ) -> tuple[str, str]:
        """Wait for a request's verdict, end the request, and return the verdict. Its rows must be
        correct, or, if it is cold, correct or zero. Then overwrite its pages, as another request
        would."""
        assert wait_for(lambda: handle.state is not None, 120), "the request is not decided"
        rows = handle.rows(0, TOKENS)
        for n in of:
            found, heads = self.pool[:, rows][:, :, HALVES[n]], pool_of(HALVES[n])
            right = (found == heads).all((0, 2, 3))
            zero = (found == 0).all((0, 2, 3))
            assert (right if handle.state is State.WARM else right | zero).all(), "a wrong row"
        self.decode.channel.close(handle)
        self.pool[:] = OTHER
        for n in of:
            if self.prefill[n].lives:
                self.prefill[n].pipe.send(("end", number))
        assert handle.state is not None
        return handle.state.value, handle.reason

    def request(self, *of: int) -> tuple[str, str]:
        number, handle = self.begin(of or (0, 1))
        return self.end(number, handle, of or (0, 1))

    def until_warm(self, seconds: float = 60) -> int:
        """Send requests until one is warm, check that the next two are warm too, and return the
        number of cold ones."""
        until, cold = time.monotonic() + seconds, 0
        while (found := self.request()) != ("warm", ""):
            print("  then", found, flush=True)
            cold += 1
            assert time.monotonic() < until, "requests stay cold"
            time.sleep(0.2)
        assert [self.request() for _ in range(2)] == [("warm", "")] * 2
        return cold

    def check_at_rest(self) -> None:
        """Check that no rank that is alive has leaks or slots in use."""
        assert rest(self.decode) == ([], SLOTS)
        for rank in self.prefill:
            if rank.lives:
                rank.pipe.send(("rest", 0))
                assert rank.pipe.recv() == ([], SLOTS)
        assert (self.pool == OTHER).all()


def run(way: str, times: Times, body: Callable[[Ranks], None], make: type[Any] = Served) -> None:
    """Run `body` with these ranks in its own process."""
    failure = in_fork(partial(live, way, times, body, make), lambda _: traceback.format_exc())
    assert failure is None, failure


def live(way: str, times: Times, body: Callable[[Ranks], None], make: type[Any]) -> None:
    ranks = Ranks(go(way), times, make)
    try:
        body(ranks)
        ranks.check_at_rest()
    finally:
        for rank in [*ranks.prefill, ranks.spare]:
            rank.kill()


def imported(pipe: Any) -> None:
    pipe.send("this module")
