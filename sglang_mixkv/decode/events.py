"""Events that a decode rank's state machine handles, and actions that it asks for.

A room is named by its *generation*, since SGLang uses its room numbers again. A *peer*
is a prefill rank as one prefill server names it: what another server says of the same rank is
another peer, so that no server can end what another one's facts began. A *read* brings segments
into slots of this rank; a *job* is one copy from a slot to the pool, or one clearing of rows. A
*handle* is what the caller knows a room by (in a server its ReceiveHandle).
"""

from __future__ import annotations

from collections.abc import Hashable
from enum import StrEnum

import msgspec

from sglang_mixkv.channel.messages import INSTANCE_BYTES, PROTOCOL, Ack, Fail, Open, Ready

Generation = int
Peer = bytes


def peer_of(instance: bytes, server: str) -> Peer:
    """The rank of this instance, by the facts of the prefill server at this bootstrap address."""
    return instance + server.encode()


def instance_of(peer: Peer) -> bytes:
    return peer[:INSTANCE_BYTES]


def server_of(peer: Peer) -> str:
    """The server's bootstrap address."""
    return peer[INSTANCE_BYTES:].decode()


class Source(msgspec.Struct, frozen=True):
    """One contacted prefill rank of the drafter's stage, for one room.

    `heads`: to read from it, may be none. `readers`: how many decode ranks open it. `slots`: how
    many it has. `segment_tokens`: how many tokens fit the smaller of its slots and this rank's.
    `patience`: its own, by which it uses a slot again that was not acknowledged.
    """

    peer: Peer
    heads: range
    readers: int
    slots: int = 0
    segment_tokens: int = 0
    patience: float = float("inf")


class OpenRoom(msgspec.Struct, frozen=True):
    """SGLang has sent a request's metadata. Rows of tokens [first_token, end) are this room's;
    the prompt ends there or earlier, within the last page, of `page_size` tokens.

    `cold`: a reason why nothing is fetched. `pending`: an earlier forward may still write these
    rows; ForwardDone follows.
    """

    generation: Generation
    bootstrap_room: int
    sources: tuple[Source, ...]
    first_token: int
    end: int
    cold: str = ""
    pending: bool = False
    version: int = PROTOCOL[1]
    handle: Hashable = None
    page_size: int = 1


class ForwardDone(msgspec.Struct, frozen=True):
    generation: Generation


class TargetArrived(msgspec.Struct, frozen=True):
    """SGLang's own transfer of the room has succeeded."""

    generation: Generation


class CloseRoom(msgspec.Struct, frozen=True):
    """SGLang is done with the room, and its gate is closed. `reason`: why it failed."""

    generation: Generation
    reason: str = ""


class Received(msgspec.Struct, frozen=True):
    peer: Peer
    message: Ready | Fail


class PeerLost(msgspec.Struct, frozen=True):
    """A message to this peer could not be sent. `gone`: it is dropped, and will not come back."""

    peer: Peer
    gone: bool = False


class ReadEnded(msgspec.Struct, frozen=True):
    """Nothing of it can land in the local slots any more. All bytes are there, unless there is an
    `error`."""

    read: int
    error: str = ""


class Result(StrEnum):
    DONE = "done"
    CLOSED = "closed"  # the gate was; nothing was written
    STALE = "stale"  # the slot held other bytes than were announced; nothing was written
    ERROR = "error"


class Copied(msgspec.Struct, frozen=True):
    """These jobs have ended alike."""

    jobs: tuple[int, ...]
    result: Result
    detail: str = ""


class Tick(msgspec.Struct, frozen=True):
    """Time has passed. Needed at least every 0.1 s while a room is open, and every second."""


Event = (
    OpenRoom | ForwardDone | TargetArrived | CloseRoom | Received | PeerLost | ReadEnded | Copied
    | Tick
)  # fmt: skip


class Send(msgspec.Struct, frozen=True):
    peer: Peer
    message: Open | Ack | Fail


class Range(msgspec.Struct, frozen=True, gc=False):
    """`tokens` tokens in a slot there, for a slot here."""

    remote_slot: int
    local_slot: int
    tokens: int


class StartRead(msgspec.Struct, frozen=True):
    """Read these segments, of so many `heads`. A ReadEnded follows, however long it takes."""

    read: int
    peer: Peer
    ranges: tuple[Range, ...]
    heads: int


class Unpack(msgspec.Struct, frozen=True, gc=False):
    """Copy a segment from a slot here to the room's rows, through its gate."""

    job: int
    handle: Hashable
    first_token: int
    tokens: int
    heads: range
    slot: int
    stamp: int


class Clear(msgspec.Struct, frozen=True):
    """Zero the room's rows of tokens [first_token, end), through its gate."""

    job: int
    handle: Hashable
    first_token: int
    end: int


Job = Unpack | Clear


class Copy(msgspec.Struct, frozen=True):
    """They may be done in any order, and together; a Copied follows for each, or for several."""

    jobs: tuple[Job, ...]


class State(StrEnum):
    WARM = "warm"  # every row is in place
    COLD = "cold"  # rows that are not in place are zero
    FAILED = "failed"  # rows may hold another request's KV


class Verdict(msgspec.Struct, frozen=True):
    """Once per room. A FAILED one is the only case in which the drafter ends a request."""

    handle: Hashable
    state: State
    reason: str = ""


class Forget(msgspec.Struct, frozen=True):
    """Another instance is at this peer's address: resolve it anew."""

    peer: Peer


class Note(msgspec.Struct, frozen=True):
    """Something to count, by `what`, and to log once per peer."""

    what: str
    peer: Peer = b""
    detail: str = ""


Action = Send | StartRead | Copy | Verdict | Forget | Note


def undone(action: Action, detail: str) -> Event | None:
    """What to handle in the place of an action that raised, and was not done. A message concerns
    its generation alone; the slots of an ACK expire."""
    match action:
        case Send(peer, Open(generation=generation) | Fail(generation=generation)):
            return Received(peer, Fail(0, generation, "unsent", detail))
        case StartRead(read):
            return ReadEnded(read, detail)
        case Copy(jobs):
            return Copied(tuple(job.job for job in jobs), Result.ERROR, detail)
    return None
