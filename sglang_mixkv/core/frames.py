"""Stock's control messages, checked before stock's own parsers see them.

SGLang reads these frames in threads that an exception would end, from sockets that anybody
who reaches the port can write to. ZMQ delivers a message whole, all its frames or none, so a
check of the whole message comes first and stock code reads only what has passed.

    to a prefill rank    registration  "None", 20 frames and the extension
                         metadata      room number, 10 frames and at most one grant
                         ABORT         tag, room, address, port, generation
    to a decode rank     status        room, status, prefill rank, reason
                         AUX_DATA      tag, room, buffer, row, length, bytes
                         ABORT_ACK     tag, room, rank, generation

Field positions: mooncake/conn.py KVArgsRegisterInfo.from_zmq, TransferInfo.from_zmq,
common/conn.py AbortNotification, AbortAck, parse_kv_status_message.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from sglang_mixkv.core.errors import MixKVError
from sglang_mixkv.core.wire import STOCK_METADATA_FRAMES, STOCK_REGISTRATION_FRAMES

# Bytes a frame: only a request's page numbers (16 million of them) can be many.
MAX_PAGES_FRAME = 64 << 20
MAX_FRAME = 1 << 20
MAX_NUMBER = 1 << 63
MAX_TEXT = 256
MAX_LISTS = 1024

# What can stand in a ZMQ address: a name, IPv4, or IPv6 with or without brackets and zone.
_HOST = re.compile(r"[0-9A-Za-z._:%\[\]-]+")

Frames = Sequence[bytes]
Numbers = npt.NDArray[np.int32]


def number(frame: bytes, what: str, *, low: int = 0, high: int = MAX_NUMBER) -> int:
    """An ASCII integer in [low, high). Raises MixKVError."""
    if not 0 < len(frame) <= 20 or not frame.removeprefix(b"-").isdigit():
        raise MixKVError(f"{what} is no number: {frame[:20]!r}.")
    value = int(frame)
    if not low <= value < high:
        raise MixKVError(f"{what} is {value}, outside [{low}, {high}).")
    return value


def room_number(frame: bytes) -> int:
    """A room: any number that fits SGLang's row for it, a uint64. Raises MixKVError."""
    return number(frame, "room", high=1 << 64)


def host(frame: bytes, what: str) -> str:
    """A host, or a host and a port, of at most MAX_TEXT characters. Raises MixKVError."""
    if not frame or len(frame) > MAX_TEXT or not frame.isascii():
        raise MixKVError(f"{what} is no address: {frame[:20]!r}.")
    found = frame.decode("ascii")
    if not _HOST.fullmatch(found):
        raise MixKVError(f"{what} is no address: {found[:20]!r}.")
    return found


def vector(frame: bytes, what: str, width: int) -> int:
    """How many items of `width` bytes a packed frame holds. Raises MixKVError."""
    count, rest = divmod(len(frame), width)
    if rest:
        raise MixKVError(f"{what} has {len(frame)} bytes, not a multiple of {width}.")
    return count


def lists(frame: bytes, what: str, width: int) -> list[int]:
    """Lengths of the lists in a frame made by stock's pack_int_lists. Raises MixKVError."""
    if not frame:
        return []
    head = struct.calcsize("<I")
    count = struct.unpack_from("<I", frame)[0] if len(frame) >= head else MAX_LISTS + 1
    if count > MAX_LISTS or len(frame) < head * (1 + count):
        raise MixKVError(f"{what} names {count} lists in {len(frame)} bytes.")
    sizes = struct.unpack_from(f"<{count}I", frame, head)
    if head * (1 + count) + sum(sizes) != len(frame) or any(size % width for size in sizes):
        raise MixKVError(f"{what}: lists of {sizes[:8]} bytes in {len(frame)}.")
    return [size // width for size in sizes]


def int_lists(frame: bytes, what: str) -> tuple[Numbers, ...]:
    """The lists in a frame made by stock's pack_int_lists(.., "i"). Raises MixKVError."""
    sizes = lists(frame, what, 4)
    numbers = np.frombuffer(frame, np.int32)[1 + len(sizes) :] if sizes else np.empty(0, np.int32)
    return tuple(np.split(numbers, np.cumsum(sizes)[:-1])) if sizes else ()


def _bounded(frames: Frames, least: int, most: int, what: str, limit: int = MAX_FRAME) -> None:
    if not least <= len(frames) <= most:
        raise MixKVError(f"{what} of {len(frames)} frames; expected {least} to {most}.")
    if any(len(frame) > limit for frame in frames):
        raise MixKVError(f"{what} with a frame above {limit} bytes.")


class Address(msgspec.Struct, frozen=True):
    """Where a peer listens, and its transport session."""

    endpoint: str
    port: int
    session: str


def sender_of(frames: Frames) -> Address:
    """Frames 1 to 3 of a registration or metadata message. Raises MixKVError."""
    session = host(frames[3], "session")
    name, _, port = session.rpartition(":")
    if not name:  # stock's scheduler takes the port from behind a colon
        raise MixKVError(f"session {session!r} is no host:port.")
    number(port.encode(), "session port", low=1, high=1 << 16)
    return Address(
        host(frames[1], "endpoint"),
        number(frames[2], "port", low=1, high=1 << 16),
        session,
    )


def check_registration(frames: Frames) -> Address:
    """Raise MixKVError unless stock can read this registration; who sent it."""
    _bounded(frames, STOCK_REGISTRATION_FRAMES, STOCK_REGISTRATION_FRAMES + 1, "registration")
    sender = sender_of(frames)
    entries = vector(frames[4], "KV pointers", 8)
    vector(frames[5], "aux pointers", 8)
    size = number(frames[8], "attention-TP size", low=1, high=1 << 16)
    number(frames[7], "attention-TP rank", high=size)
    number(frames[9], "KV item length")
    for index, what, width in ((6, "state pointers", 8), (10, "state item lengths", 4),
                               (11, "state dims", 4), (13, "state layer ids", 4)):  # fmt: skip
        lists(frames[index], what, width)
    vector(frames[12], "KV layer ids", 4)
    if len(frames[14]) not in (0, 8):
        raise MixKVError(f"staging pointer of {len(frames[14])} bytes.")
    if frames[15]:
        number(frames[15], "staging size")
    dcp = number(frames[16] or b"1", "DCP size", low=1, high=1 << 16)
    number(frames[17] or b"0", "DCP rank", high=dcp)
    vector(frames[18], "staging layer ids", 8)
    if vector(frames[19], "KV item lengths", 8) != entries:
        raise MixKVError(f"{entries} KV pointers with another number of item lengths.")
    return sender


class Metadata(msgspec.Struct, frozen=True):
    """What a room's metadata message says. `states`: destination indices by component."""

    room: int
    sender: Address
    is_dummy: bool
    pages: Numbers
    aux_index: int
    required: int
    prefix: int = 0
    states: tuple[Numbers, ...] = ()


def metadata_sender(frames: Frames) -> Metadata | None:
    """Who to answer for metadata that cannot be read otherwise; None if not even that."""
    try:
        empty = np.empty(0, np.int32)
        return Metadata(room_number(frames[0]), sender_of(frames), True, empty, -1, 1)
    except (MixKVError, IndexError):
        return None


def check_metadata(frames: Frames) -> Metadata:
    """Raise MixKVError unless stock can read this room metadata."""
    _bounded(frames, STOCK_METADATA_FRAMES, STOCK_METADATA_FRAMES + 1, "metadata", MAX_PAGES_FRAME)
    dummy = frames[4] == b"" and frames[5] == b""
    vector(frames[4], "pages", 4)
    if frames[9]:  # HiSparse's, which the plugin refuses to start with
        raise MixKVError(f"device pages, {len(frames[9])} bytes of them: not supported.")
    return Metadata(
        room=room_number(frames[0]),
        sender=sender_of(frames),
        is_dummy=dummy,
        pages=np.frombuffer(frames[4], np.int32),
        aux_index=-1 if dummy else number(frames[5], "aux row", high=1 << 31),
        required=number(frames[7], "number of decode ranks", low=1, high=1 << 16),
        prefix=number(frames[8], "prefix length", high=1 << 31),
        states=int_lists(frames[6], "state indices"),
    )


class Abort(msgspec.Struct, frozen=True):
    """An abort. `endpoint`, `port`: who asks, where it says so; `generation`: of the answer
    that it waits for, if any."""

    room: int
    endpoint: str = ""
    port: int = 0
    generation: int | None = None


def check_abort(frames: Frames) -> Abort:
    """Raise MixKVError unless this is an abort that stock can read."""
    _bounded(frames, 2, 5, "abort")
    room = room_number(frames[1])
    if len(frames) < 4:
        return Abort(room)
    endpoint, port = host(frames[2], "endpoint"), number(frames[3], "port", low=1, high=1 << 16)
    generation = number(frames[4], "generation") if len(frames) > 4 else None
    return Abort(room, endpoint, port, generation)


class Status(msgspec.Struct, frozen=True):
    """A prefill rank's verdict on a room."""

    room: int
    status: int
    prefill_rank: int


def check_status(frames: Frames) -> Status:
    """Raise MixKVError unless this is a status message that stock can read."""
    _bounded(frames, 3, 4, "status")
    return Status(
        room_number(frames[0]),
        number(frames[1], "status", high=5),
        number(frames[2], "prefill rank", high=1 << 20),
    )


def check_ack(frames: Frames) -> None:
    """Raise MixKVError unless this is an abort acknowledgement that stock can read."""
    _bounded(frames, 2, 4, "abort acknowledgement")
    room_number(frames[1])
    for frame, what in zip(frames[2:], ("prefill rank", "generation"), strict=False):
        number(frame, what)


class Aux(msgspec.Struct, frozen=True):
    """One row of one of this rank's aux buffers, for a room."""

    room: int
    buffer: int
    row: int


def check_aux(frames: Frames, item_lens: Sequence[int], rows: Sequence[int]) -> Aux:
    """Raise MixKVError unless this writes inside one row of one aux buffer.

    `item_lens`, `rows`: bytes a row, and rows, of each of this rank's aux buffers.
    """
    _bounded(frames, 6, 6, "aux data")
    buffer = number(frames[2], "aux buffer", high=len(item_lens))
    row = number(frames[3], "aux row", high=rows[buffer])
    if len(frames[4]) != 4 or len(frames[5]) > item_lens[buffer]:
        raise MixKVError(f"{len(frames[5])} bytes for an aux row of {item_lens[buffer]}.")
    return Aux(room_number(frames[1]), buffer, row)
