"""The channel's four messages: OPEN, READY, ACK, FAIL. See docs/protocol.md.

    decode  -> prefill    OPEN    I will read this request's draft KV from you
    prefill -> decode     READY   these segments are in my slots
    decode  -> prefill    ACK     I no longer read these slots
    either  -> the other  FAIL    I will send, or read, nothing more for this request

Each is one ZMQ frame: a msgpack array whose first item is the kind. The schema bounds every number,
so no state machine receives a value that it cannot represent.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Callable, Iterator
from typing import Annotated

import msgspec
from msgspec import Meta

PROTOCOL = (3, 3)
"""The oldest and newest versions that this build reads; a pair uses the newest that both read.
"Versions" in docs/protocol.md states when to raise them, and what each version changed."""

MAX_BYTES = 4096  # per message; the socket drops longer ones
MAX_LIST = 32  # segments per READY, and slots per ACK

Room = Annotated[int, Meta(ge=0)]  # SGLang's bootstrap_room; msgpack limits it to a uint64
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
    """A prefill rank announces segments of a room, which the reader may now read. The first segment
    has number `segment` and begins at token `first_token`. `last`: no segment follows; `segments`
    is empty if that became known only at the end of a chunk."""

    room: Room
    generation: Secret
    segment: Count
    first_token: Token
    segments: Annotated[tuple[Announced, ...], Meta(max_length=MAX_LIST)]
    last: bool
    weights: Weights = 0


class Ack(msgspec.Struct, frozen=True, array_like=True, tag=3, gc=False):
    """The reader confirms that no read of these slots, under these stamps, runs or will start."""

    slots: Annotated[tuple[tuple[SlotNumber, Secret], ...], Meta(max_length=MAX_LIST)]


class Fail(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Either side ends this use of the room. Decode counts `code`, and logs `detail`."""

    room: Room
    generation: Secret
    code: Code
    detail: Text = ""


Message = Open | Ready | Ack | Fail

encode: Callable[[Message], bytes] = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(Message)


def decode(frame: bytes) -> Message:
    """Decode a message. Raises ValueError if `frame` is not one."""
    try:
        return _decoder.decode(frame)
    except RecursionError as error:  # raised for a kilobyte of nested arrays
        raise ValueError("the message is nested too deeply") from error


def fail(room: int, generation: int, code: str, detail: str) -> Fail:
    """Make a FAIL. Replace unprintable characters of `detail`, and truncate it to 512 chars."""
    printable = "".join(c if c.isprintable() else " " for c in detail)
    return Fail(room, generation, code, printable[:512])


def draws() -> Iterator[int]:
    """Yield random numbers that differ between ranks, for one thread. SGLang gives `random` the
    same seed on all ranks. os.urandom releases the GIL, so each call provides 64 numbers."""
    while True:
        for number in struct.unpack("64Q", os.urandom(512)):
            yield number >> 1 or 1


def draw_instance() -> bytes:
    """Return a random ID for this rank's process. Call it after the process is spawned."""
    return os.urandom(INSTANCE_BYTES)
