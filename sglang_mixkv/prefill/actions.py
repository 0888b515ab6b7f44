"""Actions that a prefill rank's state machine requests and PrefillWorker._do carries out."""

from __future__ import annotations

from collections.abc import Hashable

import msgspec

from sglang_mixkv.channel.actions import Note, Send, StartCopies


class PagesReleased(msgspec.Struct, frozen=True):
    """The sender may report SGLang's Success: nothing reads the request's pages any more."""

    handle: Hashable


Action = StartCopies | Send | PagesReleased | Note
