"""The versioned extension of SGLang's registration and metadata messages.

Stock frames stay byte-identical; the extension is one more frame at the end:

    b"MIXKV" | protocol version, big-endian u16 | msgpack of `Extension` or `Grant`

A `Digest` is a message of its own, one such frame, sent only to a peer that asked for it.

SGLang's own parsers ignore extra trailing frames, so a stock peer is not disturbed by
it; a peer with this plugin refuses a registration that lacks it.

Bump PROTOCOL when a field changes its meaning, is removed, or is added without a
default; not for a new field with a default that means what its absence meant.

    1  0.1.0  first version
"""

from __future__ import annotations

import struct
from typing import TypeVar

import msgspec

from sglang_mixkv.errors import refuse
from sglang_mixkv.kv.routes import Route
from sglang_mixkv.protocol.facts import Facts, Room, Several, Size, Word
from sglang_mixkv.protocol.frames import MAX_FRAME, Frames, bounded, unreadable

T = TypeVar("T")

PROTOCOL = 1
MAGIC = b"MIXKV"
HEADER = len(MAGIC) + 2
MAX_EXTENSION = 1 << 20
MAX_NEW_FRAMES = 8  # that a later SGLang may add behind the ones that are known here

_UPGRADE = "Install the same sglang-mixkv on both sides and restart the older one"


class HeadRange(msgspec.Struct, frozen=True, array_like=True):
    """Half-open range of global head numbers."""

    start: Size
    stop: Size

    @staticmethod
    def of(heads: range) -> HeadRange:
        return HeadRange(heads.start, heads.stop)


class RouteNotice(msgspec.Struct, frozen=True):
    """The decode side's row of the routes table for the rank that it registers with."""

    is_send_target: bool
    target_heads: HeadRange
    draft_heads: HeadRange
    sends_aux: bool
    sends_state: bool


def notice_of(route: Route) -> RouteNotice:
    """A route as it is told to the prefill rank concerned."""
    return RouteNotice(
        is_send_target=route.is_send_target,
        target_heads=HeadRange.of(route.target_heads),
        draft_heads=HeadRange.of(route.draft_heads),
        sends_aux=route.sends_aux,
        sends_state=route.sends_state,
    )


class Extension(msgspec.Struct, frozen=True):
    """What a decode rank says of itself beyond SGLang's registration frames.

    `num_draft_entries`: the last so many of stock's pointers and item lengths of KV entries are
    the drafter's. `kv_data_lens`, `state_lens`: length in bytes of each of these entries, and of
    each state entry, so that destinations can be bounds-checked. `draft_heads`: KV heads on this
    rank; `draft_total_heads`: of the whole drafter. `draft_window`: how many tokens before the
    prompt's end its drafter can reach, 0 where all of the draft KV has to come; `draft_windows`:
    the same for each draft entry, where they differ (0.1.0 refuses such drafters at start).
    `stages`: the prefill pipeline stages that this rank contacts, ascending. `staging`: (address,
    bytes) of the buffer in which it grants regions; bytes 0: none. `aux_rows`: rows in each of
    its aux buffers. `process`: names this start of the decode rank, since another can come to its
    address. `cold`: the drafters do not fit, only the target's KV is asked for. `verify`:
    a `Digest` is asked for with each request.
    """

    facts: Facts
    num_draft_entries: Size
    draft_kind: Word
    draft_heads: Size
    draft_total_heads: Size
    kv_data_lens: Several[Size]
    route: RouteNotice
    stages: Several[Size] = (0,)
    draft_window: Size = 0
    draft_windows: Several[Size] = ()
    staging: tuple[Size, Size] = (0, 0)
    aux_rows: Size = 0
    state_lens: Several[Several[Size]] = ()
    cold: bool = False
    verify: bool = False
    process: Word = ""


class Grant(msgspec.Struct, frozen=True, array_like=True):
    """Where a request's head slices go, for the prefill rank that gets this.

    `address`, `tokens`: a region for the draft slices, its first byte and rows per entry
    (layout: kv/plan.py into_region); `tokens` 0: none. `first_page`: the request's page that its
    first row belongs to, and from which on draft KV is wanted. Where windows differ, that is of
    the entries that come whole or reach farthest; the region holds the entries of one window
    after those of another, each from its own first page on. `by_page`: slices that go to no
    region and are a part of the destination's row are written by extent (kv/extents.py).
    `extent`: tokens of an extent at most; 0: each page is one. Other than 0 only for a server
    whose facts say that it knows extents.
    """

    address: Size
    tokens: Size
    first_page: Size = 0
    by_page: bool = False
    extent: Size = 0


class Digest(msgspec.Struct, frozen=True):
    """Checksums of what one prefill rank sent for one room, in a message of its own.

    It goes to the decode rank just before the rank's success, over the same socket.
    `prefill_rank`: stock's unique number. `target`, `draft`: (address of the decode rank's
    entry, CRC-32 of the rows sent to it, in the order of the request's pages).
    """

    room: Room
    prefill_rank: Size
    target: Several[tuple[Size, Size]]
    draft: Several[tuple[Size, Size]]


def encode(extension: Extension | Grant | Digest) -> bytes:
    """The extension frame."""
    return MAGIC + struct.pack(">H", PROTOCOL) + msgspec.msgpack.encode(extension)


def split(
    message: Frames, count: int, what: str, limit: int = MAX_FRAME
) -> tuple[Frames, bytes | None]:
    """A message's own frames, `count` of them or more, and the extension behind them if any.

    The extension is found by its magic at the message's end, so that SGLang may add frames of its
    own. Raises MixKVError for other frames behind it or in its place: a grant that is not read
    leaves its region unwritten.
    """
    stock, found = message, None
    if len(message) > 1 and message[-1].startswith(MAGIC):
        stock, found = message[:-1], message[-1]
    bounded(stock, count, count + (MAX_NEW_FRAMES if found else 0), what, limit)
    return stock, found


def decode_extension(frame: bytes | None) -> Extension:
    """Read the extension of a registration. Raises MixKVError, never anything else."""
    if frame is None:
        raise refuse(
            "MIXKV-PAIR-01",
            "a registration that ends with the frame of sglang-mixkv",
            "one without it: the decode side does not run sglang-mixkv",
            "draft KV could land in other requests' pages",
            "Start the decode server with --enable-mixkv too, or this prefill without it",
        )
    return _payload(frame, Extension)


def decode_grant(frame: bytes | None) -> Grant | None:
    """The grant of a room's metadata message, None without one. Raises MixKVError."""
    return None if frame is None else _payload(frame, Grant)


def decode_digest(frames: Frames) -> Digest | None:
    """The digest, when this message to a decode rank is one. Raises MixKVError."""
    if not frames[0].startswith(MAGIC):
        return None
    if len(frames) != 1:
        raise unreadable(f"a digest of {len(frames)} frames; expected 1.")
    return _payload(frames[0], Digest)


def _payload(frame: bytes, kind: type[T]) -> T:
    if len(frame) < HEADER or not frame.startswith(MAGIC) or len(frame) > MAX_EXTENSION:
        raise refuse(
            "MIXKV-MSG-01",
            "an extension frame of sglang-mixkv",
            f"{len(frame)} other bytes",
            "the peer's drafter would be unknown",
            _UPGRADE,
        )
    (protocol,) = struct.unpack_from(">H", frame, len(MAGIC))
    if protocol != PROTOCOL:
        raise refuse(
            "MIXKV-PAIR-02",
            f"sglang-mixkv protocol {PROTOCOL}",
            f"protocol {protocol}",
            "fields could be read with another meaning",
            _UPGRADE,
        )
    try:
        return msgspec.msgpack.decode(frame[HEADER:], type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise unreadable(
            f"malformed sglang-mixkv {kind.__name__.lower()}: {error}; nothing is sent to this "
            f"peer. {_UPGRADE}."
        ) from None
