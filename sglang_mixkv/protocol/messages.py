"""Control messages of rooms, read once into typed values.

    to a prefill rank    metadata      room number, SGLang's frames, at most one grant
                         ABORT         tag, room, address, port, generation
    to a decode rank     status        room, status, prefill rank, reason
                         AUX_DATA      tag, room, buffer, row, length, bytes
                         ABORT_ACK     tag, room, rank, generation
                         digest        one frame of the plugin's own

Frame positions: TransferInfo.from_zmq in mooncake/conn.py and nixl/conn.py, and in
common/conn.py AbortNotification, AbortAck, parse_kv_status_message. What a backend puts in front
of a message is protocol/framing.py's. A registration has a module of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum

import msgspec
import numpy as np

from sglang_mixkv.errors import codes_in
from sglang_mixkv.protocol import extension, frames
from sglang_mixkv.protocol.extension import Grant
from sglang_mixkv.protocol.frames import Address, Frames, Numbers

ABORT = b"ABORT"

_UNREGISTERED = {"MIXKV-REG-02", "MIXKV-REG-03"}
_UNREGISTERED_WORDS = (  # of version 0.1, which has no codes
    "it registers again with its next request",
    "it registered from",
    "sglang-mixkv refuses this decode rank",
)
_GIVEN_UP = {"MIXKV-SEND-03"}
_GIVEN_UP_WORDS = ("Failed to send", "Decode instance could be dead")  # SGLang's


def lacks_registration(reason: str) -> bool:
    """Whether prefill failed a request for want of a good registration: it has none, or refused
    it."""
    return _says(reason, _UNREGISTERED, _UNREGISTERED_WORDS)


def is_given_up(reason: str) -> bool:
    """Whether prefill failed a request since a write to this rank failed. It sends this rank
    nothing more then; a registration ends that (MooncakeKVManager._publish_peer_registration)."""
    return _says(reason, _GIVEN_UP, _GIVEN_UP_WORDS)


def _says(reason: str, codes: set[str], words: tuple[str, ...]) -> bool:
    return bool(codes_in(reason) & codes) or any(text in reason for text in words)


MAX_INDEX = 1 << 31


class Poll(IntEnum):
    """A room's status, as SGLang's KVPoll numbers it (disaggregation/base/conn.py)."""

    FAILED = 0
    BOOTSTRAPPING = 1
    WAITING = 2
    TRANSFERRING = 3
    SUCCESS = 4


class MetadataPositions(msgspec.Struct, frozen=True):
    """Where SGLang puts what in a room's metadata message, by frame number.

    The defaults are Mooncake's of SGLang 0.5.22 and 0.5.23. `count`: frames that SGLang sends.
    None: this backend has no such frame. Where no frame says so, a dummy is who names neither
    pages nor an aux row. `read_session`: reads the name of the sender's transport session.
    """

    count: int = 10
    room: int = 0
    endpoint: int = 1
    port: int = 2
    session: int = 3
    pages: int = 4
    aux_index: int = 5
    states: int = 6
    required: int = 7
    prefix: int = 8
    device_pages: int | None = 9
    is_dummy: int | None = None
    read_session: Callable[[bytes], str] = frames.session


class Metadata(msgspec.Struct, frozen=True):
    """What a decode rank says of a room to a prefill rank.

    `pages`: destination pages, in the order of the request; `states`: destination indices by
    kind of state. `required`: decode ranks that share the room on that prefill rank. `prefix`:
    tokens that decode has cached. `grant`: how its head slices are to come.
    """

    room: int
    sender: Address
    is_dummy: bool
    pages: Numbers
    aux_index: int
    required: int
    prefix: int = 0
    states: tuple[Numbers, ...] = ()
    grant: Grant | None = None


def metadata_sender(message: Frames, at: MetadataPositions) -> tuple[int, Address]:
    """Room and sender, of a message that may not be readable otherwise. Raises MixKVError."""
    if len(message) <= max(at.room, at.endpoint, at.port, at.session):
        raise frames.unreadable(f"metadata of {len(message)} frames; expected {at.count}.")
    return frames.room(message[at.room]), Address(
        frames.host(message[at.endpoint], "endpoint"),
        frames.number(message[at.port], "port", low=1, high=frames.MAX_PORT),
        at.read_session(message[at.session]),
    )


def read_metadata(message: Frames, at: MetadataPositions) -> Metadata:
    """Raises MixKVError, never anything else, for what SGLang could not read either."""
    stock, more = extension.split(message, at.count, "metadata", frames.MAX_PAGES_FRAME)
    room, sender = metadata_sender(stock, at)
    if at.device_pages is not None and stock[at.device_pages]:
        # HiSparse's, which the plugin refuses to start with
        size = len(stock[at.device_pages])
        raise frames.unreadable(f"device pages, {size} bytes of them: not supported.")
    dummy, aux_index = _role(stock, at)
    return Metadata(
        room=room,
        sender=sender,
        is_dummy=dummy,
        pages=frames.pages(stock[at.pages], "pages"),
        aux_index=aux_index,
        required=frames.number(stock[at.required], "number of decode ranks", low=1, high=1 << 16),
        prefix=frames.number(stock[at.prefix], "prefix length", high=MAX_INDEX),
        states=frames.lists(stock[at.states], "state indices", np.int32),
        grant=extension.decode_grant(more),
    )


def _role(stock: Frames, at: MetadataPositions) -> tuple[bool, int]:
    """Whether this prefill rank sends nothing, and the aux row, -1 without."""
    if at.is_dummy is None and stock[at.pages] == b"" and stock[at.aux_index] == b"":
        return True, -1
    row = frames.number(stock[at.aux_index], "aux row", high=MAX_INDEX)
    said = stock[at.is_dummy] if at.is_dummy is not None else b"0"
    return bool(frames.number(said, "whether it is a dummy", high=2)), row


class Abort(msgspec.Struct, frozen=True):
    """A decode rank gives a room up. `endpoint`, `port`: who asks, where it says so;
    `generation`: of the answer that it waits for, if any."""

    room: int
    endpoint: str = ""
    port: int = 0
    generation: int | None = None


def read_abort(message: Frames) -> Abort:
    """Raise MixKVError unless this is an abort that SGLang can read."""
    frames.bounded(message, 2, 5, "abort")
    room = frames.room(message[1])
    if len(message) < 4:
        return Abort(room)
    endpoint = frames.host(message[2], "endpoint")
    port = frames.number(message[3], "port", low=1, high=frames.MAX_PORT)
    generation = frames.number(message[4], "generation") if len(message) > 4 else None
    return Abort(room, endpoint, port, generation)


class Status(msgspec.Struct, frozen=True):
    """A prefill rank's verdict on a room. `reason`: of a failure, where it gave one."""

    room: int
    status: int
    prefill_rank: int
    reason: str = ""


def read_status(message: Frames) -> Status:
    """Raise MixKVError unless this is a status message that SGLang can read."""
    frames.bounded(message, 3, 4, "status")
    return Status(
        frames.room(message[0]),
        frames.number(message[1], "status", high=len(Poll)),
        frames.number(message[2], "prefill rank", high=1 << 20),
        message[3].decode(errors="replace") if len(message) > 3 else "",
    )


class Ack(msgspec.Struct, frozen=True):
    """A prefill rank has nothing of an aborted room in flight any more."""

    room: int
    prefill_rank: int | None = None
    generation: int | None = None


def read_ack(message: Frames) -> Ack:
    """Raise MixKVError unless this is an abort acknowledgement that SGLang can read."""
    frames.bounded(message, 2, 4, "abort acknowledgement")
    names = ("prefill rank", "generation")
    rest = [frames.number(f, what) for f, what in zip(message[2:], names, strict=False)]
    return Ack(frames.room(message[1]), *rest)


class Aux(msgspec.Struct, frozen=True):
    """One row of one of this rank's aux buffers, for a room."""

    room: int
    buffer: int
    row: int


def read_aux(message: Frames, item_lens: Sequence[int], rows: Sequence[int]) -> Aux:
    """Raise MixKVError unless this writes inside one row of one aux buffer.

    `item_lens`, `rows`: bytes per row, and rows, of each of this rank's aux buffers.
    """
    frames.bounded(message, 6, 6, "aux data")
    buffer = frames.number(message[2], "aux buffer", high=len(item_lens))
    row = frames.number(message[3], "aux row", high=rows[buffer])
    if len(message[4]) != 4 or len(message[5]) > item_lens[buffer]:
        raise frames.unreadable(f"{len(message[5])} bytes for an aux row of {item_lens[buffer]}.")
    return Aux(frames.room(message[1]), buffer, row)
