"""Faults of the draft channel, and those of SGLang's own that reach it, on the protocol ring.

A drafter's trouble ends no request: the one that met it is served, cold where rows did not come,
and the next one is served warm by servers that nobody restarted. What ends a request are faults of
SGLang's own transfer, and a decode rank that cannot even clear its rows.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import zmq
from rig import faults
from rig.faults import GONE, Fault, Inject, case
from rig.rank import Rank

from sglang_mixkv.channel.messages import Ack, Fail, Open, Ready
from sglang_mixkv.draft.rows import DraftRows
from sglang_mixkv.draft.slot_format import HEADER


def channel_of(rank: Rank) -> Any:
    return rank.manager.decode_channel or rank.manager.prefill_channel


def lost_ready(rank: Rank) -> None:
    """A rank's first READY does not go out."""
    channel, met = channel_of(rank), []
    real = channel._send

    def send(action: Any) -> None:
        if isinstance(action.message, Ready) and not met:
            met.append(1)
        else:
            real(action)

    channel._send = send


def noise(rank: Rank) -> None:
    """Messages from elsewhere to this prefill rank's channel."""
    socket = zmq.Context.instance().socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.connect(rank.manager.prefill_channel.address)
    good = Open(3, 100, 5, rank.manager.local.instance, b"somebody", 1, (0, 1), 0, 1 << 20)
    frames = [
        b"", os.urandom(1), os.urandom(40), b"\x94" * 200, bytes(1 << 16),
        *(msgspec.msgpack.encode(m) for m in (Ack(((0, 1), (1 << 20, 9))), Fail(100, 7, "x"))),
        *(msgspec.msgpack.encode(good)[:-cut] for cut in (1, 2, 9)),
        msgspec.msgpack.encode(msgspec.structs.replace(good, prefill=b"another_")),
        msgspec.msgpack.encode(msgspec.structs.replace(good, heads=(3, 90))),
    ]  # fmt: skip
    for frame in frames:
        socket.send(frame)
        socket.send_multipart([frame, frame])


def raising(name: str) -> Inject:
    """This rank's first call of this function over rows raises."""

    def inject(rank: Rank) -> None:
        real, met = getattr(DraftRows, name), []

        def broken(self: DraftRows, *args: Any) -> Any:
            if met:
                return real(self, *args)
            met.append(1)
            raise MemoryError(f"no memory to {name}")

        setattr(DraftRows, name, broken)

    return inject


def both(*injects: Inject) -> Inject:
    def inject(rank: Rank) -> None:
        for one in injects:
            one(rank)

    return inject


def damaged(rank: Rank) -> None:
    """A byte of the first slot that is read is another's by then."""
    staging, met = rank.manager.decode_channel._store.staging, []
    real = staging.slot

    def slot(number: int) -> Any:
        found = real(number)
        if not met:
            met.append(1)
            found.view(-1)[HEADER] ^= 0xFF
        return found

    staging.slot = slot


def thread_ends(rank: Rank) -> None:
    """This rank's channel thread ends at its next piece of work."""

    def end(*_: Any) -> None:
        raise SystemExit

    setattr(channel_of(rank), "_look" if rank.side == "decode" else "_handle", end)


# ---------------------------------------------------------------- the list


def at_decode(inject: Inject, **special: Any) -> Callable[[], Any]:
    return lambda: case(faults={("decode", 0): inject}, **special)


def at_prefill(inject: Inject, **special: Any) -> Callable[[], Any]:
    """At the rank that sends draft KV alone."""
    return lambda: case(faults={("prefill", 1): inject}, **special)


def served(group: str, name: str, case: Callable[[], Any], **more: Any) -> Fault:
    return Fault(group, name, case, "success", **more)


def _channels() -> Iterator[Fault]:
    """One of each kind, in SGLang's managers; the others: tests/sim, pure/test_threads.py."""
    yield served("messages", "READY lost", at_prefill(lost_ready), cold="deadline", remains=GONE)
    yield served("messages", "random messages", at_prefill(noise), remains=GONE)
    yield served(
        "rows", "packing raises", at_prefill(raising("pack")), cold="prefill_pack", remains=GONE
    )
    yield Fault(
        "rows", "unpacking and clearing raise",
        at_decode(both(raising("unpack"), raising("clear"))), words="could not be cleared",
        remains=GONE,
    )  # fmt: skip
    yield served("rows", "a slot is damaged", at_decode(damaged), cold="stale", remains=GONE)
    for side, at in (("prefill", at_prefill), ("decode", at_decode)):
        ended = "has ended", " left"
        yield served(
            "threads", f"{side}'s channel thread ends", at(thread_ends), remains=ended,
            stays_cold=True,
        )  # fmt: skip


FAULTS: list[Fault] = [*faults.SGLANGS, *_channels()]
