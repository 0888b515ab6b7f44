"""Reading the frames of a control message: what is in one, or why it cannot be that.

SGLang reads control messages in threads that an exception would end, from sockets that anybody
who reaches the port can write to. ZMQ delivers a message whole, all its frames or none, so a
message is read here first, and SGLang's own code reads only what has passed.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from sglang_mixkv.errors import MixKVError

# Bytes per frame: only a request's page numbers (16 million of them) can be many.
MAX_PAGES_FRAME = 64 << 20
MAX_FRAME = 1 << 20
MAX_NUMBER = 1 << 63
MAX_ROOM = 1 << 64  # SGLang's row of metadata holds a room as uint64
MAX_TEXT = 256
MAX_LISTS = 1024
MAX_PORT = 1 << 16

# What can stand in a ZMQ address: a name, IPv4, or IPv6 with or without brackets and zone.
_HOST = re.compile(r"[0-9A-Za-z._:%\[\]-]+")

Frames = Sequence[bytes]
Numbers = npt.NDArray[np.int32]


class Address(msgspec.Struct, frozen=True):
    """Where a peer listens, and its transport session."""

    endpoint: str
    port: int
    session: str

    @property
    def at(self) -> tuple[str, int]:
        return self.endpoint, self.port


def unreadable(text: str) -> MixKVError:
    """What is wrong with a message that cannot be read."""
    return MixKVError("MIXKV-MSG-01", text)


def bounded(frames: Frames, least: int, most: int, what: str, limit: int = MAX_FRAME) -> None:
    """Raise MixKVError unless there are so many frames, none of more than `limit` bytes."""
    if not least <= len(frames) <= most:
        raise unreadable(f"{what} of {len(frames)} frames; expected {least} to {most}.")
    if any(len(frame) > limit for frame in frames):
        raise unreadable(f"{what} with a frame above {limit} bytes.")


def number(frame: bytes, what: str, *, low: int = 0, high: int = MAX_NUMBER) -> int:
    """An ASCII integer in [low, high). Raises MixKVError."""
    if not 0 < len(frame) <= 20 or not frame.removeprefix(b"-").isdigit():
        raise unreadable(f"{what} is not a number: {frame[:20]!r}.")
    value = int(frame)
    if not low <= value < high:
        raise unreadable(f"{what} is {value}, outside [{low}, {high}).")
    return value


def room(frame: bytes) -> int:
    return number(frame, "room", high=MAX_ROOM)


def host(frame: bytes, what: str) -> str:
    """A host, or a host and a port, of at most MAX_TEXT characters. Raises MixKVError."""
    if not frame or len(frame) > MAX_TEXT or not frame.isascii():
        raise unreadable(f"{what} is not an address: {frame[:20]!r}.")
    found = frame.decode("ascii")
    if not _HOST.fullmatch(found):
        raise unreadable(f"{what} is not an address: {found[:20]!r}.")
    return found


def session(frame: bytes) -> str:
    """A Mooncake session, host:port: SGLang's scheduler takes the port from behind the colon."""
    found = host(frame, "session")
    name, _, port = found.rpartition(":")
    if not name:
        raise unreadable(f"session {found!r} is not host:port.")
    number(port.encode(), "session port", low=1, high=MAX_PORT)
    return found


def agent(frame: bytes) -> str:
    """A NIXL agent's name: printable ASCII."""
    if not frame or len(frame) > MAX_TEXT or not frame.isascii():
        raise unreadable(f"not the name of a NIXL agent: {frame[:20]!r}.")
    found = frame.decode("ascii")
    if not found.isprintable():
        raise unreadable(f"not the name of a NIXL agent: {found[:20]!r}.")
    return found


def check_agent_metadata(frame: bytes, name: bytes) -> None:
    """Raise MixKVError unless NIXL's metadata are those of the agent of this name: NIXL puts them
    in the place of what it knows of the agent that they name, and drops that where they are broken
    (nixl 1.5.1: nixlSerDes, nixl_agent.cpp loadRemoteMD)."""
    expected = b"nixlSerDes|Agent" + struct.pack("<Q", len(name)) + name + b"|"
    if not frame.startswith(expected):
        raise unreadable(
            f"NIXL's metadata start with {frame[: len(expected)][:80]!r}, not with those of agent "
            f"{name[:40]!r}: another agent's, or of a NIXL that lays them out otherwise."
        )


def words(frame: bytes, what: str, code: str) -> tuple[int, ...]:
    """The integers of a packed frame; `code` as in `struct`. Raises MixKVError."""
    width = struct.calcsize(code)
    if len(frame) % width:
        raise unreadable(f"{what} has {len(frame)} bytes, not a multiple of {width}.")
    return struct.unpack(f"<{len(frame) // width}{code}", frame)


def pages(frame: bytes, what: str) -> Numbers:
    """Page numbers, int32. Raises MixKVError."""
    if len(frame) % 4:
        raise unreadable(f"{what} has {len(frame)} bytes, not a multiple of 4.")
    return np.frombuffer(frame, np.int32)


def lists(frame: bytes, what: str, dtype: Any) -> tuple[npt.NDArray[Any], ...]:
    """The lists of a frame made by SGLang's pack_int_lists (common/utils.py). Raises MixKVError.

    frame   | count | bytes of list 0 | bytes of list 1 | ... | list 0 | list 1 | ...
    """
    if not frame:
        return ()
    width, head = np.dtype(dtype).itemsize, struct.calcsize("<I")
    count = struct.unpack_from("<I", frame)[0] if len(frame) >= head else MAX_LISTS + 1
    if count > MAX_LISTS or len(frame) < head * (1 + count):
        raise unreadable(f"{what} names {count} lists in {len(frame)} bytes.")
    sizes = struct.unpack_from(f"<{count}I", frame, head)
    if head * (1 + count) + sum(sizes) != len(frame) or any(size % width for size in sizes):
        raise unreadable(f"{what}: lists of {sizes[:8]} bytes in {len(frame)}.")
    ends = np.cumsum([head * (1 + count), *sizes]).tolist()
    return tuple(
        np.frombuffer(frame, dtype, (end - start) // width, start) for start, end in pairwise(ends)
    )
