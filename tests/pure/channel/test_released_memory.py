"""No copy touches a pool after SGLang's memory saver may have released it.

Each case runs in a process of its own. The case unmaps the pool's pages as early as SGLang may,
while copies of the ended request are in flight and queued. The process must survive. With the gates
disabled it must die with a segmentation fault, which proves that the case can fail.
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

HOLD_S = 0.2  # delay of a copy, so that a caller that does not wait unmaps the pool too early
LIMIT_S = 60
PATIENCE = 30  # long enough that nothing times out except in the case "slow"


class Held:
    """Delays all copies of a side until the pool is unmapped, or until `let_go` has waited HOLD_S.

    `at_end`: delay a copy after it has touched its bytes, not before.
    """

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
        if self._gates:  # without gates, no caller waits for the copies
            threading.Timer(HOLD_S, self._go.set).start()

    def take_away(self) -> None:
        self._side.take_away()
        self._go.set()


def jobs(side: Prefill | Decode) -> int:
    """Return the number of copies in flight and queued."""
    return outstanding(side.channel._machine).get("jobs", 0)


def ended(how: str, channel: Channel, gates: bool) -> Prefill:
    """End a request whose first segment is being packed while others are queued.

    `how`: "aborted" aborts SGLang's sender. With "slow" packing times out, and with "hung up" the
    client aborts on decode. In the last two cases, SGLang's poll then returns Success.
    """
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
    # as process_disagg_prefill_inflight_queue: it releases the pages before it calls `clear`
    prefill.channel.release(sent)
    assert wait_for(lambda: sent.pages_released)
    held.let_go()
    assert wait_for(lambda: prefill.channel.release(sent))
    held.take_away()
    prefill.channel.end(sent)
    assert ("slow" in prefill.notes.seen) == (how == "slow")
    return prefill


def behind_another(channel: Channel, gates: bool) -> Prefill:
    """Close a room on decode while its segment is queued, so that Success comes at once.

    SGLang releases the pages before it calls `clear`.
    """
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
    """Abort two rooms on decode, one with a copy in flight and one with a queued copy."""
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
    "the sender is aborted": partial(ended, "aborted"),
    "the reader closes": partial(ended, "hung up"),
    "packing times out": partial(ended, "slow"),
    "the reader closes while its segment is queued": behind_another,
    "the room is being unpacked": partial(closed, "unpack"),
    "the room is being cleared": partial(closed, "clear"),
}


def body(case: str, gates: bool) -> None:
    copier.AT_ONCE = 0  # threads copy, so that some copies are queued
    faulthandler.disable()  # some of these processes are meant to crash
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if not gates:
        Gate.enter = Gate.try_close = lambda _: True  # type: ignore[method-assign]
        Gate.leave = Gate.close = lambda _: None  # type: ignore[method-assign]
    side = CASES[case](Channel(Times(PATIENCE)), gates)
    assert wait_for(lambda: not jobs(side))
    os._exit(0)


@pytest.mark.parametrize("gates", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_no_released_pool_memory_is_touched(case: str, gates: bool) -> None:
    process = mp.get_context("fork").Process(target=body, args=(case, gates))
    process.start()
    process.join(LIMIT_S)
    process.kill()
    process.join()
    assert process.exitcode == (0 if gates else -signal.SIGSEGV)
