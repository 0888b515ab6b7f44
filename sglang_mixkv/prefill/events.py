"""Events that a prefill rank's state machine handles, and actions that it asks for.

A *use* is one sender of SGLang's, by whatever names it (in a server its SendHandle): room numbers
come again, uses do not. A *connection* is how the socket names where a message came from. A *job*
is the packing of one segment.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import msgspec

from sglang_mixkv.channel.messages import Ack, Fail, Open, Ready

Use = Hashable
Connection = bytes


class Begin(msgspec.Struct, frozen=True):
    """SGLang made a sender for this room."""

    use: Use
    room: int


class AddChunk(msgspec.Struct, frozen=True):
    """SGLang handed a chunk over: tokens [first, first + count) of the prompt.

    `pages`: where they are (Pages in draft/layout.py); opaque here. `pending`: their KV may not be
    written yet; ChunkWritten follows. `last`: no more come. Chunks of one use follow each other in
    the prompt, and are written in their order.
    """

    use: Use
    first: int
    count: int
    last: bool
    pages: Any = None
    pending: bool = False


class ChunkWritten(msgspec.Struct, frozen=True):
    """The first of the use's pending chunks is written."""

    use: Use


class TargetSent(msgspec.Struct, frozen=True):
    """SGLang's own transfer of the use has succeeded."""

    use: Use


class End(msgspec.Struct, frozen=True):
    """SGLang is done with the sender, and its gate is closed. `reason`: why it failed."""

    use: Use
    reason: str = ""


class Received(msgspec.Struct, frozen=True):
    """A reader's message. `connection`: what a reply is addressed to."""

    connection: Connection
    message: Open | Ack | Fail


class ConnectionLost(msgspec.Struct, frozen=True):
    connection: Connection


class Unsent(msgspec.Struct, frozen=True):
    """This message did not leave, and never will."""

    message: Ready | Fail


class Packed(msgspec.Struct, frozen=True):
    """These jobs have ended. Their bytes are in the slots, unless there is an `error`, or the use's
    gate was `closed` before they began."""

    jobs: tuple[int, ...]
    error: str = ""
    closed: bool = False


class Tick(msgspec.Struct, frozen=True):
    """Time has passed. Needed at least ten times a second while a room is open."""


Event = (
    Begin | AddChunk | ChunkWritten | TargetSent | End | Received | ConnectionLost | Unsent | Packed
    | Tick
)  # fmt: skip


class PackJob(msgspec.Struct, frozen=True, gc=False):
    """Copy `count` tokens, `offset` tokens into the chunk, of these heads into the slot."""

    job: int
    handle: Use
    pages: Any
    offset: int
    count: int
    heads: range
    slot: int
    stamp: int


class Pack(msgspec.Struct, frozen=True):
    """They may be copied in any order, and together; a Packed follows for each, or for several."""

    jobs: tuple[PackJob, ...]


class Send(msgspec.Struct, frozen=True):
    connection: Connection
    message: Ready | Fail


class Settled(msgspec.Struct, frozen=True):
    """The sender may report SGLang's Success: nothing will read the use's pages any more."""

    use: Use


class Note(msgspec.Struct, frozen=True):
    """Something to count, by `what`, and to log once per reader. `reader`: its instance."""

    what: str
    reader: bytes = b""
    detail: str = ""


Action = Pack | Send | Settled | Note


def undone(action: Action, detail: str) -> Event | None:
    """What to handle in the place of an action that raised, and was not done."""
    match action:
        case Pack(jobs):
            return Packed(tuple(job.job for job in jobs), detail)
        case Send(message=message):
            return Unsent(message)
    return None
