"""Faults of the draft channel, and those of SGLang's own that reach it, on the protocol ring.

A drafter's trouble ends no request: the one that met it is served, cold where rows did not come,
and the next one is served warm by servers that nobody restarted. What ends a request are faults of
SGLang's own transfer, and a decode rank that cannot even clear its rows.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
import zmq
from rig import faults
from rig.faults import GONE, Fault, Inject, case
from rig.rank import Rank

from sglang_mixkv.channel.messages import Ack, Fail, Open, Ready
from sglang_mixkv.draft.rows import DraftRows
from sglang_mixkv.draft.slot_format import HEADER

Change = Callable[[Any], list[Any]]


def lost(_message: Any) -> list[Any]:
    return []


def doubled(message: Any) -> list[Any]:
    return [message, message]


def changed(**fields: Any) -> Change:
    return lambda message: [msgspec.structs.replace(message, **fields)]


def announced(**fields: Any) -> Change:
    """The first segment of a READY is announced otherwise."""

    def change(message: Ready) -> list[Any]:
        first, *rest = message.segments
        segments = (msgspec.structs.replace(first, **fields), *rest)
        return [msgspec.structs.replace(message, segments=segments)]

    return change


def forged(message: Ack) -> list[Any]:
    return [Ack(tuple((slot, 1) for slot, _ in message.slots))]


def behind(message: Ready) -> list[Any]:
    """It announces tokens behind those that follow."""
    return [msgspec.structs.replace(message, first_token=message.first_token + 1)]


def channel_of(rank: Rank) -> Any:
    return rank.manager.decode_channel or rank.manager.prefill_channel


def message_fault(kind: type, change: Change) -> Inject:
    """A rank's first message of this kind goes out as these instead."""

    def inject(rank: Rank) -> None:
        channel, met = channel_of(rank), []
        if rank.side == "decode":
            links = channel._links
            real = links.send
            links.send = lambda peer, message: all(real(peer, m) for m in meddled(message))
        else:
            real = channel._send

            def send(action: Any) -> None:
                for message in meddled(action.message):
                    real(msgspec.structs.replace(action, message=message))

            channel._send = send

        def meddled(message: Any) -> list[Any]:
            if not isinstance(message, kind) or met:
                return [message]
            met.append(1)
            return change(message)

    return inject


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


def raising(name: str, times: int = 1) -> Inject:
    """This rank's first calls of this function over rows raise."""

    def inject(rank: Rank) -> None:
        real, left = getattr(DraftRows, name), [times]

        def broken(self: DraftRows, *args: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                return real(self, *args)
            raise MemoryError(f"no memory to {name}")

        setattr(DraftRows, name, broken)

    return inject


def both(*injects: Inject) -> Inject:
    def inject(rank: Rank) -> None:
        for one in injects:
            one(rank)

    return inject


def read_from_nowhere(rank: Rank) -> None:
    """The first read is of memory that the peer does not have."""
    plane, met = rank.manager.decode_channel._store.plane, []
    real = plane.start

    def start(tag: Any, peer: Any, extents: Any) -> Any:
        if not met:
            met.append(1)
            extents = [one._replace(remote=one.remote + (1 << 44)) for one in extents]
        return real(tag, peer, extents)

    plane.start = start


def overwritten(rank: Rank, offset: int) -> None:
    """A byte of the first slot that is read is another's by then. `offset` 0: of its stamp."""
    staging, met = rank.manager.decode_channel._store.staging, []
    real = staging.slot

    def slot(number: int) -> Any:
        found = real(number)
        if not met:
            met.append(1)
            found.view(-1)[offset] ^= 0xFF
        return found

    staging.slot = slot


def thread_ends(name: str) -> Inject:
    """One of this rank's threads ends at its next piece of work."""

    def inject(rank: Rank) -> None:
        channel = channel_of(rank)
        owner = channel._copies if name == "_do" else channel

        def end(*_: Any) -> None:
            raise SystemExit

        setattr(owner, name, end)

    return inject


# ---------------------------------------------------------------- the list


def at_decode(inject: Inject, **special: Any) -> Callable[[], Any]:
    return lambda: case(faults={("decode", 0): inject}, **special)


def at_prefill(inject: Inject, **special: Any) -> Callable[[], Any]:
    """At the rank that sends draft KV alone."""
    return lambda: case(faults={("prefill", 1): inject}, **special)


def served(group: str, name: str, case: Callable[[], Any], **more: Any) -> Fault:
    return Fault(group, name, case, "success", **more)


def with_another(**fields: Any) -> tuple[str, Change]:
    return f"with another {', '.join(fields)}", changed(**fields)


OPENS: list[tuple[tuple[str, Change], str]] = [
    (("lost", lost), "deadline"),
    (("doubled", doubled), ""),
    (with_another(readers=2), ""),
    (with_another(prefill=b"another_"), "prefill_restarted"),
    (with_another(heads=(0, 9)), "prefill_heads"),
]
ACKS: list[tuple[tuple[str, Change], str]] = [
    (("lost", lost), ""),
    (("doubled", doubled), ""),
    (("with another stamp", forged), ""),
]
READIES: list[tuple[tuple[str, Change], str]] = [
    (("lost", lost), "deadline"),
    (("doubled", doubled), ""),
    (("of tokens behind the next ones", behind), "protocol"),
    (with_another(generation=77), "deadline"),
    (("with another slot", announced(slot=1 << 19)), "protocol"),
    (("with another count", announced(count=1 << 20)), "protocol"),
    (with_another(segment=3), "protocol"),
    (("with another stamp", announced(stamp=1)), "stale"),
]


def _messages() -> Iterator[Fault]:
    group = "messages of the channel"
    for kind, at, changes in (
        (Open, at_decode, OPENS), (Ack, at_decode, ACKS), (Ready, at_prefill, READIES),
    ):  # fmt: skip
        for (name, change), cold in changes:
            yield served(
                group, f"{kind.__name__.upper()} {name}", at(message_fault(kind, change)),
                cold=cold, remains=GONE,
            )  # fmt: skip
    yield served(group, "random messages", at_prefill(noise), remains=GONE)


def _rows() -> Iterator[Fault]:
    group = "rows and slots"
    for name, inject, cold in (
        ("packing raises", at_prefill(raising("pack")), "prefill_pack"),
        ("unpacking raises", at_decode(raising("unpack")), "unpack"),
    ):
        yield served(group, name, inject, cold=cold, remains=GONE)
    yield Fault(
        group, "unpacking and clearing raise",
        at_decode(both(raising("unpack"), raising("clear"))), words="could not be cleared",
        remains=GONE,
    )  # fmt: skip
    for name, inject, cold in (
        ("a read fails", read_from_nowhere, "read"),
        ("a slot is overwritten", partial(overwritten, offset=0), "stale"),
        ("a slot is damaged", partial(overwritten, offset=HEADER), "stale"),
    ):
        yield served(group, name, at_decode(inject), cold=cold, remains=GONE)


def _threads() -> Iterator[Fault]:
    for name, meeting in (
        ("prefill's channel thread ends", at_prefill(thread_ends("_handle"))),
        ("prefill's packing thread ends", at_prefill(thread_ends("_do"))),
        ("decode's channel thread ends", at_decode(thread_ends("_look"))),
        ("decode's copying thread ends", at_decode(thread_ends("_do"))),
    ):
        ended = "has ended", " left"
        yield served("threads", name, meeting, remains=ended, stays_cold=True)


def killed() -> Any:
    """The next request comes once the server has been started again."""
    send = partial(faults.die_when_sending, 1)
    return case(chunked=True, send=send, restart="prefill", pause=10)


def _sglangs() -> Iterator[Fault]:
    """A request whose target is there is served, whatever became of its drafter's sender."""
    for fault in faults.SGLANGS:
        if fault.name.startswith("draft-only sender stalls"):
            fault = replace(fault, ends="success", words="", cold="deadline")
        if "(draft-only sender)" in fault.name:
            fault = replace(fault, ends="success", words="", cold="deadline", case=killed)
        yield fault


FAULTS: list[Fault] = [*_sglangs(), *_messages(), *_rows(), *_threads()]
