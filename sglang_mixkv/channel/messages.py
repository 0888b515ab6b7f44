"""The four messages of the channel: OPEN, READY, ACK, FAIL. docs/protocol.md is their page.

    decode  -> prefill    OPEN    I will read this request's draft KV from you
    prefill -> decode     READY   these segments are in my slots
    decode  -> prefill    ACK     nobody reads these slots any more
    either  -> the other  FAIL    I send, or read, nothing more of this request

One ZMQ frame each, a msgpack array whose first item is the kind. Every number is bounded here, so
that the two state machines never meet one that they cannot hold.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from typing import Annotated

import msgspec
from msgspec import Meta

PROTOCOL = (3, 3)
"""The oldest and the newest version that this build reads; a pair uses the newest of both. When to
raise which, and what each changed: docs/protocol.md, "Versions"."""

MAX_BYTES = 4096  # of one message; longer ones are dropped by the socket
MAX_LIST = 32  # segments of one READY, and slots of one ACK

Room = Annotated[int, Meta(ge=0)]  # SGLang's number; a uint64, which msgpack bounds
Secret = Annotated[int, Meta(ge=1, le=(1 << 63) - 1)]
Token = Annotated[int, Meta(ge=0, le=1 << 40)]
Count = Annotated[int, Meta(ge=0, le=1 << 31)]
SlotNumber = Annotated[int, Meta(ge=0, le=1 << 20)]
Small = Annotated[int, Meta(ge=0, le=1 << 16)]
Code = Annotated[str, Meta(pattern=r"^[a-z_]{1,32}\Z")]
Text = Annotated[str, Meta(max_length=512)]
INSTANCE_BYTES = 8
Instance = Annotated[bytes, Meta(min_length=INSTANCE_BYTES, max_length=INSTANCE_BYTES)]


class Open(msgspec.Struct, frozen=True, array_like=True, tag=1, forbid_unknown_fields=False):
    """A decode rank opens a room at each prefill rank of the drafter's stage that it contacts.
    `prefill`, `reader`: the instances of the rank addressed and of the rank that opens. `heads`:
    first and end, global numbers; equal where none are wanted. `slot_bytes`: of the reader's own
    slots; no segment may be larger. The others are terms of docs/protocol.md."""

    version: Small
    room: Room
    generation: Secret
    prefill: Instance
    reader: Instance
    readers: Annotated[int, Meta(ge=1, le=1 << 16)]
    heads: tuple[Small, Small]
    first_token: Token
    slot_bytes: Annotated[int, Meta(ge=1, le=1 << 40)]

    @property
    def wanted(self) -> range:
        return range(*self.heads)


class Announced(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One segment of a READY: `count` tokens in `slot`, whose bytes carry `stamp`."""

    slot: SlotNumber
    stamp: Secret
    count: Annotated[int, Meta(ge=1, le=1 << 31)]


class Ready(msgspec.Struct, frozen=True, array_like=True, tag=2, gc=False):
    """A prefill rank tells a reader that these segments of the room can be read. They begin with
    number `segment`, at token `first_token`. `last`: no more come after them; there are none where
    only the end of a chunk showed that."""

    room: Room
    generation: Secret
    segment: Count
    first_token: Token
    segments: Annotated[tuple[Announced, ...], Meta(max_length=MAX_LIST)]
    last: bool


class Ack(msgspec.Struct, frozen=True, array_like=True, tag=3, gc=False):
    """The reader says that no read of these slots runs, or will start, under these stamps."""

    slots: Annotated[tuple[tuple[SlotNumber, Secret], ...], Meta(max_length=MAX_LIST)]


class Fail(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Either side ends this use of the room. Decode counts `code`, and logs `detail`."""

    room: Room
    generation: Secret
    code: Code
    detail: Text = ""


Message = Open | Ready | Ack | Fail

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    """Raises ValueError or OverflowError for an OPEN that its reader would drop."""
    frame = _encoder.encode(message)
    if isinstance(message, Open):  # its numbers are SGLang's
        decode(frame)
    return frame


def decode(frame: bytes) -> Message:
    """Raises ValueError for bytes that are no message."""
    try:
        return _decoder.decode(frame)
    except RecursionError as error:  # a kilobyte of nested arrays is enough
        raise ValueError("a message that is nested too deeply") from error


def fail(room: int, generation: int, code: str, detail: str) -> Fail:
    """Make a FAIL whose detail is printable and cut to what a message may carry."""
    printable = "".join(c if c.isprintable() else " " for c in detail)
    return Fail(room, generation, code, printable[:512])


def draws() -> Iterator[int]:
    """Yield numbers that no other rank draws, in one thread: SGLang seeds `random` equally in all
    ranks. One read of the system's source, which gives up the GIL, serves 64 numbers."""
    while True:
        for number in struct.unpack("64Q", os.urandom(512)):
            yield number >> 1 or 1


def draw_instance() -> bytes:
    """Draw the name of one start of a rank; call it after the spawn."""
    return os.urandom(INSTANCE_BYTES)
