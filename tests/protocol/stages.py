"""Pause a rank while one of its rooms is at a given stage, so that a test can act there.

opened    decode has sent the OPEN          reading   decode starts the read
packed    prefill has packed a segment      read      the read has ended, without an ACK yet
ready     prefill has sent its READY        copying   decode copies the rows
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from sglang_mixkv.channel.messages import Open, Ready
from sglang_mixkv.decode import actions as act
from sglang_mixkv.draft.copier import Copy

STAGES = "opened", "packed", "ready", "reading", "read", "copying"
REACHED_S, HELD_S = 30, 20


class Stop:
    """A pause at a stage, shared by all processes of one traffic run. It uses no lock, since a
    paused rank may be killed."""

    def __init__(self, context: Any) -> None:
        self._stage, self._held = context.RawValue("b", -1), context.RawValue("b", 0)

    def act(self, stage: str, act: Callable[[], object]) -> None:
        """Pause the next room that reaches the stage, call `act`, and let the room continue. The
        test's process calls this."""
        self._stage.value = STAGES.index(stage)
        deadline = time.monotonic() + REACHED_S
        while not self._held.value:
            if time.monotonic() > deadline:
                raise TimeoutError(f"no room reached stage {stage}")
            time.sleep(0.0005)
        try:
            act()
        finally:
            self._held.value = 0

    def at(self, stage: str, is_met: Callable[[], bool] = lambda: True) -> None:
        """Pause here if a test waits for this stage. A rank's process calls this when a room
        reaches the stage; `is_met` returns True if the fault is meant for this room."""
        if self._stage.value != STAGES.index(stage) or not is_met():
            return
        self._stage.value, self._held.value = -1, 1
        deadline = time.monotonic() + HELD_S
        while self._held.value and time.monotonic() < deadline:
            time.sleep(0.0005)


def hold_in_prefill(channel: Any, stop: Stop, is_met: Callable[[int], bool]) -> None:
    """Pause a prefill rank's rooms at prefill's stages, if `is_met` returns True for the room."""
    copies, send = channel._copies, channel._send
    pack = copies._copy

    def packs(copy: Copy) -> Any:
        packed = pack(copy)
        stop.at("packed", lambda: is_met(copy.job.transfer.opened.room))
        return packed

    def sends(action: Any) -> None:
        send(action)
        if isinstance(action.message, Ready):
            stop.at("ready", lambda: is_met(action.message.room))

    copies._copy, channel._send = packs, sends


def hold_in_decode(channel: Any, stop: Stop, is_met: Callable[[bytes], bool]) -> None:
    """Pause a decode rank's rooms at decode's stages, if `is_met` returns True for the peer."""
    links, copies = channel._links, channel._copies
    send, read, ended, copy = links.send, links.read, links.ended, copies and copies._copy

    def sends(peer: bytes, message: Any) -> bool:
        has_left: bool = send(peer, message)
        if isinstance(message, Open):
            stop.at("opened", lambda: is_met(peer))
        return has_left

    def reads(action: act.StartRead) -> Any:
        stop.at("reading", lambda: is_met(action.peer))
        return read(action)

    def ends() -> Iterator[tuple[act.StartRead, str]]:
        for action, error in ended():
            if not error:
                stop.at("read", lambda peer=action.peer: is_met(peer))
            yield action, error

    def copied(one: Copy) -> Any:
        if one.kind == "unpack":
            stop.at("copying", lambda: is_met(one.job.peer))
        return copy(one)

    links.send, links.read, links.ended = sends, reads, ends
    if copies is not None:
        copies._copy = copied
