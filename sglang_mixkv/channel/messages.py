"""The channel's four messages: OPEN, READY, ACK, FAIL. See docs/protocol.md.

    decode  -> prefill    OPEN    I will read this request's draft KV from you
    prefill -> decode     READY   these segments are in my slots
    decode  -> prefill    ACK     I no longer read these slots
    either  -> the other  FAIL    I will send, or read, nothing more for this request

Each is one ZMQ frame: a msgpack array whose first item is the kind. Every number is bounded here,
so that neither state machine meets one that it cannot hold.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator
from typing import Annotated

import msgspec
from msgspec import Meta
from msgspec.structs import replace as replace

PROTOCOL = (3, 3)
"""The oldest and newest versions that this build reads; a pair uses the newest that both read. For
when to raise which, and what each changed, see docs/protocol.md, "Versions"."""

MAX_BYTES = 4096  # of a message; the socket drops longer ones
MAX_LIST = 32  # segments of one READY, and slots of one ACK

Room = Annotated[int, Meta(ge=0)]  # SGLang's number; a uint64, which msgpack bounds
Secret = Annotated[int, Meta(ge=1, le=(1 << 63) - 1)]
Token = Annotated[int, Meta(ge=0, le=1 << 40)]
Count = Annotated[int, Meta(ge=0, le=1 << 31)]
SlotNumber = Annotated[int, Meta(ge=0, le=1 << 20)]
Small = Annotated[int, Meta(ge=0, le=1 << 16)]
Code = Annotated[str, Meta(pattern=r"^[a-z_]{1,32}\Z")]
Text = Annotated[str, Meta(max_length=512)]
Weights = Annotated[int, Meta(ge=0, lt=1 << 32)]  # a version's CRC-32; 0 from older releases
INSTANCE_BYTES = 8
Instance = Annotated[bytes, Meta(min_length=INSTANCE_BYTES, max_length=INSTANCE_BYTES)]
DEFAULT_WEIGHTS = zlib.crc32(b"default")


class Open(msgspec.Struct, frozen=True, array_like=True, tag=1, forbid_unknown_fields=False):
    """A decode rank opens a room on each prefill rank that it contacts in the drafter's stage.
    `prefill`, `reader`: the instances of the addressed rank and the opening rank. `heads`: [first,
    end) in global numbers, empty if none are wanted. `slot_bytes`: the size of the reader's slots;
    no segment may be larger. For the other fields see docs/protocol.md."""

    version: Small
    room: Room
    generation: Secret
    prefill: Instance
    reader: Instance
    readers: Annotated[int, Meta(ge=1, le=1 << 16)]
    heads: tuple[Small, Small]
    first_token: Token
    slot_bytes: Annotated[int, Meta(ge=1, le=1 << 40)]
    weights: Weights = 0

    @property
    def wanted(self) -> range:
        return range(*self.heads)


class Announced(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One segment of a READY: `count` tokens in `slot`, whose bytes carry `stamp`."""

    slot: SlotNumber
    stamp: Secret
    count: Annotated[int, Meta(ge=1, le=1 << 31)]


class Ready(msgspec.Struct, frozen=True, array_like=True, tag=2, gc=False):
    """A prefill rank tells a reader that these segments of the room can be read. The first has
    number `segment` and begins at token `first_token`. `last`: no more follow; `segments` is empty
    if that became known only at a chunk's end."""

    room: Room
    generation: Secret
    segment: Count
    first_token: Token
    segments: Annotated[tuple[Announced, ...], Meta(max_length=MAX_LIST)]
    last: bool
    weights: Weights = 0


class Ack(msgspec.Struct, frozen=True, array_like=True, tag=3, gc=False):
    """The reader says that no read of these slots under these stamps is running or will start."""

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
    """Encode a message. Raises ValueError or OverflowError for an OPEN that is out of bounds."""
    frame = _encoder.encode(message)
    if isinstance(message, Open):  # its numbers are SGLang's
        decode(frame)
    return frame


def decode(frame: bytes) -> Message:
    """Decode a message. Raises ValueError if `frame` is not one."""
    try:
        return _decoder.decode(frame)
    except RecursionError as error:  # a kilobyte of nested arrays is enough
        raise ValueError("the message is nested too deeply") from error


def fail(room: int, generation: int, code: str, detail: str) -> Fail:
    """Make a FAIL with its detail made printable and cut to what a message may carry."""
    printable = "".join(c if c.isprintable() else " " for c in detail)
    return Fail(room, generation, code, printable[:512])


def compare_weights(ours: int, theirs: int) -> str:
    """Compare two ranks' weights: if both have SGLang's default, no update has named a version."""
    if ours == theirs:
        return "unknown" if ours in (0, DEFAULT_WEIGHTS) else "same"
    return "different" if ours and theirs else "unknown"


def draws() -> Iterator[int]:
    """Yield numbers that no other rank draws, for one thread: SGLang seeds `random` equally in all
    ranks. Each read of the system's source gives up the GIL, so it yields 64 numbers."""
    while True:
        for number in struct.unpack("64Q", os.urandom(512)):
            yield number >> 1 or 1


def draw_instance() -> bytes:
    """Draw the name of this run of a rank. Call it after the process is spawned."""
    return os.urandom(INSTANCE_BYTES)
