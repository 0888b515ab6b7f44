"""SGLang ends a request, is idle, and its memory saver takes the pool away at once.

Each case is a process in which the pool's pages are unmapped at the moment from which on SGLang may
do so, while copies of the request are under way and queued. It has to live on. Without gates it has
to die of the first byte, so that the case can fail.
"""

from __future__ import annotations

import faulthandler
import multiprocessing as mp
import os
import resource
import signal
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from rig.channel.invariants import outstanding
from rig.channel.threads import SEGMENT, Channel, Decode, Prefill, wait_for

from sglang_mixkv.channel.times import Times
from sglang_mixkv.draft import copier
from sglang_mixkv.draft.gate import Gate

HOLD_S = 0.2  # for what has to be waited for; who did not wait has taken the pool away by then
LIMIT_S = 60
PATIENCE = 30  # nothing is given up but where a case says so


class Held:
    """The copies of a side: each begins, and touches no byte until the pool is gone, or until those
    who wait for it have waited for a while. `at_end`: each has touched its bytes, and goes on."""

    def __init__(
        self, side: Prefill | Decode, copy: str, gates: bool, at_end: bool = False
    ) -> None:
        self._side, self._gates, self._at_end = side, gates, at_end
        self._go = threading.Event()
        self._real, self.begun = getattr(side.rows, copy), threading.Event()
        setattr(side.rows, copy, self._copy)

    def _copy(self, *args: Any) -> Any:
        found = self._real(*args) if self._at_end else None
        self.begun.set()
        self._go.wait()
        return found if self._at_end else self._real(*args)

    def let_go(self) -> None:
        if self._gates:  # else nobody waits
            threading.Timer(HOLD_S, self._go.set).start()

    def take_away(self) -> None:
        self._side.take_away()
        self._go.set()


def jobs(side: Prefill | Decode) -> int:
    """Copies under way and queued."""
    return outstanding(side.channel._machine).get("jobs", 0)


def ended(how: str, channel: Channel, gates: bool) -> Prefill:
    """End a request whose first segment is being packed while others are queued: SGLang's sender is
    aborted; or packing is slower than prefill waits for it, or decode's client has hung up, so that
    SGLang's poll returns Success."""
    prefill = channel.prefill
    if how == "slow":
        prefill = Prefill(Times(0.1))
        channel.connect(prefill)
    held = Held(prefill, "pack", gates)
    handle = channel.decode.open(1, 3 * SEGMENT, prefill.instance)
    sent = prefill.send(1, 3 * SEGMENT)
    assert wait_for(lambda: held.begun.is_set() and jobs(prefill) == 3)
    if how == "aborted":
        held.let_go()
        prefill.channel.end(sent, "aborted on prefill")
        held.take_away()
        return prefill
    if how == "hung up":
        channel.decode.channel.close(handle, "aborted on decode")
    # As process_disagg_prefill_inflight_queue does: pages are given back, then `clear`.
    prefill.channel.release(sent)
    assert wait_for(lambda: sent.pages_released)
    held.let_go()
    assert wait_for(lambda: prefill.channel.release(sent))
    held.take_away()
    prefill.channel.end(sent)
    assert ("slow" in prefill.notes.seen) == (how == "slow")
    return prefill


def behind_another(channel: Channel, gates: bool) -> Prefill:
    """Let a reader hang up whose segment is queued, so that Success waits for nothing. The pages
    are given back before `clear`."""
    prefill = channel.prefill
    held = Held(prefill, "pack", gates, at_end=True)
    handles, sent = [], []
    for room in (1, 2):
        handles.append(channel.open(room, SEGMENT))
        sent.append(prefill.send(room, SEGMENT))
        assert wait_for(lambda n=room: held.begun.is_set() and jobs(prefill) == n)
    channel.decode.channel.close(handles[1], "aborted on decode")
    prefill.channel.release(sent[1])
    assert wait_for(lambda: sent[1].pages_released)
    assert prefill.channel.release(sent[1])
    held.take_away()
    return prefill


def closed(copy: str, channel: Channel, gates: bool) -> Decode:
    """SGLang's receiver is cleared, aborted or fails: of two rooms, one is copied, one queued."""
    decode = channel.decode
    held = Held(decode, copy, gates)
    decode.plane.broken = 2 if copy == "clear" else 0
    handles = [channel.open(room, SEGMENT) for room in (1, 2)]
    for room in (1, 2):
        channel.prefill.send(room, SEGMENT)
    assert wait_for(lambda: held.begun.is_set() and jobs(decode) == 2)
    held.let_go()
    for handle in handles:
        decode.channel.close(handle, "aborted on decode")
    held.take_away()
    return decode


CASES: dict[str, Callable[[Channel, bool], Prefill | Decode]] = {
    "a sender that is aborted": partial(ended, "aborted"),
    "a reader that hung up": partial(ended, "hung up"),
    "a part that is given up": partial(ended, "slow"),
    "a reader that hung up while its segment was queued": behind_another,
    "a room that is unpacked": partial(closed, "unpack"),
    "a room that is cleared": partial(closed, "clear"),
}


def body(case: str, gates: bool) -> None:
    copier.AT_ONCE = 0  # threads copy, so that some copies are queued
    faulthandler.disable()  # a death is expected of some
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if not gates:
        Gate.enter = Gate.try_close = lambda _: True  # type: ignore[method-assign]
        Gate.leave = Gate.close = lambda _: None  # type: ignore[method-assign]
    side = CASES[case](Channel(Times(PATIENCE)), gates)
    assert wait_for(lambda: not jobs(side))
    os._exit(0)


@pytest.mark.parametrize("gates", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_no_byte_of_a_pool_is_touched_that_was_given_back(case: str, gates: bool) -> None:
    process = mp.get_context("fork").Process(target=body, args=(case, gates))
    process.start()
    process.join(LIMIT_S)
    process.kill()
    process.join()
    assert process.exitcode == (0 if gates else -signal.SIGSEGV)
