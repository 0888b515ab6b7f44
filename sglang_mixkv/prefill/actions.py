"""Actions that a prefill rank's state machine asks for, and PrefillWorker._do carries out."""

from __future__ import annotations

from collections.abc import Hashable

import msgspec

from sglang_mixkv.channel.messages import Fail, Ready
from sglang_mixkv.channel.reporter import Note
from sglang_mixkv.prefill.transfer import Chunk, Segment


class Pack(msgspec.Struct, frozen=True):
    """Pack these segments, in any order, and together. `Machine.copied` follows for each, or for
    several."""

    segments: tuple[Segment, ...]


class Send(msgspec.Struct, frozen=True):
    """`chunks`: those whose last segment a READY announces."""

    connection: bytes
    message: Ready | Fail
    chunks: list[Chunk] = []


class PagesReleased(msgspec.Struct, frozen=True):
    """The sender may report SGLang's Success: nothing reads the request's pages any more."""

    handle: Hashable


Action = Pack | Send | PagesReleased | Note
