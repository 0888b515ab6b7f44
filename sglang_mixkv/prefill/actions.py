"""Actions that a prefill rank's state machine asks for."""

from __future__ import annotations

import msgspec

from sglang_mixkv.channel.messages import Fail, Ready
from sglang_mixkv.prefill.transfer import Chunk, Connection, Segment, Use


class Pack(msgspec.Struct, frozen=True):
    """They may be packed in any order, and together; `Machine.copied` follows for each, or for
    several."""

    segments: tuple[Segment, ...]


class Send(msgspec.Struct, frozen=True):
    """`chunks`: of which a READY announces the last segment."""

    connection: Connection
    message: Ready | Fail
    chunks: list[Chunk] = []


class Settled(msgspec.Struct, frozen=True):
    """The sender may report SGLang's Success: nothing will read the use's pages any more."""

    use: Use


class Note(msgspec.Struct, frozen=True):
    """Something to count, by `what`, and to log once per reader. `reader`: its instance."""

    what: str
    reader: bytes = b""
    detail: str = ""


Action = Pack | Send | Settled | Note
